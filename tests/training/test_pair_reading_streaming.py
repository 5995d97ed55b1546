"""Pairs and reference values that stay on disk: same order, same weights, and nothing is read twice."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import CTRLTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, TrainerCallback

from flat_pairs import changed, pair_of
from regretless.core.errors import ConfigError, DataError
from regretless.data import pair_source
from regretless.data.rows import read_rows, write_records
from regretless.data.tokenization import TokenizedPair, TokenizedSide, encode_prompt, tokenize_pairs
from regretless.modeling.layout import token_count
from regretless.modeling.load import tokenizer_fingerprint
from regretless.modeling.scoring import fill_rows
from regretless.objectives import build
from regretless.training import pair_reading
from regretless.training.arguments import PreferenceConfig
from regretless.training.data import Groups, PairDataset, StepSampler
from regretless.training.packing import pack_rows
from regretless.training.pair_store import PairTable
from regretless.training.reference import ReferenceLogps
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]
WORDS = ["w4", "w5", "w6", "w8", "w9"]
"""Words that the tokenizer does not take apart: w1 to w3 are special, in w10 too."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """30 pairs, three of each of 10 prompts, which do not stand together; one more row is refused."""
    numbers = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(numbers.choice(WORDS, count))

    prompts = [f"{first} {second}" for first in WORDS[:2] for second in WORDS]
    rows = [
        pair_of(prompt=prompts[number % 10], chosen=words(3 + number % 4), rejected=words(7), pair_id=f"p{number}")
        for number in range(30)
    ]
    rows.insert(4, changed(rows[4], chosen="w9", rejected="w9"))
    write_records(tmp_path / "pairs.parquet", rows)
    return tmp_path / "pairs.parquet"


def trained(trainer: PreferenceTrainer, **options: Any) -> dict[str, torch.Tensor]:
    trainer.train(**options)
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


def test_prompts_when_recorded_with_other_tokens_then_training_notes_how_many(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"objective": "dpo", "output_dir": str(tmp_path)}
    tokenizer = make_trainer(data=[pair_of(prompt="w4", chosen="w5", rejected="w6")], **options).processing_class
    prompt = encode_prompt(tokenizer, "w4")
    (pair,), _ = tokenize_pairs(
        [pair_of(prompt="w4", chosen="w5", rejected="w6")], tokenizer, max_length=None, max_prompt_length=None
    )
    rows = [
        pair_of(
            prompt="w4",
            chosen="w5",
            rejected="w6",
            prompt_token_ids=ids,
            tokenizer=tokenizer_fingerprint(tokenizer),
            chosen_token_ids=list(pair.chosen.ids),
            rejected_token_ids=list(pair.rejected.ids),
        )
        for ids in (prompt, [*prompt, 1], [*prompt, 2])
    ]
    capsys.readouterr()
    make_trainer(data=rows, **options)
    assert "2 of 3 pairs have responses that were recorded with other tokens of the prompt" in " ".join(
        capsys.readouterr().err.split()
    )


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_file_when_resumed_in_mid_epoch_then_weights_are_those_of_rows_in_memory_and_only_the_rest_is_read(
    file: Path, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"objective": "dpo", "num_train_epochs": 2, "dropout": 0.1}
    rows = [row for _, row in read_rows(file)]
    memory = trained(make_trainer(data=rows, output_dir=str(tmp_path / "memory"), **options))

    options |= {"data": str(file), "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "disk")}
    stopped = make_trainer(**options)
    stopped.add_callback(_StopAt(8))  # six steps an epoch
    stopped.train()

    read: list[int] = []
    original = PairTable.__getitem__

    def counting(self: PairTable, number: int) -> TokenizedPair:
        read.append(number)
        return original(self, number)

    monkeypatch.setattr(PairTable, "__getitem__", counting)
    monkeypatch.setattr(pair_source, "tokenize_pairs", None)
    resumed = make_trainer(**options)
    weights = trained(resumed, resume_from_checkpoint=True)
    sampler = StepSampler(resumed.train_dataset, 5, seed=resumed.args.seed, grouped=True)
    sampler.set_epoch(1)
    assert read == list(itertools.chain(*itertools.islice(sampler, 2, None)))
    for name, weight in weights.items():
        assert torch.equal(weight, memory[name]), name
    refused = [json.loads(line) for line in (tmp_path / "disk.cache" / "refused-train_dataset.jsonl").open()]
    assert [(row["line"], row["row"]["pair_id"]) for row in refused] == [(5, "p4")]


def test_table_when_written_then_pairs_come_back_as_they_were(pairs: list[TokenizedPair], tmp_path: Path) -> None:
    single = np.float32(-0.1).item()
    unlabeled = dataclasses.replace(pairs[0], chosen=TokenizedSide(pairs[0].chosen.ids), source="naïve:1")
    assert pairs[2].rejected is not None
    ids = pairs[2].rejected.ids
    numbers = {"entropy": (0.5,) * len(ids), "rank": (3.0,) * len(ids)}
    odd = [
        dataclasses.replace(unlabeled, logps_dropped="chosen: “other” vocabulary"),
        dataclasses.replace(pairs[1], chosen=TokenizedSide(pairs[1].chosen.ids), rejected=None),
        dataclasses.replace(pairs[2], rejected=TokenizedSide(ids, {"behavior": (single,) * len(ids), **numbers})),
        dataclasses.replace(pairs[3], preference_probability=0.1 + 0.2),
    ]
    exact = [
        dataclasses.replace(pair, chosen=rounded(pair.chosen), rejected=pair.rejected and rounded(pair.rejected))
        for pair in [*odd, *pairs]
    ]
    table = PairTable.write(iter(exact), tmp_path / "table")
    assert list(table) == list(PairTable.temporary(exact)) == exact
    assert PairTable.open(tmp_path / "table")[2] == exact[2]
    with pytest.raises(IndexError, match="expected 0 to"):
        table[len(exact)]


def rounded(side: TokenizedSide) -> TokenizedSide:
    """A side with values as a file holds them, in single precision."""
    return TokenizedSide(side.ids, {name: tuple(np.float32(row).tolist()) for name, row in side.values.items()})


def test_kept_table_when_settings_change_or_it_was_cut_off_then_it_is_made_again(
    file: Path, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = pair_source.tokenize_pairs

    def counting(*args: Any, **options: Any) -> Any:
        made.append("chunk")
        return original(*args, **options)

    monkeypatch.setattr(pair_source, "tokenize_pairs", counting)

    def makes(**options: Any) -> bool:
        made.clear()
        trainer = make_trainer(data=str(file), objective="dpo", pairs_cache_dir=str(tmp_path / "kept"), **options)
        assert len(trainer.train_dataset) == 30
        return bool(made)

    assert makes()
    assert not makes(learning_rate=0.5, seed=4)
    assert makes(max_length=12)
    assert not makes(max_length=12)
    # It was read without a look at the labels that soft_labels needs.
    with pytest.raises(DataError, match=r"soft_labels needs the column preference_probability.* none of 30 pairs has"):
        makes(objective_kwargs={"soft_labels": True})
    # The file that is written last marks a table as complete.
    for complete in (tmp_path / "kept").glob("*/refused.jsonl"):
        complete.unlink()
    assert makes()


def test_soft_labels_when_a_pair_has_none_then_training_notes_how_many(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        pair_of(prompt="w4", chosen="w5", rejected=rejected, preference_probability=label)
        for rejected, label in (("w6", 0.7), ("w8", None), ("w9", 0.0))
    ]
    trainer = make_trainer(data=rows, objective="dpo", objective_kwargs={"soft_labels": True})
    assert [item.pair.preference_probability for item in trainer.train_dataset] == [0.7, None, 0.0]
    assert "1 of 3 pairs have no preference_probability and count as certain" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["file", "folder"])
def test_data_when_moved_renamed_or_exchanged_then_its_content_alone_decides_whether_it_is_the_same(
    form: str, file: Path, make_trainer: Make, tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": "w4", "chosen": f"w{n}", "rejected": "w9"}) for n in (5, 9, 6)]
    name = "pairs.jsonl" if form == "file" else "pairs"
    (data := tmp_path / "a" / name).parent.mkdir()

    def write(lines: list[str]) -> None:
        (data / "rows.jsonl" if form == "folder" else data).write_text("\n".join(lines))

    def read() -> tuple[str | None, list[str]]:
        trainer = make_trainer(data=str(data), objective="dpo", output_dir=str(tmp_path / "out"))
        with (tmp_path / "out.cache" / "refused-train_dataset.jsonl").open(encoding="utf-8") as lines:
            sources = [json.loads(line)["source"] for line in lines]
        return trainer.train_dataset.key, [*sources, *(pair.source for pair in trainer.train_dataset.table)]

    if form == "folder":
        data.mkdir()
    write(rows)
    key, sources = read()
    assert sources == [str(data), f"{data}:1", f"{data}:3"]
    for target in (tmp_path / "b" / name, tmp_path / "b" / f"renamed-{name}"):
        target.parent.mkdir(exist_ok=True)
        data = data.rename(target)
        assert read() == (key, [str(data), f"{data}:1", f"{data}:3"])
    write(rows[:2])
    assert read()[0] != key


def in_rust(split: bool, _: Path) -> PreTrainedTokenizerBase:
    letters = Tokenizer(models.BPE({"<m>": 0, "a": 1, "<": 2, "m": 3, ">": 4}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<m>", pad_token="<m>")
    tokenizer.split_special_tokens = split
    return tokenizer


def in_python(joined: bool, folder: Path) -> PreTrainedTokenizerBase:
    vocabulary = {"<m>": 0, "a@@": 1, "b": 2, "ab": 3, "a": 4}
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version\n" + ("a b</w>\n" if joined else "b b\n"), encoding="utf-8")
    return CTRLTokenizer(folder / "vocabulary.json", folder / "merges.txt", unk_token="<m>", eos_token="<m>")


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [(in_rust, "a<m>a", ([1, 0, 1, 0], [1, 2, 3, 4, 1, 0])), (in_python, "ab", ([1, 2, 0], [3, 0]))],
)
def test_kept_table_when_a_tokenizer_of_the_same_vocabulary_writes_texts_otherwise_then_it_is_made_again(
    make: Callable[[bool, Path], PreTrainedTokenizerBase], text: str, expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": text, "rejected": "a"}))
    args = PreferenceConfig(str(tmp_path / "out"), use_cpu=True)
    for option in (False, True, False):
        tokenizer = make(option, tmp_path)
        table = pair_reading.pair_table(tmp_path / "pairs.jsonl", tokenizer, args, build("dpo"), "train")
        assert list(table[0].chosen.ids) == expected[option]
    assert len(list((tmp_path / "out.cache" / "pairs").iterdir())) == 2


def test_steps_when_pairs_of_a_prompt_are_scattered_then_they_come_together_in_an_order_of_the_seed(
    file: Path, make_trainer: Make
) -> None:
    data = make_trainer(data=str(file), objective="dpo").train_dataset

    def order(seed: int, epoch: int = 0, processes: int = 1) -> list[int]:
        samplers = [
            StepSampler(data, 6 // processes, seed=seed, grouped=True, rank=rank, processes=processes)
            for rank in range(processes)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [index for step in zip(*samplers, strict=True) for part in step for index in part]

    prompts = [data[index].pair.prompt_ids for index in order(0)]
    assert [len(list(run)) for _, run in itertools.groupby(prompts)] == [3] * 10
    assert order(0) == order(0, processes=2) == order(0, processes=3) != order(1)
    assert sorted(order(0, epoch=1)) == list(range(30))
    assert order(0, epoch=1) != order(0)


def test_steps_when_groups_fill_them_in_some_order_then_none_is_cut_and_else_as_few_as_can_be() -> None:
    mixed = Groups(np.repeat(np.arange(120, dtype=np.uint64), [1, 2, 4, 2, 4, 3] * 20))
    order = np.random.default_rng(0).permutation(len(mixed))

    def shared(groups: Groups, order: NDArray[np.int64], size: int) -> int:
        """Groups that more than one step computes; steps are full, and hold each pair once."""
        steps = list(groups.steps(order, size))
        assert [len(step) for step in steps[:-1]] == [size] * (len(steps) - 1)
        assert sorted(np.concatenate(steps).tolist()) == list(range(len(groups.members)))
        group_of = np.empty(len(groups.members), np.int64)
        group_of[groups.members] = np.repeat(np.arange(len(groups)), np.diff(groups.bounds))
        return sum(len(set(group_of[step].tolist())) for step in steps) - len(groups)

    assert shared(mixed, order, 16) <= 1  # 320 pairs; only the last groups may not fit
    sixes = Groups(np.repeat(np.arange(16, dtype=np.uint64), 6))
    assert shared(sixes, np.arange(16), 24) == 0
    assert shared(sixes, np.arange(16), 16) == 4  # two of every three steps end inside one
    assert shared(Groups(np.repeat(np.arange(3, dtype=np.uint64), [40, 1, 1])), np.arange(3), 16) == 2
    # Taken in order, 4 + 4 + 6 leaves room for two, and no group has two; 4 + 6 + 6 fills the step.
    mixed = Groups(np.repeat(np.arange(6, dtype=np.uint64), [4, 4, 6, 6, 6, 6]))
    assert shared(mixed, np.arange(6), 16) == 0
    assert next(sorted(set(step.tolist())) for step in mixed.steps(np.arange(6), 16)) == [*range(4), *range(8, 20)]
    assert shared(Groups(np.arange(500, dtype=np.uint64)), np.arange(500), 200) == 0
    assert shared(Groups(np.repeat(np.arange(300, dtype=np.uint64), 3)), np.arange(300), 5) < 300


def test_processes_when_lengths_differ_then_they_get_about_equally_many_tokens(pairs: list[TokenizedPair]) -> None:
    long = dataclasses.replace(pairs[0], chosen=TokenizedSide((9,) * 200))
    data = PairDataset([long, *pairs[1:20]], mismatched=False)
    parts = [next(iter(StepSampler(data, 10, seed=3, grouped=True, rank=rank, processes=2))) for rank in range(2)]
    tokens = [int(data.tokens[part].sum()) for part in parts]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert abs(tokens[0] - tokens[1]) <= int(data.tokens.max())
    assert len(parts[0]) != len(parts[1])


def test_rows_when_packed_by_length_then_they_are_fuller_and_prompts_stay_whole(pairs: list[TokenizedPair]) -> None:
    units = [[(p.prompt_ids, p.chosen.ids), (p.prompt_ids, p.rejected.ids or ())] for p in pairs]
    rows = pack_rows(units, 56)
    assert sorted(index for row in rows for index in row) == list(range(len(units)))
    assert all(token_count([item for index in row for item in units[index]]) <= 56 for row in rows)
    assert len(rows) < len(fill_rows(units, 56))
    homes: dict[tuple[int, ...], set[int]] = {}
    for number, row in enumerate(rows):
        for index in row:
            homes.setdefault(pairs[index].prompt_ids, set()).add(number)
    assert all(len(home) == 1 for home in homes.values())


def test_reference_values_when_in_many_parts_then_each_is_read_back_and_none_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regretless.training.reference.RESPONSES_IN_A_PART", 7)
    monkeypatch.setattr("regretless.training.reference.OPEN_PARTS", 2)
    numbers = np.random.default_rng(0)
    items = [((1, number), tuple(numbers.integers(50, size=1 + number % 5).tolist())) for number in range(40)]
    values = {item: numbers.normal(size=len(item[1])).astype(np.float32) for item in items}
    kept = ReferenceLogps(tmp_path)
    assert kept.compute(iter(items[:25] * 2), lambda part: [values[item] for item in part]) >= 25
    assert kept.compute(items, lambda part: [values[item] for item in part]) == 15
    for known in (kept, ReferenceLogps(tmp_path)):
        assert not list(known.missing(items))
        for item in items:
            assert np.array_equal(known[item], values[item])
        with pytest.raises(KeyError, match="no reference log-probabilities"):
            known[(9, 9), (1,)]


def test_rows_of_a_parquet_when_read_then_arrow_keeps_one_row_group_at_a_time(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    columns = {name: list(numbers.random((8000, 40))) for name in ("chosen_logps", "rejected_logps")}
    pq.write_table(pa.table(columns), tmp_path / "pairs.parquet", row_group_size=200)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() for _ in read_rows(tmp_path / "pairs.parquet")]
    # The rows take 5 MB, a row group a fortieth of that.
    assert max(held) - before < 2**20


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every (prompt, response) whose reference log-probabilities were computed, in order."""
    found: list[Any] = []
    original = PreferenceTrainer._score_reference

    def counting(self: PreferenceTrainer, items: Any) -> Any:
        found.extend(items)
        return original(self, items)

    monkeypatch.setattr(PreferenceTrainer, "_score_reference", counting)
    return found


