"""Responses of several messages: formats, the parts that the model wrote, stored tokens, masked pairs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from regretless.core.errors import ConfigError
from regretless.data.columns import Pair
from regretless.data.preferences import parse_pairs, read_pairs
from regretless.data.prompts import PromptSource, read_prompts
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import TokenizedPair, tokenize_pairs
from regretless.labeling.mask import MaskConfig, mask_pairs
from regretless.modeling.chat_templates import set_template_arguments
from regretless.modeling.layout import as_context, is_context, own_ids, read_ids

CALL, END = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "<|im_end|>"
OUTPUT = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = [{"role": "user", "content": "2+2?"}]


def trajectory(answer: str, **first: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call], **first},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": answer},
    ]


ROW = {"prompt": QUESTION, "chosen": trajectory("It is 4."), "rejected": trajectory("It is 5."), "tools": TOOLS}


def with_template(shared: Path, name: str) -> Any:
    """Qwen's tokenizer with one of the templates that TRL brings."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")
    tokenizer.chat_template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module")
def qwen(shared: Path) -> Any:
    """No generation marks."""
    return with_template(shared, "qwen3")


def read(row: Any) -> Pair:
    pairs, refused = parse_pairs([row])
    assert [refusal.reason for refusal in refused] == []
    return pairs[0]


def tokenized(pair: Pair, tokenizer: Any, **options: Any) -> TokenizedPair:
    limits = {"max_length": None, "max_prompt_length": None}
    kept, refused = tokenize_pairs([pair], tokenizer, **(limits | options))
    assert [str(refusal) for refusal in refused] == []
    return kept[0]


def refusal(pair: Pair, tokenizer: Any, **options: Any) -> str:
    kept, refused = tokenize_pairs([pair], tokenizer, **({"max_length": None, "max_prompt_length": None} | options))
    assert kept == []
    return refused[0].reason


def own_and_context(tokenizer: Any, ids: tuple[int, ...]) -> tuple[str, str]:
    context = [token for token in ids if is_context(token)]
    return tokenizer.decode(own_ids(ids)), tokenizer.decode(read_ids(context))


def labeled(tokenizer: Any, pair: Pair) -> Pair:
    """The pair with the tokens that were generated, and log-probabilities that tell their positions."""
    texts = {name: [CALL + END, f"{side.text[-1]['content']}{END}"] for name, side in pair.sides.items()}
    sides = {}
    for name, of_side in texts.items():
        ids = [token for text in of_side for token in tokenizer(text)["input_ids"]]
        logps = [-0.5 * place for place in range(len(ids))]
        sides[name] = replace(pair.sides[name], token_ids=ids, logps=logps, id=name, complete=True)
    return replace(pair, **sides, tokenizer=None)


def test_formats_when_trl_openai_or_a_table_then_the_pair_is_the_same(tmp_path: Path) -> None:
    pair = read(ROW)
    as_json = {"type": "function", "id": None, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    openai = {
        "input": {"messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": True},
        "preferred_output": trajectory("It is 4.", content=None, tool_calls=[as_json]),
        "non_preferred_output": trajectory("It is 5.", content=None, tool_calls=[as_json]),
    }
    found = read(openai)
    assert (found.prompt, found.chosen.text, found.rejected and found.rejected.text) == (
        QUESTION,
        trajectory("It is 4."),
        trajectory("It is 5."),
    )
    assert json.loads(found.chat_template_kwargs or "") == {"tools": TOOLS}
    write_records(tmp_path / "pairs.parquet", [pair, read({**ROW, "chosen": trajectory("4", reasoning="a sum")})])
    again, refused = read_pairs(tmp_path / "pairs.parquet")
    assert not refused
    assert again[0] == pair
    assert again[1].chosen.text[0]["reasoning_content"] == "a sum"
    missing = parse_pairs([{"input": {"tools": []}, "preferred_output": trajectory("4")}])[1][0]
    assert missing.reason.startswith("input: expected an object with messages beside preferred_output")


def test_sharegpt_when_read_then_it_is_the_same_conversation_and_unknown_speakers_are_refused() -> None:
    asked = [{"from": "system", "value": "Be short."}, {"from": "human", "value": "2 + 2?"}]
    right, wrong = {"from": "gpt", "value": "4"}, {"from": "gpt", "value": "5"}
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    preferred = read({"conversations": asked, "chosen": right, "rejected": wrong})
    assert preferred == read(
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": "4"}],
            "rejected": [{"role": "assistant", "content": "5"}],
        }
    )
    (imitated,), _ = parse_pairs([{"conversations": [*asked, right]}], need_rejected=False)
    assert (imitated.prompt, imitated.chosen.text) == (prompt, [{"role": "assistant", "content": "4"}])
    called = {"from": "function_call", "value": "{}"}
    (refused,) = parse_pairs([{"conversations": asked, "chosen": called, "rejected": wrong}])[1]
    assert refused.reason.startswith(
        "chosen: from: expected one of user, human, system, assistant, gpt, bot, model, got 'functio"
    )


