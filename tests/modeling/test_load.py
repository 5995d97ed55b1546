from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regretless.core.errors import ConfigError
from regretless.modeling.load import (
    ModelConfig,
    _say_slow,
    eos_token_ids,
    in_one_dtype,
    load_model,
    load_tokenizer,
    tokenizer_fingerprint,
    weights_of,
)
from regretless.world.tiny_models import shrink, smoke_architecture

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    words = ["<s>", "</s>", "<unk>", "one", "two", "three"]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(architecture={**smoke_architecture("qwen3", 16), **changes})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "gemma2", "mistral"])
def test_architecture_when_built_twice_has_the_same_weights(model_type: str) -> None:
    config = ModelConfig(architecture=smoke_architecture(model_type, 16))
    state = torch.get_rng_state()
    first, second = load_model(config), load_model(config)
    assert first.config.model_type == model_type
    assert not first.training
    assert torch.equal(logits(first), logits(second))
    assert torch.equal(state, torch.get_rng_state()), "building a model must not move the caller's random state"
    other = load_model(config.model_copy(update={"init_seed": 1}))
    assert not torch.equal(logits(first), logits(other))


def test_architecture_when_initializer_range_is_given_scales_the_weights() -> None:
    wide = load_model(tiny(initializer_range=0.5)).model.layers[0].mlp.up_proj.weight.std().item()
    assert wide == pytest.approx(0.5, rel=0.1)


def test_architecture_when_a_key_is_misspelt_is_refused_with_the_right_name() -> None:
    with pytest.raises(ConfigError, match="unknown key hiden_size; did you mean hidden_size"):
        load_model(tiny(hiden_size=8))
    with pytest.raises(ConfigError, match="knows no 'qwen33'; did you mean qwen3"):
        load_model(ModelConfig(architecture={"model_type": "qwen33"}))


def test_architecture_when_a_tokenizer_is_given_takes_its_size_and_special_tokens(word_tokenizer: Path) -> None:
    sizes = {key: value for key, value in smoke_architecture("llama", 0).items() if key != "vocab_size"}
    model = load_model(ModelConfig(architecture=sizes, tokenizer=str(word_tokenizer)))
    assert model.get_input_embeddings().weight.shape[0] == 6
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, None)
    with pytest.raises(ConfigError, match="vocab_size: expected at least 6"):
        load_model(ModelConfig(architecture={**sizes, "vocab_size": 5}, tokenizer=str(word_tokenizer)))


def test_config_when_origin_is_ambiguous_is_refused() -> None:
    for values in ({}, {"name_or_path": "a", "architecture": {"model_type": "qwen3"}}, {"architecture": {}}):
        with pytest.raises(ConfigError, match=r"name_or_path or architecture|model_type is missing"):
            ModelConfig.parse(values, "model")


def test_model_when_saved_loads_with_its_own_or_the_asked_dtype(tmp_path: Path) -> None:
    model = load_model(tiny())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    assert load_model(ModelConfig(name_or_path=folder)).dtype == torch.bfloat16
    again = load_model(ModelConfig(name_or_path=folder, dtype="float32"), for_training=True)
    assert again.dtype == torch.float32
    assert again.training
    weights = zip(again.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other.float()) for one, other in weights)


