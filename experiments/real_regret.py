"""The experiment "Does a score know regret?" of docs/real_models.md: its problems, its responses, its table.

    python experiments/real_regret.py problems train.jsonl --trained runs/gsm8k-small/prompts/prompts.jsonl
    python experiments/real_regret.py responses runs/measured/verify/responses.parquet --pieces 3
    python experiments/real_regret.py collect runs/measured/rollout-*
    python experiments/real_regret.py predictions --analysis runs/gsm8k-5e5/analyze-*

The first writes problems.jsonl: GSM8K training problems of at most three steps that no model was trained on. The second
writes selected-1.parquet, …: of each problem the first right and the first wrong response that ended by itself, where
there are both, in pieces of whole problems that are measured one by one. The third gathers the pieces' tables in
experiments/measured/real_regret.csv. The fourth reads that file, prints the table of predictions, those about trained
models if there is an analysis of them, and draws docs/figures/real-regret.svg.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats
from theory_common import BLUE, FIGURES, GRAY, ORANGE, save_figure, start_figure, table

from regretless.core.intervals import Estimate, from_samples, resamples

SEED, MOST_STEPS = 20_261_129, 3
MEASURED = Path(__file__).parent / "measured" / "real_regret.csv"
COLUMNS = [
    *("prompt_id", "response_id", "outcome", "units", "unit", "start", "end", "alpha"),
    *("n_mu", "right_mu", "cut_mu", "unknown_mu", "p_mu", "v_star", "v_mu", "regret", "local", "future"),
]
"""Of `regret.parquet`, as docs/rollouts.md describes them: what is kept of a measurement."""
RESAMPLES, PRIMARY = 2_000, 0.1
Statistic = Callable[[pd.DataFrame], float]
RANGES = {
    "P1": (0.25, 0.60),
    "P2": (-0.10, 0.10),
    "P3": (-1.00, -0.30),
    "P4": (0.30, 1.00),
    "P5": (-0.10, 0.20),
    "P6": (-0.10, 0.20),
    "P7": (-0.15, 0.15),
    "P8": (-0.15, 0.15),
    "P9": (0.00, 0.25),
    "P10": (-0.15, 0.05),
    "P11": (0.30, 0.95),
    "P12": (0.75, 1.00),
    "P13": (0.25, 0.55),
    "P14": (0.20, 0.50),
}
"""Predicted ranges, as in docs/real_models.md."""


def problems(train: Path, trained: Path, count: int) -> list[dict[str, str]]:
    """`count` random problems of at most three steps that are not in `trained`.

    A step is a line of the solution with the calculator's mark <<…>>.
    """
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    seen = trained.read_text(encoding="utf-8")
    fits = [
        row
        for row in rows
        if row["answer"].count("<<") <= MOST_STEPS and json.dumps(row["question"], ensure_ascii=False)[1:-1] not in seen
    ]
    return random.Random(SEED).sample(fits, count)


def selected(verified: Path, pieces: int) -> list[pa.Table]:
    """The first right and the first wrong response that ended, of problems that have both, in the file's order.

    In pieces of whole problems, as even as can be.
    """
    table = pq.read_table(verified)
    first: dict[str, dict[str, int]] = {}
    columns = zip(*(table[name].to_pylist() for name in ("prompt_id", "verdict", "finish_reason")), strict=True)
    for number, (prompt, verdict, reason) in enumerate(columns):
        if reason == "stop" and verdict in ("correct", "wrong"):
            first.setdefault(prompt, {}).setdefault(verdict, number)
    both = [list(numbers.values()) for numbers in first.values() if len(numbers) == 2]
    return [table.take(sorted(np.concatenate(piece))) for piece in np.array_split(np.array(both), pieces)]


def over_problems(table: pd.DataFrame, statistic: Statistic) -> Estimate:
    """A statistic of the rows of a table, with the central 95 % of its values where problems are resampled."""
    table = table.reset_index(drop=True)
    groups = list(table.groupby("prompt_id", sort=True).indices.values())
    draws = resamples(len(groups), RESAMPLES, SEED).astype(int)
    of_row = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rows = np.concatenate(groups)
    samples = np.array([statistic(table.take(np.repeat(rows, draw[of_row]))) for draw in draws])
    return from_samples(statistic(table), len(groups), samples[~np.isnan(samples)])


def rank(first: str, second: str) -> Statistic:
    """Spearman's rank correlation of two columns; NaN where one of them does not vary."""

    def of(rows: pd.DataFrame) -> float:
        if len(rows) < 3 or rows[first].nunique() < 2 or rows[second].nunique() < 2:
            return float("nan")
        return float(np.corrcoef(stats.rankdata(rows[first]), stats.rankdata(rows[second]))[0, 1])

    return of


