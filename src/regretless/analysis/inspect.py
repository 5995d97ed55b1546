"""The inspect stage: statistics of the data as the objectives will see it, before training starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from regretless.analysis.behavior_audit import FAR, gap, labeled, rescored
from regretless.analysis.first_step import Reference, at_start, lists_of, spread
from regretless.analysis.near_duplicates import near_duplicates
from regretless.analysis.pair_order import Ordered, in_order_of_column, in_order_of_margin
from regretless.analysis.subset import whole_prompts
from regretless.analysis.tables import show_table
from regretless.analysis.trained_tokens import parts_of, show_parts
from regretless.core.files import write_json
from regretless.core.paths import page
from regretless.core.settings import Section, Seed
from regretless.core.terminal import console
from regretless.data.codec import Codec, codec_of
from regretless.data.columns import CONTINUATIONS, SIDES, TOP, Pair, SideName, text_key
from regretless.data.contamination import Benchmarks
from regretless.data.pair_source import PairSource
from regretless.data.prompt_templates import AS_MESSAGES, PAIR_TEMPLATE
from regretless.data.rejected_rows import Refusal
from regretless.data.tokenization import (
    FUTURE,
    MAX_LENGTH,
    OTHER_PROMPTS,
    TokenizedPair,
    missing_values,
    said_of_units,
    share_of_continuations,
    unit_counts,
)
from regretless.modeling.layout import Ids, token_count
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.modeling.scoring import score_responses
from regretless.objectives import OBJECTIVES, Objective, build, hyperparameter_names
from regretless.objectives.base import SATURATED

NEARLY = "differ from an earlier one in a few words, case, spaces or punctuation only"
SCORES, SHOWN = ("chosen", "rejected", "margin"), ("mean", "median")
"""Of pairs with and without a known behavior policy: what is shown, and which numbers of it."""
COUNTED = {
    "other_prompts": OTHER_PROMPTS,
    "repeated_pairs": "repeat an earlier one (same prompt, same responses): each is trained on as often as it occurs",
    "near_pairs": f"{NEARLY} (near_pairs in inspect.json)",
    "reversed_pairs": "are also there with chosen and rejected exchanged: they contradict each other",
    "equal_scores": "have equal scores on both sides: they express no preference",
    "lower_scores": "have a lower score on the chosen side: check which side is the better one, and that higher scores "
    "are better",
    "unmarked_beside_cut": "have one side that is marked as cut, and one that is not marked, which gets an end token; "
    "say chosen_complete and rejected_complete of both",
    "different_models": "compare responses of different models: in such data, losses that weigh both responses alike "
    "(λ = 1) can lower both; where this was measured, λ = 0.5 without RePO's weights was best (objective=repo_det "
    f"discount=0 rejected_weight=0.5; {page('experiments')})",
}
"""What is said of pairs that `data` counts, behind their number."""
NAMED = 20
"""Most rows that are listed of those with something in common."""
IMPOSSIBLE = -100.0
"""Nats. A token that a model writes is never this unlikely: that is one draw in 10⁴³."""


class InspectConfig(Section):
    """Settings of the inspect stage."""

    objectives: tuple[Annotated[str, AfterValidator(OBJECTIVES.check)], ...] = ()
    """Objectives to inspect, with their default hyperparameters; by default those of `train`."""
    sample: int | None = Field(default=1000, ge=0)
    """Approximate number of pairs for the model to score, drawn at random in whole prompts, of which none gives more
    than this number; null scores all, 0 loads no model. Counts, lengths and rejected rows always refer to all rows."""
    betas: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Values of β to show for each objective in addition to its own."""
    rescore: bool = False
    """Whether to score the responses again with the models that wrote them and compare the results with the stored
    log-probabilities."""
    behavior: ModelConfig | None = None
    """Model that wrote all responses, for `rescore`; by default the models named in the data."""
    max_length: int | None = Field(default=MAX_LENGTH, ge=1)
    """Most tokens in prompt and response together; in a recipe, by default as for the first method of `train`."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Most tokens in a prompt; in a recipe, by default as for the first method of `train`."""
    truncation: Literal["refuse", "keep_start"] = "refuse"
    """What happens to longer responses: `refuse` rejects the pair, `keep_start` cuts the response. In a recipe, by
    default as for the first method of `train`."""
    seed: Seed = 0
    """Random seed for the prompts of the sample."""
    show: int = Field(default=0, ge=0)
    """Number of pairs, the first ones, to print part by part: which tokens are trained, and which are context."""
    sort: str | None = None
    """What the pairs of `show` are sorted by, the lowest first, so that pairs with exchanged sides come early: `score`
    (that of the chosen response minus that of the rejected one), another column of numbers, such as `chosen_score`, or
    an objective that is inspected (its margin at the start, of the pairs that the model scores). By default the order
    of the file."""


