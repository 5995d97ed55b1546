"""The world stage: nothing in; prompts, held-out problems, demonstrations and a tokenizer out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from regretless.core.files import write_jsonl
from regretless.core.settings import FolderName, Section
from regretless.world.problems import Arithmetic, Faults, Generator, Problem, solve
from regretless.world.tokenizer import build_tokenizer


class PolicyFaults(Faults):
    """One policy's demonstrations: how many, and how often they go wrong."""

    demonstrations: int = Field(default=16000, ge=1)
    """Demonstrations to write; supervised training on them makes the policy."""


class WorldConfig(Section):
    """The embedded world. A file of it changes only with the settings that it depends on."""

    seed: int = Field(default=0, ge=0)
    """Seed of every draw."""
    prompts: int = Field(default=1500, ge=1)
    """Problems for the behaviour models to answer, all different."""
    test: int = Field(default=1000, ge=1)
    """Held-out problems, all different; none of them is among the prompts or in any demonstration."""
    longer_test: int = Field(default=0, ge=0)
    """Held-out problems with one step more than any in training; 0 writes no such file."""
    steps: tuple[int, int] = (2, 4)
    """Fewest and most steps of a problem."""
    largest_amount: int = Field(default=9, ge=1, le=98)
    """Most that is bought or given away in one step."""
    policies: dict[FolderName, PolicyFaults] = Field(min_length=1)
    """Policies to be pretrained, by name, with the faults of their demonstrations."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> Self:
        fewest, most = self.steps
        if not 1 <= fewest <= most:
            raise ValueError(f"steps: expected fewest and most with 1 <= fewest <= most, got {fewest} and {most}")
        return self


def run(config: WorldConfig, output: Path) -> dict[str, Any]:
    """Write the world into the folder `output`; returns counts.

    Files: prompts.jsonl and test.jsonl (and longer-test.jsonl) with `prompt_id`, `prompt`, `answer`, `steps`;
    demonstrations-<policy>.jsonl with `prompt`, `chosen`; and tokenizer/.
    Held-out problems are drawn first and whatever is trained on avoids them: so they are the same whatever the policies
    are, and as the generator makes them. Dropping from the test what training happened to draw would leave out the
    short problems, of which there are few. Two problems are the same when start and steps are, whatever the names.
    Raises ConfigError when more different problems are asked for than there are.
    """
    generator = Generator(config.steps, config.largest_amount)
    longest = config.steps[1] + 1
    longer = Generator((longest, longest), config.largest_amount)
    test = generator.distinct(config.test, _stream(config, "test"))
    held_out = {problem.arithmetic for problem in test}
    prompts = generator.distinct(config.prompts, _stream(config, "prompts"), held_out)

    _write_problems(output / "prompts.jsonl", "train", prompts)
    _write_problems(output / "test.jsonl", "test", test)
    if config.longer_test:
        problems = longer.distinct(config.longer_test, _stream(config, "longer test"))
        _write_problems(output / "longer-test.jsonl", "longer", problems)
    for name, policy in config.policies.items():
        rows = _demonstrations(generator, policy, _stream(config, f"demonstrations {name}"), held_out)
        write_jsonl(output / f"demonstrations-{name}.jsonl", rows)
    build_tokenizer().save_pretrained(output / "tokenizer")
    return {
        "prompts": config.prompts,
        "test": config.test,
        "longer_test": config.longer_test,
        "demonstrations": {name: policy.demonstrations for name, policy in config.policies.items()},
    }


def output_names(config: WorldConfig) -> list[str]:
    """Files and folders that `run` writes."""
    names = ["prompts.jsonl", "test.jsonl", *(["longer-test.jsonl"] if config.longer_test else [])]
    names += [f"demonstrations-{name}.jsonl" for name in config.policies]
    return [*names, "tokenizer"]


def _stream(config: WorldConfig, purpose: str) -> random.Random:
    """A generator of its own for every file, so that changing one leaves the others as they are."""
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
