"""One more number per token, from a plug-in's engine to its objective: the entropy of what it was drawn from."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from regretless.analysis import inspect
from regretless.core.errors import DataError
from regretless.core.files import read_json
from regretless.data.columns import Pair, Side
from regretless.data.responses import read_responses
from regretless.data.tokenization import tokenize_pairs
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.objectives import OBJECTIVES, Logps, Objective, build
from regretless.training.arguments import PreferenceConfig
from regretless.training.batch import build_batch
from regretless.training.data import PairDataset
from regretless.training.pair_reading import pair_table
from regretless.training.pair_store import PairTable
from regretless.world.tokenizer import build_tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
TEMPERATURE = 0.9
ARCHITECTURE = {
    "model_type": "qwen3",
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
}
TRAIN = {"lora": None, "learning_rate": 0.01, "max_length": 128}
RECIPE = {
    "name": "entropy",
    "threads": 1,
    "world": {
        **{"prompts": 16, "test": 8, "longer_test": 0, "steps": [1, 1], "largest_amount": 1},
        "policies": {"behavior": {"demonstrations": 1600, "off_by_one": 0.3}},
    },
    "pretrain": {
        "behavior": {
            **TRAIN,
            "model": {"architecture": ARCHITECTURE, "tokenizer": "{run}/world/tokenizer"},
            "data": "{run}/world/demonstrations-behavior.jsonl",
            "max_steps": 100,
            "pairs_per_step": 16,
        }
    },
    "model": {"name_or_path": "{run}/pretrain/behavior"},
    "sample": {
        "engine": "entropy",
        "prompts": {"dataset": "{run}/world/prompts.jsonl", "answer_column": "answer"},
        "models": [{"name_or_path": "{run}/pretrain/behavior"}],
        **{"n": 12, "temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
        **{"max_new_tokens": 16, "batch_size": 64},
    },
    "verify": {},
    "pair": {},
    "mask": {"lengths": [2, 3], "tokenizer": "{run}/world/tokenizer"},
    "inspect": {},
    "train": {
        **TRAIN,
        "objective": ["forking_dpo", "dpo"],
        "methods": {"forking_dpo": {"threshold": 0.0}},
        "max_steps": 4,
        "pairs_per_step": 4,
        "logging_steps": 1,
    },
    "analyze": {"pairs": 4},
    "report": {},
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(regretless: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, from sampling with the plug-in's engine to training with its objective."""
    folder = tmp_path_factory.mktemp("entropy")
    recipe = folder / "entropy.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    done = regretless("run", recipe, "--output-dir", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture
def forking_dpo(monkeypatch: pytest.MonkeyPatch) -> type[Objective]:
    """The plug-in's objective in this process, where the plug-in is not installed."""
    monkeypatch.syspath_prepend(EXAMPLE)
    found: type[Objective] = importlib.import_module("regretless_example.entropy").ForkingDPO
    monkeypatch.setitem(OBJECTIVES, "forking_dpo", found)
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_json(folder / "trainer_state.json")["log_history"] if "loss" in entry]


@pytest.mark.slow
def test_entropies_when_sampled_then_they_are_those_of_the_model_and_every_stage_keeps_them(run: Path) -> None:
    responses, refused = read_responses(run / "sample" / "responses.parquet")
    assert len(responses) == 16 * 12 and not refused
    model = load_model(ModelConfig(name_or_path=str(run / "pretrain" / "behavior")))
    for response in responses[::8]:
        ids = torch.tensor([[*(response.prompt_token_ids or ()), *(response.token_ids or ())]], device=model.device)
        start = len(response.prompt_token_ids or ())
        with torch.no_grad():
            drawn_from = (model(ids).logits[0, start - 1 : -1].double() / TEMPERATURE).log_softmax(dim=1)
        expected = -(drawn_from.exp() * drawn_from).sum(dim=1).cpu()
        np.testing.assert_allclose((response.token_numbers or {})["entropy"], expected, atol=1e-4)
        assert expected.std() > 0.1, "some tokens are surer than others"
    kept = {response.response_id: response.token_numbers for response in responses}
    verified = rows(run / "verify" / "responses.parquet")
    assert {row["response_id"]: row["token_numbers"] for row in verified} == kept
    pairs = rows(run / "pair" / "pairs.parquet")
    assert len(pairs) > 4
    for row in pairs:
        for side in ("chosen", "rejected"):
            assert row[f"{side}_token_numbers"] == kept[row[f"{side}_id"]]
    masked = [row for row in rows(run / "mask" / "pairs.parquet") if row["kind"] == "masked"]
    assert masked
    for row in masked:
        whole, left = (row[f"{side}_token_numbers"]["entropy"] for side in ("chosen", "rejected"))
        assert left == whole[: len(row["rejected_token_ids"])] and len(whole) - len(left) in (2, 3)


