"""Arguments of `PreferenceTrainer` besides its data: checked before anything is loaded, none is silently ignored."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Mapping
from typing import Any

from accelerate import ParallelismConfig
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.utils import find_adapter_config_file

from regretless.core.errors import ConfigError, reject
from regretless.core.hub import one_attempt
from regretless.core.paths import page
from regretless.core.terminal import print_note
from regretless.modeling.compiled_layers import compile_layers, leave_uncompiled
from regretless.modeling.forward import causal_model
from regretless.modeling.quantization import keep_weights_as_loaded
from regretless.modeling.router_loss import has_router_loss
from regretless.objectives import Objective
from regretless.training.adapter import BaseWeights, add_adapter, check_trainable, sort_sets
from regretless.training.arguments import ARGUMENTS, PreferenceConfig, deepspeed_problems
from regretless.training.precision import fit_trained_weights, match_reference

LOGITS = "evaluation keeps no logits; the rewards of each pair are in evaluation_loop(…).predictions, and a callback's "
INSTEAD = {
    "data_collator": "the trainer lays out pairs in shared rows itself; omit it",
    "compute_loss_func": "the loss is the objective's; to add one, see CONTRIBUTING.md under 'Adding an objective'",
    "compute_metrics": LOGITS + "on_evaluate sees all metrics",
    "preprocess_logits_for_metrics": LOGITS + "on_evaluate sees all metrics",
    "model_init": "pass the model or its name; a search over settings creates a trainer for each trial",
    "tokenizer": "it is called processing_class",
    "model_init_kwargs": "it belongs to PreferenceConfig",
    "tools": "put them into the column `tools` of the rows",
    "chat_template_kwargs": "put them into the column `chat_template_kwargs` of the rows",
    "formatting_func": "rows have the columns prompt, chosen and rejected; convert them first",
}
"""Unsupported arguments of transformers' Trainer, and of other preference trainers, and what to use instead."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for unsupported or unknown arguments; one that is None counts as not set."""
    names = [name for name in inspect.signature(Trainer.__init__).parameters if name not in {"self", *INSTEAD}]
    problems = []
    for name, value in arguments.items():
        if name in INSTEAD and value is not None:
            problems.append(f"{name}: not used here: {INSTEAD[name]}")
        elif name not in INSTEAD and name not in names:
            close = difflib.get_close_matches(name, [*names, "ref_model", "peft_config", "quantization_config"], 1)
            if name in {field.name for field in dataclasses.fields(PreferenceConfig)} or name in ARGUMENTS:
                problems.append(f"{name}: it belongs to PreferenceConfig")
            else:
                problems.append(f"{name}: unknown argument" + (f"; did you mean {close[0]}?" if close else ""))
    reject("PreferenceTrainer", problems)


def check_kinds(model: Any, ref_model: Any, args: Any, peft_config: Any, optimizers: Any = (None, None)) -> None:
    """Raise ConfigError for arguments in another order than TRL's, or that cannot be used together."""
    problems = []
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        problems.append(f"peft_config: expected a PeftConfig, such as LoraConfig(r=32), got {peft_config!r:.80}")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        problems.append(f"optimizers: expected a pair (optimizer, schedule or None), got {type(optimizers).__name__}")
    elif isinstance(optimizers[0], type):
        problems.append("optimizers: got a class; pass an optimizer, or optimizer_cls_and_kwargs=(class, arguments)")
    if isinstance(ref_model, TrainingArguments):
        problems.append("ref_model: got training arguments; the order is model, ref_model, args; pass args=…")
    elif ref_model is not None and ref_model is model and not isinstance(model, str):
        problems.append("ref_model: the same object as model, which changes; omit it: the reference is the start")
    if args is not None and not isinstance(args, PreferenceConfig):
        kind = type(args).__name__
        hint = "build it with the same arguments" if isinstance(args, TrainingArguments) else "pass data by name"
        problems.append(f"args: expected a PreferenceConfig, got {kind}; {hint}")
    elif args is not None and args.schedule_part is not None and not problems and optimizers[1] is not None:
        problems.append("schedule_part: a schedule was passed in optimizers, which has no parts; remove one")
    reject("PreferenceTrainer", problems)