@pytest.mark.parametrize(("objective", "lora"), [("dpo", True), ("kto", False), ("sft", False)])
def test_reference_when_few_steps_are_asked_for_then_what_they_read_is_computed_and_a_resumed_run_adds_the_rest(
    objective: str, lora: bool, file: Path, make_trainer: Make, scored: list[Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": str(file), "objective": objective, "lora": lora, "num_train_epochs": 2}
    options |= {"save_strategy": "steps", "save_steps": 1, "max_tokens_per_microbatch": 10_000}
    options |= {"lr_scheduler_type": "constant"}  # one that a longer training goes on with

    def read_by(trainer: PreferenceTrainer, first: int, last: int) -> set[Any]:
        data, sampler = trainer.train_dataset, StepSampler(trainer.train_dataset, 5, seed=0, grouped=True)
        steps = [step for epoch in (0, 1) for _ in [sampler.set_epoch(epoch)] for step in sampler]
        pairs = [data[index] for step in steps[first:last] for index in step]
        mismatched = {item for pair in pairs for item in pair.mismatched_items()}
        return mismatched | {item for pair in pairs for item in pair.items(rejected=True)}

    whole = make_trainer(**options, output_dir=str(tmp_path / "whole"))
    whole.prepare_reference()
    everything = set(scored)
    expected = trained(whole)
    scored.clear()
    first = make_trainer(**options, max_steps=2)
    first.train()
    assert len(scored) == len(set(scored))
    if objective == "sft":
        assert not scored and not everything
        return
    assert set(scored) == read_by(first, 0, 2) and len(scored) < len(everything) / 2

    def goes_on(steps: int) -> dict[str, torch.Tensor]:
        scored.clear()
        return trained(make_trainer(**options, max_steps=steps), resume_from_checkpoint=True)

    goes_on(2)
    assert not scored  # marked as complete, without a look at the pairs
    goes_on(4)
    assert set(scored) == read_by(first, 2, 4) - read_by(first, 0, 2)
    weights = goes_on(12)
    assert len(scored) == len(set(scored)) and set(scored) == everything - read_by(first, 0, 4)
    assert weights.keys() == expected.keys()
    assert all(torch.allclose(weights[name], weight, atol=1e-6) for name, weight in expected.items())


def test_reference_of_evaluation_pairs_when_nothing_reads_them_then_it_is_computed_unless_it_would_be_gone(
    pairs: list[TokenizedPair], make_trainer: Make, scored: list[Any]
) -> None:
    held_out = {(p.prompt_ids, ids) for p in pairs[30:] for ids in (p.chosen.ids, p.rejected.ids)}
    for lora in (True, False):
        scored.clear()
        trainer = make_trainer(objective="dpo", data=pairs[:20], eval_dataset=pairs[30:], lora=lora, max_steps=1)
        trainer.train()
        assert (held_out <= set(scored)) == (not lora)
        scored.clear()
        trainer.evaluate()
        assert set(scored) == (held_out if lora else set())


def test_training_when_it_goes_on_beyond_what_was_prepared_then_a_reference_that_is_gone_is_not_made_up(
    pairs: list[TokenizedPair], make_trainer: Make
) -> None:
    trainer = make_trainer(objective="dpo", lora=False, max_steps=1)
    trainer.train()
    trainer.args.max_steps = 6
    with pytest.raises(ConfigError, match=r"the reference is the model as it was before training.*prepare_reference"):
        trainer.train()
    prepared = make_trainer(objective="dpo", lora=False, max_steps=1)
    prepared.prepare_reference()
    prepared.train()
    prepared.args.max_steps = 6
    assert prepared.train().global_step == 6


def test_pairs_read_by_steps_when_shared_out_then_the_processes_read_what_one_process_would(
    file: Path, make_trainer: Make
) -> None:
    data = make_trainer(data=str(file), objective="dpo").train_dataset
    alone = StepSampler(data, 6, seed=3, grouped=True)
    shared = [StepSampler(data, 3, seed=3, grouped=True, rank=rank, processes=2) for rank in range(2)]
    # Five steps an epoch: the third and fourth, the end of an epoch and the next one's start, all of one.
    for first, last, count in ((2, 4, 12), (4, 6, None), (3, 13, 30)):
        numbers = alone.read_by(first, last)
        assert count is None or len(numbers) == count
        assert set(numbers.tolist()) == set(np.concatenate([each.read_by(first, last) for each in shared]).tolist())
        assert shared[0].of_one_process().read_by(first, last).tolist() == numbers.tolist()
    assert alone.read_by(4, 4).tolist() == []
