"""Which texts are paths of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.paths import NO_URL, check_output, url_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/x", "s3://bucket/x"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("gs://b/x/", "gs://b/x/"),
        ("file:///tmp/x", "file://tmp/x"),
        ("runs/x", None),
        ("a:b", None),
        ("/mnt/s3:/x", None),
        ("C:/x", None),
        ("run\U0001f600", None),
    ],
)
def test_path_when_it_is_a_url_also_with_merged_slashes_then_it_is_refused(text: str, url: str | None) -> None:
    assert url_of(text) == url
    if url is None:
        assert check_output(text) == text
    else:
        with pytest.raises(ValueError, match="expected a path on this machine"):
            check_output(text)


def test_refusal_of_a_url_then_the_page_that_it_names_exists() -> None:
    page = NO_URL.rpartition("/")[2].replace(".html", ".md")
    assert "object store" in (DOCS / page).read_text(encoding="utf-8")