def test_messages_when_supervised_then_the_response_is_all_that_follows_the_last_question() -> None:
    (pair,), _ = parse_pairs([{"messages": [*QUESTION, *trajectory("It is 4.")]}], need_rejected=False)
    assert (pair.prompt, pair.chosen.text) == (QUESTION, trajectory("It is 4."))


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "qwen2_5_training"])
def test_parts_when_a_template_marks_them_or_not_then_only_the_messages_are_trained(
    template: str, shared: Path
) -> None:
    tokenizer = with_template(shared, template)
    pair = tokenized(read(ROW), tokenizer)
    assert tokenizer.decode(pair.prompt_ids).count('{"type": "function"') == 1
    for side, answer in zip(pair.sides, ("It is 4.", "It is 5."), strict=True):
        assert own_and_context(tokenizer, side.ids) == (CALL + END + answer + END, OUTPUT)
    # Up to the final line break, the row is the template's own text.
    whole = tokenizer.apply_chat_template([*QUESTION, *trajectory("It is 4.")], tools=TOOLS, tokenize=False)
    written = tokenizer.decode([*pair.prompt_ids, *read_ids(pair.chosen.ids)])
    assert written == whole.rstrip() if template != "qwen3" else whole.replace("<think>\n\n</think>\n\n", "").rstrip()


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training"])
def test_empty_reasoning_when_a_template_adds_it_to_a_call_then_it_is_no_difference_to_a_text(
    template: str, shared: Path
) -> None:
    tokenizer = with_template(shared, template)
    text = [{"role": "assistant", "content": "It is 5."}]
    pair = tokenized(read({**ROW, "chosen": trajectory("")[:1], "rejected": text}), tokenizer)
    assert own_and_context(tokenizer, pair.chosen.ids) == (CALL + END, "<think>\n\n</think>\n\n")
    assert pair.rejected is not None and tokenizer.decode(pair.rejected.ids) == f"It is 5.{END}"
    # A block that the message itself has is trained on, empty or not.
    written = {"content": "<think>\n\n</think>\n\n"}
    own = tokenized(read({**ROW, "chosen": trajectory("", **written)[:1], "rejected": text}), tokenizer)
    assert own_and_context(tokenizer, own.chosen.ids) == (f"<think>\n\n</think>\n\n{CALL}{END}", "")
    thought = tokenized(read({**ROW, "chosen": trajectory("", reasoning="a sum")[:1], "rejected": text}), tokenizer)
    assert own_and_context(tokenizer, thought.chosen.ids) == (f"<think>\na sum\n</think>\n\n{CALL}{END}", "")


