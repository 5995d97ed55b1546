from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from killed import AtCall, AtWrite
from regretless.core.continuations import unpacked
from regretless.core.errors import ConfigError, DataError
from regretless.core.regret_values import best_value, split, writer_value
from regretless.data.columns import Response, Verdict
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.labeling import pair, verify
from regretless.labeling.pair import PairConfig
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.decoding import Decoder
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.rollouts.contexts import Measured
from regretless.rollouts.continuations import Continued, Policy
from regretless.rollouts.rollout import Measures, RolloutConfig, Subject, run
from regretless.sampling import sample
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.sample import SampleConfig
from regretless.workflow.run_folder import RunFolder
from run_contents import contents, differences
from single_unit import do_unit

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
VERIFIER = VerifyConfig(verifier="math").model_copy(update={"verifier": "has"})
MOST = 6
END, RIGHT = 0, 4
"""Token ids."""


def responses_of(writer: ModelConfig, prompts: dict[str, Any], folder: Path, **params: Any) -> Path:
    """Twelve responses to each prompt, with verdicts."""
    folder.mkdir()
    common = {"prompts": prompts, "n": 12, "max_new_tokens": MOST, "seed": 5}
    config = SampleConfig.parse({**common, **PLAIN, **params, "models": [writer.model_dump()]}, "sample")
    sample.run(config, folder)
    verify.run(VERIFIER, folder / "responses.parquet", folder, "verified.parquet")
    return folder / "verified.parquet"


def config_of(**values: Any) -> RolloutConfig:
    return RolloutConfig.parse({"k": 32, "at": "tokens", "positions": [0.5], "max_tokens": MOST, **values}, "rollout")


def measured(config: RolloutConfig, responses: Path, model: ModelConfig, output: Path) -> list[dict[str, Any]]:
    output.mkdir(exist_ok=True)
    run(config, responses, model, VERIFIER, output)
    rows: list[dict[str, Any]] = pq.read_table(output / "regret.parquet").to_pylist()
    return rows


@dataclass
class Tree:
    """Every continuation of a prompt, by a writer at a temperature, and its reference."""

    writer: ModelConfig
    reference: ModelConfig
    temperature: float
    prompt: tuple[int, ...]

    @cached_property
    def values(self) -> dict[tuple[int, ...], tuple[float, float, float]]:
        """By the tokens written so far: success rates of the reference and of the writer, and the writer's KL-to-go."""
        models = [load_model(config) for config in (self.reference, self.writer)]
        found: dict[tuple[int, ...], tuple[float, float, float]] = {}
        for length in reversed(range(MOST)):
            written = list(itertools.product(range(1, 5), repeat=length))
            ids = torch.tensor([[*self.prompt, *tokens] for tokens in written])
            with torch.no_grad():
                logits = [model(input_ids=ids).logits[:, -1].double() for model in models]
            logps = [logits[0].log_softmax(1).numpy(), (logits[1] / self.temperature).log_softmax(1).numpy()]
            for tokens, theirs, ours in zip(written, *logps, strict=True):
                later = [
                    (float(RIGHT in tokens),) * 2 + (0.0,)
                    if token == END
                    else found.get((*tokens, token), (0.0, 0.0, 0.0))
                    for token in range(5)
                ]
                rates, back, divergences = np.array(later).T
                divergence = np.exp(ours) @ (ours - theirs + divergences)
                found[tokens] = (float(np.exp(theirs) @ rates), float(np.exp(ours) @ back), float(divergence))
        return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("writer_seed", [0, 1])
