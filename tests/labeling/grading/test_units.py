"""Quantities and times of day: what is read, converted and refused."""

from __future__ import annotations

import pytest

from regretless.labeling.grading.units import equal_quantities, read_clock, read_quantity


@pytest.mark.parametrize(
    ("gold", "other", "same"),
    [
        ("2 hours and 30 minutes", "2.5 hours", True),
        (r"2\text{ hours and }30\text{ minutes}", "150 min", True),
        ("2 hours and 30 minutes", "2 hours", False),
        ("5 feet 10 inches", "70 in", True),
        ("$5.50", "5 dollars and 50 cents", True),
        ("50 cents", r"\$0.50", True),
        ("25 m²", "25 square meters", True),
        ("25 m²", "250000 cm^2", True),
        (r"60\text{ km/h}", "60 kilometers per hour", True),
        ("36 km/h", "10 m/s", True),
        (r"8.64 \mathrm{~g} / \mathrm{cm}^{3}", r"8640\ \mathrm{kg/m^3}", True),
        (r"3.84\times 10^{5}\ \mathrm{km}", "3.84e8 m", True),
        ("5 m", "5 cm", False),
        ("25 m", "25 m^2", None),
        ("€12", r"\$12", None),
        ("20 °C", r"20^\circ \text{F}", False),
        ("20 °C", "68 °F", True),
        ("20 °C", "293.15 K", True),
        (r"20^\circ \text{C}", "20°", True),
        (r"3.61e-10 \mathrm{~m}", r"3.61 \text{ Å}", True),
        ("36.5 degrees", "36 degrees 30 arcminutes", True),
        ("60 mph", "60 miles per hour", True),
        ("1.5小时", "90 min", True),
        ("5 kN", "5000 N", True),
        ("2 J", "2 kJ", False),
    ],
)
def test_quantities_when_their_units_are_of_one_kind_then_they_are_converted(
    gold: str, other: str, same: bool | None
) -> None:
    quantities = read_quantity(gold), read_quantity(other)
    assert quantities[0] is not None
    assert quantities[1] is not None
    assert equal_quantities(quantities[0], quantities[1]) is same


@pytest.mark.parametrize("text", ["4m", "12", "30 minutes and 2 hours", "3 days, 12 apples", "5 apples", "x m", "m"])
def test_read_quantity_when_a_text_states_none_then_none(text: str) -> None:
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("3:15 P.M.", 915), ("15:15", 915), ("12:05 a.m.", 5), ("noon", 720), ("3 pm", 900), ("25:00", None), ("3", None)],
)
def test_read_clock_when_a_text_is_a_time_of_day_then_its_minutes(text: str, minutes: int | None) -> None:
    clock = read_clock(text)
    assert (clock and clock.minutes) == minutes
