"""Special tokens that a tokenizer lacks: chat templates by name, end-of-turn tokens, a padding token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from regretless.core.errors import ConfigError, DataError
from regretless.core.processor_time import processor_limit

TEMPLATE_SETTING = "model.chat_template (in Python tokenizer.chat_template)"
"""Where a chat template is set, for messages that readers of a recipe and of a script get."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template in Jinja and the special tokens that it needs; the last of them ends a turn."""

    jinja: str
    tokens: tuple[str, ...]


CHAT_TEMPLATES = {
    "chatml": ChatTemplate(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatTemplate(
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": ChatTemplate(
        # Gemma knows two roles: what the system says goes in front of the first question.
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
        "{% if message['role'] == 'system' %}"
        "{% set ns.system = ns.system + message['content'] | trim + '\n\n' %}{% else %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' + ns.system }}"
        "{% set ns.system = '' %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}


def set_chat_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> None:
    """Set a tokenizer's template to a preset, with its end of turn as the end-of-sequence token, or to one from a file.

    Raises ConfigError if there is no such preset or file, or if the preset's tokens are not in the vocabulary.
    """
    preset = CHAT_TEMPLATES.get(choice)
    tokenizer.name_of_template = choice
    if preset is None:
        if not Path(choice).is_file():
            names = ", ".join(CHAT_TEMPLATES)
            raise ConfigError(
                f"model.chat_template: expected one of {names}, or the path of a Jinja file; got {choice!r}"
            )
        tokenizer.chat_template = read_template(Path(choice))
        return
    missing = [token for token in preset.tokens if token_id(tokenizer, token) is None]
    if missing:
        raise ConfigError(
            f"model.chat_template: {choice} needs the tokens {', '.join(missing)}, which the tokenizer does not have; "
            "choose another template"
        )
    tokenizer.chat_template = preset.jinja
    tokenizer.eos_token = preset.tokens[-1]


def read_template(path: Path) -> str:
    """Chat template of a Jinja file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {path}: {error}; expected a Jinja file in UTF-8") from error


RENDER_SECONDS = 10.0
"""Most processor time for one conversation, which takes a thousandth of a second: templates can loop without end."""


class EndlessTemplate(ConfigError):
    """A chat template that takes `RENDER_SECONDS` for one conversation."""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Text of messages in the chat template; `arguments` are those of transformers' `apply_chat_template`.

    Raises DataError and EndlessTemplate as `template_errors` does.
    """
    with template_errors(tokenizer):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))


@contextmanager
def template_errors(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise DataError for whatever a chat template raises in the block, EndlessTemplate if it takes too long."""
    try:
        with processor_limit(RENDER_SECONDS):
            yield
    except TimeoutError as error:
        raise EndlessTemplate(
            f"{TEMPLATE_SETTING}: {template_name(tokenizer)} took more than {RENDER_SECONDS:g} seconds of processor "
            "time to write one conversation; choose another template"
        ) from error
    except Exception as error:  # a template is a program: it can also divide by zero or use up the memory
        raise DataError(
            f"prompt: {template_name(tokenizer)} rejects it: {str(error) or type(error).__name__}"
        ) from error


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """What messages call a tokenizer's chat template."""
    name = getattr(tokenizer, "name_of_template", None) or tokenizer.name_or_path
    return f"the chat template {name}".strip()


ARGUMENT = re.compile(r"\{%- set (\w+) = \1 \| default\((.*?)\) %\}")
"""What `set_template_arguments` writes."""


def templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """A tokenizer's chat templates by name; a single one is called `default`.

    transformers takes `tool_use`, if it is there, for messages with tools, and `default` for all others.
    """
    template = tokenizer.chat_template
    return dict(template) if isinstance(template, Mapping) else {"default": template} if template else {}


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, bool | int | str]) -> None:
    """Give the chat template values for arguments that a call leaves out; of several, those that use an argument.

    They become a part of the template, and so of the tokenizer that is saved with a model: whoever serves the model
    prompts it as it was trained. Raises ConfigError for an argument that the template does not use.
    """
    by_name = templates(tokenizer)
    unused = [name for name in arguments if not any(mentions(template, name) for template in by_name.values())]
    if unused:
        raise ConfigError(
            f"model.chat_template_kwargs: the chat template does not use {', '.join(unused)}; leave it out, or set "
            "model.chat_template to a template that does"
        )
    changed = {}
    for key, template in by_name.items():
        used = {name: json.dumps(value) for name, value in arguments.items() if mentions(template, name)}
        lines = [f"{{%- set {name} = {name} | default({value}) %}}" for name, value in used.items()]
        changed[key] = "".join(lines) + template
    tokenizer.chat_template = changed if isinstance(tokenizer.chat_template, Mapping) else changed["default"]


