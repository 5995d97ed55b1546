"""The judge stage: a language model rates responses on several aspects, and the ratings are averaged to scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from regretless.core.errors import DataError
from regretless.core.files import write_jsonl
from regretless.core.settings import Seed
from regretless.data.columns import Response, Text
from regretless.data.rejected_rows import check_some_left, report_refusals
from regretless.data.responses import read_responses, split_ambiguous
from regretless.data.rows import write_records
from regretless.labeling.judge_prompt import ASPECTS, Aspect, JudgePrompt, ShownSystem, load_aspects
from regretless.labeling.judge_replies import Rating, parse_ratings
from regretless.servers.ask import Answer, Answers, Question
from regretless.servers.judge_client import JudgeAccess, answer_of, ask_judge, bill, check_judged
from regretless.servers.reply import Reply


class JudgeConfig(JudgeAccess):
    """Settings of the judge stage."""

    model: str
    """Name of the judge model on its server. The paper uses gpt-5-mini."""
    aspects: list[str] = Field(default=list(ASPECTS), min_length=1)
    """Aspects to rate, each in a request of its own: instruction_following, helpfulness, honesty, truthfulness, and any
    name that has a file in `rubrics`."""
    rubrics: dict[str, str] = Field(default={})
    """Text files by aspect, with what to look for and the rating scale; they replace this package's own."""
    typed: list[str] = Field(default=["helpfulness", "truthfulness"])
    """Aspects for which the judge also names the kind of merit or fault; their rubrics number these kinds."""
    not_applicable: list[str] = Field(default=["honesty"])
    """Aspects that the judge may rate as not applicable; such a rating is left out of the score."""
    system: str | None = None
    """Jinja file with the system message for the judge; it replaces this package's own."""
    layout: str | None = None
    """Jinja file with the layout of a request; it replaces this package's own."""
    shown_system: ShownSystem = "own"
    """Which system messages of a prompt the judge sees as part of the instruction: `own` leaves out those that the
    templates `assistant` and `math` added for sampling; `all` shows every one; `none` shows none."""
    seed: Seed = 0
    """Random seed for the order of the responses within a request."""

    @model_validator(mode="after")
    def _known_aspects(self) -> Self:
        without = [name for name in self.aspects if name not in ASPECTS and name not in self.rubrics]
        used = {"rubrics": self.rubrics, "typed": self.typed, "not_applicable": self.not_applicable}
        stray = [
            f"{key}: {name}" for key, names in used.items() for name in names if name not in {*self.aspects, *ASPECTS}
        ]
        rules = {
            f"rubrics: needed for {', '.join(without)}": bool(without),
            f"{', '.join(stray)}: no such aspect": bool(stray),
            "aspects: one is named twice": len(set(self.aspects)) < len(self.aspects),
        }
        problems = [problem for problem, broken in rules.items() if broken]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def judge_name(self) -> str:
        """Name of the judge on its server."""
        return self.model

    def files(self) -> dict[str, Path]:
        """Files, besides the responses, that the ratings depend on, keyed by their setting."""
        named = {"system": self.system, "layout": self.layout}
        named |= {f"rubrics.{name}": path for name, path in self.rubrics.items()}
        return {key: Path(path).expanduser() for key, path in named.items() if path is not None}


@dataclass(frozen=True)
class PromptGroup:
    """The distinct responses to one prompt."""

    prompt_id: str
    prompt: Text
    texts: list[str]


Ratings = dict[str, Rating]
"""Text to rating."""


def run(config: JudgeConfig, responses: Path, output: Path) -> dict[str, Any]:
    """Score the responses of a file with a judge; returns counts and cost.

    Written into the folder `output`: responses.parquet (all rows in their order, with `score` = mean over the aspects,
    or None if unknown), judgments.jsonl (ratings and reasons for each response) and refused.jsonl.
    Replies are cached beside the folder (or in `config.replies`), so that no run asks for one twice.

    Raises ConfigError for unusable templates or a missing key, DataError if nothing can be judged, BudgetError if the
    budget is spent, ServerError if the server is down; after the last two, the next run resumes.
    """
    rows, refused = read_responses(responses)
    rows, ambiguous = split_ambiguous(rows)
    refused += ambiguous
    check_some_left(rows, refused, responses)
    report_refusals(refused, output / "refused.jsonl")
    groups = group_responses(rows)
    answers = ask_judge(config, make_questions(config, groups.values()), output)
    by_prompt = _by_prompt(answers.answers, list(groups), config.aspects)
    judgments = [judgment_of(row, by_prompt[row.prompt_id]) for row in rows]
    summary = _summary(config, answers, len(groups), judgments) | {"refused": len(refused)}
    check_judged(
        config,
        answers,
        output,
        done=summary["scored"],
        total=summary["responses"],
        what="responses have a score",
        failed=summary["unknown"],
    )
    write_jsonl(output / "judgments.jsonl", judgments)
    scored = [replace(row, score=judgment["score"]) for row, judgment in zip(rows, judgments, strict=True)]
    write_records(output / "responses.parquet", scored)
    return summary