def right_minus_wrong(column: str) -> Statistic:
    """Difference of a column's means over right and over wrong responses."""
    return lambda rows: float(rows[column][rows.outcome == 1].mean() - rows[column][rows.outcome == 0].mean())


def measured(units: pd.DataFrame) -> Iterator[tuple[str, Estimate]]:
    """P1 to P4, from `regret.parquet`."""
    units = units[units.alpha == 1.0].sort_values(["response_id", "unit"])
    identity = ["prompt_id", "response_id", "outcome"]
    tokens = units.groupby("response_id").end.transform("max")
    # The context nearest to three fifths of a response; the prompt is none of those.
    behind = units[units.unit > 0].assign(distance=(units.start / tokens - 0.6).abs())
    after = behind.loc[behind.groupby("response_id").distance.idxmin()]
    yield "P1", over_problems(after, right_minus_wrong("p_mu"))
    # G, and its one-sample estimate: what lies ahead of each unit, the last excepted, behind which is the return.
    waste = units.groupby(identity).future.sum()
    one_sample = behind.assign(sample=behind.v_star - behind.outcome).groupby(identity)["sample"].sum()
    responses = pd.DataFrame({"G": waste, "sample": one_sample}).dropna().reset_index()
    yield "P2", over_problems(responses, right_minus_wrong("G"))
    for name, outcome in (("P3", 1.0), ("P4", 0.0)):
        yield name, over_problems(responses[responses.outcome == outcome], rank("G", "sample"))


def cut(units: pd.DataFrame) -> Iterator[tuple[str, Estimate]]:
    """P12 to P14: the share of right responses and cuts in which the complete response has less regret."""
    for name, alpha in (("P12", 1.0), ("P13", 0.1), ("P14", 0.01)):
        cases = []
        right = units[(units.alpha == alpha) & (units.outcome == 1)].sort_values(["response_id", "unit"])
        for _, response in right.groupby("response_id"):
            added = response.regret[::-1].cumsum()[::-1]  # by the units behind a cut before unit j
            cases.append(response.assign(less=(added < 0).astype(float))[response.unit > 0])
        yield name, over_problems(pd.concat(cases), lambda rows: float(rows.less.mean()))


def trained(units: pd.DataFrame) -> Iterator[tuple[str, Estimate]]:
    """P5 to P11, from `unit_regret.parquet` of an analysis of the models `dpo` and `repo`."""
    units = units[units.alpha == PRIMARY].assign(read=units.own + units.ahead)
    of = {name: units[(units.policy == name) & (units.method == name)] for name in ("dpo", "repo")}
    keys = ["prompt_id", "response_id", "outcome", "unit", "regret", "local"]
    both = of["dpo"][[*keys, "own"]].merge(of["repo"][[*keys, "read"]], on=keys)
    for first, (column, target) in {5: ("own", "local"), 7: ("read", "regret")}.items():
        for number, outcome in enumerate((1.0, 0.0)):
            yield f"P{first + number}", over_problems(both[both.outcome == outcome], rank(column, target))
    dpo, repo = rank("own", "regret"), rank("read", "regret")
    yield "P9", over_problems(both, dpo)
    yield "P10", over_problems(both, lambda rows: abs(repo(rows)) - abs(dpo(rows)))
    yield "P11", over_problems(both, rank("read", "own"))


def verdict(estimate: Estimate, low: float, high: float) -> str:
    """What an interval says about a predicted range."""
    start, end = estimate.interval
    if low <= start and end <= high:
        return "confirmed"
    return "refuted" if end < low or start > high else "open"


def prediction_table(found: Iterable[tuple[str, Estimate]], ranges: Mapping[str, tuple[float, float]]) -> str:
    """Each prediction with its range, estimate, 95 % interval and verdict."""
    rows = []
    for name, estimate in found:
        low, high = ranges[name]
        ends = " to ".join(f"{end:.2f}" for end in estimate.interval)
        rows.append((name, f"{low:.2f} to {high:.2f}", f"{estimate.value:.2f}", ends, verdict(estimate, low, high)))
    return table(["", "predicted", "measured", "95 %", ""], rows)


