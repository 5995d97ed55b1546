"""A round's pairs, with pairs of earlier rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from regretless.data.columns import Pair
from regretless.data.preferences import read_pairs, split_kinds
from regretless.data.rows import write_records


def run(pairs: Path, earlier: Sequence[Path], share: float, seed: int, output: Path) -> dict[str, Any]:
    """Write pairs.parquet into the folder `output`: all of `pairs`, then earlier ones drawn at random; returns counts.

    earlier: files of earlier rounds' pairs, the youngest first. share: that of earlier pairs in the result, at most.
    In the column `pair_id`, an earlier pair's age follows behind `@`: its responses were written by older models, whose
    log-probabilities they keep.
    """
    fresh = _usable(pairs)
    stock = [
        replace(pair, pair_id=f"{pair.pair_id}@{age}") for age, path in enumerate(earlier, 1) for pair in _usable(path)
    ]
    wanted = min(len(stock), round(share / (1 - share) * len(fresh)))
    replayed = [stock[index] for index in sorted(Random(seed).sample(range(len(stock)), wanted))]
    write_records(output / "pairs.parquet", [*fresh, *replayed])
    ages = Counter(str(pair.pair_id).rpartition("@")[2] for pair in replayed)
    return {"pairs": len(fresh) + wanted, "replayed": wanted, "ages": {age: ages[age] for age in sorted(ages, key=int)}}


def _usable(path: Path) -> list[Pair]:
    return split_kinds(*read_pairs(path))[0]