def group_responses(rows: Sequence[Response]) -> dict[str, PromptGroup]:
    """Distinct responses of each prompt, keyed by prompt id, in the order of the rows.

    Raises DataError if one prompt id stands for two prompts.
    """
    groups: dict[str, PromptGroup] = {}
    for row in rows:
        group = groups.setdefault(row.prompt_id, PromptGroup(row.prompt_id, row.prompt, []))
        if group.prompt != row.prompt:
            raise DataError(
                f"{row.origin}: prompt id {row.prompt_id} stands for two prompts; every prompt needs its own id"
            )
        if row.response not in group.texts:
            group.texts.append(row.response)
    return groups


def make_questions(config: JudgeConfig, groups: Iterable[PromptGroup]) -> list[Question[Ratings]]:
    """All requests, in order of prompts: if the budget ends, most prompts that were started are complete.

    Raises ConfigError for templates that cannot be used.
    """
    prompt = JudgePrompt(config.system, config.layout, config.shown_system)
    aspects = load_aspects(config.aspects, config.rubrics, config.typed, config.not_applicable)
    return [make_question(config, prompt, aspect, group) for group in groups for aspect in aspects]


def make_question(config: JudgeConfig, prompt: JudgePrompt, aspect: Aspect, group: PromptGroup) -> Question[Ratings]:
    """The request for one aspect of all responses to a prompt. Every attempt has a new random order."""

    def shuffled(attempt: int) -> list[str]:
        # Seeded by content, not by position: the order of rows in a file must not matter.
        texts = sorted(group.texts)
        Random(f"{config.seed}:{group.prompt_id}:{aspect.name}:{attempt}").shuffle(texts)
        return texts

    def body(attempt: int, code: str) -> dict[str, Any]:
        return config.request(prompt.messages(group.prompt, shuffled(attempt), aspect, code))

    def read(reply: Reply, attempt: int, code: str) -> Ratings:
        texts = shuffled(attempt)
        expected = code if prompt.uses_code else None
        ratings = parse_ratings(answer_of(reply), texts, expected, not_applicable=aspect.not_applicable)
        return dict(zip(texts, ratings, strict=True))

    return Question(f"{group.prompt_id} {aspect.name}", body, read)


def judgment_of(row: Response, answers: Mapping[str, Answer[Ratings]]) -> dict[str, Any]:
    """Judgment of a response: its score, or why there is none, and the judge's reply for each aspect.

    The score is the mean of the aspects' ratings, without those that do not apply. It is None if a single aspect is
    unknown, because a mean over the others would not be comparable with the scores of other responses.
    """
    aspects: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name, answer in answers.items():
        if answer.value is None:
            problems.append(answer.problem or "")
            aspects[name] = {"problem": answer.problem}
        else:
            rating = answer.value[row.response]
            aspects[name] = {"rating": rating.value, "types": rating.types, "rationale": rating.rationale}
        aspects[name] |= {"attempts": answer.attempts, "reply": answer.key}
    values = [aspect["rating"] for aspect in aspects.values() if aspect.get("rating") is not None]
    if not problems and not values:
        problems.append("no aspect applies")
    return {
        "prompt_id": row.prompt_id,
        "response_id": row.response_id,
        "score": None if problems else fmean(values),
        "problem": problems[0] if problems else None,
        "aspects": aspects,
    }


def _by_prompt(
    answers: Sequence[Answer[Ratings]], prompts: Sequence[str], names: Sequence[str]
) -> dict[str, dict[str, Answer[Ratings]]]:
    """Answers keyed by prompt and aspect; the input is in order of prompts."""
    starts = range(0, len(answers), len(names))
    return {
        prompt_id: dict(zip(names, answers[start : start + len(names)], strict=True))
        for prompt_id, start in zip(prompts, starts, strict=True)
    }


def _summary(
    config: JudgeConfig, answers: Answers[Ratings], prompts: int, judgments: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    unknown = Counter(str(judgment["problem"]) for judgment in judgments if judgment["score"] is None)
    return {
        "prompts": prompts,
        "responses": len(judgments),
        "scored": len(judgments) - unknown.total(),
        "unknown": dict(sorted(unknown.items())),
        "aspects": {name: _aspect_summary(name, judgments) for name in config.aspects},
        **bill(config, answers),
    }


def _aspect_summary(name: str, judgments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    entries = [judgment["aspects"][name] for judgment in judgments]
    ratings = [aspect["rating"] for aspect in entries if "rating" in aspect]
    values = [value for value in ratings if value is not None]
    return {
        "rated": len(values),
        "mean": fmean(values) if values else None,
        "not_applicable": len(ratings) - len(values),
        "unknown": len(entries) - len(ratings),
    }
