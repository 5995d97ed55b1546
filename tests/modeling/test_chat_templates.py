"""Chat templates that cannot be used: files in another encoding, programs that fail or do not end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flat_pairs import pair_of
from regretless.core.errors import ConfigError, DataError
from regretless.data.tokenization import encode_prompt, tokenize_pairs
from regretless.modeling import chat_templates
from regretless.modeling.chat_templates import set_chat_template
from regretless.modeling.load import ModelConfig, eos_token_ids, load_tokenizer
from regretless.world.tokenizer import build_tokenizer

CONTENTS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OF_CONTENT = "{% if messages[0]['content'] == 'slow' %}" + LOOPS + "{% endif %}"


def with_template(folder: Path, template: str) -> Any:
    tokenizer = build_tokenizer()
    (folder / "own.jinja").write_text(template)
    set_chat_template(tokenizer, str(folder / "own.jinja"))
    return tokenizer


def test_file_when_not_utf8_then_the_error_names_it(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "latin.jinja").write_bytes("{# für #}".encode("latin-1") + CONTENTS.encode())
    config = ModelConfig(name_or_path=str(tmp_path), chat_template=str(tmp_path / "latin.jinja"))
    with pytest.raises(
        ConfigError, match=r"chat_template: .*latin\.jinja: 'utf-8' codec .* expected a Jinja file in UTF"
    ):
        load_tokenizer(config)


def test_template_when_it_does_not_end_then_it_is_stopped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "RENDER_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"own\.jinja took more than 0\.2 seconds of processor time"):
        eos_token_ids(with_template(tmp_path, LOOPS + CONTENTS))


def test_template_when_it_does_not_end_for_one_row_then_the_next_rows_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "RENDER_SECONDS", 0.2)
    tokenizer = with_template(tmp_path, OF_CONTENT + CONTENTS)
    pairs = [pair_of(prompt=asked(text), chosen="Tom", rejected="Ann") for text in ("Tom has ", "slow", "slow")]
    with pytest.raises(ConfigError, match=r"own\.jinja took more than 0\.2 seconds"):
        tokenize_pairs(pairs, tokenizer, max_length=None, max_prompt_length=None)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[9].content.x.y }}", "no element 9"),
        ("{{ 'a'.center(10**18) }}", "MemoryError"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_template_when_it_fails_then_the_prompt_is_refused_with_its_reason(
    program: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"the chat template .*own\.jinja rejects it: .*{reason}"):
        encode_prompt(with_template(tmp_path, program + CONTENTS), asked("Tom has "))


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
