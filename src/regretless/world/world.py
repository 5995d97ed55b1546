"""The world stage: writes prompts, held-out problems, demonstrations and a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from regretless.core.files import write_jsonl
from regretless.core.settings import ByFolder, Section, Seed
from regretless.world.problems import Arithmetic, Faults, Generator, Problem, solve
from regretless.world.tokenizer import build_tokenizer


class PolicyFaults(Faults):
    """The demonstrations of one policy: how many, and how often they contain faults."""

    demonstrations: int = Field(default=16000, ge=1)
    """Number of demonstrations to write; supervised training on them makes the policy."""


class WorldConfig(Section):
    """The embedded world. Each of its files depends only on the settings that concern it."""

    seed: Seed = 0
    """Random seed of all problems and demonstrations."""
    prompts: int = Field(default=1500, ge=1)
    """Number of distinct problems for the behavior models to answer."""
    test: int = Field(default=1000, ge=1)
    """Number of distinct held-out problems; none of them is among the prompts or in a demonstration."""
    validation: int = Field(default=0, ge=0)
    """Number of further held-out problems, to choose settings on; 0 writes no such file."""
    longer_test: int = Field(default=0, ge=0)
    """Number of held-out problems with more steps than the prompts; 0 writes no such file."""
    steps: tuple[int, int] = (2, 4)
    """Smallest and largest number of steps in a problem."""
    prompt_steps: tuple[int, int] | None = None
    """The same for prompts, test and validation, if demonstrations have problems of other lengths too."""
    longer_steps: tuple[int, int] | None = None
    """The same for the longer test; by default one step more than any other problem."""
    largest_amount: int = Field(default=9, ge=1, le=98)
    """Largest number of things that is bought or given away in one step."""
    policies: ByFolder[PolicyFaults] = Field(min_length=1)
    """Policies to pretrain, by name, with the faults that their demonstrations have."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> Self:
        for name in ("steps", "prompt_steps", "longer_steps"):
            fewest, most = getattr(self, name) or (1, 1)
            if not 1 <= fewest <= most:
                raise ValueError(f"{name}: expected fewest and most with 1 <= fewest <= most, got {fewest} and {most}")
        return self

    @property
    def held_out(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Files of held-out problems that are written, by name: how many, and their fewest and most steps."""
        prompts, longest = self.prompt_steps or self.steps, self.steps[1] + 1
        files = {
            "test": (self.test, prompts),
            "validation": (self.validation, prompts),
            "longer-test": (self.longer_test, self.longer_steps or (longest, longest)),
        }
        return {name: (count, steps) for name, (count, steps) in files.items() if count}


def run(config: WorldConfig, output: Path) -> dict[str, Any]:
    """Write the world into the folder `output`; returns counts.

    Files: prompts.jsonl and test.jsonl (and validation.jsonl, longer-test.jsonl) with `prompt_id`, `prompt`, `answer`,
    `steps`; demonstrations-<policy>.jsonl with `prompt`, `chosen`; and tokenizer/.
    Held-out problems are drawn first, and training problems avoid them. So they do not depend on the policies, and have
    the generator's distribution: removing training problems from the test set afterwards would remove short problems,
    of which there are few. Two problems are equal if their start and steps are, whatever the names.
    Raises ConfigError if more distinct problems are requested than exist.
    """
    held_out: set[Arithmetic] = set()
    for name, (count, steps) in config.held_out.items():
        problems = Generator(steps, config.largest_amount).distinct(count, _stream(config, name), held_out)
        held_out |= {problem.arithmetic for problem in problems}
        _write_problems(output / f"{name}.jsonl", name, problems)
    asked = Generator(config.prompt_steps or config.steps, config.largest_amount)
    prompts = asked.distinct(config.prompts, _stream(config, "prompts"), held_out)
    _write_problems(output / "prompts.jsonl", "train", prompts)
    generator = Generator(config.steps, config.largest_amount)
    for name, policy in config.policies.items():
        rows = _demonstrations(generator, policy, _stream(config, f"demonstrations {name}"), held_out)
        write_jsonl(output / f"demonstrations-{name}.jsonl", rows)
    build_tokenizer().save_pretrained(output / "tokenizer")
    return {
        "prompts": config.prompts,
        **{name: count for name, (count, _) in config.held_out.items()},
        "demonstrations": {name: policy.demonstrations for name, policy in config.policies.items()},
    }


def output_names(config: WorldConfig) -> list[str]:
    """Files and folders that `run` writes."""
    names = [f"{name}.jsonl" for name in ("prompts", *config.held_out)]
    names += [f"demonstrations-{name}.jsonl" for name in config.policies]
    return [*names, "tokenizer"]


def _stream(config: WorldConfig, purpose: str) -> random.Random:
    """A separate random generator for every file, so that a change of one file leaves the others unchanged."""
    return random.Random(f"{config.seed}/{purpose}")


def _write_problems(path: Path, kind: str, problems: Sequence[Problem]) -> None:
    rows = (
        {
            "prompt_id": f"{kind}-{number:05d}",
            "prompt": problem.prompt,
            "answer": str(problem.answer),
            "steps": len(problem.steps),
        }
        for number, problem in enumerate(problems)
    )
    write_jsonl(path, rows)


def _demonstrations(
    generator: Generator, policy: PolicyFaults, rng: random.Random, held_out: Set[Arithmetic]
) -> Iterator[dict[str, str]]:
    for _ in range(policy.demonstrations):
        problem = generator.draw(rng, held_out)
        yield {"prompt": problem.prompt, "chosen": solve(problem, policy, rng)}
