from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from regretless.analysis import inspect
from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.core.top_logps import ENTRY
from regretless.data.columns import Response, Verdict
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.labeling import mask, pair, verify
from regretless.modeling.load import ModelConfig, tokenizer_fingerprint
from regretless.sampling import sample
from regretless.sampling.base import Completion
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.stop_strings import StopStrings
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.sampling.vllm_engine import VllmEngine
from regretless.world.tiny_models import smoke_architecture

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
JOINED = [(".", "Ċ"), (".Ċ", "Ċ"), ("Ċ", "Ċ"), ("Q", ":"), ("4", "2")]


def byte_level() -> PreTrainedTokenizerFast:
    """All bytes, a few longer tokens (one of them is `.` with two line breaks), <end> and <turn>."""
    pieces = [*BYTES, *("".join(pair) for pair in JOINED)]
    backend = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, JOINED))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<end>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return tokenizer


def sentence_piece() -> PreTrainedTokenizerFast:
    """A vocabulary with `▁` for a space, and `<0xE3>` for the bytes of other characters, as Llama 2's."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁Te42Qh:.日本", "▁4", "<end>", "<turn>"]
    backend = Tokenizer(BPE({word: number for number, word in enumerate(words)}, [("▁", "4")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<end>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "pieces": sentence_piece()}


def ids_of(kind: str, text: str) -> list[int]:
    return list(TOKENIZERS[kind](text, add_special_tokens=False)["input_ids"])


CASES: list[tuple[str, list[str], str | None, str | dict[str, str]]] = [
    ("The 42\n\nQ: 4", ["\n\nQ:"], "The 42", ""),
    ("The 42\n\nQ: 4", ["zz"], None, ""),
    ("The 42.\n\nQ: 4", ["\n\nQ:"], "The 42.", {"bytes": ".", "pieces": ""}),
    ("The 42.\n\nQ: 4", ["2"], "The 4", {"bytes": "4", "pieces": ""}),
    ("The 4Q: 4Q:", ["Q:"], "The 4", ""),
    ("e.e.e.4e.e.4", ["e.e.4"], "e.", ""),
    ("The 4Q:2", ["Q:2", "4Q", "zz"], "The ", {"bytes": "", "pieces": " "}),
    ("The 42Q:", ["Q:", "2Q:"], "The 4", {"bytes": "4", "pieces": ""}),
    ("The 42日本。2", ["本。"], "The 42日", ""),
    ("The 42。日", ["。"], "The 42", ""),
    ("The 😀😁4", ["😁"], "The 😀", ""),
    ("\n\nQ: 4", ["\n\n"], "", ""),
    ("Q: 42", ["Q:", "4"], "", ""),
    ("The 42<turn>Q: 4", ["<turn>"], "The 42", ""),
    ("The 42<turn>Q: 4", ["2<tu"], "The 4", {"bytes": "4", "pieces": ""}),
]
OF_BYTES: list[Any] = [
    ("The 4<turn>2.Q", ["Q"], "The 42.", ""),
    ("The 4<turn>2.Q", ["42"], "The ", ""),
]
"""A special token is left out of the text: SentencePiece puts a space behind it."""


@pytest.mark.parametrize(
    ("kind", "text", "strings", "before", "lost"),
    [(kind, *case) for kind in TOKENIZERS for case in CASES] + [("bytes", *case) for case in OF_BYTES],
)
def test_cut_when_a_stop_string_occurs_then_tokens_wholly_before_it_are_left_and_all_text(
    kind: str, text: str, strings: list[str], before: str | None, lost: str | dict[str, str]
) -> None:
    ids, stops = ids_of(kind, text), StopStrings(TOKENIZERS[kind], strings)
    found = stops.cut(ids)
    if before is None:
        assert found is None
        return
    assert found is not None and found[1] == before
    kept = TOKENIZERS[kind].decode(ids[: found[0]], skip_special_tokens=True)
    assert kept == before.removesuffix(lost if isinstance(lost, str) else lost[kind])


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        (["T", "h", "e", "▁", "4"], " 4"),  # the first space of a text is lost
        (["T", *["<0xE2>", "<0x82>", "<0xAC>"] * 5, "<0x0A>"], "\n"),  # bytes from within a character on are no text
    ],
)
def test_end_when_the_last_tokens_by_themselves_lose_the_stop_string_then_it_is_found(
    pieces: list[str], stop: str
) -> None:
    stops, ids = StopStrings(TOKENIZERS["pieces"], [stop]), TOKENIZERS["pieces"].convert_tokens_to_ids(pieces)
    found = [stops.end_with([ids[:count]])[0] for count in range(1, len(ids) + 1)]
    assert found == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_when_they_come_one_by_one_then_the_first_complete_stop_string_ends_them(kind: str) -> None:
    draw, tokenizer, ended = Random(0), TOKENIZERS[kind], 0
    # Few tokens, so that stop strings come up; every byte of 日 and 本 too, also out of order.
    pool = [*ids_of(kind, "The 42.Q:"), *ids_of(kind, "日本"), *ids_of(kind, "。\n<turn>"), *ids_of(kind, ".\n\n")]
    for _ in range(150):
        strings = draw.sample(["\n\n", "Q:", "日", "本", "。", "<turn>", "42", "2.", " 4", "。\n"], 3)
        stops, ids = StopStrings(tokenizer, strings), draw.choices(pool, k=60)
        whole = stops.cut(ids)
        count = next((count for count in range(1, 61) if stops.end_with([ids[:count]])[0]), None)
        plain = [tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False) for count in range(1, 61)]
        first = next((count for count, text in enumerate(plain, 1) if any(one in text for one in strings)), None)
        assert count == first
        if count is None:
            continue
        ended += 1
        assert whole is not None and stops.cut(ids[:count]) == whole and stops.cut(ids[:count] + [ids[0]] * 9) == whole
        text = plain[count - 1]
        before = text[: min(text.find(one) for one in strings if one in text)]
        assert whole[0] == max(count for count, text in enumerate(["", *plain]) if before.startswith(text))
    assert ended > 100


@pytest.fixture(scope="module", params=["bytes"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZERS[request.param].save_pretrained(folder)
    return folder


def config_of(checkpoint: Path) -> ModelConfig:
    architecture = {**smoke_architecture("qwen3", len(TOKENIZERS["bytes"])), "initializer_range": 0.05}
    return ModelConfig(architecture=architecture, tokenizer=str(checkpoint))


class Counting(TransformersEngine):
    """Records the number of steps, and a number per token."""

    steps = 0

    def measure(self, logits: Any, shaped: Any, tokens: Any) -> dict[str, Any]:
        self.steps += 1
        return {"id": tokens[:, 0].float()}


HOT: dict[str, Any] = {"n": 1, "max_new_tokens": 40, "temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_engine_transformers_when_rows_reach_a_stop_string_then_they_end_and_others_go_on(checkpoint: Path) -> None:
    engine = Counting(config_of(checkpoint), SamplingParams(**HOT))
    prompts = [ids_of("bytes", text) for text in ("Q:", "The 42.\n\nQ: 4", "4")]
    plain = engine.generate(prompts, 3)
    tokenizer = TOKENIZERS["bytes"]
    texts = [tokenizer.decode(item.token_ids or []) for item in plain]
    # Of the second row, and not of the others; both sides of a border between tokens, not at their borders.
    stop = next(texts[1][at : at + 2] for at in range(8, 30) if "\ufffd" not in texts[1][at : at + 2])
    assert stop not in texts[0] + texts[2]
    changed = engine.with_params(SamplingParams(**HOT, stop=[stop, "Q:"]))
    found = changed.generate(prompts, 3)
    for row in (0, 2):
        assert found[row].token_ids == plain[row].token_ids, "what is in the prompt ends nothing"
        # A row that ends changes how the others are rounded.
        assert found[row].logps == pytest.approx(plain[row].logps, abs=1e-5)
    item, count = found[1], len(found[1].token_ids or [])
    assert (item.finish_reason, item.text) == ("stop_string", texts[1].partition(stop)[0])
    assert 0 < count < 40 and tokenizer.decode(item.token_ids or []) == item.text
    for name in ("logps", "sampled_logps"):
        assert getattr(item, name) == pytest.approx(getattr(plain[1], name)[:count], abs=1e-5)
    assert item.token_ids == (plain[1].token_ids or [])[:count]
    assert item.token_numbers == {"id": [float(token) for token in item.token_ids or []]}
    changed.steps = 0
    changed.generate(prompts[1:2] * 3, 3)
    assert changed.steps <= 40
    first = engine.with_params(SamplingParams(**HOT, stop=sorted(set("".join(texts)) - {"\ufffd"})[:16]))
    first.steps = 0
    ended = first.generate(prompts, 3)
    assert first.steps < 40 and {row.finish_reason for row in ended} == {"stop_string"}


def test_engine_transformers_when_the_stop_string_is_its_end_token_then_the_model_itself_ended(
    checkpoint: Path,
) -> None:
    engine = TransformersEngine(config_of(checkpoint), SamplingParams(**HOT, stop=["<end>"]))
    engine.ends = list(range(0, 200))
    for item in engine.generate([ids_of("bytes", "Q:")] * 4, 0):
        assert item.finish_reason == "stop" and (item.token_ids or [])[-1] in engine.ends


class FakeVllm:
    """vLLM's engine as the class uses it: a request at a time, one or two tokens a step."""

    def __init__(self, texts: list[list[int]], at_once: int) -> None:
        self.texts, self.at_once = texts, at_once
        self.left: dict[str, list[int]] = {}
        self.given: dict[str, int] = {}
        self.kinds: set[Any] = set()

    def add_request(self, name: str, request: Any, params: Any, lora_request: Any) -> None:
        self.left[name], self.given[name] = list(self.texts[int(name)]), 0
        self.kinds.add(params.output_kind)
        self.listed = params.logprobs

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def step(self) -> list[Any]:
        outputs = []
        for name, left in list(self.left.items()):
            new, rest = left[: self.at_once], left[self.at_once :]
            self.left[name] = rest
            self.given[name] += len(new)
            # The token that was drawn, and the two most likely ones, of which it may be one.
            likely = {7: SimpleNamespace(logprob=-0.5), 3: SimpleNamespace(logprob=-1.5)}
            logprobs = [{token: SimpleNamespace(logprob=-float(token)), **likely} for token in new]
            reason = None if rest else "stop" if new[-1] == END else "length"
            if reason:
                del self.left[name]
            output = SimpleNamespace(token_ids=new, logprobs=logprobs, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=name, finished=bool(reason), outputs=[output]))
        return outputs