def load_by_name(
    name: str, args: PreferenceConfig, quantization_config: Any = None, *, reference: bool = False
) -> PreTrainedModel:
    """A model from the hub or a folder, with the arguments of from_pretrained in `args`; quantized on request.

    The name of an adapter gives its base model with it: trainable, unless it is the reference.
    """
    loading = args.loading(reference=reference)
    if quantization_config is not None:
        if "quantization_config" in loading:
            raise ConfigError("quantization_config: set twice, by itself and inside model_init_kwargs")
        loading["quantization_config"] = quantization_config
    with one_attempt(name):
        if find_adapter_config_file(name, revision=loading.get("revision")) is not None:
            return AutoPeftModelForCausalLM.from_pretrained(name, is_trainable=not reference, **loading)
        return AutoModelForCausalLM.from_pretrained(name, **loading)


def models_of(
    model: Any,
    ref_model: str | PreTrainedModel | None,
    args: PreferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    quantization_config: Any,
    peft_config: PeftConfig | None,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedModel | None, bool]:
    """The model to train, with a new adapter if one is configured, and the reference model if one is given.

    The last is whether the model to train is, without its new adapter, the model as given, now and in training.
    """
    # For a model by name and without an adapter, a dtype applies to the trained weights.
    chosen = args.loading().get("dtype", args.loading().get("torch_dtype", "auto"))
    as_loaded = isinstance(model, str) and peft_config is None and chosen != "auto"
    policy = policy_of(model, args, tokenizer, quantization_config)
    check_quantized(policy, adapter=peft_config is not None)
    adapters_off = False
    if peft_config is not None:
        before = BaseWeights(policy)
        policy = add_adapter(policy, peft_config, args.seed)
        adapters_off = before.are_left_by(policy)
    if not any(weight.requires_grad for weight in policy.parameters()):
        raise ConfigError(
            "model: none of its weights has requires_grad, so nothing would be trained; load an adapter with "
            "is_trainable=True, or pass a peft_config"
        )
    check_adapter(policy)
    if isinstance(policy, PeftModel):
        sort_sets(policy.peft_config.values())
    fit_trained_weights(policy, args, as_loaded=as_loaded)
    reference = load_by_name(ref_model, args, reference=True) if isinstance(ref_model, str) else ref_model
    if reference is not None:
        keep_weights_as_loaded(reference)
        match_reference(reference, policy)
    if args.disable_dropout:
        turn_off_dropout(policy, reference)
    return policy, reference, adapters_off


def policy_of(model: Any, args: PreferenceConfig, tokenizer: PreTrainedTokenizerBase, quantization_config: Any) -> Any:
    """The model to train: the object that was given, or loaded by its name; with `args.pad_token`."""
    if isinstance(model, str):
        model = load_by_name(model, args, quantization_config)
    else:
        _check_loaded(args, quantization_config)
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ConfigError(
                "model: transformers has put an adapter into it, which would be lost; load it with peft "
                "(AutoPeftModelForCausalLM.from_pretrained(…, is_trainable=True)), or pass the adapter's name"
            )
    if hasattr(model, "_orig_mod"):
        raise ConfigError("model: torch.compile has wrapped it; pass the model itself, and set compile_layers=True")
    keep_weights_as_loaded(model)
    if args.pad_token is not None:
        causal_model(model).config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def _check_loaded(args: PreferenceConfig, quantization_config: Any) -> None:
    """Raise ConfigError for arguments about how a model is loaded, which a model object cannot follow."""
    settings = {"quantization_config": quantization_config, "model_init_kwargs": args.model_init_kwargs}
    reject(
        "PreferenceTrainer",
        [
            f"{name}: the model is an object, so it is loaded already; pass its name"
            for name in settings
            if settings[name]
        ],
    )