@pytest.mark.parametrize(
    ("has_instructions", "dtype", "notes"), [(False, "bfloat16", 1), (False, "float32", 0), (True, "bfloat16", 0)]
)
def test_half_precision_when_the_cpu_has_no_instructions_for_it_is_said_once(
    has_instructions: bool, dtype: Any, notes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    _say_slow.cache_clear()
    for _ in range(2):
        load_model(ModelConfig(architecture=smoke_architecture("llama", 16), dtype=dtype))
    assert capsys.readouterr().err.count("no instructions for bfloat16") == notes


def test_models_when_stored_in_different_types_are_compared_in_float32_unless_told_otherwise(tmp_path: Path) -> None:
    model = load_model(tiny())
    for dtype in ("float32", "bfloat16"):
        model.to(getattr(torch, dtype)).save_pretrained(tmp_path / dtype)
    get_peft_model(model, LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    single, half = (ModelConfig(name_or_path=str(tmp_path / name)) for name in ("float32", "bfloat16"))
    on_half = half.model_copy(update={"adapter": str(tmp_path / "adapter")})
    asked = ModelConfig(name_or_path=str(tmp_path / "float32"), dtype="bfloat16")
    assert in_one_dtype([half, on_half, asked]) == [half, on_half, asked]
    assert [config.dtype for config in in_one_dtype([half, single, asked])] == ["float32", "float32", "bfloat16"]
    assert [config.dtype for config in in_one_dtype([half, tiny()])] == ["float32", "float32"]


def test_model_when_weights_are_missing_is_refused(tmp_path: Path) -> None:
    model = load_model(tiny())
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"1 weight\(s\) of Qwen3ForCausalLM are missing.*layers.1.mlp.up_proj"):
        load_model(ModelConfig(name_or_path=str(tmp_path)))


def test_adapter_when_named_alone_or_beside_its_base_gives_the_same_model(tmp_path: Path) -> None:
    base = load_model(tiny())
    base.save_pretrained(tmp_path / "base")
    plain = logits(base)
    trained = get_peft_model(load_model(ModelConfig(name_or_path=str(tmp_path / "base"))), LoraConfig(r=2))
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    trained.save_pretrained(tmp_path / "adapter")

    alone = load_model(ModelConfig(name_or_path=str(tmp_path / "adapter")))
    beside = load_model(
        ModelConfig(name_or_path=str(tmp_path / "base"), adapter=str(tmp_path / "adapter")), for_training=True
    )
    assert isinstance(alone, PeftModel)
    assert torch.equal(logits(alone), logits(trained.eval()))
    assert torch.equal(logits(beside.eval()), logits(alone))
    assert not torch.allclose(logits(alone), plain)
    assert not any(weight.requires_grad for weight in alone.parameters())
    assert sum(weight.requires_grad for weight in beside.parameters()) == 8

    with pytest.raises(ConfigError, match="itself an adapter"):
        load_model(ModelConfig(name_or_path=str(tmp_path / "adapter"), adapter="other"))
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(ConfigError, match="base: no such folder"):
        load_model(ModelConfig(name_or_path=str(tmp_path / "adapter")))


def test_adapter_when_made_for_another_model_is_refused(tmp_path: Path) -> None:
    get_peft_model(load_model(tiny(num_hidden_layers=1)), LoraConfig(r=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter .*missing adapter keys"):
        load_model(tiny().model_copy(update={"adapter": str(tmp_path)}))


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}], ids=["kept", "trained"])
def test_adapter_when_trained_with_added_tokens_resizes_its_base(settings: dict[str, Any], tmp_path: Path) -> None:
    load_model(tiny()).save_pretrained(tmp_path / "base")
    base: Any = load_model(ModelConfig(name_or_path=str(tmp_path / "base")))
    base.resize_token_embeddings(18)
    trained = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **settings))
    trained.save_pretrained(tmp_path / "adapter")
    found: list[Any] = [load_model(ModelConfig(name_or_path=str(tmp_path / "adapter"))) for _ in range(2)]
    ids = torch.tensor([[1, 16, 17, 2, 17]])
    with torch.no_grad():
        assert torch.equal(found[0](ids).logits, trained.eval()(ids).logits)
        with found[0].disable_adapter(), found[1].disable_adapter():
            assert torch.equal(found[0](ids).logits, found[1](ids).logits)