def run(
    config: InspectConfig,
    pairs: Path,
    model: ModelConfig,
    output: Path,
    objectives: Mapping[str, Mapping[str, Any]],
    template: str | None = "plain",
    benchmarks: Benchmarks | None = None,
) -> dict[str, Any]:
    """Statistics of the pairs of a file, for the policy `model` and each objective (name → hyperparameters).

    benchmarks: those whose problems are looked for in the prompts.
    Written into the folder `output`: inspect.json and refused.jsonl; tables go to the terminal. Log-probabilities and
    margins are in nats, lengths in tokens. Raises DataError if no pair is usable, ConfigError for bad objectives.
    """
    # The pairs that the objectives can use.
    built = dict(_objectives(objectives, config.betas))
    tokenizer = load_tokenizer(model)
    codec = codec_of(tokenizer)
    source = PairSource.read(pairs, template)
    keep = {name for each in built.values() for name in (FUTURE, CONTINUATIONS) if name in each.required}
    tokenized = source.tokenize(tokenizer, config, keep=keep)
    source.check(tokenized, output / "refused.jsonl")

    # What needs no model: counts and lengths of all pairs.
    near_prompts, near_pairs = near_duplicates([pair.row for pair in tokenized if pair.row is not None])
    results: dict[str, Any] = {
        "data": {
            **_counts(tokenized, source.refused),
            **_prompt_kinds(tokenized, codec),
            "near_prompts": len(near_prompts),
            "near_pairs": len(near_pairs),
        },
        "near_prompts": _near(near_prompts, tokenized),
        "near_pairs": _near(near_pairs, tokenized),
        **_contamination(tokenized, benchmarks),
        "tokens": _tokens(tokenized),
        "lists": _lists(tokenized) if any(each.lists for each in built.values()) else {},
        "lengths": _lengths(tokenized),
        "steps": _steps(tokenized),
    }
    wanted = sorted(frozenset().union(*(objective.token_numbers for objective in built.values())))
    results["data"]["without_token_numbers"] = {
        name: lacking for name in wanted if (lacking := missing_values(tokenized, name))
    }
    # Their loss would need what the reference says of all listed tokens, or of continuations.
    results["data"]["listed_objectives"] = [
        name for name, each in built.items() if {TOP, CONTINUATIONS} & each.required
    ]
    results["data"]["without_continuations"] = missing_values(tokenized, CONTINUATIONS) if CONTINUATIONS in keep else {}

    # What the model says of a sample of them.
    by_margin = config.sort is not None and config.sort in OBJECTIVES
    order: Ordered = [(None, pair) for pair in tokenized]
    if config.sort is not None and not by_margin:
        order = in_order_of_column(config.sort, tokenized)
    sample = whole_prompts(tokenized, config.sample, config.seed, lambda pair: pair.prompt_ids)
    reference: Reference = {}
    if sample:
        cut = [pair.without_future() for pair in sample]
        responses = list(dict.fromkeys(_responses([*sample, *cut])))
        scores = score_responses(load_model(model), responses, description="inspect: reference")
        reference = dict(zip(responses, scores, strict=True))
        results["objectives"] = {
            label: at_start(objective, sample, reference, codec.ends_step)
            for label, objective in built.items()
            if label not in results["data"]["listed_objectives"]
        }
        results["behavior_minus_reference"] = gap(labeled(sample), reference)
        if config.rescore:
            results["stored_minus_rescored"] = rescored(labeled(sample), config.behavior, codec.fingerprint)

    # The files and the terminal.
    if config.sort is not None and by_margin:
        order = in_order_of_margin(config.sort, built, sample, reference, codec.ends_step)
    shown = [
        {"source": pair.source, "value": value, "parts": parts_of(pair, codec)} for value, pair in order[: config.show]
    ]
    write_json(
        output / "inspect.json", {"notes": _notes(results), "scored_pairs": len(sample), **results, "shown": shown}
    )
    _show(results)
    show_parts(shown)
    return {
        "pairs": len(tokenized),
        "refused": len(source.refused),
        "scored_pairs": len(sample),
        "distinct_token_ratio": results["tokens"]["distinct_token_ratio"],
    }