def test_rollout_on_every_continuation_of_a_tiny_model_then_intervals_contain_the_exact_values(
    writer_seed: int,
    temperature: float,
    models: Callable[[int], ModelConfig],
    prompts: dict[str, Any],
    tmp_path: Path,
) -> None:
    writer, reference = models(writer_seed), models(0)
    file = responses_of(writer, prompts, tmp_path / "sampled", temperature=temperature)
    rows = measured(config_of(writers=[writer.model_dump()]), file, reference, tmp_path / "out")
    is_on_policy = (writer_seed, temperature) == (0, 1.0)
    assert sorted(path.name for path in (tmp_path / "out").glob("*-[0-9]")) == (
        ["reference-0"] if is_on_policy else ["reference-0", "writer-1"]
    )
    responses = {row.response_id: row for row in read_responses(file)[0]}
    trees: dict[str, Tree] = {}
    inside: list[bool] = []
    divergences: dict[str, tuple[float, float]] = {}
    for (name, alpha), units in itertools.groupby(rows, key=lambda row: (row["response_id"], row["alpha"])):
        response, listed = responses[name], list(units)
        ids, outcome = tuple(response.token_ids or ()), float(response.verdict is Verdict.CORRECT)
        tree = trees.setdefault(
            response.prompt_id, Tree(writer, reference, temperature, tuple(response.prompt_token_ids or ()))
        )
        exact = [tree.values[ids[: unit["start"]]] for unit in listed]
        best = [*(float(best_value(min(rate, 1.0), alpha)) for rate, _, _ in exact), outcome]
        values = [*(float(writer_value(rate, divergence, alpha)) for _, rate, divergence in exact), outcome]
        parts = split(best, values)
        for number, unit in enumerate(listed):
            truth = {
                "p_ref": exact[number][0],
                "p_mu": exact[number][1],
                "v_star": best[number],
                "v_mu": values[number],
            }
            truth |= {"q": values[number + 1], "regret": parts.regret[number], "local": parts.local[number]}
            truth |= {"future": parts.future[number]}
            inside += [unit[f"{key}_low"] - 1e-6 <= value <= unit[f"{key}_high"] + 1e-6 for key, value in truth.items()]
            assert unit["regret"] == pytest.approx(unit["local"] + unit["future"], abs=1e-12)
            assert unit["n_mu"] == 32 and unit["end"] > unit["start"]
            error = unit["kl_to_go_error"]
            divergences[unit["context"]] = unit["kl_to_go"] - exact[number][2], error
            assert (error == 0) == is_on_policy
    assert len(inside) > 400
    # Some ten contexts, each in several rows: their errors come together.
    assert np.mean(inside) >= 0.85
    differences_of_kl, errors = np.array(list(divergences.values())).T
    assert abs(differences_of_kl.sum()) <= 4 * np.sqrt((errors**2).sum()) + 1e-5
    # What pair reads is the sum over units at the first α, and what it is made of.
    for row in read_responses(tmp_path / "out" / "responses.parquet")[0]:
        of_row = [unit for unit in rows if (unit["response_id"], unit["alpha"]) == (row.response_id, 1.0)]
        if of_row:
            assert row.token_ids is not None
            assert row.regret == pytest.approx(sum(unit["regret"] for unit in of_row))
            assert row.regret_halves is not None
            middle = row.regret - of_row[0]["v_star"]
            assert np.mean(row.regret_halves) == pytest.approx(middle, abs=0.05), "V* is not linear in counts"
            # And Q^μ of each unit, that of the last one being the return.
            assert np.mean(row.unit_q_halves or (), axis=0) == pytest.approx([unit["q"] for unit in of_row], abs=1e-9)
            errors_of_q = row.unit_q_error or [1.0]
            assert errors_of_q[-1] == 0 and len(errors_of_q) == len(of_row)
            for error, following in zip(errors_of_q, of_row[1:], strict=False):
                right, n = following["right_mu"] + 0.5, following["n_mu"] + 1
                of_rate = np.sqrt(right * (n - right) / (n * n * (n + 1)))
                assert error == pytest.approx(np.hypot(of_rate, following["kl_to_go_error"]), rel=0.05)
            # The tokenizer joins words with a space.
            letters = [["ab\n7"[token - 1] for token in row.token_ids[: unit["end"]] if token] for unit in of_row]
            assert row.unit_characters == [len(" ".join(words)) for words in letters]
            assert (row.unit_ends, row.unit_right) == (
                [unit["end"] for unit in of_row],
                [unit["right_mu"] for unit in of_row],
            )


