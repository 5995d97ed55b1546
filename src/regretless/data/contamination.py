"""Training prompts that stand in a benchmark: equal texts, or thirteen words in a row."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from regretless.data.columns import Pair, Response, Text, text_key
from regretless.data.rejected_rows import Refusal

R = TypeVar("R", Pair, Response)

WORD = re.compile(r"[\u2e80-\u9fff]|[^\W\u2e80-\u9fff]+|[^\w\s.,;:!?'\"`“”‘’()\[\]{}$\\]")
"""A word or number, a character of a script that has no spaces, or a sign such as + and %."""
RUN_OF_WORDS = 13
"""Words in a row that two texts do not share by chance (Brown et al. 2020, appendix C)."""
COMMON = 10
"""A run of words that more problems have belongs to none of them: it is a phrase of the benchmark (there, too)."""
EQUAL = "equal"
REMEDY = "decontaminate=true leaves such prompts out"


class Problem(NamedTuple):
    """A problem of a benchmark."""

    benchmark: str
    problem_id: str


def words(text: str) -> list[str]:
    """The words of a text, and signs of calculation, without case, forms of characters, spaces and punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def asked(prompt: Text) -> list[str]:
    """The texts that a user asks in a prompt; what a system message or an earlier answer says is left out."""
    if isinstance(prompt, str):
        return [prompt]
    return [message["content"] for message in prompt if message["role"] == "user"]


class Benchmarks:
    """The problems of benchmarks, to look up prompts in."""

    def __init__(self, problems: Mapping[str, Mapping[str, Text]]) -> None:
        """problems: prompts by benchmark and problem id."""
        self.sizes = {benchmark: len(prompts) for benchmark, prompts in problems.items()}
        self._whole: dict[str, list[Problem]] = {}
        for benchmark, prompts in problems.items():
            for problem_id, prompt in prompts.items():
                for text in {" ".join(words(text)) for text in asked(prompt)} - {""}:
                    self._whole.setdefault(text, []).append(Problem(benchmark, problem_id))
        counts = Counter(itertools.chain.from_iterable(map(_runs, self._whole)))
        self._runs: dict[str, list[str]] = {}
        for text in self._whole:
            for run in _runs(text):
                if counts[run] <= COMMON:
                    self._runs.setdefault(run, []).append(text)

    def repeated_by(self, prompt: Text) -> dict[Problem, str]:
        """The problems that a prompt repeats, each with how: `EQUAL`, or the first words in a row that both have."""
        repeated: dict[Problem, str] = {}
        for text in (" ".join(words(text)) for text in asked(prompt)):
            repeated |= dict.fromkeys(self._whole.get(text, ()), EQUAL)
            for run in _runs(text):
                for problem in (problem for other in self._runs.get(run, ()) for problem in self._whole[other]):
                    repeated.setdefault(problem, run)
        return repeated

    def reason(self, prompt: Text) -> str | None:
        """Why a prompt is left out of training, or None."""
        for problem, how in self.repeated_by(prompt).items():
            both = "equal to" if how == EQUAL else f"{RUN_OF_WORDS} words in a row as in"
            return f"prompt: {both} a problem of the benchmark {problem.benchmark}"
        return None

    def without(self, rows: Sequence[R]) -> tuple[list[R], list[Refusal]]:
        """The rows whose prompt repeats no problem, and the others, rejected."""
        reasons = {
            key: self.reason(prompt) for key, prompt in {text_key(row.prompt): row.prompt for row in rows}.items()
        }
        kept: list[R] = []
        refused: list[Refusal] = []
        for row in rows:
            if (reason := reasons[text_key(row.prompt)]) is None:
                kept.append(row)
            else:
                refused.append(Refusal.at(row.origin, reason, {"prompt": row.prompt}))
        return kept, refused

    def notes(self, prompts: Iterable[Text]) -> list[str]:
        """A sentence for each benchmark with problems that some of the training prompts repeat."""
        repeated = {problem for prompt in prompts for problem in self.repeated_by(prompt)}
        counts = Counter(problem.benchmark for problem in repeated)
        return [
            f"{benchmark}: {counts[benchmark]} of {size} problems stand in the training prompts (equal, or "
            f"{RUN_OF_WORDS} words in a row), so its results say too much; {REMEDY}"
            for benchmark, size in self.sizes.items()
            if counts[benchmark]
        ]


def _runs(text: str) -> dict[str, None]:
    """The runs of words of a normalized text, each once, in order."""
    split = text.split(" ")
    starts = range(len(split) - RUN_OF_WORDS + 1)
    return dict.fromkeys(" ".join(split[start : start + RUN_OF_WORDS]) for start in starts)