def _objectives(choices: Mapping[str, Mapping[str, Any]], betas: Sequence[float]) -> Iterator[tuple[str, Objective]]:
    """Each objective with its own β, then with the other values, labeled with them."""
    for name, settings in choices.items():
        objective = build(name, **settings)
        if "beta" not in hyperparameter_names(name):
            yield name, objective
            continue
        for beta in dict.fromkeys([objective.model_dump()["beta"], *betas]):
            yield f"{name} β={beta:g}", build(name, **{**settings, "beta": beta})


def _counts(pairs: Sequence[TokenizedPair], refused: Sequence[Refusal]) -> dict[str, Any]:
    rows = [pair.row for pair in pairs if pair.row is not None]
    gains = _gains(rows)
    distinct = {(pair.prompt_ids, *(side.ids for side in pair.sides)) for pair in pairs}
    # Numbers and texts differ from row to row; the rest of the reason does not.
    reasons = Counter(re.sub(r"'[^']*'|\d[\d.]*", "…", refusal.reason) for refusal in refused)
    return {
        "pairs": len(pairs),
        "original": sum(pair.kind == "original" for pair in pairs),
        "masked": sum(pair.kind == "masked" for pair in pairs),
        "prompts": len({pair.prompt_ids for pair in pairs}),
        "responses": 2 * len(pairs),
        "distinct_responses": len(set(_responses(pairs))),
        "other_prompts": sum(pair.other_prompt for pair in pairs),
        "repeated_pairs": len(pairs) - len(distinct),
        "reversed_pairs": sum((prompt, *reversed(sides)) in distinct for prompt, *sides in distinct if len(sides) == 2),
        "equal_scores": sum(score == 0 for score in gains),
        "lower_scores": sum(score < 0 for score in gains),
        "different_models": sum(map(_different_models, rows)),
        "cut": {name: sum(_is_cut(pair, name) for pair in rows) for name in SIDES},
        "unmarked_beside_cut": sum(_is_unmarked_beside_cut(pair) for pair in rows),
        "without_behavior_logps": missing_values(pairs),
        "by_units": unit_counts(pairs),
        "impossible_behavior_logps": _impossible(pairs),
        "refused": len(refused),
        "refused_because": dict(reasons.most_common()),
    }


def _prompt_kinds(pairs: Sequence[TokenizedPair], codec: Codec) -> dict[str, int]:
    """Pairs whose text prompt was put into a template, and those whose text stays as it is although there is one."""
    texts = sum(pair.row is not None and isinstance(pair.row.prompt, str) for pair in pairs)
    wrapped = sum(pair.wrapped for pair in pairs)
    return {"wrapped_texts": wrapped, "texts_without_template": 0 if codec.turn_tokens is None else texts}


def _near(near: Mapping[int, int], pairs: Sequence[TokenizedPair]) -> list[list[str]]:
    """The first rows that are nearly equal to an earlier one, each with the earlier one."""
    return [[pairs[index].source, pairs[other].source] for index, other in list(near.items())[:NAMED]]


def _contamination(pairs: Sequence[TokenizedPair], benchmarks: Benchmarks | None) -> dict[str, Any]:
    """Rows whose prompt repeats a problem of a benchmark, with how (`Benchmarks.repeated_by`), and notes on these."""
    if benchmarks is None:
        return {"contaminated": [], "contamination": []}
    rows = [(pair.source, pair.row.prompt) for pair in pairs if pair.row is not None]
    prompts = {text_key(prompt): prompt for _, prompt in rows}
    repeated = {key: benchmarks.repeated_by(prompt) for key, prompt in prompts.items()}
    return {
        "contaminated": [
            {"source": source, **problem._asdict(), "both": how}
            for source, prompt in rows
            for problem, how in repeated[text_key(prompt)].items()
        ],
        "contamination": benchmarks.notes(prompts.values()),
    }


