"""How a text becomes a prompt: by the template that settings name, else by the chat templates of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from regretless.core.plugins import Registry
from regretless.core.terminal import print_note
from regretless.data.codec import Tokenizer, codec_of
from regretless.data.columns import Pair, Text


def _with_system(line: str) -> Callable[[str], Text]:
    return lambda text: [{"role": "system", "content": line}, {"role": "user", "content": text}]


SYSTEM_LINES = {
    "math": "Please reason step by step, and put your final answer within \\boxed{}.",
    "assistant": "You are a helpful assistant.",
}
"""System messages of templates: added for the model, and not part of the task."""
TEMPLATES: Registry[Callable[[str], Text]] = Registry(
    "templates",
    {
        **{name: _with_system(line) for name, line in SYSTEM_LINES.items()},
        "user": lambda text: [{"role": "user", "content": text}],
        "plain": lambda text: text,
    },
    lambda _, part: None if callable(part) else f"expected a function from a text to a prompt, got {part!r}",
)
"""How a text becomes a prompt. `math` and `assistant` are the paper's prompts for data generation (appendix)."""


@dataclass(frozen=True)
class TextPrompts:
    """What certain models are asked where a prompt is a text and no template is set."""

    as_messages: bool = False
    """Whether a text becomes a user message: all of the models have a chat template that writes something around it."""
    tokens: frozenset[str] = frozenset()
    """Special tokens of these chat templates: a text with one of them is written in a template already."""

    @classmethod
    def of(cls, tokenizers: Sequence[Tokenizer | None]) -> Self:
        """What models with these tokenizers are asked; None for a tokenizer that only a server has."""
        written = [None if tokenizer is None else codec_of(tokenizer).turn_tokens for tokenizer in tokenizers]
        tokens = [of_one for of_one in written if of_one is not None]
        return cls(bool(tokens) and len(tokens) == len(written), frozenset().union(*tokens))

    def asked(self, prompts: Sequence[Text | None], source: str, setting: str) -> list[Text | None]:
        """The prompts as the models get them, None for None; what became of the texts of `source` is printed.

        setting: the one that names a template, for the message.
        """
        asked = [prompt and self.ask(prompt) for prompt in prompts]
        messages = sum(was is not now for was, now in zip(prompts, asked, strict=True))
        texts = sum(isinstance(prompt, str) for prompt in asked) if self.as_messages else 0
        say_choice(source, setting, messages, texts, "because they contain special tokens of the chat template")
        return asked

    def ask(self, prompt: Text) -> Text:
        """A prompt as the models get it."""
        if not self.as_messages or not isinstance(prompt, str) or any(token in prompt for token in self.tokens):
            return prompt
        return TEMPLATES["user"](prompt)


AS_MESSAGES = "asked as user messages, in the chat template; {setting}=plain leaves them as they are"
"""What is said of text prompts where the setting names no template."""
PAIR_TEMPLATE = "pairs.template"
PLAIN = TextPrompts()
CHAT = TextPrompts(as_messages=True)
"""For a server that takes nothing but messages."""


def say_choice(source: str, setting: str, messages: int, texts: int, why: str) -> None:
    """Print how many text prompts of a source are asked as messages by default, and how many as they are, and why."""
    if messages:
        print_note(f"{source}: {messages} text prompts are {AS_MESSAGES.format(setting=setting)}")
    if texts:
        print_note(f"{source}: {texts} text prompts are asked as they are, not in the model's chat template, {why}")


def asked_pair(tokenizer: Tokenizer, template: str | None) -> Callable[[Pair], Pair]:
    """A function that puts the text prompt of a pair into a template; None: what suits the model, as `TextPrompts`.

    That of a response with recorded tokens stays: its log-probabilities are those behind the prompt as it is.
    """
    ask = TextPrompts.of([tokenizer]).ask if template is None else TEMPLATES.find(template)

    def asked(pair: Pair) -> Pair:
        if not isinstance(pair.prompt, str) or any(side.pieces for side in pair.sides.values()):
            return pair
        prompt = ask(pair.prompt)
        return pair if prompt == pair.prompt else replace(pair, prompt=prompt)

    return asked
