"""The quickstart over several seeds: Pass@1 and paired gain of every method, and how long each stage takes.

python experiments/quickstart_seeds.py --seeds 0 1 2 3
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from trials import BASE, World, arguments, markdown, mean_and_interval, spread

from regretless.core.files import read_json
from regretless.core.intervals import over_seeds
from regretless.core.stage_folder import MANIFEST


def stage_seconds(run: Path) -> dict[str, float]:
    """Seconds of each stage's folder, its parts added up."""
    seconds: dict[str, float] = {}
    for file in sorted(run.rglob(MANIFEST)):
        stage = file.parent.relative_to(run).parts[0]
        seconds[stage] = seconds.get(stage, 0.0) + float(read_json(file)["seconds"])
    return seconds


def results(run: Path) -> dict[str, dict[str, Any]]:
    """Greedy results of a run on its one benchmark, by model label."""
    return {row["label"]: row for row in read_json(run / "evaluate" / "results.json")["rows"]}


def main() -> None:
    """Run and print two Markdown tables."""
    parser = arguments(__doc__.splitlines()[0], Path("recipes/quickstart.yaml"), Path("runs/experiments"), range(4))
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        world = World(options.recipe, seed, options.folder, options.overrides)
        world.make(())
        runs.append(world.path)

    found = [results(run) for run in runs]
    rows = []
    for label in found[0]:
        shares = [one[label]["value"] for one in found]
        gains = [one[label]["gain"] for one in found] if label != BASE else []
        clear = sum(one[label]["gain_low"] > 0 for one in found) if label != BASE else ""
        rows.append(
            [
                label,
                *spread(shares),
                mean_and_interval(gains, sign=True) if gains else "",
                f"{clear} of {len(found)}" if gains else "",
            ]
        )
    seeds = " / ".join(map(str, options.seeds))
    header = [
        "model",
        f"seeds {seeds}",
        "mean [95 % t-interval]",
        "sd",
        "paired gain",
        "seeds with a gain beyond its 95 % interval",
    ]
    print(f"Greedy Pass@1, %, n = {found[0][BASE]['n']} held-out problems a seed.\n")
    print(markdown(header, rows))

    seconds = [stage_seconds(run) for run in runs]
    stages = sorted(seconds[0], key=lambda stage: -seconds[0][stage])
    means = [over_seeds([one[stage] for one in seconds]).mean for stage in stages]
    print("\nSeconds of a run, mean over seeds.\n")
    print(markdown([*stages, "all"], [[*(f"{value:.1f}" for value in means), f"{sum(means):.1f}"]]))
    # Linux counts kibibytes, macOS bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"\nPeak memory of the process: {peak / 2**30:.2f} GiB.")


if __name__ == "__main__":
    main()
