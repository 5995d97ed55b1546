"""Tokenization with real tokenizers: ends, boundaries, stored ids, token strings, limits."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from flat_pairs import changed, pair_of
from regretless.core.errors import ConfigError
from regretless.data.columns import TOKEN_VALUES, Pair
from regretless.data.preferences import parse_pairs
from regretless.data.tokenization import (
    TokenizedPair,
    encode_prompt,
    missing_values,
    tokenize_pairs,
)
from regretless.modeling.layout import own_ids, read_ids
from regretless.modeling.load import tokenizer_fingerprint

QUESTION = [{"role": "user", "content": "2+2?"}]
IM_END = 151645


@pytest.fixture(scope="module")
def qwen(shared: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")


@pytest.fixture(scope="module")
def mistral(shared: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/mistral-v1")


def one(pair: Pair, tokenizer: Any, **options: Any) -> TokenizedPair:
    kept, refused = tokenize_pairs([pair], tokenizer, **{"max_length": None, "max_prompt_length": None} | options)
    assert [str(refusal) for refusal in refused] == []
    return kept[0]


def encode_response(tokenizer: Any, prompt: Any, response: Any, complete: bool = True) -> list[int]:
    """Ids of a response as it is trained after a prompt."""
    pair = pair_of(prompt=prompt, chosen=response, rejected="another", chosen_complete=complete)
    return list(one(pair, tokenizer).chosen.ids)


def refusal(pair: Pair, tokenizer: Any, **options: Any) -> str:
    kept, refused = tokenize_pairs([pair], tokenizer, **{"max_length": None, "max_prompt_length": None} | options)
    assert kept == []
    return str(refused[0])


@lru_cache
def fingerprint(tokenizer: Any) -> str:
    return tokenizer_fingerprint(tokenizer)


def sampled(tokenizer: Any, chosen: str = "It is 4.", rejected: str = "It is 5.") -> Pair:
    """A pair as `sample` and `pair` make it: ids with the end token, their log-probabilities, and the text without."""
    ids = [[*tokenizer(text)["input_ids"], IM_END] for text in (chosen, rejected)]
    return pair_of(
        prompt="2+2?",
        chosen=chosen,
        rejected=rejected,
        chosen_token_ids=ids[0],
        rejected_token_ids=ids[1],
        chosen_logps=[-0.1 * position for position in range(len(ids[0]))],
        rejected_logps=[-0.2 * position for position in range(len(ids[1]))],
        tokenizer=fingerprint(tokenizer),
        chosen_complete=True,
        rejected_complete=True,
        origin="pairs.parquet:7",
    )


def test_prompt_when_text_or_messages_then_it_is_plain_or_in_the_chat_template(qwen: Any, mistral: Any) -> None:
    assert qwen.decode(encode_prompt(qwen, QUESTION)).endswith(
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encode_prompt(qwen, "2+2?") == qwen("2+2?")["input_ids"]
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        encode_prompt(mistral, QUESTION)


def test_prompt_when_its_text_spells_the_first_token_then_there_is_one_of_it(mistral: Any) -> None:
    assert encode_prompt(mistral, "Hello") == encode_prompt(mistral, "<s>Hello") == [1, 22557]
    assert encode_prompt(mistral, "") == [1]


def test_prompt_when_options_of_the_tokenizer_change_then_its_ids_do() -> None:
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4}, merges=[])
    assert encode_prompt(tokenizer, "a") == [3, 4]
    tokenizer.add_bos_token = True
    assert encode_prompt(tokenizer, "a") == [1, 3, 4]
    tokenizer.add_bos_token = False
    assert encode_prompt(tokenizer, "a") == [3, 4]


@pytest.mark.parametrize("prompt", ["2+2?", QUESTION])
@pytest.mark.parametrize(
    "text", ["4", "4<|im_end|>", "4<|im_end|><|im_end|>", "4<|im_end|>\n", "4<|im_end|> <|im_end|>\n"]
)
def test_response_when_complete_then_it_has_one_end_token_however_it_is_spelled(
    qwen: Any, prompt: Any, text: str
) -> None:
    assert encode_response(qwen, prompt, text) == [19, IM_END]
    assert encode_response(qwen, prompt, [{"role": "assistant", "content": text}]) == [19, IM_END]
    assert encode_response(qwen, prompt, text, complete=False) == [19]


def test_response_when_it_spells_another_end_token_of_the_vocabulary_then_that_one_is_kept(qwen: Any) -> None:
    assert encode_response(replace_eos(qwen, "<|endoftext|>"), QUESTION, "4<|im_end|>") == [19, IM_END]


def test_response_when_the_template_closes_turns_with_its_own_token_then_messages_end_with_it(qwen: Any) -> None:
    base = replace_eos(qwen, "<|endoftext|>")
    assert encode_response(base, QUESTION, "4") == [19, IM_END]
    assert encode_response(base, QUESTION, "4<|endoftext|>\n") == [19, IM_END]
    assert encode_response(base, QUESTION, "4\n<|im_end|>\n") == [19, 198, IM_END]
    assert encode_response(base, "2+2?", "4") == [19, 151643]
    assert encode_response(base, "2+2?", "4<|im_end|>") == [19, IM_END]


def replace_eos(tokenizer: Any, eos: str) -> Any:
    changed = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changed.eos_token = eos
    return changed


def test_response_when_the_vocabulary_puts_spaces_before_texts_then_none_is_added_behind_a_text_prompt(
    mistral: Any,
) -> None:
    joined = mistral("Answer:\n4")["input_ids"]
    prompt = encode_prompt(mistral, "Answer:\n")
    assert [*prompt, *encode_response(mistral, "Answer:\n", "4", complete=False)] == joined


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ SPACE + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL_PROMPT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEADERS = ["<|user|>", "<|assistant|>", "<|tool|>", "<|im_start|>", "<|im_end|>"]


TEMPLATED = {
    "zephyr": ZEPHYR,
    "chatml": CHATML,
    "inst": INST.replace("SPACE", "''"),
    "inst-space": INST.replace("SPACE", "' '"),
    "special-prompt": SPECIAL_PROMPT,
}


TEXTS = ["It is 4.", "4", "答案是 4", "I\n\tt", "`4`"]


@pytest.mark.parametrize("template", TEMPLATED)
@pytest.mark.parametrize(("name", "special"), [("mistral-v1", []), ("mistral-v1", HEADERS), ("qwen2", HEADERS)])
def test_response_when_tokenized_then_its_tokens_are_those_of_the_whole_conversation(
    name: str, special: list[str], template: str, shared: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers" / name)
    tokenizer.bos_token = tokenizer.bos_token or "<|im_start|>"
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATED[template]
    if template == "chatml":
        if not special:
            pytest.skip("what ends a turn has to be a token")
        tokenizer.eos_token = "<|im_end|>"
    for text in TEXTS:
        answer = {"role": "assistant", "content": text}
        whole = tokenizer.apply_chat_template([*QUESTION, answer], tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        prompt = encode_prompt(tokenizer, QUESTION)
        pair = pair_of(prompt=QUESTION, chosen=[answer], rejected=[{**answer, "content": "It is 5."}])
        for response in (encode_response(tokenizer, QUESTION, text), one(pair, tokenizer).chosen.ids):
            body = [*prompt, *own_ids(response)][:-1]
            assert body == ids[: len(body)], text
            assert "".join(tokenizer.decode(ids[len(body) :]).split()) in ("</s>", "<|im_end|>"), text
        # The tokens between the messages of a response, and those of all its messages, are those of the whole as well.
        turns = [answer, {"role": "user", "content": "sure?"}, answer]
        pair = pair_of(prompt=QUESTION, chosen=turns, rejected=[*turns[:2], {**answer, "content": "no"}])
        whole = tokenizer.apply_chat_template([*QUESTION, *turns], tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        body = [*prompt, *read_ids(one(pair, tokenizer).chosen.ids)][:-1]
        assert body == ids[: len(body)], text


def test_response_when_a_token_would_join_it_with_its_prompt_then_the_prompts_tokens_stay(qwen: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen.name_or_path)
    tokenizer.chat_template = SPECIAL_PROMPT
    whole = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": "`4`"}], tokenize=False)
    prompt = encode_prompt(tokenizer, QUESTION)
    assert tokenizer(whole)["input_ids"][: len(prompt)] != prompt
    assert encode_response(tokenizer, QUESTION, "`4`", complete=False) == tokenizer("`4`")["input_ids"]


def test_response_when_it_has_several_turns_then_all_are_written_by_the_template(qwen: Any) -> None:
    turns = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    ids = encode_response(qwen, QUESTION, turns)
    assert qwen.decode(own_ids(ids)) == "4<|im_end|>yes<|im_end|>"
    text = qwen.decode(read_ids(ids))
    assert text == "4<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"


def test_stored_ids_when_the_tokenizer_is_the_same_then_they_are_taken_over_untouched(qwen: Any) -> None:
    pair = sampled(qwen)
    # "It" as two tokens: not what tokenizing the text gives, and what the behavior model wrote all the same.
    drifted = [*qwen("I")["input_ids"], *qwen("t")["input_ids"], *(pair.chosen.token_ids or [])[1:]]
    pair = changed(pair, chosen_token_ids=drifted, chosen_logps=[-1.0] * len(drifted))
    found = one(pair, qwen)
    assert found.chosen.ids == tuple(drifted)
    assert found.chosen.values.get("behavior") == (-1.0,) * len(drifted)
    assert found.rejected.ids == tuple(pair.rejected.token_ids or ())
    assert (found.source, found.logps_dropped) == ("pairs.parquet:7", None)


def test_numbers_per_token_when_a_column_has_them_then_its_name_in_the_loss_hides_an_equal_further_one(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = sampled(qwen)
    logps = tuple(pair.chosen.logps or ())
    further = {"behavior": [9.0] * len(logps), "entropy": [0.5] * len(logps)}
    pair = changed(pair, chosen_token_numbers=further)
    assert one(pair, qwen).chosen.values == {"behavior": logps, "entropy": (0.5,) * len(logps)}
    # A column with a number per token needs no more than its name: here one that has a single number.
    monkeypatch.setitem(TOKEN_VALUES, "score", "scores")
    problem = refusal(changed(pair, chosen_score=[1.0]), qwen)
    assert "chosen_score: expected one value per token, got 1 values" in problem


def test_stored_ids_when_they_spell_another_text_then_the_row_is_refused_though_lengths_agree(qwen: Any) -> None:
    pair = changed(sampled(qwen), chosen="It is 6.")
    reason = "chosen: token ids do not spell the text with the policy's tokenizer"
    assert refusal(pair, qwen) == f"pairs.parquet:7: {reason}"
    # Without a fingerprint there is no claim that the ids are this tokenizer's: the text is tokenized.
    found = one(changed(pair, tokenizer=None), qwen)
    assert found.chosen.ids == (*qwen("It is 6.")["input_ids"], IM_END)
    assert (found.chosen.values.get("behavior"), found.logps_dropped) == (None, reason)
    assert found.rejected.values.get("behavior") is not None


@pytest.mark.parametrize(
    "tail", [[11162, 99], [4175]], ids=["two of a fox's three tokens", "a whole letter and half of one"]
)
def test_stored_ids_when_the_server_kept_a_cut_character_back_then_they_are_taken_over(
    qwen: Any, tail: list[int]
) -> None:
    ids = [*qwen("It is")["input_ids"], *tail]
    assert qwen.decode(ids).endswith("\ufffd")
    logps = [-0.5] * len(ids)
    # Servers that write as they generate leave out what could still have become another character.
    cut = changed(
        sampled(qwen), chosen="It is", chosen_token_ids=ids, chosen_logps=logps, chosen_complete=False, tokenizer=None
    )
    found = one(cut, qwen)
    assert (found.chosen.ids, found.chosen.values.get("behavior"), found.logps_dropped) == (
        tuple(ids),
        tuple(logps),
        None,
    )
    assert one(changed(cut, chosen=qwen.decode(ids)), qwen).chosen.ids == tuple(ids)
    assert "do not spell the text" in str(one(changed(cut, chosen="It"), qwen).logps_dropped)


def test_stored_ids_when_beyond_the_vocabulary_then_the_row_is_refused(qwen: Any) -> None:
    pair = changed(sampled(qwen), rejected_token_ids=[*(sampled(qwen).rejected.token_ids or [])[:-1], 151667])
    assert refusal(pair, qwen).endswith("rejected: token id 151667 is not in the policy's vocabulary (0 to 151645)")


def test_stored_ids_when_from_another_vocabulary_then_text_is_tokenized_and_the_loss_is_counted(
    qwen: Any, mistral: Any
) -> None:
    pair = sampled(qwen)
    found = one(pair, mistral)
    assert found.chosen.ids == (*encode_response(mistral, "2+2?", "It is 4.", complete=False), 2)
    assert (found.chosen.values.get("behavior"), found.rejected.values.get("behavior")) == (None, None)
    reason = (
        f"made with another tokenizer ({pair.tokenizer}) than the policy's ({tokenizer_fingerprint(mistral)}); its "
        "rows lack logps, or token_bytes, which say where its tokens end in the text"
    )
    assert found.logps_dropped == f"chosen: {reason}; rejected: {reason}"
    assert missing_values([found]) == {found.logps_dropped: 1}


def released(qwen: Any, tokens: list[str], text: str) -> Pair:
    return changed(
        sampled(qwen),
        tokenizer=None,
        chosen=text,
        chosen_token_ids=None,
        chosen_tokens=tokens,
        chosen_logps=[-1.0] * len(tokens),
    )


def test_token_strings_when_pieces_or_vocabulary_entries_then_they_resolve_to_the_ids_they_name(qwen: Any) -> None:
    text = "It costs 5 € 🤖 <|im_end|>"
    ids = qwen(text)["input_ids"]
    pieces = qwen.batch_decode([[number] for number in ids])
    assert pieces.count("\ufffd") > 1  # bytes of one character: only the text tells which
    assert one(released(qwen, pieces, text), qwen).chosen.ids == tuple(ids)
    assert one(released(qwen, qwen.convert_ids_to_tokens(ids), text), qwen).chosen.ids == tuple(ids)
    split = ["I", "t", " is", " ", "4"]
    assert qwen.convert_ids_to_tokens(one(released(qwen, split, "It is 4"), qwen).chosen.ids) == [
        "I",
        "t",
        "Ġis",
        "Ġ",
        "4",
    ]


def test_token_strings_when_they_are_no_tokens_of_the_policy_then_their_log_probabilities_are_those_of_units(
    qwen: Any,
) -> None:
    given = changed(released(qwen, ["It", " is 4", "\u20ac"], "It is 4\u20ac"), chosen_logps=[-1.0, -2.0, -4.0])
    found = one(given, qwen)
    assert [qwen.decode([number]) for number in found.chosen.ids] == ["It", " is", " ", "4", "\u20ac"]
    assert (found.chosen.units, found.chosen.values["behavior"]) == ((0, 1, 1, 1, 2), (-1, 0, 0, -2, -4))
    assert "token 1 (' is 4') stands for no token of the policy's tokenizer" in str(found.logps_dropped)


@pytest.mark.parametrize(
    ("tokens", "text", "reason"),
    [
        (["It", " is", " ", "4"], "It is 5", "tokens spell '4' at character 6, where the text has '5'"),
        (["I", "t is 4", "<x>"], "It is 4<x", "tokens spell '>' at character 9, where the text has ''"),
        (["I", "t ", "\ufffd", "\ufffd"], "It ", "tokens spell '\ufffd\ufffd' at character 3, where the text has ''"),
    ],
)
def test_token_strings_when_they_drift_from_the_text_then_the_row_is_refused_or_tokenized(
    qwen: Any, tokens: list[str], text: str, reason: str
) -> None:
    pair = released(qwen, tokens, text)
    assert refusal(pair, qwen) == f"pairs.parquet:7: chosen: {reason}"
    found = one(pair, qwen, need_logps=False)
    assert found.chosen.ids == tuple(encode_response(qwen, "2+2?", text))
    assert (found.chosen.values.get("behavior"), found.logps_dropped) == (None, f"chosen: {reason}")


def test_lengths_when_over_a_limit_then_the_row_is_refused_with_the_limit(qwen: Any) -> None:
    pair = sampled(qwen, rejected="It is 5, I think.")
    prompt, rejected = len(qwen("2+2?")["input_ids"]), len(pair.rejected.token_ids or [])
    assert one(pair, qwen, max_length=prompt + rejected, max_prompt_length=prompt).rejected.ids is not None
    assert refusal(pair, qwen, max_length=prompt + rejected - 1).endswith(
        f"rejected: too long, with its prompt, for max_length {prompt + rejected - 1}; raise it, or set "
        "truncation=keep_start"
    )
    assert refusal(pair, qwen, max_prompt_length=prompt - 1).endswith(
        f"prompt: too long for max_prompt_length {prompt - 1}; raise it or drop the row"
    )


def test_truncation_when_asked_for_then_ids_and_log_probabilities_lose_the_end_together(qwen: Any) -> None:
    pair = sampled(qwen, rejected="That is 5, I think.")
    prompt = len(qwen("2+2?")["input_ids"])
    found = one(pair, qwen, max_length=prompt + 3, truncation="keep_start")
    assert found.chosen.ids == tuple((pair.chosen.token_ids or [])[:3])
    assert found.chosen.values.get("behavior") == tuple((pair.chosen.logps or [])[:3])
    assert found.rejected.ids == tuple((pair.rejected.token_ids or [])[:3])
    text_only = changed(pair, tokenizer=None, chosen_token_ids=None, chosen_logps=None)
    assert IM_END not in one(text_only, qwen, max_length=prompt + 3, truncation="keep_start").chosen.ids
    same_start = sampled(qwen)
    assert refusal(same_start, qwen, max_length=prompt + 2, truncation="keep_start").endswith(
        f"chosen and rejected are equal when truncated to max_length {prompt + 2}"
    )


def test_masked_pair_when_tokenized_then_only_its_chosen_side_ends(qwen: Any) -> None:
    ids, logps = sampled(qwen).chosen.token_ids or [], sampled(qwen).chosen.logps or []
    cut = {"rejected": qwen.decode(ids[:2]), "rejected_token_ids": ids[:2], "rejected_logps": logps[:2]}
    pair = changed(sampled(qwen), **cut, rejected_complete=False, kind="masked")
    found = one(pair, qwen)
    assert (found.chosen.ids, found.rejected.ids, found.rejected.values.get("behavior")) == (
        tuple(ids),
        tuple(ids[:2]),
        tuple(logps[:2]),
    )
    from_text = changed(pair, chosen_token_ids=None, rejected_token_ids=None, chosen_logps=None, rejected_logps=None)
    assert one(from_text, qwen).rejected.ids == tuple(ids[:2])
    ended = changed(pair, rejected_token_ids=[*ids[:2], IM_END], rejected_logps=[-1.0] * 3)
    assert "rejected: marked as truncated, yet its tokens end with" in refusal(ended, qwen)


def test_supervised_pair_when_tokenized_then_it_has_no_rejected_side(qwen: Any) -> None:
    found = one(pair_of(prompt="2+2?", chosen="4"), qwen)
    assert (found.chosen.ids, found.rejected) == ((19, IM_END), None)


def test_prompts_when_the_template_refuses_one_then_only_its_row_is_refused(qwen: Any) -> None:
    strict = AutoTokenizer.from_pretrained(qwen.name_or_path)
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|im_start|>{{ messages[-1].content }}"
    )
    good = pair_of(prompt=QUESTION, chosen="4", rejected="5")
    bad = changed(good, prompt=[{"role": "system", "content": "Be brief."}, *QUESTION])
    kept, refused = tokenize_pairs([good, bad], strict, max_length=None, max_prompt_length=None)
    assert len(kept) == 1
    assert [str(item) for item in refused] == [
        f"pairs:2: prompt: the chat template {qwen.name_or_path} rejects it: no system role"
    ]


@pytest.mark.parametrize(
    ("name", "tokenizer", "given_as_strings"),
    [
        ("test_flash_qwen2", "qwen", True),
        # What the model wrote here is not what tokenizing its text gives.
        ("test_compressed_tensors_w8a8_int_dynamic_weight", "qwen", True),
        # Pieces of this vocabulary do not tell a word from the same word behind a space.
        ("test_lora_mistral_without_customer_support_adapter", "mistral", False),
    ],
)
def test_published_generations_when_read_then_their_ids_and_log_probabilities_are_kept(
    name: str, tokenizer: str, given_as_strings: bool, request: pytest.FixtureRequest, shared: Path
) -> None:
    loaded = request.getfixturevalue(tokenizer)
    generation = json.loads((shared / f"data/logprobs/tgi/{name}.json").read_text())
    tokens = generation["details"]["tokens"]
    ids, logps = tuple(token["id"] for token in tokens), tuple(token["logprob"] for token in tokens)
    text = generation["generated_text"]
    pair = pair_of(prompt="Q", chosen=text, rejected="?", chosen_token_ids=list(ids), chosen_logps=list(logps))
    found = one(pair, loaded)
    assert (found.chosen.ids, found.chosen.values.get("behavior")) == (ids, logps)
    strings = changed(pair, chosen_token_ids=None, chosen_tokens=[token["text"] for token in tokens])
    if given_as_strings:
        assert one(strings, loaded).chosen.ids == ids
    else:
        in_units = one(strings, loaded)
        assert "stands for several tokens of the policy's tokenizer" in str(in_units.logps_dropped)
        assert sum(in_units.chosen.values["behavior"]) == pytest.approx(sum(logps), abs=1e-9)


def test_template_arguments_when_a_pair_has_them_then_its_prompt_is_written_with_them(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")
    tokenizer.chat_template = (
        "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: "
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    plain = pair_of(
        prompt=QUESTION,
        chosen=[{"role": "assistant", "content": "4"}],
        rejected=[{"role": "assistant", "content": "5"}],
        origin="pairs.jsonl:3",
    )

    def given(**arguments: Any) -> Pair:
        return changed(plain, chat_template_kwargs=json.dumps(arguments))

    tools = [{"type": "function", "function": {"name": "add", "description": "sums"}}]
    pairs = [plain, given(tools=tools), given(enable_thinking=False), given(tools=tools, enable_thinking=False)]
    kept, refused = tokenize_pairs(pairs, tokenizer, max_length=None, max_prompt_length=None)
    assert not refused
    for pair, arguments in zip(kept, ({}, {"tools": tools}, {"enable_thinking": False}, None), strict=True):
        arguments = arguments if arguments is not None else {"tools": tools, "enable_thinking": False}
        wanted = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **arguments)
        assert tokenizer.decode(pair.prompt_ids) == wanted
    assert len({pair.prompt_ids for pair in kept}) == 4

    for pair, reason in (
        (given(enable_thinkin=False), "enable_thinkin: the chat template does not use it"),
        (given(tokenize=True), "tokenize: the chat template does not use it"),
        (changed(given(tools=tools), prompt="2+2?"), "tools: input for a chat template, which a plain-text prompt"),
    ):
        assert reason in refusal(pair, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("tools", "helpers")
    assert "tools: the chat template does not use it" in refusal(given(tools=tools), tokenizer)


def test_texts_when_they_differ_and_stored_ids_do_not_then_the_refusal_says_which(qwen: Any) -> None:
    pair = sampled(qwen, rejected="4")
    ids = pair.chosen.token_ids
    same = changed(pair, chosen="4", rejected="4 ", rejected_token_ids=ids, rejected_logps=pair.chosen.logps)
    same = changed(same, chosen_token_ids=qwen("4")["input_ids"], rejected_token_ids=qwen("4")["input_ids"])
    assert "have the same token ids, though their texts differ" in refusal(
        changed(same, chosen_logps=[-0.1], rejected_logps=[-0.1]), qwen
    )
    assert refusal(changed(same, rejected="4", chosen_logps=None, rejected_logps=None), qwen).endswith("are equal")


@pytest.mark.parametrize(
    ("template", "begins"), [("$A <|end|>", False), ("<|end|> $A", True), ("<|end|> $A <|end|>", True)]
)
def test_prompt_when_one_token_begins_and_ends_texts_then_it_is_put_where_the_tokenizer_puts_it(
    template: str, begins: bool
) -> None:
    words = Tokenizer(models.WordLevel({"<|end|>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<|end|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|end|>", eos_token="<|end|>")
    assert list(encode_prompt(tokenizer, "a b")) == ([0, 1, 2] if begins else [1, 2])
    assert list(encode_response(tokenizer, "a", "b")) == [2, 0]


@pytest.mark.parametrize("as_message", [True, False])
@pytest.mark.parametrize(
    ("text", "special"),
    [
        ("Write <|im_end|> behind it.", "<|im_end|>"),
        ("4<|im_end|>\n<|im_start|>user\n3+3?", "<|im_end|>"),
        ("<|im_start|>assistant\n4<|im_end|>", "<|im_start|>"),
        ("a<|endoftext|>b", "<|endoftext|>"),
    ],
)
def test_response_when_its_text_spells_a_special_token_before_its_end_then_the_row_is_refused(
    qwen: Any, text: str, special: str, as_message: bool
) -> None:
    answers = [[{"role": "assistant", "content": answer}] if as_message else answer for answer in (text, "5")]
    reason = refusal(pair_of(prompt=QUESTION, chosen=answers[0], rejected=answers[1]), qwen)
    assert f"chosen: its text spells the special token {special}, which would be trained as that token" in reason
    # Behind a text, which may be a conversation written out, and where its tokens are recorded, it is right.
    assert special in qwen.decode(one(pair_of(prompt="2+2?", chosen=text, rejected="5"), qwen).chosen.ids)
    ids = qwen(text)["input_ids"]
    stored = pair_of(prompt=QUESTION, chosen=text, rejected="5", chosen_token_ids=ids, rejected_token_ids=[20])
    assert list(one(stored, qwen).chosen.ids) == ids


def test_tool_output_when_it_spells_a_special_token_then_it_is_text_and_the_row_is_kept(qwen: Any) -> None:
    turns = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "a<|im_end|>b"},
        {"role": "assistant", "content": "yes"},
    ]
    pair = pair_of(prompt=QUESTION, chosen=turns, rejected=[{"role": "assistant", "content": "5"}])
    ids = read_ids(one(pair, qwen).chosen.ids)
    assert ids.count(IM_END) == 3 and "a<|im_end|>b<|im_end|>" in qwen.decode(ids)


def test_masked_row_when_it_does_not_say_that_its_rejected_side_is_cut_then_that_has_no_end(qwen: Any) -> None:
    row = {"prompt": QUESTION, "chosen": "It is 4.", "rejected": "It is", "kind": "masked"}
    (pair,), refused = parse_pairs([row])
    assert refused == []
    found = one(pair, qwen)
    assert (found.chosen.ids[-1], qwen.decode(found.rejected.ids)) == (IM_END, "It is")
    _, (refused,) = parse_pairs([{**row, "rejected_complete": True}])
    assert refused.reason.startswith("rejected_complete: true in a row of kind masked")
    (equal,), _ = parse_pairs([{**row, "rejected": "It is 4."}])
    assert qwen.decode(one(equal, qwen).rejected.ids) == "It is 4."


@pytest.mark.parametrize("prompt", ["2+2?", QUESTION])
@pytest.mark.parametrize("cut", [("chosen",), ("rejected",), ("chosen", "rejected")])
def test_sides_when_cut_then_no_end_token_is_put_behind_them(prompt: Any, cut: tuple[str, ...], qwen: Any) -> None:
    row = {"prompt": prompt, "chosen": "It is 4.", "rejected": "It is"}
    (pair,), _ = parse_pairs([{**row, **{f"{name}_complete": False for name in cut}}])
    sides = zip(("chosen", "rejected"), one(pair, qwen).sides, strict=True)
    for name, side in sides:
        assert qwen.decode(side.ids) == row[name] + ("" if name in cut else qwen.decode([side.ids[-1]]))
        assert (len(side.ids) - len(qwen(row[name])["input_ids"])) == (name not in cut)


def test_side_when_tokens_are_stored_behind_its_cut_then_they_are_left_out_or_marked_as_future(qwen: Any) -> None:
    whole = sampled(qwen)
    ids, logps = whole.chosen.token_ids or [], whole.chosen.logps or []
    pair = changed(whole, chosen=qwen.decode(ids[:2]), chosen_cut_at=2, chosen_complete=False)
    cut, kept = one(pair, qwen).chosen, one(pair, qwen, keep={"future"})
    assert (cut.ids, cut.values) == (tuple(ids[:2]), {"behavior": tuple(logps[:2])})
    future = (0.0, 0.0, *[1.0] * (len(ids) - 2))
    assert (kept.chosen.ids, kept.chosen.values) == (tuple(ids), {"behavior": tuple(logps), "future": future})
    assert kept.rejected.values["future"] == (0.0,) * len(kept.rejected.ids)
    assert kept.without_future() == one(pair, qwen)
    # Both sides may be the same tokens, cut at different places.
    masked = changed(pair, rejected=whole.chosen.text, rejected_token_ids=ids, rejected_logps=logps)
    assert one(masked, qwen, keep={"future"}).rejected.ids == kept.chosen.ids
    assert "equal" in refusal(changed(masked, rejected=pair.chosen.text, rejected_cut_at=2), qwen, keep={"future"})
    # The text is that of the tokens up to the cut, which has no end token.
    assert "do not spell the text" in refusal(changed(pair, chosen_cut_at=4), qwen)
    ended = changed(pair, chosen=whole.chosen.text, chosen_token_ids=[*ids, 19], chosen_logps=[*logps, -1.0])
    assert "marked as truncated, yet" in refusal(changed(ended, chosen_cut_at=len(ids)), qwen)


def test_prefix_when_both_sides_share_it_then_it_is_context(qwen: Any) -> None:
    pair = changed(sampled(qwen), prefix_tokens=2)
    ids, logps = pair.chosen.token_ids or [], pair.chosen.logps or []
    found = one(pair, qwen).chosen
    assert (read_ids(found.ids), found.own, found.values["behavior"]) == (tuple(ids), tuple(ids[2:]), tuple(logps[2:]))
    stored = changed(pair, chosen=qwen.decode(ids[:3]), chosen_cut_at=3, chosen_complete=False)
    assert one(stored, qwen).chosen.own == (ids[2],)
    assert one(stored, qwen, keep={"future"}).chosen.values["future"] == (0.0, *[1.0] * (len(ids) - 3))
    other = changed(pair, tokenizer="another")
    assert "prefix_tokens: they count tokens that are not used" in refusal(other, qwen, need_logps=False)


def test_recorded_prompt_when_the_template_writes_another_today_then_the_pair_says_so(qwen: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen.name_or_path)
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + qwen.chat_template
    prompt = encode_prompt(tokenizer, QUESTION)
    pair = changed(sampled(qwen), prompt=QUESTION, prompt_token_ids=prompt)
    assert not one(pair, tokenizer).other_prompt
    yesterday = changed(pair, prompt_token_ids=[*prompt[:9], prompt[9] + 1, *prompt[10:]])
    assert one(yesterday, tokenizer).other_prompt
    assert not one(changed(yesterday, tokenizer="another"), tokenizer, need_logps=False).other_prompt