@pytest.mark.everyday
@pytest.mark.slow
def test_entropies_when_trained_on_then_the_objective_reads_those_of_the_file(
    run: Path, regretless: Command, tmp_path: Path
) -> None:
    version = read_json(run / "sample" / "manifest.json")["versions"]["regretless-example-plugin"]
    assert version.startswith("0.1.0 (code ")
    # Every token has an entropy of 0 or more, none of 99: all of DPO's loss is left, or none.
    all_count, dpo = run / "train" / "forking_dpo", run / "train" / "dpo"
    assert losses(all_count) == losses(dpo)
    assert losses(dpo)[0] == pytest.approx(math.log(2), abs=1e-3) and losses(dpo)[-1] != losses(dpo)[0]
    weights = [load_file(folder / "model.safetensors") for folder in (all_count, dpo)]
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
    inspected = read_json(run / "inspect" / "inspect.json")
    assert inspected["objectives"]["forking_dpo β=0.1"]["loss"] == pytest.approx(math.log(2))
    pairs, model = run / "mask" / "pairs.parquet", run / "pretrain" / "behavior"
    settings = ["objective=forking_dpo", "threshold=99", "lora=null", "max_steps=3", "learning_rate=0.01"]
    more = ["logging_steps=1", "pairs_per_step=4"]
    done = regretless("train", "--pairs", pairs, "--model", model, "--output", tmp_path / "none", *settings, *more)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "none") == pytest.approx([math.log(2)] * 3, abs=1e-6)


def table_of(data: Path, run: Path, objective: Objective, folder: Path, **settings: Any) -> PairDataset:
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(run / "pretrain" / "behavior")))
    args = PreferenceConfig(output_dir=str(folder), report_to="none", use_cpu=True, **settings)
    return PairDataset(pair_table(data, tokenizer, args, objective, "pairs"), mismatched=False)


@pytest.mark.slow
def test_batch_when_built_then_it_has_the_entropies_of_each_response_cut_as_its_tokens_are(
    run: Path, forking_dpo: type[Objective], tmp_path: Path
) -> None:
    objective, longest = forking_dpo(), 24
    pairs = run / "mask" / "pairs.parquet"
    dataset = table_of(pairs, run, objective, tmp_path, max_length=longest, truncation="keep_start")
    # Reference values that name their tokens, so that each row of the batch is known again.
    batch = build_batch(
        [dataset[number] for number in range(len(dataset))],
        objective,
        reference=lambda item: np.array(item[1], np.float32),
    )
    assert "reference" in batch.inputs
    expected = {}
    for row in rows(pairs):
        for side in ("chosen", "rejected"):
            ids = row[f"{side}_token_ids"]
            expected.setdefault(tuple(ids), []).append(row[f"{side}_token_numbers"]["entropy"])
    cut = 0
    for ids, mask, values in zip(batch.inputs["reference"], batch.mask, batch.inputs["entropy"], strict=True):
        length = int(mask.sum())
        tokens = tuple(int(token) for token in ids[:length])
        stored = [found[:length] for whole, same in expected.items() if whole[:length] == tokens for found in same]
        assert values[:length].tolist() in stored and not values[length:].any()
        cut += tokens not in expected
    assert cut, "some responses are longer than max_length leaves room for"


@pytest.mark.slow
@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_numbers_that_the_data_lacks_when_trained_on_then_the_list_and_its_column_are_named(
    form: str, run: Path, forking_dpo: type[Objective], tmp_path: Path
) -> None:
    found = rows(run / "pair" / "pairs.parquet")
    for row in found[:2]:
        row["rejected_token_numbers"] = {"surprise": row["rejected_token_numbers"]["entropy"]}
    pairs = tmp_path / f"pairs{form}"
    if form == ".jsonl":
        write(pairs, found)
    else:
        pq.write_table(pa.Table.from_pylist(found), pairs)
    with pytest.raises(DataError) as error:
        table_of(pairs, run, forking_dpo(), tmp_path)
    message = str(error.value)
    assert f"forking_dpo needs token_numbers.entropy, and 2 of {len(found)} pairs have none" in message
    assert "chosen_token_numbers and rejected_token_numbers with a list `entropy`" in message
    model = ModelConfig(name_or_path=str(run / "pretrain" / "behavior"))
    inspect.run(inspect.InspectConfig(), pairs, model, tmp_path / "inspect", {"forking_dpo": {}})
    (note,) = read_json(tmp_path / "inspect" / "inspect.json")["notes"]
    assert note.startswith(f"2 of {len(found)} pairs lack token_numbers.entropy (the data has none)")
    # A table that is kept for an objective of other needs is not taken for one that was checked.
    table_of(pairs, run, Other(), tmp_path)
    with pytest.raises(DataError, match=r"token_numbers\.entropy"):
        table_of(pairs, run, forking_dpo(), tmp_path)