END = TOKENIZERS["bytes"].eos_token_id


@pytest.mark.parametrize("at_once", [1, 2])
def test_engine_vllm_when_a_request_reaches_a_stop_string_then_it_is_aborted_and_cut(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    modules = {"vllm.sampling_params": SimpleNamespace(RequestOutputKind=kinds)}
    monkeypatch.setattr(importlib, "import_module", lambda name: modules[name])
    texts = [ids_of("bytes", text) for text in ("The 42.\n\nQ: 4" + "4" * 20, "Th 4", "Q: 4\n\nQ:", "\n\nQ: 4")]
    texts[1].append(END)
    fake = FakeVllm(texts, at_once)
    engine: Any = object.__new__(VllmEngine)
    engine.params, engine.tokenizer, engine.ends = (
        SamplingParams(**HOT, stop=["\n\nQ:"], top_logps=2),
        TOKENIZERS["bytes"],
        [END],
    )
    engine.options = SimpleNamespace(logprobs_mode="raw")
    engine._vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    engine.llm, engine.lora = SimpleNamespace(llm_engine=fake), None
    found: dict[int, Completion] = dict(engine.stream([[1]] * 4, [0] * 4))
    assert [(found[row].text, found[row].finish_reason) for row in range(4)] == [
        ("The 42.", "stop_string"),
        ("Th 4", "stop"),
        ("Q: 4", "stop_string"),
        ("", "stop_string"),
    ]
    kept = [5, 5, 3, 0]
    for row, count in enumerate(kept):
        assert found[row].token_ids == texts[row][:count]
        assert found[row].logps == [-float(token) for token in texts[row][:count]]
        assert found[row].top_logps == np.array([[(7, -0.5), (3, -1.5)]] * count, ENTRY).tobytes()
    assert fake.listed == 2
    assert fake.given["0"] < 12 and not fake.left and fake.kinds == {"delta"}


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("Q:", "stop: input should be a valid list"),
        ([""], "stop.0: string should have at least 1 character"),
        (["Q:", "4", "Q:"], "stop: expected different strings, got 'Q:' twice"),
        ([3], "stop.0: input should be a valid string"),
        ([f"{number}:" for number in range(17)], "stop: list should have at most 16 items"),
    ],
)
def test_setting_when_it_is_no_list_of_different_texts_then_it_is_refused(stop: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams.parse({"stop": stop}, "sample")
    assert said in str(error.value)


def test_engine_of_a_plug_in_when_it_runs_on_behind_a_stop_string_then_it_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopStrings, "applied", lambda self, completion: completion)
    monkeypatch.setattr(StopStrings, "end_with", lambda self, rows: [False] * len(rows))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Q:"}\n')
    stop = [chr(number) for number in range(65, 81)]
    config = sample.SampleConfig.parse(
        {
            "prompts": {"dataset": str(tmp_path / "prompts.jsonl")},
            "models": [config_of(checkpoint).model_dump()],
            **{**HOT, "n": 4, "stop": stop},
        },
        "sample",
    )
    with pytest.raises(ConfigError, match=r"row 1 of the prompts: a text that goes on behind a string of `stop`"):
        sample.run(config, tmp_path / "out")