def tokenizer_for(model: str | nn.Module, processing_class: Any, args: PreferenceConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, or that of the model's name, with `args.pad_token`.

    Raises ConfigError if there is none, or if the padding token is not in its vocabulary.
    """
    if processing_class is None:
        name = model if isinstance(model, str) else str(getattr(causal_model(model).config, "_name_or_path", ""))
        if not name:
            raise ConfigError("processing_class: required with a model object; pass its tokenizer")
        about = {key: args.loading()[key] for key in ("revision", "trust_remote_code") if key in args.loading()}
        with one_attempt(name):
            processing_class = AutoTokenizer.from_pretrained(name, **about)
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        kind, inner = type(processing_class).__name__, getattr(processing_class, "tokenizer", None)
        hint = "; pass its tokenizer" if isinstance(inner, PreTrainedTokenizerBase) else ""
        raise ConfigError(f"processing_class: expected a tokenizer, got {kind}{hint}")
    if args.pad_token is not None:
        if args.pad_token not in processing_class.get_vocab():
            raise ConfigError(f"pad_token: {args.pad_token!r} is not in the tokenizer's vocabulary; choose one that is")
        processing_class.pad_token = args.pad_token
    return processing_class


def check_reference(ref_model: Any, objective: Objective) -> None:
    """Raise ConfigError for a reference that would be loaded and never read."""
    if (
        ref_model is not None
        and objective.zero_point is None
        and not {"reference", "reference_kl"} & objective.required
    ):
        raise ConfigError(f"ref_model: {objective.name} reads no reference with these hyperparameters; omit it")


def compile_models(args: PreferenceConfig, *models: nn.Module | None) -> None:
    """Compile the layers of policy and reference alike, so that both round alike, or undo it."""
    if args.compile_layers:
        print_note("note: compile_layers: the first rows compile the layers, which can take minutes")
    for model in models:
        if model is not None:
            (compile_layers if args.compile_layers else leave_uncompiled)(causal_model(model))


def turn_off_dropout(*models: nn.Module | None) -> None:
    """Set the probability of all dropout to 0, in place.

    It is that of a module, or a number that another module keeps: `attention_dropout`, `attn_pdrop`, `layerdrop`. Some
    layers keep none and read their configuration in each pass (Falcon, Persimmon), so it is 0 there, too.
    """
    for module in (module for model in models if model is not None for module in model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        for holder in (module, config) if isinstance(config, PretrainedConfig) else (module,):
            for name, value in vars(holder).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(holder, name, 0.0)


def taken(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are passed on to transformers' Trainer."""
    return {name: value for name, value in arguments.items() if name not in INSTEAD}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise ConfigError if a passed optimizer would not update all trainable weights."""
    if optimizer is None:
        return
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    without = sum(id(weight) not in held for weight in trained)
    if without:
        raise ConfigError(
            f"optimizers: the optimizer lacks {without} of {len(trained)} trainable weights; with peft_config they are "
            "made here, so pass optimizer_cls_and_kwargs instead, or a model that has its adapter already"
        )


def check_adapter(model: nn.Module) -> None:
    """Raise ConfigError for an adapter that cannot be trained here, or whose files would not be found again.

    peft saves an adapter of another name than `default` in a folder of its own. transformers reads the best model, and
    everyone an uploaded one, from the folder above.
    """
    if not isinstance(model, PeftModel):
        return
    active = model.active_adapters
    if active != ["default"]:
        raise ConfigError(
            f"model: its active adapter is {', '.join(map(repr, active))}; only one called 'default' is saved where "
            "its files are looked for: leave adapter_name out of get_peft_model or PeftModel.from_pretrained"
        )
    check_trainable(model.peft_config["default"])


def check_quantized(model: nn.Module, *, adapter: bool) -> None:
    """Raise ConfigError for a quantized model without an adapter: its weights cannot be trained."""
    if isinstance(model, PreTrainedModel) and getattr(model, "is_quantized", False) and not adapter:
        raise ConfigError("model: its weights are quantized, which only an adapter can train; pass a peft_config")


def router_coefficient(model: nn.Module, args: PreferenceConfig) -> float:
    """Weight of the load-balancing loss of a mixture of experts in the loss; 0 if none is added.

    It is `args.router_aux_loss_coef`; without one, that of the model's configuration if this says
    `output_router_logits: true`, as in transformers' own loss. Raises ConfigError if the loss is asked for, and
    transformers computes none for this model.
    """
    inner = causal_model(model)
    config, chosen = inner.config.get_text_config(), args.router_aux_loss_coef
    asks = bool(getattr(config, "output_router_logits", False))
    if chosen == 0 or (chosen is None and not asks):
        return 0.0
    name = type(inner).__name__
    if not has_router_loss(inner):
        by = "the model's configuration says output_router_logits: true" if chosen is None else f"got {chosen:g}"
        raise ConfigError(
            f"router_aux_loss_coef: {by}, but transformers computes no load-balancing loss for {name}; set it to 0"
        )
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ConfigError(
            "gradient_checkpointing_kwargs: with use_reentrant, the load-balancing loss of the routers has no "
            "gradient; leave use_reentrant out, or set router_aux_loss_coef to 0"
        )
    coefficient = getattr(config, "router_aux_loss_coef", None) if chosen is None else chosen
    if coefficient is None:
        raise ConfigError(
            f"router_aux_loss_coef: the configuration of {name} says output_router_logits: true and has no "
            "router_aux_loss_coef; set it here, or to 0"
        )
    return float(coefficient)


def check_parallelism(args: TrainingArguments) -> None:
    """Raise ConfigError for accelerate's ways to let processes share a sequence or a layer, and for DeepSpeed.

    They replace kernels that shared rows do not call: torch's context parallelism gives wrong numbers on CPU processes
    without an error (`experiments/context_parallel.py`). `sequence_parallel_size` is this package's own.
    """
    reject("PreferenceTrainer", deepspeed_problems())
    config = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    kinds = {
        "cp_size": "set it to 1, and PreferenceConfig's sequence_parallel_size instead",
        "sp_size": "set it to 1, and PreferenceConfig's sequence_parallel_size instead",
        "tp_size": f"set it to 1. For memory, shard the model with FSDP2 ({page('large_models')})",
    }
    reject(
        "parallelism_config",
        [
            f"{name}: accelerate's way of dividing a {'layer' if name == 'tp_size' else 'sequence'} among processes is "
            f"not supported: {instead}"
            for name, instead in kinds.items()
            if (getattr(config, name, 1) or 1) > 1
        ],
    )


def check_offloading(args: PreferenceConfig) -> None:
    """Raise ConfigError if what checkpointing keeps is to be moved from a CPU's memory to the same memory."""
    if (args.gradient_checkpointing_kwargs or {}).get("offload") and args.device.type == "cpu":
        raise ConfigError(
            "gradient_checkpointing_kwargs (activation_checkpointing_kwargs): offload moves the layers' inputs from a "
            "GPU's memory to the host's, and this training has no GPU; leave it out"
        )


def use_one_gpu(args: TrainingArguments) -> None:
    """Make one process train on one GPU, and print that: the Trainer would split each batch over copies of the model.

    A shared row cannot be split, and all of a step's pairs count for one process.
    """
    if args.n_gpu > 1:
        print_note(
            f"note: {args.n_gpu} GPUs are visible, and one process trains on one: {args.device} is used. To train on "
            f"all: train.processes in a recipe; a script with torchrun --nproc-per-node {args.n_gpu}, or accelerate "
            f"launch ({page('several_processes')})"
        )
        args._n_gpu = 1
