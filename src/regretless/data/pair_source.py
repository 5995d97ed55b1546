"""Pairs read from a source and tokenized for a policy; every row that cannot be used keeps its reason."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from regretless.data.codec import Tokenizer
from regretless.data.columns import Pair
from regretless.data.preferences import read_pairs, split_kinds
from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
from regretless.data.tokenization import TokenizedPair, Truncation, tokenize_pairs


class Lengths(Protocol):
    """Settings of how long prompts and responses may be (`tokenize_pairs`)."""

    @property
    def max_length(self) -> int | None:
        """Most tokens in prompt and response together; None for any number."""

    @property
    def max_prompt_length(self) -> int | None:
        """Most tokens in a prompt; None for any number."""

    @property
    def truncation(self) -> Truncation:
        """Whether longer responses are rejected or cut."""


@dataclass
class PairSource:
    """The pairs of a source, and its rows that cannot be used, in the order of their lines."""

    name: str | Path
    pairs: list[Pair]
    refused: list[Refusal]
    template: str | None = "plain"
    """What text prompts are put into (`prompt_templates.asked_pair`)."""

    @classmethod
    def read(cls, path: Path, template: str | None = "plain", *, one_kind: bool = False) -> Self:
        """The pairs of a file; with `one_kind` those that one table can hold (`split_kinds`)."""
        pairs, refused = read_pairs(path)
        return cls(path, *(split_kinds(pairs, refused) if one_kind else (pairs, refused)), template)

    def tokenize(
        self,
        tokenizer: Tokenizer,
        lengths: Lengths | None = None,
        *,
        pairs: Sequence[Pair] | None = None,
        need_logps: bool = False,
        keep: Collection[str] = (),
        first: int = 1,
    ) -> list[TokenizedPair]:
        """All pairs, or these `pairs` of it, as `tokenize_pairs` makes them; `refused` gets those that it rejects.

        lengths: None for pairs of any length.
        """
        tokenized, refused = tokenize_pairs(
            self.pairs if pairs is None else pairs,
            tokenizer,
            max_length=None if lengths is None else lengths.max_length,
            max_prompt_length=None if lengths is None else lengths.max_prompt_length,
            truncation="refuse" if lengths is None else lengths.truncation,
            need_logps=need_logps,
            keep=keep,
            first=first,
            template=self.template,
        )
        for refusal in refused:
            insort(self.refused, refusal, key=lambda row: row.line)
        return tokenized

    def check(self, usable: Sequence[object], report: Path | None = None) -> None:
        """Write the rejected rows to `report`, and raise DataError with the first reasons if no pair is usable."""
        if report is not None:
            report_refusals(self.refused, report)
        check_some_left(usable, self.refused, self.name)
