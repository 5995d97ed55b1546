"""Smoke runs: any recipe from end to end in seconds and offline, with the real architecture class at a tiny size.

Data and tokenizer are those of the embedded world, with its easiest problems. Behavior models are trained on them for
a hundred steps, enough to get some right and most wrong, so that every later stage has real work to do. Where a recipe
asks a judge, `local_judge` answers. The numbers mean nothing.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from regretless.labeling.pair import pairs_verdicts
from regretless.modeling.load import ModelConfig
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.workflow.run_folder import RUN
from regretless.world import local_judge
from regretless.world.chat_files import write_chat_benchmarks
from regretless.world.problems import Generator
from regretless.world.tiny_models import shrink
from regretless.world.tokenizer import build_tokenizer

TOKENIZER = f"{RUN}/world/tokenizer"
BEHAVIOR = "behavior"
"""Name prefix of the behavior models that are trained when the recipe trains none itself: one for each architecture
class."""
STEPS, BATCH = 100, 16
STEPS_OF_A_PROBLEM, LARGEST_AMOUNT = (1, 1), 1
WORLD = {
    "prompts": 32,
    "test": 8,
    "validation": 0,
    "longer_test": 0,
    "steps": STEPS_OF_A_PROBLEM,
    "prompt_steps": None,
    "longer_steps": None,
    "largest_amount": LARGEST_AMOUNT,
}
POLICY = {"demonstrations": STEPS * BATCH, "off_by_one": 0.3}
SAMPLE = {"n": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
LENGTH = {"max_new_tokens": 16, "batch_size": 256}
OFFLINE = {"push_to_hub": False, "report_to": "none", "log_completions_steps": None}
"""Nothing of a smoke run leaves the machine: no model goes to the hub, no log to a tracker."""
PLAIN = {
    "bf16": False,
    "fp16": False,
    "fsdp": None,
    "use_liger_kernel": False,
    "compile_layers": False,
    "num_train_epochs": 1,
}
"""Training arguments that need special hardware, or time, or that are meaningless for a few steps."""
HERE = {"processes": 1, "sequence_parallel_size": 1, "strategy": "ddp", "gradient_accumulation_steps": 1}
"""These models are too small to be trained faster by several processes."""
PRETRAIN = {
    **PLAIN,
    **OFFLINE,
    **HERE,
    "max_steps": STEPS,
    "pairs_per_step": BATCH,
    "learning_rate": 0.01,
    "warmup_steps": 5,
}
TRAIN = {**PLAIN, **OFFLINE, **HERE, "max_steps": 2, "pairs_per_step": 4, "warmup_steps": 0, "logging_steps": 1}
LEFT_OUT = ("per_device_train_batch_size", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
"""Training arguments that `pairs_per_step` replaces, or that may need a GPU."""
EVAL_PAIRS = 8
"""Pairs from more than one prompt: KTO needs answers to another prompt."""
SERVER = {"api_key_env": local_judge.KEY_VARIABLE, "concurrency": 8}
"""Server without an address: `local_judge` sets it in the environment."""
JUDGE = {"server": SERVER, "replies": None, "when_spent": "stop"}
CHAT_FILES = "chat-benchmarks"
"""Folder of the chat benchmarks' files in the run folder."""
CHAT_QUESTIONS = 8
"""One question for each category of MT-Bench."""
CHAT: dict[str, dict[str, Any]] = {
    "alpaca_eval": {"baseline": None, "gamed_baselines": f"{RUN}/{CHAT_FILES}/gamed_baselines.csv"},
    "arena_hard": {"baseline": f"{RUN}/{CHAT_FILES}/arena_hard_baseline.jsonl"},
    "mt_bench": {"references": f"{RUN}/{CHAT_FILES}/mt_bench_references.jsonl"},
}
"""Files of the chat benchmarks besides their questions."""
NOTE = "smoke run: tiny models, toy data; its numbers mean nothing"


def smoke_recipe(recipe: Recipe) -> Recipe:
    """The recipe with tiny models, the embedded world's easiest problems, few steps; stages and methods are the same.

    Existing pairs or responses are replaced by sampled ones. The run folder's name gets the suffix -smoke. The recipe
    runs inside `surroundings`.
    Raises ConfigError for a model whose family cannot be derived from its name.
    """
    values = recipe.model_dump(exclude_unset=True, exclude={"prompts", "responses", "pairs"})
    # Work of a second gains nothing from processes that take seconds to start.
    values |= {"output_dir": f"{recipe.run_dir}-smoke", "threads": 1, "parallel": 1}
    data = recipe.sample is not None or recipe.responses is not None or recipe.pairs is not None
    if recipe.model is not None:
        values["model"] = _model(recipe.model)
    if data:
        behavior = _behavior(recipe)
        values["sample"] = _sample(values.get("sample"), behavior, is_judged=recipe.judge is not None)
        if recipe.judge is None:
            values["verify"] = values.get("verify") or {}
            # The responses will have verdicts and no scores.
            if recipe.pairs is not None or (recipe.pair is not None and not pairs_verdicts(recipe.pair.rule)):
                values["pair"] = {}
        if not recipe.pretrain:
            values["pretrain"] = {_trained_name(model): _pretrained(model) for model in behavior}
    values["pretrain"] = {name: _pretrain(entry) for name, entry in values.get("pretrain", {}).items()}
    values["world"] = {
        **(values.get("world") or {}),
        **WORLD,
        "policies": dict.fromkeys(_policies(recipe), POLICY),
    }
    for name, change in CHANGES.items():
        if values.get(name) is not None:
            values[name] = change(values[name])
    return parse_recipe(values, f"smoke run of {recipe.name}")