def response(text: str, cut: str | None, number: int, verdict: Verdict) -> Response:
    """A response that a stop string ended (`cut`: what its tokens spell), or the model (None)."""
    ids = ids_of("bytes", text if cut is None else cut) + ([END] if cut is None else [])
    return Response(
        prompt_id="p",
        response_id=f"p-0-{number}",
        prompt="Q: 4",
        response=text,
        token_ids=ids,
        logps=[-0.5] * len(ids),
        logps_kind="raw",
        tokenizer=tokenizer_fingerprint(TOKENIZERS["bytes"]),
        finish_reason="stop" if cut is None else "stop_string",
        verdict=verdict,
    )


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Path]:
    """Pairs whose chosen sides a stop string ended."""
    rows = [
        response("The 42.", "The 42", 0, Verdict.CORRECT),
        response("Th 42", "Th 42", 1, Verdict.CORRECT),
        response("The 4", None, 2, Verdict.WRONG),
        response("", "", 3, Verdict.WRONG),
        response("4", "", 4, Verdict.WRONG),
    ]
    write_records(tmp_path / "responses.parquet", rows)
    counts = pair.run(pair.PairConfig(), tmp_path / "responses.parquet", tmp_path)
    assert (counts["pairs"], counts["refused"]) == (2, 2)
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in refused} == {"empty completion"}
    yield tmp_path / "pairs.parquet"