def test_units_when_paired_by_regret_then_both_sides_are_tokenized_as_they_were_sampled(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    file = responses_of(models(0), prompts, tmp_path / "sampled")
    measured(config_of(k=64, positions=[0.3, 0.6]), file, models(0), tmp_path / "out")
    config = PairConfig(rule="regret", smallest_gap=0.0, max_correct=6, max_wrong=6)
    pair.run(config, tmp_path / "out" / "responses.parquet", tmp_path)
    pairs, refused = read_pairs(tmp_path / "pairs.parquet")
    limits: dict[str, Any] = {"max_length": None, "max_prompt_length": None}
    tokenized, unusable = tokenize_pairs(pairs, load_tokenizer(models(0)), **limits)
    assert (refused, unusable) == ([], []) and {one.prefix_tokens is None for one in pairs} == {True, False}
    for row, of_row in zip(pairs, tokenized, strict=True):
        start = row.prefix_tokens or 0
        for side, ids in zip(row.sides.values(), of_row.sides, strict=True):
            assert list(ids.own) == (side.token_ids or [])[start : side.cut_at]
            assert ids.values["behavior"] == tuple((side.logps or [])[start : side.cut_at])


@pytest.mark.parametrize("writer_seed", [0, 1])
def test_continuations_when_kept_then_each_response_has_its_writers_from_the_ends_of_its_units(
    writer_seed: int, models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    writer = models(writer_seed)
    file = responses_of(writer, prompts, tmp_path / "sampled", temperature=1.0)
    config = config_of(k=3, positions=[0.3, 0.6], keep_continuations=True, writers=[writer.model_dump()])
    rows = measured(config, file, models(0), tmp_path / "out")
    name = "writer-1" if writer_seed else "reference-0"
    drawn: dict[str, list[tuple[list[int], list[float]]]] = {}
    for one in read_responses(tmp_path / "out" / name / "responses.parquet")[0]:
        drawn.setdefault(one.prompt_id, []).append((one.token_ids or [], one.logps or []))
    starts = {(row["response_id"], row["start"]): row["context"] for row in rows if row["start"]}
    checked = 0
    responses, refused = read_responses(tmp_path / "out" / "responses.parquet")
    for response in responses:
        contexts = sorted((start, of) for (name_of, start), of in starts.items() if name_of == response.response_id)
        wanted = [(start, *path) for start, context in contexts for path in drawn[context]]
        if response.regret is None:
            assert response.continuations is None
        else:
            found = unpacked(response.continuations or b"")
            assert [(one.start, one.ids.tolist(), one.logps.tolist()) for one in found] == wanted
            checked += len(found)
    assert not refused and checked > 30
    other = [replace(row, logps_kind="sampled") for row in read_responses(file)[0]]
    write_records(tmp_path / "other.parquet", other)
    with pytest.raises(DataError, match="log-probabilities are sampled, and those of its continuations raw"):
        measured(config, tmp_path / "other.parquet", models(0), tmp_path / "other")


def test_continuations_that_reach_the_limit_are_wrong_and_counted(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    file = responses_of(models(0), prompts, tmp_path / "sampled")
    rows = measured(config_of(), file, models(0), tmp_path / "out")
    continued = read_responses(tmp_path / "out" / "reference-0" / "responses.parquet")[0]
    lengths = {row["context"]: row["start"] for row in rows}
    for context, start in lengths.items():
        of_context = [row for row in continued if row.prompt_id == context]
        cut = [row for row in of_context if row.finish_reason == "length"]
        assert {start + len(row.token_ids or []) for row in cut} <= {MOST}
        assert all(start + len(row.token_ids or []) <= MOST for row in of_context)
        found = next(row for row in rows if row["context"] == context)
        assert found["cut_ref"] == len(cut) and found["n_ref"] == len(of_context) == 32
        assert found["right_ref"] == sum("7" in row.response for row in of_context if row.finish_reason == "stop")
    assert any(row["cut_ref"] for row in rows)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (16, 16, {0, 1}),  # half and half: V* = 0.62 against 0.5
        (31, 1, set()),  # the first unit threw it away, and the second one found it
        (16, 30, set()),
        (16, 32, {1}),  # after 32 of 32, V* has no upper bound but 1
    ],
)
def test_contexts_are_open_beside_a_unit_whose_interval_of_regret_covers_0(
    first: int, second: int, expected: set[int], models: Callable[[int], ModelConfig]
) -> None:
    policy = Policy(models(0), SamplingParams.parse(PLAIN, "sampling"))
    response = Response(
        prompt_id="p", response_id="r", prompt="a", prompt_token_ids=[1], response="7b", token_ids=[4, 2, 0]
    )
    subject = Subject(Measured(response, 1.0, (1, 3)), policy, policy)
    contexts = subject.measured.contexts
    counted = [Continued((True,) * right + (False,) * (32 - right), (), 0, 0, 32) for right in (first, second)]
    measures = Measures(config_of(), {policy.key: dict(zip(contexts, counted, strict=True))})
    assert set(measures.open_contexts(subject)) == {contexts[number] for number in expected}


def test_rollout_grows_where_a_regret_is_open_and_keeps_what_was_drawn(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    file = responses_of(models(0), prompts, tmp_path / "sampled")
    few = measured(config_of(k=16, alphas=[0.01]), file, models(0), tmp_path / "few")
    open_contexts = set()
    for row, following in itertools.zip_longest(few, few[1:]):
        if row["regret_low"] <= 0 <= row["regret_high"]:
            open_contexts |= {row["context"]}
            open_contexts |= {following["context"]} if row["unit"] + 1 < row["units"] else set()
    grown = measured(config_of(k=16, most=32, alphas=[0.01]), file, models(0), tmp_path / "grown")
    assert {row["context"] for row in grown if row["n_mu"] == 32} == open_contexts
    assert open_contexts
    counted = {row["context"]: row["right_mu"] for row in few}
    assert all(row["right_mu"] == counted[row["context"]] for row in grown if row["n_mu"] == 16)
    drawn = {row.response_id: row for row in read_responses(tmp_path / "few" / "reference-0" / "responses.parquet")[0]}
    more = read_responses(tmp_path / "grown" / "reference-0-more" / "responses.parquet")[0]
    kept = [row for row in more if int(row.response_id.rpartition("-")[2]) < 16]
    assert len(more) == 2 * len(kept) > 0
    for row in kept:
        assert (row.token_ids, row.verdict) == (drawn[row.response_id].token_ids, drawn[row.response_id].verdict)


def changed(**changes: Any) -> Callable[[list[Response]], list[Response]]:
    return lambda rows: [replace(rows[0], **changes), *rows[1:]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            changed(token_ids=None, token_bytes=None, logps=None, sampled_logps=None),
            "token_ids, prompt_token_ids: missing",
        ),
        (changed(prompt_token_ids=None), "token_ids, prompt_token_ids: missing"),
        (changed(answer=None), "answer: missing"),
        (changed(verdict=None), "verdict: expected correct or wrong, got none: run verify first"),
        (changed(verdict=Verdict.UNKNOWN), "verdict: expected correct or wrong, got unknown"),
        (changed(tokenizer="another"), "tokenizer: another one"),
        (changed(model="somebody"), "model: no writer has the name 'somebody'"),
        (changed(model=None), "model: no writer has the name None"),
        (changed(sampling=None), "sampling: how the response was drawn is unknown"),
        (changed(sampling="{}"), "sampling: expected the settings that sample stores"),
        (changed(sampling='{"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "stop": []}'), "greedy"),
    ],
)
def test_responses_that_cannot_be_measured_are_refused_with_the_reason(
    change: Callable[[list[Response]], list[Response]],
    told: str,
    models: Callable[[int], ModelConfig],
    prompts: dict[str, Any],
    tmp_path: Path,
) -> None:
    rows = [row for row in read_responses(responses_of(models(0), prompts, tmp_path / "sampled"))[0] if row.verdict]
    decided = [row for row in rows if row.verdict is not Verdict.UNKNOWN][:2]
    write_records(tmp_path / "rows.parquet", change(decided))
    found = measured(config_of(k=2), tmp_path / "rows.parquet", models(0), tmp_path / "out")
    assert {row["response_id"] for row in found} == {decided[1].response_id}
    assert told in (tmp_path / "out" / "refused.jsonl").read_text()


