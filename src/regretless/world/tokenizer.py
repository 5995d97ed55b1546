"""A tokenizer for the world's texts: whole words and single digits; decoding restores every text."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from regretless.world.problems import FIRST_NAMES, FRIENDS, ITEMS, SYMBOLS

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
EVENTS = (" has ", " buys ", " gives ", " to ", " doubles", " loses half", ". ", "How many?")
ITEM_TOKENS = tuple(f" {item}" for item in ITEMS)
TOKENS = (
    *(PAD, EOS, UNKNOWN),
    *"0123456789",
    *SYMBOLS.values(),
    *("=", "\n", "\\boxed{", "}"),
    *EVENTS,
    *FIRST_NAMES,
    *FRIENDS,
    *ITEM_TOKENS,
)
"""The vocabulary in order of its ids. Words include their spaces, so that decoding is concatenation."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""A conversation is the concatenation of its texts, with a token after each answer, so that a first question reads like
a plain prompt. The vocabulary has no words for system messages: they become `<unk>`."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer with `decode(encode(text)) == text` for every text of the world.

    Any other text becomes `<unk>`, and is lost in decoding.
    """
    words = sorted(TOKENS[3:], key=len, reverse=True)
    # Not re.escape: it escapes spaces and newlines, which this regex engine interprets differently.
    pattern = "|".join(_escape(word) for word in words)
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def _escape(word: str) -> str:
    return "".join(f"\\{char}" if char in "\\^$.|?*+()[]{}-" else char for char in word)
