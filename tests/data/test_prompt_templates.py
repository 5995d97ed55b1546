"""What a text prompt becomes: by default one user message for chat models, and the same wherever prompts are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regretless.data.preferences import parse_pairs
from regretless.data.prompt_templates import CHAT, PLAIN, TextPrompts
from regretless.data.prompts import PromptSource, read_prompts
from regretless.data.tokenization import encode_prompt, tokenize_pairs
from regretless.world.tokenizer import build_tokenizer

TAGGED = (
    "{% for m in messages %}<eos>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<eos>{% endif %}"
)
"""A template that writes a special token of the world's tokenizer."""
TEXT, MESSAGE = "Tom has 7 apples", [{"role": "user", "content": "Tom has 7 apples"}]
WRITTEN = "<eos>user\nTom has 7 apples<eos>"


def tokenizer_with(template: str | None) -> Any:
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("templates", "text", "asked"),
    [
        ([TAGGED], TEXT, MESSAGE),
        ([TAGGED], WRITTEN, WRITTEN),  # written in the template already
        ([TAGGED], MESSAGE, MESSAGE),
        (["{{ messages[0]['content'] }}"], TEXT, TEXT),  # writes nothing around a question
        ([""], TEXT, TEXT),
        ([TAGGED, ""], TEXT, TEXT),  # one of two models has no template
        ([TAGGED, TAGGED], TEXT, MESSAGE),
        ([TAGGED, None], TEXT, TEXT),  # of one model only a server has the tokenizer
        ([], TEXT, TEXT),
    ],
)
def test_text_when_models_have_chat_templates_then_it_is_a_user_message_unless_it_is_written_in_one(
    templates: list[str | None], text: Any, asked: Any
) -> None:
    tokenizers = [None if template is None else tokenizer_with(template) for template in templates]
    assert TextPrompts.of(tokenizers).ask(text) == asked


def test_server_when_it_takes_messages_only_then_every_text_is_one() -> None:
    assert CHAT.ask(WRITTEN) == [{"role": "user", "content": WRITTEN}]


def test_prompts_when_read_for_a_chat_model_then_the_choice_is_said_and_a_template_that_is_set_goes_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": TEXT}, {"prompt": MESSAGE}, {"prompt": "b", "prompt_template": "plain"}, {"prompt": "c"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = TextPrompts.of([tokenizer_with(TAGGED)])
    kept, refused = read_prompts(PromptSource(dataset=str(tmp_path / "a.jsonl")), "prompts.", texts)
    assert [row.prompt for row in kept] == [MESSAGE, MESSAGE, [{"role": "user", "content": "c"}]]
    assert [(row.line, row.reason[:15]) for row in refused] == [(3, "prompt: a text,")], "a file holds one kind"
    said = " ".join(capsys.readouterr().err.split())
    assert "a.jsonl: 2 text prompts are asked as user messages, in the chat template; prompts.template=plain" in said
    plain, _ = read_prompts(PromptSource(dataset=str(tmp_path / "a.jsonl"), template="plain", limit=1), "", texts)
    assert plain[0].prompt == TEXT
    assert read_prompts(PromptSource(dataset=str(tmp_path / "a.jsonl"), limit=1), "", PLAIN)[0][0].prompt == TEXT


@pytest.mark.parametrize(
    ("template", "more", "prompt"),
    [
        (None, {}, MESSAGE),
        ("plain", {}, TEXT),
        ("user", {}, MESSAGE),
        ("unset", {}, TEXT),  # as in Python: TRL's meaning
        # Sampled behind the text: its log-probabilities are those behind that.
        (None, {"chosen_token_ids": [5, 1], "chosen_logps": [-1.0, -0.5]}, TEXT),
    ],
)
def test_pair_when_its_prompt_is_a_text_then_the_template_that_is_set_decides(
    template: str | None, more: dict[str, Any], prompt: Any
) -> None:
    tokenizer = tokenizer_with(TAGGED)
    given = {} if template == "unset" else {"template": template}
    pairs, refused = parse_pairs([{"prompt": TEXT, "chosen": "2", "rejected": "3", **more}])
    assert not refused
    limits: dict[str, Any] = {"max_length": None, "max_prompt_length": None, "need_logps": False}
    (pair,), refused = tokenize_pairs(pairs, tokenizer, **limits, **given)
    assert not refused
    assert list(pair.prompt_ids) == encode_prompt(tokenizer, prompt)
    assert pair.wrapped == (prompt != TEXT)
