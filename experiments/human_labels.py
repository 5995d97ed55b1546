"""The experiment "Do human labels follow regret?" of docs/real_models.md: its steps, and its table.

    python experiments/human_labels.py steps prm800k_steps.jsonl --gold math/train.jsonl math/test.jsonl --model MODEL
    python experiments/human_labels.py table runs/labels/rollout

The first writes steps.parquet, which `regretless rollout column=ends` reads: first negative steps of PRM800K, each with
a positive one of the same problem and, as far as there is one, at the same place in its solution. The beginning of the
solution before a step is context; behind a step its response ends, so that both contexts of the step are continued,
and no other. The second prints how well what was measured, and the model's log-probability, tell the two apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import stats

from regretless.core.intervals import from_samples, resamples
from regretless.data.columns import Response, Verdict, text_key
from regretless.data.prompt_templates import TEMPLATES
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows, write_records
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.scoring import score_responses
from regretless.rollouts.rollout import RolloutConfig, contexts_to_continue, subjects_of
from regretless.sampling.engine_settings import SamplingParams

SEED, RESAMPLES = 20_261_129, 2000
FINAL = "# Answer"
"""What PRM800K's last steps have: behind them nothing is left to be continued."""
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


class Step(NamedTuple):
    """A labeled step of a solution."""

    problem: str
    before: str
    """The steps before it, with line breaks."""
    text: str
    place: int
    """Steps before it."""


def gold_answers(files: Iterable[Path], hardest: int) -> dict[str, str]:
    """Solutions of MATH problems up to a level, by problem."""
    rows = [row for file in files for _, row in read_rows(file) if isinstance(row, dict)]
    return {row["problem"]: row["solution"] for row in rows if row["level"] <= f"Level {hardest}"}


def labeled_steps(rows: Iterable[Response]) -> dict[int, dict[str, list[Step]]]:
    """Steps labeled positive (1) or negative (-1) by problem, each once.

    Steps that have two labels, those with the answer, and those behind one that somebody labeled negative are left out.
    """
    labels: dict[Step, set[int | None]] = {}
    for row in rows:
        assert isinstance(row.prompt, str)
        starts = [0, *(row.step_ends or ())]
        for place, label in enumerate(row.step_labels or ()):
            text = row.response[starts[place] : starts[place + 1]].strip()
            labels.setdefault(Step(row.prompt, row.response[: starts[place]], text, place), set()).add(label)
    wrong = {(step.problem, f"{step.before}{step.text}\n") for step, of_step in labels.items() if -1 in of_step}
    found: dict[int, dict[str, list[Step]]] = {1: {}, -1: {}}
    for step, of_step in sorted(labels.items()):
        (label, *others) = of_step
        is_behind = any(step.problem == problem and step.before.startswith(text) for problem, text in wrong)
        if label in found and not others and FINAL not in step.text and not is_behind:
            found[label].setdefault(step.problem, []).append(step)
    return found


def matched(steps: Mapping[int, Mapping[str, Sequence[Step]]], count: int) -> Iterator[tuple[Step, Step]]:
    """`count` negative steps, each with a positive one of its problem, the nearest in place; problems in turns.

    Raises ValueError if there are fewer.
    """
    random = Random(SEED)
    problems = sorted(set(steps[1]) & set(steps[-1]))
    random.shuffle(problems)
    left = {problem: [list(steps[label][problem]) for label in (-1, 1)] for problem in problems}
    made = 0
    while made < count:
        before = made
        for problem in problems:
            negative, positive = left[problem]
            if made == count or not negative or not positive:
                continue
            both = [(one, other) for one in negative for other in positive]
            nearest = min(abs(one.place - other.place) for one, other in both)
            pair = random.choice([pair for pair in both if abs(pair[0].place - pair[1].place) == nearest])
            for of_label, step in zip(left[problem], pair, strict=True):
                of_label.remove(step)
            yield pair
            made += 1
        if made == before:
            raise ValueError(f"expected {count} negative steps with a positive one of their problem, found {made}")


def responses(steps: Sequence[tuple[Step, int]], gold: Mapping[str, str], model: ModelConfig) -> list[Response]:
    """Each step as a response behind its context, with the model's log-probabilities, and an end behind the step."""
    tokenizer = load_tokenizer(model)
    items = []
    for step, _ in steps:
        prompt = encode_prompt(tokenizer, TEMPLATES["math"](step.problem))
        before, text = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in (step.before, f"{step.text}\n")
        )
        items.append(([*prompt, *before], [*text, tokenizer.eos_token_id]))
    scores = score_responses(load_model(model), items, description="log-probabilities")
    common: dict[str, Any] = {"logps_kind": "raw", "model": model.label, "finish_reason": "stop"}
    common |= {"verdict": Verdict.WRONG, "tokenizer": tokenizer_fingerprint(tokenizer)}
    params = SamplingParams(**PLAIN).model_dump(exclude={"engine", "seed"}, exclude_none=True)
    return [
        Response(
            prompt_id=text_key(step.problem),
            response_id=f"{number}-{step.place}",
            prompt=TEMPLATES["math"](step.problem),
            prompt_token_ids=prompt,
            response=f"{step.text}\n",
            token_ids=ids,
            logps=logps.tolist(),
            sampling=json.dumps(params),
            answer=gold[step.problem],
            step_ends=[len(step.text) + 1],
            step_labels=[label],
            **common,
        )
        for number, ((step, label), (prompt, ids), logps) in enumerate(zip(steps, items, scores, strict=True))
    ]


