"""Files of rows: tables of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.errors import DataError
from regretless.data.rows import read_rows


def test_table_of_text_when_read_then_cells_are_texts_and_rows_have_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffprompt,chosen\n"a, ""b""\nc",d\n\n,e\n', encoding="utf-8")
    assert list(read_rows(tmp_path / "a.csv")) == [
        (2, {"prompt": 'a, "b"\nc', "chosen": "d"}),
        (5, {"prompt": None, "chosen": "e"}),
    ]
    (tmp_path / "a.tsv").write_text("prompt\tchosen\na,b\tc\td\n", encoding="utf-8")
    ((number, row),) = read_rows(tmp_path / "a.tsv")
    assert (number, str(row)) == (2, f"{tmp_path}/a.tsv:2: expected 2 cells, as in the first line, got 3")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"prompt,prompt\na,b\n", "the columns' names in the first line"),
        (b"prompt,\na,b\n", "the columns' names in the first line"),
        (b'prompt\n"a"b\n', "not valid CSV in UTF-8"),
        (b"prompt\n\xff\n", "not valid CSV in UTF-8"),
    ],
)
def test_table_of_text_when_broken_as_a_whole_then_it_says_how(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"a.csv: .*{told}"):
        list(read_rows(tmp_path / "a.csv"))