def test_stopped_response_when_trained_on_then_no_end_token_is_behind_it(pairs: Path, tmp_path: Path) -> None:
    rows, refused = read_pairs(pairs)
    assert not refused and [row.chosen.stopped for row in rows] == [True, True] and rows[0].rejected is not None
    tokenizer = TOKENIZERS["bytes"]
    for texts_only in (False, True):
        if texts_only:
            plain = {"token_ids": None, "logps": None}
            sides = [(replace(row.chosen, **plain), replace(row.rejected, **plain)) for row in rows if row.rejected]
            rows = [replace(row, chosen=a, rejected=b) for row, (a, b) in zip(rows, sides, strict=True)]
        found, refused = tokenize_pairs(rows, tokenizer, max_length=None, max_prompt_length=None, need_logps=False)
        assert not refused and all(not row.logps_dropped for row in found)
        texts = {tokenizer.decode(row.chosen.ids) for row in found}
        assert texts == {"The 42." if texts_only else "The 42", "Th 42"}
        assert {tokenizer.decode(row.rejected.ids) for row in found if row.rejected} == {"The 4<end>"}
    masked = mask.run(mask.MaskConfig(lengths=(1,), tokenizer=str(saved(tmp_path))), pairs, tmp_path / "mask")
    assert masked["masked"] == 2 and not masked["left_out"]
    rows, _ = read_pairs(tmp_path / "mask" / "pairs.parquet")
    cut = [row.rejected for row in rows if row.kind == "masked" and row.rejected]
    assert {(side.text, side.complete, side.stopped) for side in cut} == {("The ", False, None), ("Th ", False, None)}


