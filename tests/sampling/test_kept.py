from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regretless.core.errors import DataError
from regretless.core.files import read_json
from regretless.core.settings import dump
from regretless.data.columns import Response
from regretless.data.responses import read_responses
from regretless.data.schema import read_gold
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.sampling import job, sample
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.workflow.run_folder import RunFolder
from regretless.workflow.stage_folder import MANIFEST, earlier_results
from single_unit import do_unit

HOT = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "max_new_tokens": 12}
"""Settings under which no two responses are equal by chance."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the parts that the engine generated."""
    sizes: list[int] = []
    stream = TransformersEngine.stream

    def noting(self: TransformersEngine, prompts: Any, seeds: Any) -> Any:
        sizes.append(len(prompts))
        return stream(self, prompts, seeds)

    monkeypatch.setattr(TransformersEngine, "stream", noting)
    yield sizes


def responses(run_dir: Path, settings: dict[str, Any], **changes: Any) -> dict[tuple[str | None, str, int], Response]:
    """The result of the stage in a run folder, by model, prompt_id and sample number."""
    config = sample.SampleConfig.parse({**settings, **HOT, **changes}, "sample")
    folder = RunFolder(run_dir)
    with folder.locked():
        do_unit(folder, "sample", dump(config), lambda output: sample.run(config, output), keeps=sample.KEEPS)
    rows, refused = read_responses(run_dir / "sample" / "responses.parquet")
    assert not refused
    return {(row.model, row.prompt_id, int(row.response_id.rsplit("-", 1)[1])): row for row in rows}


def texts(rows: dict[Any, Response]) -> dict[Any, Any]:
    return {key: (row.token_ids, row.logps, row.sampled_logps, row.seed) for key, row in rows.items()}


def add_prompts(settings: dict[str, Any], count: int) -> None:
    with Path(settings["prompts"]["dataset"]).open("a") as file:
        file.writelines(json.dumps({"prompt": f"w2 w{number}", "answer": 99}) + "\n" for number in range(count))


def test_settings_when_they_cover_more_then_only_what_is_new_is_drawn(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int]
) -> None:
    run_dir, other = tmp_path / "run", {**settings["models"][0], "init_seed": 1}
    first = responses(run_dir, settings)
    assert sum(drawn) == len(first) == 24

    drawn.clear()
    more = responses(run_dir, settings, n=5, batch_size=7)
    assert sum(drawn) == len(more) - len(first) == 36
    assert texts(more).items() >= texts(first).items()
    long = [tuple(row.token_ids or ()) for row in more.values() if len(row.token_ids or ()) > 6]
    assert len(set(long)) == len(long) > 20, "no new response repeats the draws of a kept one"

    drawn.clear()
    add_prompts(settings, 3)
    longer = responses(run_dir, settings, n=5)
    assert sum(drawn) == len(longer) - len(more) == 15
    assert texts(longer).items() >= texts(more).items()

    drawn.clear()
    both = responses(run_dir, settings, n=5, models=[other, settings["models"][0]])
    assert sum(drawn) == len(both) - len(longer) == 75
    assert texts(both).items() >= texts(longer).items()
    ids = [row.response_id for row in both.values()]
    assert sorted(ids) == sorted(f"{prompt}-{model}-{number}" for _, prompt, number in longer for model in range(2)), (
        "a kept response has the id of its place in the new work"
    )
    assert read_json(run_dir / "sample" / MANIFEST)["summary"]["kept"] == 75

    drawn.clear()
    assert texts(responses(run_dir, settings, n=1)) == texts({key: row for key, row in longer.items() if key[2] == 0})
    assert texts(responses(run_dir, settings, n=5)) == texts(longer), "what fewer samples leave out is not lost"
    assert drawn == []


@pytest.mark.parametrize(
    "change",
    [{"temperature": 4.0}, {"max_new_tokens": 13}, {"seed": 4}, {"top_k": 13}, "weights", "prompt", "version"],
    ids=str,
)
def test_settings_when_they_change_what_is_drawn_then_nothing_is_kept(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int], monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    responses(tmp_path / "run", settings)
    drawn.clear()
    changes: dict[str, Any] = change if isinstance(change, dict) else {}
    if change == "weights":
        changes = {"models": [{**settings["models"][0], "init_seed": 1}]}
    if change == "prompt":
        file = Path(settings["prompts"]["dataset"])
        file.write_text(file.read_text().replace("w1", "w3"))
    if change == "version":
        monkeypatch.setattr("regretless.sampling.kept.versions_for", lambda settings: {"torch": "another"})
        changes = {"n": 3}
    assert sum(drawn) == 0
    rows = responses(tmp_path / "run", settings, **changes)
    assert sum(drawn) == len(rows)
    assert "kept" not in read_json(tmp_path / "run" / "sample" / MANIFEST)["summary"]