def test_response_when_cut_below_the_limit_then_refused_and_at_it_then_wrong(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    file = responses_of(models(0), prompts, tmp_path / "sampled", max_new_tokens=3)
    cut = {row.response_id for row in read_responses(file)[0] if row.finish_reason == "length"}
    at = measured(config_of(k=2, max_tokens=3), file, models(0), tmp_path / "at")
    assert {row["outcome"] for row in at if row["response_id"] in cut} == {0.0}
    below = measured(config_of(k=2), file, models(0), tmp_path / "below")
    assert cut.isdisjoint(row["response_id"] for row in below)
    assert "cut at 3 tokens, below max_tokens=6" in (tmp_path / "below" / "refused.jsonl").read_text()
    short = measured(config_of(k=2, max_tokens=2), file, models(0), tmp_path / "short")
    assert max(row["end"] for row in short) <= 2
    assert "3 tokens, and its continuations end at max_tokens=2" in (tmp_path / "short" / "refused.jsonl").read_text()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"k": 8, "most": 4}, "most: expected k=8 or more, got 4"),
        ({"positions": [0.5, 0.2]}, "positions: expected rising fractions"),
        ({"positions": [0.5, 1.0]}, "positions.1"),
        ({"alphas": [1.0, 1.0]}, "alphas: expected different numbers"),
        ({"alphas": [0.0]}, "alphas.0"),
        ({"k": 1}, "k: "),
        ({"engine": "openai"}, "server: required by the engine openai"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(**values)


def test_units_of_a_column_end_where_it_says(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    table = pq.read_table(responses_of(models(0), prompts, tmp_path / "sampled"))
    ends = [[1] if len(ids) > 1 else [] for ids in table["token_ids"].to_pylist()]
    pq.write_table(table.append_column("steps", [ends]), tmp_path / "rows.parquet")
    rows = measured(config_of(k=2, column="steps"), tmp_path / "rows.parquet", models(0), tmp_path / "out")
    assert {(row["unit"], row["start"]) for row in rows} == {(0, 0), (1, 1)}
    stepwise = [
        replace(row, step_ends=[1, len(row.response)]) if len(row.response) > 1 else row
        for row in read_responses(tmp_path / "rows.parquet")[0]
    ]
    write_records(tmp_path / "stepwise.parquet", stepwise)
    by_step = measured(config_of(k=2, at="steps"), tmp_path / "stepwise.parquet", models(0), tmp_path / "steps")
    longer = {row.response_id for row in stepwise if len(row.response) > 1}
    assert by_step == [row for row in rows if row["response_id"] in longer]
    refused = (tmp_path / "steps" / "refused.jsonl").read_text()
    assert "step_ends: missing, so where its steps end is unknown" in refused
    with pytest.raises(DataError, match="no column others"):
        measured(config_of(column="others"), tmp_path / "rows.parquet", models(0), tmp_path / "other")


def test_continuation_when_other_responses_k_and_batches_change_then_it_is_the_same(
    models: Callable[[int], ModelConfig], prompts: dict[str, Any], tmp_path: Path
) -> None:
    rows = read_responses(responses_of(models(0), prompts, tmp_path / "sampled"))[0]
    usable = [row for row in rows if row.finish_reason == "stop" and len(row.token_ids or ()) > 2][:3]

    def continued(name: str, responses: Sequence[Response], **values: Any) -> dict[str, list[int] | None]:
        write_records(tmp_path / f"{name}.parquet", responses)
        measured(config_of(**values), tmp_path / f"{name}.parquet", models(0), tmp_path / name)
        continuations = read_responses(tmp_path / name / "reference-0" / "responses.parquet")[0]
        return {row.response_id: row.token_ids for row in continuations}

    alone = continued("alone", usable[:1], k=8)
    assert alone.items() <= continued("together", usable[::-1], k=9, batch_size=5).items()
    assert alone != continued("seeded", usable[:1], k=8, seed=1)


def in_run_folder(
    config: RolloutConfig, file: Path, model: ModelConfig, folder: Path, kill: Callable[[], None] | None
) -> None:
    """Do the work as a unit of a run folder; the process is killed where `kill` says."""
    if kill is not None:
        kill()
    with (run_folder := RunFolder(folder)).locked():
        do_unit(run_folder, "rollout", {"k": config.k}, lambda output: run(config, file, model, VERIFIER, output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "more"),
    [
        # Rising, because a step between two results that stay takes several writes.
        pytest.param(AtWrite, 3, id="between results"),
        # Within batches of continuations that are being drawn.
        pytest.param(lambda _, number: AtCall(Decoder, "step", number), 2, id="within batches"),
    ],
)
def test_rollout_when_killed_over_and_over_then_its_results_are_equal_to_the_byte(
    kill: Callable[[Path, int], Callable[[], None]],
    more: int,
    models: Callable[[int], ModelConfig],
    prompts: dict[str, Any],
    tmp_path: Path,
) -> None:
    writer = models(1)
    file = responses_of(writer, prompts, tmp_path / "sampled", temperature=0.7)
    config = config_of(k=4, most=8, batch_size=16, writers=[writer.model_dump()])
    in_run_folder(config, file, models(0), tmp_path / "whole", None)
    folder, kills = tmp_path / "killed", 0
    context = multiprocessing.get_context("fork")
    for number in itertools.count(2, more):
        arguments = config, file, models(0), folder, kill(folder, number)
        process = context.Process(target=in_run_folder, args=arguments)
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills >= 10
    assert differences(contents(tmp_path / "whole"), contents(folder)) == []
