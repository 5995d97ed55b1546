"""Pairs of earlier rounds among those of a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from flat_pairs import pair_of
from regretless.data.preferences import read_pairs
from regretless.data.rows import write_records
from regretless.rounds.replay import run


def file(folder: Path, name: str, count: int) -> Path:
    """Pairs whose log-probabilities name their file."""
    pairs = [
        pair_of(
            prompt=f"p{row}", chosen="a", rejected="b", pair_id=f"{row}", prompt_id=f"p{row}", logps_kind="raw",
            chosen_token_ids=[1], rejected_token_ids=[2], chosen_logps=[-float(name)], rejected_logps=[-float(name)],
        )
        for row in range(count)
    ]  # fmt: skip
    write_records(folder / f"{name}.parquet", pairs)
    return folder / f"{name}.parquet"


@pytest.mark.parametrize(
    ("share", "counts", "replayed"),
    [(0.5, (6, 6), 6), (0.25, (6, 6), 2), (0.75, (9, 9), 18), (0.9, (2, 3), 5)],
    ids=["half", "quarter", "all there are", "fewer than asked for"],
)
def test_replay_when_a_share_is_set_then_so_many_earlier_pairs_follow_with_their_writers_logps(
    share: float, counts: tuple[int, int], replayed: int, tmp_path: Path
) -> None:
    fresh, earlier = file(tmp_path, "0", 6), [file(tmp_path, f"{age}", count) for age, count in enumerate(counts, 1)]
    summary = run(fresh, earlier, share, seed=3, output=tmp_path)
    pairs = read_pairs(tmp_path / "pairs.parquet")[0]
    assert pairs[:6] == read_pairs(fresh)[0] and len(pairs) == 6 + replayed == summary["pairs"]
    assert summary["replayed"] == sum(summary["ages"].values()) == replayed
    names = [str(pair.pair_id).split("@") for pair in pairs[6:]]
    assert [pair.chosen.logps for pair in pairs[6:]] == [[-float(age)] for _, age in names]
    assert len(set(map(tuple, names))) == replayed, "none twice"