def saved(folder: Path) -> Path:
    TOKENIZERS["bytes"].save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@pytest.mark.parametrize(
    ("text", "ids", "reason"),
    [
        ("The 42.", "The 42.<end>", "ended by a stop string, yet its tokens end with an end-of-sequence token"),
        ("The 42.", "The 4Q", "token ids do not spell the text"),
        ("The 42." + "4" * 20, "The 42", "token ids do not spell the text"),
    ],
)
def test_stopped_side_when_its_tokens_are_not_its_beginning_then_the_row_is_refused(
    pairs: Path, text: str, ids: str, reason: str
) -> None:
    row, _ = read_pairs(pairs)[0]
    tokens = ids_of("bytes", ids)
    row = replace(row, chosen=replace(row.chosen, text=text, token_ids=tokens, logps=[-0.5] * len(tokens)))
    _, (refused,) = tokenize_pairs([row], TOKENIZERS["bytes"], max_length=None, max_prompt_length=None)
    assert reason in refused.reason


def test_stopped_responses_when_sampled_verified_and_inspected_then_they_are_graded_and_counted(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Q:", "answer": "4"}\n')
    stop = [chr(number) for number in range(65, 81)]
    model = config_of(checkpoint)
    config = sample.SampleConfig.parse(
        {
            "prompts": {"dataset": str(tmp_path / "prompts.jsonl"), "answer_column": "answer"},
            "models": [model.model_dump()],
            **{**HOT, "n": 24, "stop": stop, "seed": 1},
        },
        "sample",
    )
    counts = sample.run(config, tmp_path / "sample")
    rows, refused = read_responses(tmp_path / "sample" / "responses.parquet")
    stopped = [row for row in rows if row.finish_reason == "stop_string"]
    assert counts["stopped"] == len(stopped) > 10 and not refused
    assert not any(character in row.response for row in rows for character in stop)
    assert json.loads(rows[0].sampling or "")["stop"] == stop
    verify.run(verify.VerifyConfig(workers=1), tmp_path / "sample" / "responses.parquet", tmp_path / "verify")
    verified, _ = read_responses(tmp_path / "verify" / "responses.parquet")
    assert {row.verdict for row in verified if row.finish_reason == "stop_string"} == {Verdict.WRONG}
    whole = max(stopped, key=lambda row: len(row.token_ids or []))
    sides = [replace(whole, verdict=Verdict.CORRECT), response("The 4", None, 99, Verdict.WRONG)]
    sides = [replace(row, prompt_id="q", prompt="Q:", response_id=f"q-0-{at}") for at, row in enumerate(sides)]
    write_records(tmp_path / "labeled.parquet", sides)
    pair.run(pair.PairConfig(), tmp_path / "labeled.parquet", tmp_path / "pair")
    inspect.run(inspect.InspectConfig(), tmp_path / "pair" / "pairs.parquet", model, tmp_path / "inspect", {"repo": {}})
    numbers = read_json(tmp_path / "inspect" / "inspect.json")["behavior_minus_reference"]
    assert abs(numbers["chosen"]["nats_per_token"]["mean"]) < 1e-4