@contextlib.contextmanager
def surroundings(recipe: Recipe) -> Iterator[local_judge.LocalJudge | None]:
    """Provide, within the block, what a smoke recipe needs from outside: the chat benchmarks' files and a judge."""
    has_chat = recipe.evaluate is not None and bool(recipe.evaluate.chat)
    if has_chat:
        rng = random.Random(recipe.seed)
        problems = Generator(STEPS_OF_A_PROBLEM, LARGEST_AMOUNT)
        sampled = [problems.draw(rng) for _ in range(4 * CHAT_QUESTIONS)]
        write_chat_benchmarks(recipe.run_dir / CHAT_FILES, sampled, rng)
    if recipe.judge is None and not has_chat:
        yield None
        return
    with local_judge.serving() as judge:
        yield judge


def _policies(recipe: Recipe) -> list[str]:
    return list(recipe.world.policies) if recipe.world is not None else [BEHAVIOR]


def _behavior(recipe: Recipe) -> list[ModelConfig]:
    """The models that write responses: the recipe's; if it starts from data, one like the policy."""
    if recipe.sample is not None:
        return recipe.sample.models
    assert recipe.model is not None  # no stage of a recipe can use data without a model
    return [recipe.model]


def _made_here(model: ModelConfig) -> bool:
    return model.name_or_path is not None and model.name_or_path.startswith(RUN)


def _model(model: ModelConfig) -> dict[str, Any]:
    """A model of the recipe's own world unchanged; any other as its architecture with random weights."""
    return model.model_dump(exclude_unset=True) if _made_here(model) else _tiny(model)


def _tiny(model: ModelConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        architecture = shrink(model, tokenizer=folder).architecture
    return {"architecture": architecture, "tokenizer": TOKENIZER}


def _pretrained(model: ModelConfig) -> dict[str, Any]:
    return {"model": _tiny(model), "data": f"{RUN}/world/demonstrations-{BEHAVIOR}.jsonl", "lora": None}


def _pretrain(entry: Mapping[str, Any]) -> dict[str, Any]:
    model = ModelConfig(**entry["model"])
    return {**_kept(entry), **PRETRAIN, "model": _tiny(model), "methods": {}}


def _trained_name(model: ModelConfig) -> str:
    return f"{BEHAVIOR}-{_tiny(model)['architecture']['model_type']}"


def _sample(section: Mapping[str, Any] | None, models: list[ModelConfig], *, is_judged: bool) -> dict[str, Any]:
    values = section or {}
    here = [model.model_dump(exclude_unset=True) for model in models if _made_here(model)]
    prompts = {"dataset": f"{RUN}/world/prompts.jsonl", "answer_column": "answer"}
    template = values.get("prompts", {}).get("template")
    return {
        **values,
        **SAMPLE,
        **LENGTH,
        **({"n": values["n"]} if is_judged and "n" in values else {}),
        **({"engine": "transformers", "server": None} if "engine" in values else {}),
        "prompts": {**prompts, "template": template} if is_judged else prompts,
        # Name the tokenizer: for some families transformers does not load the one in the model's folder.
        "models": here
        or [{"name_or_path": f"{RUN}/pretrain/{_trained_name(model)}", "tokenizer": TOKENIZER} for model in models],
        "max_prompt_tokens": None,
    }


def _pair(section: Mapping[str, Any]) -> dict[str, Any]:
    rescore = section.get("rescore", {})
    return {**section, "rescore": {name: _model(ModelConfig(**model)) for name, model in rescore.items()}}


def _judge(section: Mapping[str, Any]) -> dict[str, Any]:
    return {**section, **JUDGE}


def _mask(section: Mapping[str, Any]) -> dict[str, Any]:
    return {**section, "lengths": (2, 3), "count": "all", "per_response": min(section.get("per_response", 1), 2)} | {
        "tokenizer": TOKENIZER
    }


def _inspect(section: Mapping[str, Any]) -> dict[str, Any]:
    return {**section, "behavior": None, "rescore": False}


def _train(section: Mapping[str, Any]) -> dict[str, Any]:
    methods = {
        name: {key: value for key, value in _kept(entry).items() if key not in TRAIN}
        for name, entry in section.get("methods", {}).items()
    }
    held_out = min(section.get("eval_pairs", 0), EVAL_PAIRS)
    return {**_kept(section), **TRAIN, "methods": methods, "eval_pairs": held_out}


def _kept(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in LEFT_OUT}


def _evaluate(section: Mapping[str, Any]) -> dict[str, Any]:
    test = {"dataset": f"{RUN}/world/test.jsonl", "answer_column": "answer"}
    labels = list(section.get("benchmarks", {}))[:2] or ([] if section.get("chat") else ["arithmetic"])
    benchmarks = dict.fromkeys(labels, test)
    chat = {label: _chat(entry) for label, entry in section.get("chat", {}).items()}
    shrunk = {"benchmarks": benchmarks, "chat": chat, "server": None, "seeds": section.get("seeds", [])[:2]}
    # Other models and other programs are not part of a run in miniature.
    return {**section, **LENGTH, **shrunk, "policies": {}, "harness": []}


def _chat(entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = entry["benchmark"]
    shrunk = {"limit": None, "judge_prompt": None, "max_new_tokens": LENGTH["max_new_tokens"], "bootstrap": 100}
    return {**entry, **JUDGE, **shrunk, "questions": f"{RUN}/{CHAT_FILES}/{kind}.jsonl", **CHAT[kind]}


def _report(section: Mapping[str, Any]) -> dict[str, Any]:
    return {**section, "title": NOTE}


CHANGES = {
    "judge": _judge,
    "pair": _pair,
    "mask": _mask,
    "inspect": _inspect,
    "train": _train,
    "evaluate": _evaluate,
    "report": _report,
}