def predictions(analyses: Sequence[Path]) -> None:
    """Print each prediction with its range, estimate, 95 % interval and verdict; means of units; draw these."""
    units = pd.read_csv(MEASURED)
    found = [*measured(units), *cut(units)]
    if analyses:
        found += trained(pd.concat([pd.read_parquet(folder / "unit_regret.parquet") for folder in analyses]))
    print(prediction_table(sorted(found, key=lambda pair: list(RANGES).index(pair[0])), RANGES))
    print("\n" + unit_table(units))
    draw(units, FIGURES / "real-regret.svg")


def unit_table(units: pd.DataFrame) -> str:
    """`by_unit`, right responses first."""
    header = ["response", "unit", "success rate before it", "local", "future", "regret"]
    rows = [
        ("right" if outcome else "wrong", unit + 1, *(f"{value:.2f}" for value in of.to_numpy()))
        for (outcome, unit), of in by_unit(units).sort_index(ascending=[False, True]).iterrows()
    ]
    return table(header, rows)


def by_unit(units: pd.DataFrame) -> pd.DataFrame:
    """Means over the responses with the most common number of units: of each outcome, unit and column, at `PRIMARY`."""
    chosen = units[(units.alpha == PRIMARY) & (units.units == units.units.mode()[0])]
    return chosen.groupby(["outcome", "unit"])[["p_mu", "local", "future", "regret"]].mean()


def draw(units: pd.DataFrame, path: Path) -> None:
    """Success rates along right and wrong responses, each and their mean; and the two parts of the units' regret."""
    means = by_unit(units)
    figure, (rates, parts) = start_figure(2, width=8.0, height=3.0)
    common = units[(units.alpha == PRIMARY) & (units.units == units.units.mode()[0])]
    for shift, (outcome, color, name) in {-0.2: (1.0, BLUE, "right"), 0.2: (0.0, ORANGE, "wrong")}.items():
        for _, response in common[common.outcome == outcome].sort_values("unit").groupby("response_id"):
            rates.plot([*(response.unit + 1), len(response) + 1], [*response.p_mu, outcome], color=color, alpha=0.12)
        of = means.loc[outcome]
        places = of.index.to_numpy() + 1
        rates.plot([*places, len(of) + 1], [*of.p_mu, outcome], color=color, linewidth=2.5, label=name)
        parts.bar(places + shift, of.local, 0.36, color=color, label=f"{name}: local")
        bottom = np.where(of.local > 0, of.local, 0)
        parts.bar(places + shift, of.future, 0.36, bottom=bottom, color=color, alpha=0.45, label=f"{name}: future")
    rates.set(xlabel="before unit (last: the end)", ylabel="success rate", ylim=(-0.03, 1.03))
    parts.set(xlabel="unit", ylabel=f"regret at α = {PRIMARY}")
    parts.axhline(0, color=GRAY, linewidth=0.8)
    parts.set(xticks=places, ylim=(None, 1.3 * parts.get_ylim()[1]))
    rates.set(xticks=[*places, len(places) + 1])
    rates.legend()
    parts.legend(fontsize=7, ncols=2, loc="upper center")
    save_figure(figure, path)


def main() -> None:
    """Write what the command asks for, and say how many rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("problems")
    command.add_argument("file", type=Path, help="GSM8K's training problems")
    command.add_argument("--trained", type=Path, required=True, help="prompts of the run that trained models")
    command.add_argument("--count", type=int, default=120)
    command = commands.add_parser("responses")
    command.add_argument("file", type=Path, help="verified responses")
    command.add_argument("--pieces", type=int, default=3)
    command = commands.add_parser("collect")
    command.add_argument("folders", type=Path, nargs="+", help="what `regretless rollout` wrote about each piece")
    command = commands.add_parser("predictions")
    command.add_argument(
        "--analysis", type=Path, nargs="*", default=[], help="what `regretless analyze` wrote, with each piece"
    )
    args = parser.parse_args()
    if args.command == "predictions":
        predictions(args.analysis)
    elif args.command == "collect":
        units = pd.concat([pd.read_parquet(folder / "regret.parquet", columns=COLUMNS) for folder in args.folders])
        units.to_csv(MEASURED, index=False, float_format="%.6g")
        print(f"{MEASURED}: {units.response_id.nunique()} responses of {units.prompt_id.nunique()} problems")
    elif args.command == "problems":
        rows = problems(args.file, args.trained, args.count)
        Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"problems.jsonl: {len(rows)} problems")
    else:
        for number, table in enumerate(selected(args.file, args.pieces), 1):
            pq.write_table(table, f"selected-{number}.parquet")
            print(f"selected-{number}.parquet: {table.num_rows} responses of {table.num_rows // 2} problems")


if __name__ == "__main__":
    main()