def mentions(template: str, name: str) -> bool:
    """Whether a chat template uses an input."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def template_arguments(template: str) -> dict[str, Any]:
    """Values that `set_template_arguments` gave a template, by argument; the first is the one that counts."""
    arguments: dict[str, Any] = {}
    while match := ARGUMENT.match(template):
        arguments.setdefault(match[1], json.loads(match[2]))
        template = template[match.end() :]
    return arguments


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """Id of a token, or None if it is not in the vocabulary."""
    number = tokenizer.convert_tokens_to_ids(token)
    return None if number is None or number == tokenizer.unk_token_id else int(number)


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that end a turn in the tokenizer's chat templates: what is written, and what presets know."""
    written = "".join(templates(tokenizer).values())
    ends = [preset.tokens[-1] for preset in CHAT_TEMPLATES.values() if preset.tokens[-1] in written]
    ids = {number for end in ends if (number := token_id(tokenizer, end)) is not None}
    return ids.union(*(answer_end(tokenizer, tools=tools)[-1:] for tools in (False, True)))


QUESTION = {"role": "user", "content": "?"}
ANSWER = "regretless"
"""What a chat template is given, to see what it writes around an answer; no template contains this word."""


def without_tools(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of the chat template without the tools; an empty list of them still has their own template chosen."""
    kept = {name: value for name, value in arguments.items() if name != "tools"}
    return {**kept, "tools": []} if "tools" in arguments and "tool_use" in templates(tokenizer) else kept


def written_around_answer(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """What the chat template writes between a prompt and the answer to it, and behind the answer.

    Two empty texts without a template, and for one that does not write a question with an answer. The first is empty
    too if the text of both does not begin with the prompt. `arguments`: inputs of the template besides the messages.
    """
    if not tokenizer.chat_template:
        return "", ""
    messages = [QUESTION, {"role": "assistant", "content": ANSWER}]
    try:
        whole = rendered(tokenizer, messages, **arguments)
        prompt = rendered(tokenizer, [QUESTION], add_generation_prompt=True, **arguments)
    except DataError:
        return "", ""
    before, answer, behind = whole.rpartition(ANSWER)
    if not answer:
        return "", ""
    return before[len(prompt) :] if before.startswith(prompt) else "", behind


def answer_end(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> tuple[int, ...]:
    """Ids that end an answer in the chat template, or nothing: its first special token, and those right behind it.

    The last of them ends the turn. Other text before them comes along, white space does not. `tools`: in the template
    for conversations with tools, if there is one.
    """
    arguments = without_tools(tokenizer, {"tools": []} if tools else {})
    written = tokenizer(written_around_answer(tokenizer, arguments)[1], add_special_tokens=False)["input_ids"]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {*tokenizer.all_special_ids}
    first = next((index for index, number in enumerate(written) if number in special), None)
    if first is None:
        return ()
    last = first
    while written[last] != tokenizer.eos_token_id and last + 1 < len(written) and written[last + 1] in special:
        last += 1
    return tuple(written[0 if tokenizer.decode(written[:first]).strip() else first : last + 1])


RESERVED_PADS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")


def choose_pad_token(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Use an existing token for padding: a new one would have no row in the model's embedding.

    Which one does not matter to this package (lengths and masks are explicit); a token that means nothing else is
    preferred for the sake of others. Raises ConfigError if the tokenizer `source` has no such token.
    """
    reserved = [token for token in RESERVED_PADS if token_id(tokenizer, token) is not None]
    candidates = [*reserved, tokenizer.unk_token, tokenizer.eos_token, tokenizer.bos_token]
    chosen = next((token for token in candidates if token is not None), None)
    if chosen is None:
        raise ConfigError(f"tokenizer {source}: no pad, unknown, end or begin token to pad with; set its pad token")
    tokenizer.pad_token = chosen
