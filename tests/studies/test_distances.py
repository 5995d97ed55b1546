"""Score distances of a study: their mean and deviation over seeds."""

from __future__ import annotations

from regretless.studies.distances import Distance, Measured


def measured(*values: tuple[int | None, int | None, float]) -> Distance:
    return Distance(
        "Tiny-1B", "dpo", "repo", tuple(Measured(data, seed, value, None, None) for data, seed, value in values)
    )


def test_distance_when_data_and_training_have_seeds_then_trainings_on_the_same_data_are_averaged_first() -> None:
    # Means 0.2 and 0.6 of the data seeds: 0.4 ± 0.2828; over the four values it would be ± 0.2582.
    assert measured((0, 0, 0.1), (0, 1, 0.3), (1, 0, 0.5), (1, 1, 0.7)).text == "0.4 ± 0.28"
    assert measured((0, 0, 0.1), (0, 1, 0.3)).text == "0.2 ± 0.14"
    assert measured((None, None, 0.1)).text == "0.1"
