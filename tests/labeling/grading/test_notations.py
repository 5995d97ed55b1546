"""The table of notations: each is read as the table says."""

from __future__ import annotations

import pytest

from regretless.labeling.grading.notations import NOTATIONS, Notation, clean

ALL = [notation for table in NOTATIONS.values() for notation in table]


@pytest.mark.parametrize("notation", ALL, ids=[notation.written for notation in ALL])
def test_notation_when_written_then_read_as_the_table_says(notation: Notation) -> None:
    assert notation.apply(notation.written) == notation.read
    # And so by the function for answers, which applies them all.
    assert clean(notation.written) == clean(notation.read)