def _impossible(pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """Pairs with behavior log-probabilities of tokens that no model would have written, and the lowest (nats)."""
    lowest = [
        min([0.0, *(value for side in pair.without_units().sides for value in side.values.get("behavior", ()))])
        for pair in pairs
    ]
    return {"pairs": sum(value < IMPOSSIBLE for value in lowest), "lowest": min(lowest)}


def _tokens(pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """Tokens that a trainer processes: pair by pair, or every distinct prompt, response and response prefix once."""
    responses = _responses(pairs)
    pairwise = sum(len(prompt) + len(response) for prompt, response in responses)
    distinct = token_count(responses)
    ratio = round(pairwise / distinct, 4)
    # Each response's once: pairs share it.
    continued = sum(
        side.continued for _, side in dict.fromkeys((p.prompt_ids, side) for p in pairs for side in p.sides)
    )
    return {"pairwise": pairwise, "distinct": distinct, "distinct_token_ratio": ratio, "continued": continued}


def _lists(pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """How many lists a method of `lists` trains on, and the number of their responses."""
    sizes = [1 + len(one) for one in lists_of(pairs)]
    return {"lists": len(sizes), "responses": spread(sizes)}


def _lengths(pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    return {
        "prompt": spread([len(prompt) for prompt in {pair.prompt_ids for pair in pairs}]),
        "chosen": spread([len(pair.chosen.own) for pair in pairs]),
        "rejected": spread([len(side.own) for pair in pairs for side in pair.sides[1:]]),
    }


def _steps(pairs: Sequence[TokenizedPair]) -> dict[str, Any]:
    """Steps of the sides of which the data says where they end."""
    counts: dict[str, list[int]] = {}
    for pair in pairs:
        for name, side in zip(SIDES, pair.sides, strict=False):
            if side.steps:
                counts.setdefault(name, []).append(side.steps[-1] + 1)
    return {name: spread(of_side) for name, of_side in counts.items()}


def _responses(pairs: Sequence[TokenizedPair]) -> list[tuple[Ids, Ids]]:
    """(prompt, response) of both sides of all pairs."""
    return [item for pair in pairs for item in pair.items]


def _gains(rows: Sequence[Pair]) -> list[float]:
    """What the chosen side's score has above the rejected one's, of pairs that have both."""
    scores = ([side.score for side in pair.sides.values()] for pair in rows)
    return [both[0] - both[1] for both in scores if len(both) == 2 and both[0] is not None and both[1] is not None]


def _different_models(pair: Pair) -> bool:
    names = [side.model for side in pair.sides.values()]
    return None not in names and len(set(names)) > 1


def _is_cut(pair: Pair, name: SideName) -> bool:
    """Whether a side is the beginning of a response."""
    side = pair.sides.get(name)
    return side is not None and (side.complete is False or (pair.kind == "masked" and name == "rejected"))


def _is_unmarked_beside_cut(pair: Pair) -> bool:
    """Whether one side of a pair of texts is marked as cut, and it is not said whether the other one is."""
    if pair.kind == "masked" or any(side.pieces for side in pair.sides.values()):
        return False
    return {side.complete for side in pair.sides.values()} == {False, None}


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Remarks on the numbers that a reader should not miss."""
    data, notes = results["data"], []
    lacking = sum(data["without_behavior_logps"].values())
    if lacking:
        whole = "no pair has" if lacking == data["pairs"] else f"{lacking} of {data['pairs']} pairs lack"
        reasons = "; ".join(data["without_behavior_logps"])
        notes.append(
            f"{whole} behavior log-probabilities ({reasons}): repo cannot use them without "
            "unknown_behavior=dirac, repo_det and others can"
        )
    if (by_units := data["by_units"])["units"]:
        notes.append(f"{by_units['pairs']} of {data['pairs']} pairs {said_of_units(by_units)}")
    if (impossible := data["impossible_behavior_logps"])["pairs"]:
        notes.append(
            f"{impossible['pairs']} of {data['pairs']} pairs have behavior log-probabilities below {IMPOSSIBLE:g} nats "
            f"(the lowest: {impossible['lowest']:g}), which no model gives to a token that it writes: they may stand "
            "for unknown values; the setting rescore of pair replaces them"
        )
    notes += [
        f"{name}: its loss at the start is not shown: with its estimator it takes more than the response tokens"
        for name in data["listed_objectives"]
    ]
    if continued := results["tokens"]["continued"]:
        notes.append(share_of_continuations(continued, continued + results["tokens"]["distinct"]))
    if counts := data["without_continuations"]:
        notes.append(
            f"{sum(counts.values())} of {data['pairs']} pairs lack continuations ({'; '.join(counts)}): "
            "estimator=rollouts cannot use them; rollout.keep_continuations stores those of the responses it measures"
        )
    for name, counts in data["without_token_numbers"].items():
        notes.append(
            f"{sum(counts.values())} of {data['pairs']} pairs lack token_numbers.{name} ({'; '.join(counts)}): "
            "objectives that need it cannot use them"
        )
    if data["wrapped_texts"]:
        said = AS_MESSAGES.format(setting=PAIR_TEMPLATE)
        notes.append(f"{data['wrapped_texts']} of {data['pairs']} text prompts are {said}")
    if data["texts_without_template"]:
        notes.append(
            f"{data['texts_without_template']} of {data['pairs']} prompts are texts, trained as they are, not in the "
            "model's chat template"
        )
    notes += [f"{data[name]} of {data['pairs']} pairs {said}" for name, said in COUNTED.items() if data[name]]
    if data["near_prompts"]:
        notes.append(f"{data['near_prompts']} of {data['prompts']} prompts {NEARLY} (near_prompts in inspect.json)")
    notes += results["contamination"]
    notes += [
        f"{label}: {100 * entry['saturated']:.0f} % of pairs start with a margin beyond ±{SATURATED:g} nats: "
        "correctly ranked pairs contribute no gradient, wrongly ranked ones the maximum; lower β"
        for label, entry in results.get("objectives", {}).items()
        if (entry["saturated"] or 0) > 0.1
    ]
    notes += [
        f"{name}: {100 * entry['share_far']:.0f} % of the stored log-probabilities are more than {FAR:g} nats from "
        "those that this model gives: check that it wrote the responses, to these prompts (chat template), and that "
        "logps_kind is right; the setting rescore of pair replaces them"
        for name, entry in results.get("stored_minus_rescored", {}).items()
        if entry.get("share_far", 0) > 0.1
    ]
    if "objectives" not in results:
        notes.append("no model was loaded (inspect.sample is 0): no margins and no gap to the reference")
    return notes


def _show(results: Mapping[str, Any]) -> None:
    data, tokens = results["data"], results["tokens"]
    console.print(
        f"{data['pairs']} pairs ({data['masked']} masked) of {data['distinct_responses']} distinct responses to "
        f"{data['prompts']} prompts; {data['refused']} rows rejected; a pairwise trainer reads "
        f"{tokens['pairwise']:,} tokens, {tokens['distinct_token_ratio']:.2f} times the distinct ones"
    )
    lists = {f"{found['lists']:,} lists": found["responses"]} if (found := results["lists"]) else {}
    show_table("responses of a list, the chosen one included", lists, ("mean", "min", "median", "q95", "max"))
    show_table("tokens", results["lengths"], ("mean", "min", "median", "q95", "max"))
    show_table("steps, where the data says where they end", results["steps"], ("mean", "min", "median", "q95", "max"))
    margins = {
        label: {"loss": entry["loss"], "saturated": entry["saturated"], **(entry["margin"] or {})}
        for label, entry in results.get("objectives", {}).items()
    }
    show_table("margin at the start, nats", margins, ("loss", "saturated", "mean", "q05", "median", "q95"))
    halves = {
        f"{label}, {name}": {
            f"{value}, {key}": (entry[name][value] or {}).get(key) for value in SCORES for key in SHOWN
        }
        | {"pairs": entry[name]["pairs"]}
        for label, entry in results.get("objectives", {}).items()
        for name in ("recorded", "filled")
        if name in entry
    }
    columns = ("pairs", *(f"{value}, {key}" for value in SCORES for key in SHOWN))
    show_table("scores at the start, nats, by whether the behavior policy is known", halves, columns)
    gaps = {side: entry["nats_per_token"] or {} for side, entry in results.get("behavior_minus_reference", {}).items()}
    show_table("behavior − reference, nats a token", gaps, ("mean", "q05", "median", "q95"))
    show_table(
        "stored − re-scored", results.get("stored_minus_rescored", {}), ("mean", "mean_distance", "max_distance")
    )
    for note in _notes(results):
        console.print(f"note: {note}", soft_wrap=True)
