"""Training data as a table of tokenized pairs; unusable rows are reported, counted and left out."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from regretless.core.errors import DataError, reject
from regretless.core.files import atomic_path, fingerprint, json_line, path_fingerprint, write_jsonl
from regretless.core.progress import bar
from regretless.core.settings import check_name
from regretless.core.terminal import print_note
from regretless.core.text_cleaning import one_line
from regretless.core.versions import versions
from regretless.data.codec import codec_of
from regretless.data.columns import CONTINUATIONS, TOP, Pair
from regretless.data.pair_source import PairSource
from regretless.data.preferences import ROWS_AT_ONCE, pair_chunks
from regretless.data.prompt_templates import PAIR_TEMPLATE, say_choice
from regretless.data.rejected_rows import IN_ERROR, REPORTED, Refusal, check_some_left, say_refusals
from regretless.data.rows import row_count
from regretless.data.sources import held_out_split, open_source
from regretless.data.tokenization import (
    FUTURE,
    OTHER_PROMPTS,
    TokenizedPair,
    missing_values,
    said_of_units,
    share_of_continuations,
    unit_counts,
)
from regretless.modeling.load import probe_ids
from regretless.objectives.base import Objective, similar
from regretless.objectives.inputs import of_data
from regretless.training.arguments import PreferenceConfig
from regretless.training.data import PairDataset
from regretless.training.pair_store import FORMAT, PairTable

REFUSED = "refused.jsonl"
"""File beside a complete table: the rows that are not in it."""


def pair_table(
    rows: str | Path | Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    args: PreferenceConfig,
    objective: Objective,
    name: str,
    *,
    held_out: bool = False,
    template: str | None = "plain",
) -> PairTable:
    """Pairs of a file, a hub id, a data set or rows, ready for training with `objective`; never all of them in memory.

    The table of a file or a `datasets.Dataset` is cached in `pairs_cache_dir` under a hash of its content, the
    tokenizer and the settings, so that a later run reads no row again. Rank 0 writes it for all processes.
    Of a data set by name with several splits, `train` is read; for an evaluation (`held_out`), the only other one.
    Rows that cannot be used are printed and written to `refused-<name>.jsonl` in `args.cache_dir`.
    template: what text prompts are put into (`prompt_templates.asked_pair`).
    Raises DataError if no row is left, or if the method needs behavior log-probabilities that the rows lack.
    """
    split, source = "train", name
    if isinstance(rows, str | Path):
        split, source = held_out_split(rows) if held_out else split, str(rows)
        opened = open_source(rows, split)
    else:
        opened = _rows(rows, name)
    reading = _Reading(tokenizer, args, objective, name, template)
    # Not the path: a run folder that was moved or copied has the same pairs. `datasets` counts that of a folder.
    is_here = isinstance(opened, Path) or (isinstance(rows, str | Path) and Path(rows).is_dir())
    content = path_fingerprint(Path(source)) if is_here else getattr(opened, "_fingerprint", None)
    if content is None:
        table = reading.make(PairTable.temporary, opened, source)
        reading.report(table)
        return table
    key = fingerprint([FORMAT, content, split, reading.settings(), versions()])
    folder = Path(args.pairs_cache_dir or args.cache_dir / "pairs") / key
    complete = folder / REFUSED
    with args.main_process_first(local=args.save_on_each_node, desc="reading of the pairs"):
        if not complete.exists():
            reading.make(lambda pairs: PairTable.write(pairs, folder), opened, source)
            _copy(reading.refused, complete, source)
    table = PairTable.open(folder, source)
    if args.should_save:
        _copy(complete, reading.refused, source)
        reading.report(table)
    return table


def pair_dataset(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    args: PreferenceConfig,
    objective: Objective,
    name: str,
    *,
    held_out: bool = False,
) -> PairDataset | None:
    """What a trainer reads of these rows; None for None, and a data set that it has read already as it is."""
    if rows is None or isinstance(rows, PairDataset):
        return rows
    table = pair_table(rows, tokenizer, args, objective, name, held_out=held_out)
    return PairDataset(table, mismatched=objective.zero_point == "mismatched", lists=objective.lists)


def evaluation_data(
    rows: Any, tokenizer: PreTrainedTokenizerBase, args: PreferenceConfig, objective: Objective
) -> PairDataset | dict[str, PairDataset | None] | None:
    """The data of one evaluation, or of several by name. Raises ConfigError for names that cannot be those of files."""
    if not isinstance(rows, Mapping):
        return pair_dataset(rows, tokenizer, args, objective, "eval_dataset", held_out=True)
    problems = []
    for name in rows:
        try:
            check_name(str(name))
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    reject("eval_dataset", problems)
    return {name: pair_dataset(part, tokenizer, args, objective, name, held_out=True) for name, part in rows.items()}


def _rows(data: Any, name: str) -> Iterable[Any]:
    """The rows of a data source. Raises DataError for an unsupported type."""
    if isinstance(data, Mapping):
        if "train" not in data:
            splits = ", ".join(map(str, data)) or "nothing"
            raise DataError(f"{name}: expected rows, got {type(data).__name__} of {splits}; pass one of its values")
        return _rows(data["train"], name)
    if isinstance(data, pa.Table):
        return (row for batch in data.to_batches(ROWS_AT_ONCE) for row in batch.to_pylist())
    if type(data).__module__.partition(".")[0] == "pandas":
        import datasets

        try:
            return datasets.Dataset.from_pandas(data, preserve_index=False)
        except (pa.ArrowException, TypeError, AttributeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise DataError(
                f"{name}: the table has a column of mixed types: {reason}; pass rows, as by to_dict('records')"
            ) from error
    return data if isinstance(data, Iterable) else _by_number(data, name)


def _by_number(data: Any, name: str) -> Iterable[Any]:
    """Rows of a PyTorch data set, which has indices and a length."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(f"{name}: expected a file, a hub id, a data set, a table or rows, got {type(data).__name__}")
    return (data[number] for number in range(len(data)))