def test_adapter_when_a_shape_differs_says_which(tmp_path: Path) -> None:
    get_peft_model(load_model(tiny(hidden_size=64)), LoraConfig(r=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter .*Error\(s\) in loading.*: size mismatch for .*lora_A"):
        load_model(tiny().model_copy(update={"adapter": str(tmp_path)}))


def test_model_when_there_is_none_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model .*/nothing: no such folder"):
        load_model(ModelConfig(name_or_path=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"tokenizer no-such/model: cannot be loaded(.|\n)*hub id"):
        load_tokenizer(ModelConfig(name_or_path="no-such/model"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer: required"):
        load_tokenizer(tiny())


def test_tokenizer_when_it_has_no_pad_token_pads_with_one_it_knows(word_tokenizer: Path, shared: Path) -> None:
    for folder, size, pad in ((word_tokenizer, 6, "<unk>"), (shared / "data/tokenizers/mistral-v1", 32000, "<unk>")):
        tokenizer = load_tokenizer(ModelConfig(name_or_path=str(folder)))
        assert (tokenizer.pad_token, len(tokenizer)) == (pad, size)


def test_fingerprint_when_only_added_tokens_differ_is_equal(shared: Path, tmp_path: Path, word_tokenizer: Path) -> None:
    folder = shared / "data/tokenizers/qwen2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == before

    changed = json.loads((word_tokenizer / "tokenizer.json").read_text())
    original = tokenizer_fingerprint(AutoTokenizer.from_pretrained(word_tokenizer))
    vocab = changed["model"]["vocab"]
    vocab["one"], vocab["two"] = vocab["two"], vocab["one"]
    (word_tokenizer / "tokenizer.json").write_text(json.dumps(changed))
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(word_tokenizer)) != original


def test_eos_token_ids_when_model_template_and_tokenizer_differ_are_all_found(shared: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(shared / "data/tokenizers/qwen2")))
    tokenizer.eos_token = "<|endoftext|>"
    model = load_model(tiny())
    model.generation_config.eos_token_id = [7, 8]
    model.config.eos_token_id = 9
    assert eos_token_ids(tokenizer) == {151643, 151645}, "its template ends turns with <|im_end|>"
    assert eos_token_ids(model, tokenizer) == {7, 8, 9, 151643, 151645}


def test_chat_template_when_preset_or_file_is_named_is_used(shared: Path, tmp_path: Path) -> None:
    folder = str(shared / "data/tokenizers/qwen2")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    chatml = load_tokenizer(ModelConfig(name_or_path=folder, chat_template="chatml"))
    assert chatml.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml.eos_token == "<|im_end|>"

    (tmp_path / "mine.jinja").write_text("{{ messages[-1]['content'] }}=")
    mine = load_tokenizer(ModelConfig(name_or_path=folder, chat_template=str(tmp_path / "mine.jinja")))
    assert mine.apply_chat_template(messages, tokenize=False) == "Q="

    with pytest.raises(ConfigError, match=r"llama3 needs the tokens <.start_header_id.>"):
        load_tokenizer(ModelConfig(name_or_path=folder, chat_template="llama3"))
    with pytest.raises(ConfigError, match="expected one of chatml, llama3, gemma, or the path"):
        load_tokenizer(ModelConfig(name_or_path=folder, chat_template="nope"))


@pytest.mark.parametrize(
    ("preset", "tokens", "expected"),
    [
        (
            "llama3",
            ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            ["<start_of_turn>", "<end_of_turn>"],
            "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_chat_template_presets_give_the_families_formats(
    preset: str, tokens: list[str], expected: str, word_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name_or_path=str(tmp_path), chat_template=preset))
    messages = [{"role": "system", "content": " S"}, {"role": "user", "content": "Q "}]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert loaded.eos_token == tokens[-1]


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Qwen/Qwen3-1.7B-Base", "qwen3"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
        ("meta-llama/Llama-3.2-1B", "llama"),
        ("google/gemma-2-2b", "gemma2"),
    ],
)
def test_shrink_when_given_a_hub_id_builds_the_same_class_offline(
    name: str, model_type: str, word_tokenizer: Path
) -> None:
    small = shrink(ModelConfig(name_or_path=name, adapter="x"), tokenizer=str(word_tokenizer))
    model = load_model(small)
    assert (model.config.model_type, model.config.vocab_size, model.config.num_hidden_layers) == (model_type, 6, 2)


class Foreign:
    """Unpickled, it would call a function."""

    def __reduce__(self) -> Any:
        return print, ("code of others ran",)


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_bin(file: Path, tensors: Any = None) -> Path:
    target = file.with_name({"model": "pytorch_model.bin"}.get(file.stem, f"{file.stem}.bin"))
    torch.save(load_file(file) if tensors is None else tensors, target)
    file.unlink()
    return target


def with_kernel(file: Path) -> None:
    config = file.with_name("config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "attn_implementation": "owner/kernel"}))


CUT, CODE_INSIDE = "cannot be read, perhaps because it was cut", "holds something other than tensors"
BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "cut": (halved, ".safetensors", CUT),
    "empty": (lambda file: file.write_bytes(b""), ".safetensors", CUT),
    "pointer": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), ".safetensors", CUT),
    "cut .bin": (lambda file: halved(as_bin(file)), ".bin", CUT),
    "empty .bin": (lambda file: as_bin(file).write_bytes(b""), ".bin", CUT),
    "pickled": (lambda file: as_bin(file, {"a": Foreign()}), ".bin", CODE_INSIDE),
    "plain pickle": (lambda file: as_bin(file).write_bytes(pickle.dumps(Foreign())), ".bin", CODE_INSIDE),
}


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("fault", BROKEN)
def test_weights_that_cannot_be_read_when_loaded_then_one_line_names_the_file(
    word_tokenizer: Path, tmp_path: Path, kind: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(tiny())
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    if kind == "adapter":
        model.name_or_path = str(tmp_path / "model")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        adapted.save_pretrained(tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_model.safetensors"
    spoil, suffix, said = BROKEN[fault]
    spoil(file)
    with pytest.raises(ConfigError) as error:
        load_model(ModelConfig(name_or_path=str(file.parent)))
    (line,) = str(error.value).splitlines()
    (broken,) = file.parent.glob(f"*{suffix}")
    assert line.startswith(f"{kind} {broken}: {said}")
    assert "code of others ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (with_kernel, r"its config\.json names a kernel on the hub, .*\(attn_implementation: 'owner/kernel'\)"),
        (lambda file: file.with_name("config.json").write_text("[]"), r"config\.json: expected a JSON object"),
        (lambda file: file.with_name("config.json").write_text("{"), rf"config\.json: {CUT}"),
    ],
)
def test_configuration_that_cannot_be_used_when_loaded_then_one_line_names_it(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    load_model(tiny()).save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=said) as error:
        load_model(ModelConfig(name_or_path=str(tmp_path / "model")))
    assert len(str(error.value).splitlines()) == 1


def test_origin_when_settings_name_an_adapter_then_its_path_is_plain_text(model: Path) -> None:
    # vLLM hands the path to its engine with a serializer that refuses subclasses of str.
    origin = weights_of(ModelConfig(name_or_path=str(model), adapter="~/a"))
    assert (type(origin.base), type(origin.adapter)) == (str, str)