def test_reasoning_when_kept_then_it_is_trained_and_when_off_then_both_sides_lose_it(qwen: Any, shared: Path) -> None:
    sides = {
        "chosen": trajectory("<think>\nsure\n</think>\n\nIt is 4.", reasoning_content="a sum"),
        "rejected": trajectory("It is 5.", thinking="no sum"),
    }
    kept = tokenized(read({**ROW, **sides}), qwen)
    thought = f"<think>\na sum\n</think>\n\n{CALL}{END}<think>\nsure\n</think>\n\nIt is 4.{END}"
    assert own_and_context(qwen, kept.chosen.ids) == (thought, OUTPUT)
    # Once a question follows, the template leaves the reasoning out, which the model had before it at message 3.
    later = [*sides["chosen"], {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    reason = refusal(read({**ROW, **sides, "chosen": later}), qwen)
    assert "writes what precedes message 3 differently when more messages follow: the model received" in reason
    # A message right before a question loses its reasoning without a difference in what precedes the next one.
    for answer in ({"content": "It is 4.", "reasoning_content": "a sum"}, {"content": "<think>\na sum\n</think>\n4"}):
        reason = refusal(read({**ROW, "chosen": [{"role": "assistant", **answer}, *later[-2:]]}), qwen)
        assert "chosen: message 1: the chat template leaves out its reasoning, with which the model wrote it" in reason
    prompt = [*QUESTION, *sides["chosen"], *later[-2:-1]]
    history = tokenized(read({**ROW, "prompt": prompt, "chosen": later[-1:], "rejected": later[-3:-2]}), qwen)
    assert "a sum" not in qwen.decode(history.prompt_ids)

    single = {"chosen": [sides["chosen"][-1]], "rejected": [sides["rejected"][-1]]}
    for setting in ("row", "model"):
        tokenizer = with_template(shared, "qwen3")
        row = {**ROW, **single}
        if setting == "row":
            row["chat_template_kwargs"] = {"enable_thinking": False}
        else:
            set_template_arguments(tokenizer, {"enable_thinking": False})
        pair = tokenized(read(row), tokenizer)
        assert tokenizer.decode(pair.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
        assert [tokenizer.decode(side.ids) for side in pair.sides] == [f"It is 4.{END}", f"It is 5.{END}"]
    # The empty block that opens each turn is not in the template's text of earlier turns.
    assert "writes what precedes message 1 differently when more messages follow" in refusal(
        read({**ROW, **sides, "chat_template_kwargs": {"enable_thinking": False}}), qwen
    )
    with pytest.raises(ConfigError, match="the chat template does not use mood"):
        set_template_arguments(tokenizer, {"mood": "calm"})


def test_templates_when_a_tokenizer_has_several_then_tools_get_their_own_as_in_transformers(qwen: Any) -> None:
    tokenizer = copy.deepcopy(qwen)
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}"
    written = {
        "default": "{% for m in messages %}" + turn + "<|im_end|>\n{% endfor %}",
        "tool_use": "{{ tools | tojson }}{% for m in messages %}" + turn + "<|endoftext|>\n{% endfor %}",
    }
    generate = "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}hush {% endif %}{% endif %}"
    written = {name: template + generate for name, template in written.items()}
    written["tool_use"] = written["tool_use"].replace("quiet", "true")
    tokenizer.chat_template = dict(written)
    set_template_arguments(tokenizer, {"quiet": True})
    assert tokenizer.chat_template["tool_use"] == written["tool_use"] != tokenizer.chat_template["default"]

    answer = [{"role": "assistant", "content": "4"}]
    for tools, end in ((None, END), (TOOLS, "<|endoftext|>")):
        pair = read({"prompt": QUESTION, "chosen": answer, "rejected": said("5", as_message=True), "tools": tools})
        found = tokenized(pair, tokenizer)
        expected = tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True)["input_ids"]
        assert list(found.prompt_ids) == expected
        assert tokenizer.decode(found.prompt_ids).endswith("assistant\nhush ")
        assert tokenizer.decode(found.chosen.ids) == f"4{end}"

    with pytest.raises(ConfigError, match="the chat template does not use mood"):
        set_template_arguments(tokenizer, {"mood": "calm"})
    del tokenizer.chat_template["default"]
    assert "of its chat templates (tool_use) none is called default" in refusal(
        read({"prompt": QUESTION, "chosen": answer, "rejected": said("5", as_message=True)}), tokenizer
    )


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def said(text: str, *, as_message: bool) -> Any:
    return [{"role": "assistant", "content": text}] if as_message else text


@pytest.mark.parametrize("as_message", [True, False])
def test_reasoning_when_off_then_a_text_loses_it_too_and_one_without_an_answer_is_refused(
    qwen: Any, as_message: bool
) -> None:
    sides = {"chosen": "<think>\na <think> sum\n</think>\n\nIt is 4.", "rejected": "so\n</think>\n\nIt is 5."}
    row = {**ROW, **OFF, **{name: said(text, as_message=as_message) for name, text in sides.items()}}
    pair = tokenized(read(row), qwen)
    assert [qwen.decode(side.ids) for side in pair.sides] == [f"It is 4.{END}", f"It is 5.{END}"]
    plain = said("Between <think> and </think>.", as_message=as_message)
    assert (
        qwen.decode(tokenized(read({**row, "chosen": plain}), qwen).chosen.ids) == f"Between <think> and </think>.{END}"
    )
    for text, reason in (
        (
            "<think>\na sum",
            "a message of the assistant has <think> and no </think>, so it was cut within its reasoning",
        ),
        ("<think>\na sum\n</think>\n", "nothing but reasoning, which enable_thinking=false leaves out"),
    ):
        found = refusal(read({**row, "chosen": said(text, as_message=as_message)}), qwen)
        assert f"chosen: {reason}" in found


@pytest.mark.parametrize("as_message", [True, False])
def test_reasoning_when_the_prompt_begins_it_then_it_has_one_beginning_and_an_end(
    shared: Path, as_message: bool
) -> None:
    tokenizer = with_template(shared, "qwen3_5_think")
    texts = ("<think>\na sum\n</think>\n\n4", "<think>no sum</think>5", "a sum\n</think>\n\n4")
    chosen, rejected, whole = (said(text, as_message=as_message) for text in texts)
    question = {"prompt": QUESTION}
    pair = tokenized(read({**question, "chosen": chosen, "rejected": rejected}), tokenizer)
    assert tokenizer.decode(pair.prompt_ids).endswith("assistant\n<think>\n")
    assert [tokenizer.decode(side.ids) for side in pair.sides] == [
        f"a sum\n</think>\n\n4{END}",
        f"no sum</think>5{END}",
    ]
    same = tokenized(read({**question, "chosen": whole, "rejected": rejected}), tokenizer)
    assert same.chosen.ids == pair.chosen.ids

    bare = {**question, "chosen": said("4", as_message=as_message), "rejected": rejected}
    assert "chosen: the chat template begins each answer with <think>, and this one has no </think>" in refusal(
        read(bare), tokenizer
    )
    answer = tokenized(read({**bare, **OFF}), tokenizer)
    assert [tokenizer.decode(side.ids) for side in answer.sides] == [f"4{END}", f"5{END}"]
    # What a model generated, by its ids, is what it generated.
    stored = tokenizer("4" + END)["input_ids"]
    kept = tokenized(read({**bare, "chosen_token_ids": stored}), tokenizer)
    assert kept.chosen.ids == tuple(stored)
    # The template's own default may be to turn it off, which leaves the data's reasoning where it is.
    tokenizer = with_template(shared, "qwen3_5_nothink")
    reasoned = {**question, "chosen": chosen, "rejected": rejected}
    assert "chosen: the chat template ends the prompt with an empty block of reasoning, and this answer begins" in (
        refusal(read(reasoned), tokenizer)
    )
    on = tokenized(read({**reasoned, "chat_template_kwargs": {"enable_thinking": True}}), tokenizer)
    assert on.chosen.ids == pair.chosen.ids


def test_template_when_it_disagrees_drops_or_does_not_end_messages_then_the_row_is_refused(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")
    body = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{{ tools }}<|im_end|>{% endfor %}"
    ask = "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.chat_template = "{{ messages | length }}" + body + ask
    reason = refusal(read(ROW), tokenizer)
    assert "chosen: the chat template writes what precedes message 1 differently when more messages follow" in reason
    assert 'the model received "1<user>2+2?' in reason
    assert 'and the whole response has "3<user>2+2?' in reason
    tokenizer.chat_template = body.replace("<|im_end|>", "") + ask
    assert "writes no end-of-sequence token (" in refusal(read(ROW), tokenizer)
    tokenizer.chat_template = body.replace("{{ m.tool_calls }}", "") + ask
    assert "tool_calls: the chat template does not write it" in refusal(read(ROW), tokenizer)
    marked = body.replace("<{{ m.role }}>", "{{ m.role }}{% generation %}{% endgeneration %}")
    tokenizer.chat_template = marked.replace("{% generation %}{% endgeneration %}", "{# {% generation %} #}") + ask
    assert "marks 0 part(s) as generated, where the response has 1 messages" in refusal(read(ROW), tokenizer)


def test_stored_tokens_when_they_are_the_messages_then_labels_belong_to_them_and_otherwise_they_are_refused(
    qwen: Any,
) -> None:
    pair = labeled(qwen, read(ROW))
    found = tokenized(pair, qwen)
    for side, stored in zip(found.sides, pair.sides.values(), strict=True):
        assert (side.own, side.values["behavior"]) == (tuple(stored.token_ids or ()), tuple(stored.logps or ()))
        assert own_and_context(qwen, side.ids)[1] == OUTPUT
    # As many as the tokens of the conversation, tool outputs included: the labels of other tokens.
    everything = list(read_ids(found.chosen.ids))
    wrong = replace(
        pair, chosen=replace(pair.chosen, token_ids=everything, logps=[-1.0] * len(everything)), tokenizer=None
    )
    assert (tokenized(wrong, qwen).logps_dropped or "").startswith(
        "chosen: token ids of 3 message(s), each with its end-of-sequence token, where the response has 2"
    )
    other = [*qwen("It is 3." + END)["input_ids"]]
    start = len(qwen(CALL + END)["input_ids"])
    wrong = replace(pair, chosen=replace(pair.chosen, token_ids=[*(pair.chosen.token_ids or [])[:start], *other]))
    assert "do not spell the text of the assistant's message 2" in (tokenized(wrong, qwen).logps_dropped or "")
    short = [{**ROW, "chosen_token_ids": pair.chosen.token_ids, "chosen_logps": (pair.chosen.logps or [])[1:]}]
    assert parse_pairs(short)[1][0].reason.startswith("chosen_logps: expected one value per token, got ")


def test_truncation_when_it_reaches_into_an_output_then_the_response_ends_with_the_message_before(qwen: Any) -> None:
    pair = labeled(qwen, read({**ROW, "rejected": trajectory("It is 5.", content="Let me add.")}))
    pair = replace(pair, rejected=replace(pair.rejected, token_ids=None, logps=None) if pair.rejected else None)
    whole = tokenized(pair, qwen)
    first = len(qwen(CALL + END)["input_ids"])
    cut = tokenized(pair, qwen, max_length=len(whole.prompt_ids) + first + 3, truncation="keep_start")
    assert cut.chosen.ids == whole.chosen.ids[:first]
    assert cut.chosen.values["behavior"] == whole.chosen.values["behavior"][:first]


def test_mask_when_a_response_has_several_messages_then_the_last_tokens_of_the_model_are_removed(
    qwen: Any, tmp_path: Path
) -> None:
    qwen.save_pretrained(tmp_path)
    pair = labeled(qwen, read(ROW))
    answer = len(qwen("It is 4." + END)["input_ids"])
    for removed, messages, left in ((2, 3, "It is 4"), (answer + 4, 1, None)):
        masked, counts = mask_pairs([pair], MaskConfig(lengths=(removed,), tokenizer=str(tmp_path)))
        assert counts["masked"] == 1
        assert masked[0].rejected is not None
        assert len(masked[0].rejected.text) == messages
        assert left is None or masked[0].rejected.text[-1]["content"] == left
        found = tokenized(masked[0], qwen)
        rejected = found.sides[1]
        kept = len(found.chosen.own) - removed
        assert (rejected.own, rejected.values["behavior"]) == (
            found.chosen.own[:kept],
            found.chosen.values["behavior"][:kept],
        )
        assert rejected.ids == found.chosen.ids[: len(rejected.ids)]
    between = mask_pairs([pair, *masked], MaskConfig(lengths=(answer, 1), count=1, tokenizer=str(tmp_path)))[0]
    assert len(between[0].rejected.text if between[0].rejected else []) == 3


def test_prompts_when_a_row_has_tools_then_it_is_refused_since_sampling_would_drop_them(tmp_path: Path) -> None:
    rows = [{"prompt": QUESTION, "tools": TOOLS}, {"prompt": [*QUESTION, *trajectory("4")[:2]], "tools": None}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, refused = read_prompts(PromptSource(dataset=str(tmp_path / "prompts.jsonl")))
    assert [row.prompt for row in prompts] == [[*QUESTION, *trajectory("4")[:2]]]
    assert refused[0].reason.startswith("tools, chat_template_kwargs: answers are sampled without them")
    (tmp_path / "responses.jsonl").write_text(json.dumps({"prompt": prompts[0].prompt, "response": "4"}))
    assert read_responses(tmp_path / "responses.jsonl")[0][0].prompt == prompts[0].prompt


def test_context_when_converted_then_it_is_told_from_the_tokens_of_the_model_id_0_included() -> None:
    ids = (5, *as_context((0, 7)), 0)
    assert (own_ids(ids), read_ids(ids), [*map(is_context, ids)]) == ((5, 0), (5, 0, 7, 0), [False, True, True, False])


INSTRUCTION = (
    "{% for m in messages %}{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n{% else %}"
    "### Response:\n{{ m['content'] }}\n<|EOT|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:{% endif %}"
)
COHERE = ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"]
NO_PROMPT = "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] + eos_token }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "special", "context", "own"),
    [
        ("gptoss", ["<|channel|>", "<|message|>", "<|return|>"], "<|channel|>final<|message|>", "4<|return|>"),
        ("cohere2", COHERE, "", "4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("phi3", ["<|user|>", "<|assistant|>", "<|end|>"], "", "4<|end|>"),
        ("gemma4", ["<turn|>"], "", "4<turn|>"),
        (INSTRUCTION, ["<|EOT|>"], "\n", "4<|EOT|>"),
        (NO_PROMPT, [], "### assistant: ", "4<|im_end|>"),
    ],
)
def test_answer_when_the_template_writes_more_around_it_then_its_header_is_context_and_its_end_that_of_the_template(
    template: str, special: list[str], context: str, own: str, shared: Path
) -> None:
    if "{" in template:
        tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")
        tokenizer.chat_template = template
    else:
        tokenizer = with_template(shared, template)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    row = {"prompt": QUESTION}
    row |= {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "4"), ("rejected", "5"))}
    pair = tokenized(read(row), tokenizer)
    assert own_and_context(tokenizer, pair.chosen.ids) == (own, context)
    text = tokenizer.decode([*pair.prompt_ids, *read_ids(pair.chosen.ids)])
    whole = tokenizer.apply_chat_template([*QUESTION, *row["chosen"]], tokenize=False)
    # Between an answer and its end, white space is left out: no model is asked to write it.
    assert whole.replace("\n<|EOT|>", "<|EOT|>").startswith(text)
    # An answer that has header and end already gets no second ones, and known tokens are all that there was.
    full = {**row, "chosen": [{"role": "assistant", "content": context.lstrip("\n") + own}]}
    again = tokenized(read(full), tokenizer)
    assert tokenizer.decode(read_ids(again.chosen.ids)) in (context + own, own)
    assert read_ids(again.chosen.ids).count(again.chosen.ids[-1]) == 1
    ids = tokenizer(own)["input_ids"]
    stored = replace(pair_of := read(row), chosen=replace(pair_of.chosen, token_ids=ids, complete=True))
    assert list(tokenized(stored, tokenizer).chosen.ids) == ids


def test_template_when_it_leaves_out_texts_then_the_row_is_refused(shared: Path) -> None:
    tokenizer = with_template(shared, "idefics3")
    row = {"prompt": QUESTION, "chosen": "4", "rejected": "5"}
    assert "leaves out the content of messages with role user" in refusal(read(row), tokenizer)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['reasoning_content'] }}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "marked"),
    [
        ("", ""),
        # A mark around nothing, behind a tool's output and in front of its end token.
        ("{% endif %}{% endfor %}", "{% generation %}{% endgeneration %}{% endif %}{% endfor %}"),
        ("{% else %}{{ m['content'] }}", "{% else %}{{ m['content'] }}{% generation %}{% endgeneration %}"),
        # The line break behind the end token: in the mark, and in one of its own.
        ("<|im_end|>{% endgeneration %}{{ '\\n' }}", "<|im_end|>{{ '\\n' }}{% endgeneration %}"),
        (
            "{% endgeneration %}{{ '\\n' }}",
            "{% endgeneration %}{% generation %}{{ '\\n' }}{% endgeneration %}",
        ),
        # The end token: in a mark of its own, with and without the line break, and unmarked.
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"),
        (
            "<|im_end|>{% endgeneration %}{{ '\\n' }}",
            "{% endgeneration %}{% generation %}<|im_end|>{{ '\\n' }}{% endgeneration %}",
        ),
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    ],
)
@pytest.mark.parametrize("thought", ["", "hm."])
def test_marks_when_they_are_empty_split_or_include_line_breaks_then_the_same_tokens_are_trained(
    written: str, marked: str, thought: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written in MARKED
    monkeypatch.setattr(qwen, "chat_template", MARKED.replace(written, marked))
    texts = [("assistant", "f"), ("tool", "4"), ("assistant", "It")]
    chosen = [{"role": role, "content": text} for role, text in texts]
    chosen[-1]["reasoning_content"] = thought  # with it, the template writes the last message as well
    pair = read({"prompt": QUESTION, "chosen": chosen, "rejected": [{"role": "assistant", "content": "5"}]})
    own, context = own_and_context(qwen, tokenized(pair, qwen).chosen.ids)
    assert own == f"f<|im_end|>{thought}It<|im_end|>"
    assert context == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