class Other(Objective):
    """An objective of other needs."""

    name = "other"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"behavior", "rejected"})

    def compute(self, logps: Any, pairs: Any) -> Any:
        raise AssertionError("not computed here")


BROKEN: Mapping[str, tuple[Callable[[list[float]], Any], str]] = {
    "short": (lambda values: values[1:], "token_numbers.entropy: expected one value per token, got "),
    "nan": (lambda values: [math.nan, *values[1:]], "token_numbers.entropy: value 0 is nan; expected for each name a "),
    "above float32": (lambda values: [1e39, *values[1:]], "token_numbers.entropy: value 0 is 1e+39; expected "),
    "text": (lambda values: "high", "token_numbers.entropy: expected for each name a list of numbers from "),
    "list": (lambda values: None, "token_numbers: expected for each name a list of numbers from "),
}


def broken(row: dict[str, Any], column: str, fault: str) -> dict[str, Any]:
    values = BROKEN[fault][0](row[column]["entropy"])
    return {**row, column: row[column]["entropy"] if fault == "list" else {"entropy": values}}


def write(file: Path, found: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_numbers_that_are_broken_when_read_then_the_row_is_rejected_with_the_place(
    fault: str, run: Path, forking_dpo: type[Objective], tmp_path: Path
) -> None:
    pairs = rows(run / "pair" / "pairs.parquet")
    pairs[1] = broken(pairs[1], "chosen_token_numbers", fault)
    table = table_of(write(tmp_path / "pairs.jsonl", pairs), run, forking_dpo(), tmp_path / "trained")
    (refused,) = (tmp_path / "trained.cache" / "refused-pairs.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(refused)["line"] == 2 and f"chosen_{BROKEN[fault][1]}" in json.loads(refused)["reason"]
    assert len(table) == len(pairs) - 1
    responses = rows(run / "verify" / "responses.parquet")[:3]
    responses[1] = broken(responses[1], "token_numbers", fault)
    counts = verify.run(verify.VerifyConfig(workers=1), write(tmp_path / "in.jsonl", responses), tmp_path / "verified")
    assert (counts["responses"], counts["refused"]) == (2, 1)
    (refused,) = (tmp_path / "verified" / "refused.jsonl").read_text(encoding="utf-8").splitlines()
    assert BROKEN[fault][1] in json.loads(refused)["reason"]


@pytest.mark.slow
def test_numbers_that_only_some_rows_have_when_verified_then_the_others_have_none(run: Path, tmp_path: Path) -> None:
    responses = rows(run / "sample" / "responses.parquet")[:4]
    entropy = responses[0]["token_numbers"]
    responses[1]["token_numbers"], responses[2]["token_numbers"] = {}, None
    responses[3]["token_numbers"] = {"surprise": [0.5] * len(responses[3]["token_ids"])}
    verify.run(verify.VerifyConfig(workers=1), write(tmp_path / "in.jsonl", responses), tmp_path / "verified")
    found, refused = read_responses(tmp_path / "verified" / "responses.parquet")
    assert [row.token_numbers for row in found] == [entropy, None, None, responses[3]["token_numbers"]] and not refused
    for row in responses:
        row["token_numbers"] = {}
    verify.run(verify.VerifyConfig(workers=1), write(tmp_path / "in.jsonl", responses), tmp_path / "none")
    found, refused = read_responses(tmp_path / "none" / "responses.parquet")
    assert [row.token_numbers for row in found] == [None] * 4 and not refused


def test_number_with_the_name_of_another_input_when_stored_then_it_takes_no_place_of_it(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    sides = []
    for text, logp in (("34", -1.0), ("56", None)):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        numbers = {name: [5.0] * len(ids) for name in ("logps", "behavior", "reference")}
        logps = None if logp is None else [logp] * len(ids)
        sides.append(Side(text=text, token_ids=ids, logps=logps, token_numbers=numbers))
    pair = Pair(prompt="1", chosen=sides[0], rejected=sides[1])
    tokenized, _ = tokenize_pairs([pair], tokenizer, max_length=None, max_prompt_length=None)
    (read,) = PairTable.temporary(tokenized)
    assert read == tokenized[0] and set(read.chosen.values) == {"logps", "behavior", "reference"}
    assert set(read.chosen.values["behavior"]) == {-1.0} and set(read.chosen.values["logps"]) == {5.0}
    assert read.rejected is not None and set(read.rejected.values) == {"logps", "reference"}
    logps = Logps(torch.zeros(2, 1), mask=torch.ones(2, 1), token_numbers={"reference": torch.ones(2, 1)})
    with pytest.raises(DataError, match="dpo needs `reference`"):
        build("dpo")(logps, torch.tensor([[0, 1]]))