def _copy(refused: Path, target: Path, source: str) -> None:
    """Copy rejected rows as those of `source`, whatever it was called then; those of an earlier file keep its name."""
    with refused.open(encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        write_jsonl(
            target, (row if (row["row"] or {}).get("source_row") else {**row, "source": source} for row in rows)
        )


def _saved(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the files that a tokenizer saves: its vocabulary, how it joins tokens, and its options."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return path_fingerprint(Path(folder))


class _Reading:
    """One pass over rows: usable pairs are yielded, the others are written to a file."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        args: PreferenceConfig,
        objective: Objective,
        name: str,
        template: str | None,
    ) -> None:
        self.tokenizer, self.args, self.objective, self.name = tokenizer, args, objective, name
        self.template = template
        self.need_rejected, self.names = "rejected" in objective.required, of_data(objective)
        mine = "" if args.should_save else f"-{args.process_index}"
        self.refused = args.cache_dir / f"refused-{name}{mine}.jsonl"

    def settings(self) -> list[Any]:
        """Everything besides the rows that the tokens of a pair depend on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return [
            _saved(self.tokenizer) if backend is None else backend.to_str(),
            probe_ids(self.tokenizer),
            self.tokenizer.chat_template,
            self.template,
            self.tokenizer.special_tokens_map,
            [self.args.max_length, self.args.max_prompt_length, self.args.truncation],
            [self.need_rejected, self.names, dict(self.objective.missing), self.objective.soft_labels],
            self.objective.reads_units,
        ]

    def make(
        self, write: Callable[[Iterator[TokenizedPair]], PairTable], rows: Path | Iterable[Any], source: str
    ) -> PairTable:
        """The table that `write` makes of the usable rows; the others are written to `refused`.

        Raises DataError if no row is left, or if rows lack inputs of the method.
        """
        problem: DataError | None = None
        with atomic_path(self.refused) as temporary, temporary.open("w", encoding="utf-8") as handle:
            try:
                table = write(self.pairs(rows, source, handle))
            except DataError as error:
                problem = error
        if problem is None:
            return table
        self.report()
        raise problem

    def report(self, table: PairTable | None = None) -> None:
        """Report rejected rows, on the process that saves; no empty file remains, and none of another process.

        One by one where no table was made; else how many pairs are used, and the most common reasons; and how much of
        the work continuations are.
        """
        kept = None if table is None else len(table)
        if table is not None and CONTINUATIONS in self.names and self.args.should_save:
            print_note(f"{self.name}: {share_of_continuations(int(table.continued.sum()), int(table.tokens.sum()))}")
        with self.refused.open(encoding="utf-8") as lines:
            rows = (Refusal(**json.loads(line)) for line in lines)
            first = list(islice(rows, REPORTED))
            reasons = Counter(row.reason for row in chain(first, rows))
        count = reasons.total()
        if not count or not self.args.should_save:
            self.refused.unlink()
        elif kept is None:
            say_refusals(first, count, self.refused)
        else:
            listed = "; ".join(f"{reason} ({number})" for reason, number in reasons.most_common(IN_ERROR))
            print_note(
                f"{self.name}: {kept} of {kept + count} pairs are used; skipped, as {self.refused} lists: "
                f"{one_line(listed)}{'; …' * (len(reasons) > IN_ERROR)}"
            )

    def pairs(self, rows: Path | Iterable[Any], source: str, refusals: TextIO) -> Iterator[TokenizedPair]:
        """The usable pairs, in order; the others are written to `refusals`. Raises, at the end, as `make` does."""
        # The pairs, chunk by chunk.
        kept, first_refused, refused_count, done, other_prompts, wrapped, texts = 0, list[Refusal](), 0, 0, 0, 0, 0
        filled = labeled = 0
        units = Counter[str]()
        lacking: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        listed: set[int] = set()
        with bar(f"tokenize {self.name}", _length(rows)) as advance:
            for chunk, refused in _chunks(rows, source, self.need_rejected):
                tokenized: list[TokenizedPair] = chunk
                if not (chunk and isinstance(chunk[0], TokenizedPair)):
                    part = PairSource(source, chunk, refused, self.template)
                    tokenized = part.tokenize(
                        self.tokenizer,
                        self.args,
                        need_logps=bool(set(self.names) - set(self.objective.missing)),
                        keep=self.names,
                        first=done + 1,
                    )
                    refused = part.refused
                tokenized = [pair if self.objective.reads_units else pair.without_units() for pair in tokenized]
                tokenized = [pair.with_missing(self.objective.missing) for pair in tokenized]
                units.update(unit_counts(tokenized))
                filled += sum(bool(pair.filled) for pair in tokenized)
                labeled += sum(pair.preference_probability is not None for pair in tokenized)
                # Pairs that were tokenized before may have it for an objective that does not read it.
                looks_ahead = FUTURE in self.names
                tokenized = [pair.with_future() if looks_ahead else pair.without_future() for pair in tokenized]
                refusals.writelines(json_line(vars(refusal)) for refusal in refused)
                first_refused += refused[: REPORTED - len(first_refused)]
                refused_count += len(refused)
                for name in self.names:
                    lacking[name].update(missing_values(tokenized, name))
                if TOP in self.names:
                    listed.update(side.listed for pair in tokenized for side in pair.sides if side.top)
                kept += len(tokenized)
                other_prompts += sum(pair.other_prompt for pair in tokenized)
                wrapped += sum(pair.wrapped for pair in tokenized)
                texts += sum(pair.row is not None and isinstance(pair.row.prompt, str) for pair in tokenized)
                done += len(chunk)
                advance(len(tokenized) + len(refused))
                yield from tokenized

        # What is wrong with all of them together.
        check_some_left(range(kept), first_refused, self.name, refused_count)
        if codec_of(self.tokenizer).turn_tokens is not None:
            say_choice(self.name, PAIR_TEMPLATE, wrapped, texts, "which takes messages")
        if self.objective.soft_labels and not labeled:
            raise DataError(
                f"{self.name}: soft_labels needs the column preference_probability, the probability that the chosen "
                f"response is the better one, and none of {kept} pairs has it; write it, as pair.rule=regret does, or "
                "leave soft_labels out"
            )
        if self.objective.soft_labels and labeled < kept:
            print_note(
                f"{self.name}: {kept - labeled} of {kept} pairs have no preference_probability and count as certain"
            )
        notes = {
            "lack behavior log-probabilities and are trained with a Dirac behavior policy, as by repo_det "
            "(unknown_behavior=dirac); inspect shows how their scores start": filled,
            OTHER_PROMPTS: other_prompts,
            said_of_units(units) if units["units"] else "": units["pairs"],
        }
        for said, count in notes.items():
            if count:
                print_note(f"{self.name}: {count} of {kept} pairs {said}")
        for name, counts in lacking.items():
            if counts:
                reasons = "; ".join(f"{reason} ({count})" for reason, count in counts.items())
                raise DataError(
                    f"{self.name}: {self.objective.name} needs {_wanted(name)}, and {counts.total()} of {kept} pairs "
                    f"have none: {reasons}. {_remedy(name, self.objective)}"
                )
        if len(listed) > 1:
            raise DataError(
                f"{self.name}: expected equally many tokens in all lists of top_logps, got "
                f"{' and '.join(map(str, sorted(listed)))}; train on the pairs of one sample.top_logps"
            )


def _wanted(name: str) -> str:
    named = {"behavior": "the behavior policy's token log-probabilities", TOP: "the behavior policy's top_logps"}
    named[CONTINUATIONS] = "the behavior policy's continuations"
    return named.get(name, f"token_numbers.{name}")


def _remedy(name: str, objective: Objective) -> str:
    if name == TOP:
        return "Sample with top_logps=20, for chosen_top_logps and rejected_top_logps, or set estimator=sampled"
    if name == CONTINUATIONS:
        return (
            "Run rollout with keep_continuations=true before pair, on all responses (max_correct and max_wrong leave "
            "some out), or set estimator=sampled; pair.rescore and another kind of pair.logps drop them"
        )
    if name != "behavior":
        expected = (
            f"Expected chosen_token_numbers and rejected_token_numbers with a list `{name}`, one number per token"
        )
        return expected + similar(name)
    other = ", or with another one and chosen_token_bytes and rejected_token_bytes too" * objective.reads_units
    instead = (
        "train with repo_det, which needs none, or set unknown_behavior=dirac, which does so for these pairs alone"
    )
    if name not in objective.needs:
        instead = "leave out importance and reference=behavior, which alone need them here"
    return (
        "Expected chosen_token_ids, chosen_logps, rejected_token_ids and rejected_logps made with the policy's "
        f"tokenizer{other}. Sample with `regretless sample`, which records them, or {instead}"
    )


def _chunks(rows: Path | Iterable[Any], source: str, need_rejected: bool) -> Iterator[tuple[list[Any], list[Refusal]]]:
    """Pairs of any form and the rejected rows, several hundred at a time."""
    if isinstance(rows, Path):
        yield from pair_chunks(rows, source=source, need_rejected=need_rejected)
        return
    rest = iter(rows)
    first = list(islice(rest, 1))
    rows = chain(first, rest)
    if first and not isinstance(first[0], TokenizedPair | Pair | Mapping):
        raise DataError(
            f"{source}: expected rows with columns, got {type(first[0]).__name__} {first[0]!r:.40}; a table of columns "
            "becomes rows by datasets.Dataset.from_dict"
        )
    if first and isinstance(first[0], TokenizedPair | Pair):
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            yield chunk, []
    else:
        yield from pair_chunks(rows, source=source, need_rejected=need_rejected)


def _length(rows: Path | Iterable[Any]) -> int | None:
    if isinstance(rows, Path):
        return row_count(rows)
    return len(rows) if isinstance(rows, Sized) else None