def test_model_when_its_files_change_under_the_same_path_then_nothing_is_kept(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int]
) -> None:
    saved = str(tmp_path / "model")
    for seed, expected in ((0, 36), (1, 36), (1, 12)):
        config = ModelConfig(**{**settings["models"][0], "init_seed": seed})
        load_model(config).save_pretrained(saved)
        load_tokenizer(config).save_pretrained(saved)
        drawn.clear()
        responses(tmp_path / "run", settings, models=[{"name_or_path": saved}], n=3 if expected == 36 else 4)
        assert sum(drawn) == expected


def test_models_when_they_are_the_same_then_each_keeps_its_own_responses(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int]
) -> None:
    twins = {"models": settings["models"] * 2}
    before = read_ids(tmp_path, settings, **twins, n=2)
    drawn.clear()
    after = read_ids(tmp_path, settings, **twins, n=3)
    assert sum(drawn) == 24
    assert after.items() >= before.items()
    long = [tuple(ids) for ids in after.values() if len(ids) > 6]
    assert len(set(long)) == len(long) > 10


def read_ids(tmp_path: Path, settings: dict[str, Any], **changes: Any) -> dict[str, list[int]]:
    responses(tmp_path / "run", settings, **changes)
    rows, _ = read_responses(tmp_path / "run" / "sample" / "responses.parquet")
    return {row.response_id: row.token_ids or [] for row in rows}


def test_work_when_interrupted_then_its_parts_and_its_merged_result_are_kept(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, whole, broken = {**settings, "batch_size": 2}, tmp_path / "whole", tmp_path / "broken"
    for place in (whole, broken):
        responses(place, settings)
    responses(whole, settings, n=5)
    expected = (whole / "sample" / "responses.parquet").read_bytes()

    drawn.clear()
    limit = iter(range(3))

    def stopping(*args: Any, **kwargs: Any) -> Any:
        raise InterruptedError

    write_records = job.write_records

    def three(*args: Any) -> None:
        if next(limit, None) is None:
            raise InterruptedError
        write_records(*args)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(job, "write_records", three)
        responses(broken, settings, n=5)
    done = sum(drawn[:3])
    drawn.clear()
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(sample, "_counts", stopping)
        responses(broken, settings, n=5)
    assert sum(drawn) == 36 - done, "finished parts are kept"
    drawn.clear()
    responses(broken, settings, n=5)
    assert drawn == [], "a merged result is not drawn again"
    assert (broken / "sample" / "responses.parquet").read_bytes() == expected

    # Parts that were left unfinished under other settings are covered like finished results.
    limit = iter(range(2))
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(job, "write_records", three)
        responses(broken, settings, n=7)
    begun = sum(drawn[:2])
    drawn.clear()
    assert len(responses(broken, settings, n=8)) == 96
    assert sum(drawn) == 96 - 60 - begun


def test_earlier_result_when_it_is_damaged_then_it_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    responses(tmp_path / "run", settings)
    responses(tmp_path / "run", settings, temperature=4.0)
    (place,) = earlier_results(tmp_path / "run" / "sample")
    file = place / "responses.parquet"
    content = bytearray(file.read_bytes())
    content[100] ^= 0xFF
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"earlier/000000/responses.parquet: damaged .*delete it"):
        responses(tmp_path / "run", settings, n=3)
    file.unlink()
    assert len(responses(tmp_path / "run", settings, n=3)) == 36


def test_earlier_results_when_they_are_many_then_the_oldest_go(settings: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(7):
        responses(tmp_path / "run", settings, seed=seed, n=1)
    kept = earlier_results(tmp_path / "run" / "sample")
    assert [int(place.name) for place in kept] == [5, 4, 3, 2]
    assert all((place / "responses.parquet").is_file() for place in kept)


def test_gold_answers_when_they_become_lists_or_texts_then_kept_responses_have_the_new_ones(
    settings: dict[str, Any], tmp_path: Path, drawn: list[int]
) -> None:
    file = Path(settings["prompts"]["dataset"])
    rows = [json.loads(line) for line in file.read_text().splitlines()][:2]
    responses(tmp_path / "run", settings)
    for samples, golds in ((2, [["1", 2], {"final": 3}]), (3, ["4", ["5"]]), (3, ["6", "[7]"])):
        file.write_text(
            "".join(json.dumps({**row, "answer": gold}) + "\n" for row, gold in zip(rows, golds, strict=True))
        )
        drawn.clear()
        sampled = responses(tmp_path / "run", settings, n=samples)
        assert sum(drawn) == (2 if golds[0] == "4" else 0)
        found = {row.prompt_id: read_gold(vars(row)) for row in sampled.values()}
        assert list(found.values()) == golds