def write_steps(args: argparse.Namespace) -> None:
    """Choose the steps, write them, and print what `rollout` would draw at most."""
    model = ModelConfig(name_or_path=args.model)
    gold = gold_answers(args.gold, args.hardest)
    rows = [row for row in read_responses(args.file)[0] if row.prompt in gold]
    pairs = list(matched(labeled_steps(rows), args.count))
    steps = [(step, label) for pair in pairs for step, label in zip(pair, (-1, 1), strict=True)]
    write_records("steps.parquet", made := responses(steps, gold, model))
    ends = pa.array([[len(one.token_ids or ()) - 1] for one in made])
    pq.write_table(pq.read_table("steps.parquet").append_column("ends", ends), "steps.parquet")
    config = RolloutConfig(k=args.k, max_tokens=args.max_tokens, column="ends")
    _, subjects, refused = subjects_of(config, Path("steps.parquet"), model)
    contexts = contexts_to_continue(subjects)
    apart = sum(abs(bad.place - good.place) for bad, good in pairs)
    print(
        f"steps.parquet: {len(pairs)} negative and {len(pairs)} positive steps of "
        f"{len({bad.problem for bad, _ in pairs})} problems, {apart} places apart in all; {len(refused)} refused\n"
        f"rollout: {contexts} contexts, {contexts * args.k} continuations, at most "
        f"{contexts * args.k * args.max_tokens:,} tokens"
    )


Vector = NDArray[np.float64]


def auc(scores: Vector, good: NDArray[np.bool_]) -> float:
    """Share of pairs of a good and a bad step of which the good one has the higher score; ties count half."""
    if good.all() or not good.any():
        return float("nan")
    above = stats.rankdata(scores)[good].sum() - good.sum() * (good.sum() + 1) / 2
    return float(above / (good.sum() * (~good).sum()))


def scores_of(folder: Path) -> tuple[dict[str, Vector], NDArray[np.bool_], list[str]]:
    """What is known of each step that `rollout` has measured, by name; whether it is positive; and its problem."""
    rows = {row.response_id: row for row in read_responses(folder / "responses.parquet")[0]}
    units = [row for _, row in read_rows(folder / "regret.parquet") if isinstance(row, dict) and row["unit"] == 0]
    alphas = list(dict.fromkeys(unit["alpha"] for unit in units))
    of_alpha = {alpha: [unit for unit in units if unit["alpha"] == alpha] for alpha in alphas}
    first = of_alpha[alphas[0]]
    steps = [rows[unit["response_id"]] for unit in first]
    logps = [np.asarray(step.logps)[: unit["end"]] for step, unit in zip(steps, first, strict=True)]
    values = {f"-Reg, α = {alpha:g}": [-unit["regret"] for unit in of_one] for alpha, of_one in of_alpha.items()}
    values |= {"Q": [unit["q"] for unit in first], "Q - V^μ": [unit["q"] - unit["v_mu"] for unit in first]}
    values |= {"mean log-probability": [one.mean() for one in logps], "log-probability": [one.sum() for one in logps]}
    good = np.array([step.step_labels == [1] for step in steps])
    return {name: np.asarray(of) for name, of in values.items()}, good, [step.prompt_id for step in steps]


def estimated(value: Callable[[NDArray[np.intp]], float], problems: Sequence[str]) -> str:
    """A number of some of the steps, of all of them, with the central 95 % over resampled problems."""
    names = sorted(set(problems))
    of_problem = [np.flatnonzero(np.asarray(problems) == name) for name in names]
    drawn = [
        value(np.concatenate([np.tile(of, int(count)) for of, count in zip(of_problem, counts, strict=True)]))
        for counts in resamples(len(names), RESAMPLES, SEED)
    ]
    kept = np.asarray(drawn)[~np.isnan(drawn)]
    found = from_samples(value(np.arange(len(problems))), len(names), kept).shown()
    value, low, high = (found[name] for name in ("value", "low", "high"))
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"


def print_table(args: argparse.Namespace) -> None:
    """AUC of each score against the human label, and differences of two."""
    scores, good, problems = scores_of(args.folder)
    print(f"{good.sum()} positive and {(~good).sum()} negative steps of {len(set(problems))} problems\n")
    print("| score | AUC (95 %) |\n|---|---|")
    for name, values in scores.items():
        print(f"| {name} | {estimated(lambda rows, values=values: auc(values[rows], good[rows]), problems)} |")
    regrets = [name for name in scores if name.startswith("-Reg")]
    likely = "mean log-probability"
    for name, other in [
        *((name, likely) for name in (*regrets, "Q", "Q - V^μ")),
        *(("Q - V^μ", one) for one in regrets),
    ]:
        both = scores[name], scores[other]
        gap = estimated(
            lambda rows, both=both: auc(both[0][rows], good[rows]) - auc(both[1][rows], good[rows]), problems
        )
        print(f"| {name}, minus that of {other} | {gap} |")


def main() -> None:
    """Do what the command asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("steps")
    command.add_argument("file", type=Path, help="rows of PRM800K")
    command.add_argument("--gold", type=Path, nargs="+", required=True, help="MATH's problems with their solutions")
    command.add_argument("--model", required=True, help="hub id or folder")
    command.add_argument("--hardest", type=int, default=3, help="level of the hardest problems")
    command.add_argument("--count", type=int, default=60, help="negative steps, and positive ones")
    command.add_argument("--k", type=int, default=16)
    command.add_argument("--max-tokens", type=int, default=216)
    command.set_defaults(run=write_steps)
    command = commands.add_parser("table")
    command.add_argument("folder", type=Path, help="output of rollout")
    command.set_defaults(run=print_table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
