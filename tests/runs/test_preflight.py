"""Mistakes in settings, section by section: each is refused before any stage runs, and named by its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless.cli.app import main
from regretless.core.errors import ConfigError, Problem
from regretless.training.arguments import PreferenceConfig

WORLD: dict[str, Any] = {"prompts": 8, "test": 4, "policies": {"a": {"demonstrations": 8}}}
MODEL: dict[str, Any] = {
    "architecture": {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    "tokenizer": "{run}/world/tokenizer",
}
PROMPTS = {"dataset": "{run}/world/prompts.jsonl", "answer_column": "answer"}
RECIPES: dict[str, dict[str, Any]] = {
    "sampled": {
        "world": WORLD,
        "pretrain": {"a": {"model": MODEL, "data": "{run}/world/demonstrations-a.jsonl", "max_steps": 1}},
        "model": {"name_or_path": "{run}/pretrain/a"},
        "prompts": {"mine": PROMPTS},
        "sample": {
            "prompts": {"dataset": "{run}/prompts/prompts.jsonl", "answer_column": "answer"},
            "models": [{"name_or_path": "{run}/pretrain/a"}],
        },
        "verify": {},
        "pair": {},
        "mask": {"tokenizer": "{run}/world/tokenizer"},
        "inspect": {},
        "train": {
            "objective": ["repo", "dpo"],
            "max_steps": 1,
            "methods": {"dpo": {"beta": 0.1}, "ipo": {"beta": 0.1}},
        },
        "evaluate": {"benchmarks": {"easy": {"dataset": "{run}/world/test.jsonl"}}},
        "analyze": {},
        "report": {},
    },
    "judged": {
        "world": WORLD,
        "model": MODEL,
        "responses": "{run}/world/test.jsonl",
        "judge": {"model": "j", "server": {"base_url": "http://127.0.0.1:9/v1"}},
        "pair": {"rule": "best_vs_random"},
        "evaluate": {
            "server": {"base_url": "http://127.0.0.1:9/v1"},
            "chat": {
                "alpaca": {"benchmark": "alpaca_eval", "questions": "CHAT/alpaca_eval.jsonl", "judge": "j"},
                "arena": {
                    "benchmark": "arena_hard",
                    "questions": "CHAT/arena_hard.jsonl",
                    "baseline": "CHAT/arena_hard_baseline.jsonl",
                    "judge": "j",
                },
                "mt": {"benchmark": "mt_bench", "questions": "CHAT/mt_bench.jsonl", "judge": "j"},
            },
        },
    },
    "imported": {
        "world": WORLD,
        "model": MODEL,
        "pairs": {"dataset": "{run}/world/prompts.jsonl"},
        "train": {"objective": "kto", "max_steps": 1},
    },
    "rounds": {
        "world": WORLD,
        "pretrain": {"a": {"model": MODEL, "data": "{run}/world/demonstrations-a.jsonl", "max_steps": 1}},
        "model": {"name_or_path": "{run}/pretrain/a"},
        "sample": {"prompts": PROMPTS},
        "verify": {},
        "pair": {},
        "train": {"objective": ["repo", "kto"], "max_steps": 1},
        "rounds": {"count": 3},
    },
}
Case = tuple[str, str, str]
"""Recipe, override, and the problems that are found: key and code of each. Their texts are in `golden.txt`."""
TABLE: dict[str, list[tuple[str, str]]] = {
    "sampled": [
        # the recipe itself
        ("name=../x", "name: expected-a-name"),
        ("name=", "name: a-valid-string"),
        ("seed=-1", "seed: greater-than-or"),
        ("seed=one", "seed: a-valid-integer"),
        ("seed=1.5", "seed: a-valid-integer"),
        ("threads=0", "threads: greater-than-or"),
        ("threads=many", "threads: a-valid-integer"),
        ("trian.objective=dpo", "trian: unknown-key"),
        ("smaple={}", "smaple: unknown-key"),
        ("evaluation={}", "evaluation: unknown-key"),
        ("learning_rate=1e-5", "learning_rate: unknown-key"),
        ("output_dir=[a]", "output_dir: a-valid-string"),
        ("model=null", "model: required-by-inspect"),
        ("sample=null", "verify: nothing-to-verify; pair: nothing-to-pair"),
        ("pair=null", "mask: no-pairs-to; inspect: no-pairs-to; train: no-pairs-to; analyze: no-pairs-to"),
        ("train=null", "analyze: no-trained-model"),
        ("train=dpo", "train: a-valid-dictionary"),
        ("verify=[]", "verify: a-valid-dictionary"),
        # world
        ("world.prompts=0", "world.prompts: greater-than-or"),
        ("world.test=none", "world.test: a-valid-integer"),
        ("world.steps=[3,1]", "world.steps: expected-fewest-and"),
        ("world.steps=[1]", "world.steps.1: required"),
        ("world.largest_amount=99", "world.largest_amount: less-than-or"),
        ("world.policies=null", "world.policies: a-valid-dictionary"),
        ("world.policies.a.demonstrations=0", "world.policies.a.demonstrations: greater-than-or"),
        ("world.policies.a.gives_as_plus=2", "world.policies.a.gives_as_plus: less-than-or"),
        ("world.policies.a.off_by_on=0.1", "world.policies.a.off_by_on: unknown-key"),
        ("world.promts=3", "world.promts: unknown-key"),
        # pretrain
        ("pretrain.a.model=null", "pretrain.a.model: a-valid-dictionary"),
        ("pretrain.a.data=null", "pretrain.a.data: a-valid-string"),
        ("pretrain.a.data=/nowhere/d.jsonl", "pretrain.a.data: no-such-file"),
        ('pretrain.a.data="{run}/world/demonstrations-b.jsonl"', "pretrain.a.data: not-in-the"),
        ("pretrain.a.learning_rate=fast", "pretrain.a.learning_rate: expected-a-number"),
        ("pretrain.a.max_steps=0", "pretrain.a.max_steps: expected"),
        ("pretrain.a.objective=[sft,dpo]", "pretrain.a.objective: expected-one-method"),
        ("pretrain.a.optim=banana", "pretrain.a.optim: expected-one-of"),
        (
            "pretrain.a.model.architecture.model_type=qwen33",
            "pretrain.a.model.architecture.model_type: transformers-knows-no",
        ),
        ("pretrain.a.model.architecture.hidden_sise=8", "pretrain.a.model.architecture: unknown-key-hidden_sise"),
        ("pretrain.a.model.architecture.num_attention_heads=0", "pretrain.a.model.architecture: cannot-be-built"),
        ("pretrain.a.model.tokenizer=null", "pretrain.a.model.tokenizer: required-next-to"),
        ('pretrain.a.model.tokenizer="{run}/world/tokeniser"', "pretrain.a.model.tokenizer: not-in-the"),
        # model
        ("model.name_or_path=/nowhere/model", "model.name_or_path: no-such-file"),
        ("model.name_or_path=./nowhere", "model.name_or_path: no-such-file"),
        ('model.name_or_path="{run}/pretrain/b"', "model.name_or_path: not-in-the"),
        ("model.name_or_path=null", "model: expected-either-name_or_path"),
        ("model.architecture.model_type=qwen3", "model: expected-either-name_or_path"),
        ("model.architecture={}", "model: expected-either-name_or_path"),
        ("model.adapter=/nowhere/adapter", "model.adapter: no-such-file"),
        ("model.dtype=int4", "model.dtype: input-should-be"),
        ("model.dtyp=float32", "model.dtyp: unknown-key"),
        ("model.chat_template=chatml2", "model.chat_template: expected-one-of"),
        ("model.tokenizer=/nowhere/tokenizer", "model.tokenizer: no-such-file"),
        ("model.trust_remote_code=perhaps", "model.trust_remote_code: a-valid-boolean"),
        # prompts, sample
        ("prompts.mine.dataset=/nowhere/p.jsonl", "prompts.mine.dataset: no-such-file"),
        ("prompts.mine.limit=0", "prompts.mine.limit: greater-than-or"),
        ("prompts.mine.template=maths", "prompts.mine.template: expected-one-of"),
        ("prompts.mine.prompt_colum=q", "prompts.mine.prompt_colum: unknown-key"),
        ("prompts.a/b.dataset=p.jsonl", "prompts.a/b: expected-a-name"),
        ("sample.prompt_column=q", "sample.prompt_column: unknown-key"),
        ("sample.prompts=null", "sample.prompts: a-valid-dictionary"),
        ("sample.prompts.dataset=nowhere.jsonl", "sample.prompts.dataset: no-such-file"),
        ("sample.models=[]", "sample.models: list-should-have"),
        ("sample.models=[{name_or_path: /nowhere/m}]", "sample.models.0.name_or_path: no-such-file"),
        ("sample.engine=vlm", "sample.engine: expected-one-of"),
        ("sample.engine=vllm", "sample.engine: vllm-is-not"),
        ("sample.engine=openai", "sample.server: required-by-the"),
        ("sample.n=0", "sample.n: greater-than-or"),
        ("sample.temperature=0", "sample.n: with-temperature"),
        ("sample.temperature=-1", "sample.temperature: greater-than-or"),
        ("sample.top_p=0", "sample.top_p: greater-than"),
        ("sample.top_p=1.5", "sample.top_p: less-than-or"),
        ("sample.top_k=-1", "sample.top_k: greater-than-or"),
        ("sample.repetition_penalty=0", "sample.repetition_penalty: greater-than-or"),
        ("sample.max_new_tokens=0", "sample.max_new_tokens: greater-than-or"),
        ("sample.batch_size=0", "sample.batch_size: expected-a-number"),
        ("sample.max_prompt_tokens=0", "sample.max_prompt_tokens: greater-than-or"),
        ("sample.temperatur=1", "sample.temperatur: unknown-key"),
        # verify, pair, mask, inspect
        ("verify.verifier=maths", "verify.verifier: expected-one-of"),
        ("verify.time_limit=0", "verify.time_limit: greater-than"),
        ("verify.workers=0", "verify.workers: greater-than-or"),
        ("pair.rule=random", "pair.rule: expected-one-of"),
        ("pair.max_correct=0", "pair.max_correct: greater-than-or"),
        ("pair.logps=both", "pair.logps: input-should-be"),
        ("mask.count=-1", "mask.count: greater-than-or"),
        ("mask.count=some", "mask.count: a-valid-integer"),
        ("mask.lengths=[]", "mask.lengths: tuple-should-have"),
        ("mask.lengths=[0]", "mask.lengths.0: greater-than-or; mask.lengths: tuple-should-have"),
        ("mask.tokenizer=/nowhere/tokenizer", "mask.tokenizer: no-such-file"),
        ("inspect.sample=-1", "inspect.sample: greater-than-or"),
        ("inspect.betas=[0]", "inspect.betas.0: greater-than"),
        ("inspect.truncation=cut", "inspect.truncation: input-should-be"),
        ("inspect.behavior.name_or_path=/nowhere/m", "inspect.behavior.name_or_path: no-such-file"),
        # train: methods
        ("train.objective=dpu", "train.objective: expected-one-of"),
        ("train.objective=[]", "train.objective: expected-at-least"),
        ("train.objective=[dpo,dpo]", "train.objective: a-method-is"),
        ("train.objective=3", "train.objective: a-valid-string"),
        ("train.methods.dpu.beta=1", "train.methods.dpu: expected-one-of"),
        ("train.methods.dpo.bta=1", "train.methods.dpo.bta: unknown-for-dpo"),
        ("train.methods.dpo.foo_bar=1", "train.methods.dpo.foo_bar: unknown-for-dpo"),
        ("train.methods.dpo.beta=0", "train.methods.dpo.beta: greater-than"),
        ("train.methods.ipo.beta=-1", "train.methods.ipo.beta: greater-than"),
        ("train.methods.dpo.learning_rate=-1", "train.methods.dpo.learning_rate: expected-a-number"),
        ("train.methods.repo.estimator=rollouts", "train.methods.repo.estimator: rollouts-reads-the"),
        ("train.methods.dpo=3", "train.methods.dpo: a-valid-dictionary"),
        ("train.beta=big", "train.beta: a-valid-number"),
        ("train.formulation=papers", "train.formulation: input-should-be"),
        ("train.eta=0.2", "train.eta: repo"),
        ("train.granularity=word", "train.granularity: input-should-be"),
        ("train.learnin_rate=1", "train.learnin_rate: unknown-for-repo"),
        ("train.evalpairs=8", "train.evalpairs: unknown-for-repo"),
        ("train.eval_pairs=-1", "train.eval_pairs: greater-than-or"),
        ("train.lora.r=0", "train.lora.r: greater-than-or"),
        ("train.lora.rank=8", "train.lora.rank: unknown-key"),
        ("train.lora.dropout=1", "train.lora.dropout: less-than"),
        ("train.lora=8", "train.lora: a-valid-dictionary"),
        # train: arguments
        ("train.learning_rate=fast", "train.learning_rate: expected-a-number"),
        ("train.learning_rate=-1", "train.learning_rate: expected-a-number"),
        ("train.learning_rate=.nan", "train.learning_rate: expected-a-number"),
        ("train.learning_rate=.inf", "train.learning_rate: expected-a-number"),
        (
            "train.per_device_train_batch_size=0",
            "train.per_device_train_batch_size: expected-a-whole",
        ),
        ("train.per_device_train_batch_size=2.5", "train.per_device_train_batch_size: expected-a-whole"),
        ("train.pairs_per_step=0", "train.pairs_per_step: greater-than-or"),
        ("train.pairs_per_step=many", "train.pairs_per_step: a-valid-integer"),
        ("train.methods.dpo.pairs_per_step=2.5", "train.methods.dpo.pairs_per_step: expected-a-whole"),
        (
            "train.methods.dpo={pairs_per_step: 8, per_device_train_batch_size: 4}",
            "train.methods.dpo.per_device_train_batch_size: pairs_per_step-says-how",
        ),
        ("train.processes=0", "train.processes: input-should-be"),
        ("train.processes=some", "train.processes: input-should-be"),
        (
            "train.processes=3",
            "train.pairs_per_step: pairs-cannot-be",
        ),
        ("train.gradient_accumulation_steps=3", "train.pairs_per_step: pairs-cannot-be"),
        ("train.strategy=zero3", "train.strategy: input-should-be"),
        (
            "cluster.train.workers=3",
            "pretrain.a.pairs_per_step: pairs-cannot-be; train.pairs_per_step: pairs-cannot-be",
        ),
        ("cluster.train.workers=[1,2]", "cluster.train.workers: expected-one-number"),
        ("train={strategy: fsdp2, fsdp: full_shard}", "train.fsdp: fsdp2-is-the"),
        ("train.per_device_eval_batch_size=0", "train.per_device_eval_batch_size: expected-a-whole"),
        ("train.gradient_accumulation_steps=0", "train.gradient_accumulation_steps: expected-a-whole"),
        ("train.max_steps=0", "train.max_steps: expected"),
        (f"train.max_steps={10**30}", "train.max_steps: expected"),
        ("train.num_train_epochs=1e30", "train.num_train_epochs: expected-a-number"),
        ("train.max_steps=-2", "train.max_steps: expected"),
        ("train.max_steps=true", "train.max_steps: expected-a-whole"),
        (
            "train.num_train_epochs=-1",
            "train.num_train_epochs: expected-a-number",
        ),
        ("train.num_train_epochs=0", "train.num_train_epochs: expected-a-number"),
        ("train.methods.repo.estimator=topk", "train.methods.repo.estimator: topk-reads-the"),
        ("train.soft_labels=true", "train.soft_labels: it-reads-preference_probability"),
        ("train.optim=banana", "train.optim: expected-one-of"),
        ("train.optim=lomo", "train.optim: you-need-to"),
        ("train.lr_scheduler_type=cosin", "train.lr_scheduler_type: expected-one-of"),
        ("train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_type: one-of-min_lr"),
        ("train.lr_scheduler_kwargs.foo=1", "train.lr_scheduler_kwargs: get_linear_schedule_with_warmup"),
        ("train.warmup_steps=-1", "train.warmup_steps: expected-a-number"),
        ("train.weight_decay=heavy", "train.weight_decay: expected-a-number"),
        ("train.adam_beta1=1", "train.adam_beta1: expected-a-number"),
        ("train.adam_beta2=-0.1", "train.adam_beta2: expected-a-number"),
        ("train.adam_epsilon=0", "train.adam_epsilon: expected-a-number"),
        ("train.max_grad_norm=-1", "train.max_grad_norm: expected-a-number"),
        ("train.bf16=maybe", "train.bf16: expected-true-or"),
        ("train.gradient_checkpointing=2", "train.gradient_checkpointing: expected-true-or"),
        ("train.logging_steps=0", "train.logging_steps: expected-a-number"),
        ("train.save_steps=-5", "train.save_steps: expected-a-number"),
        ("train.save_strategy=sometimes", "train.save_strategy: expected-one-of"),
        ("train.save_total_limit=0", "train.save_total_limit: expected-a-whole"),
        ("train.eval_strategy=epoch", "train.eval_strategy: no-pairs-are"),
        ("train.load_best_model_at_end=true", "train.load_best_model_at_end: load_best_model_at_end-requires-the"),
        ("train.report_to=mlflow", "train.report_to: mlflow-needs-a"),
        ("train.report_to=[tensorbord]", "train.report_to: expected-none"),
        ("train.report_to=3", "train.report_to: expected-a-tracker"),
        ("train.max_length=0", "train.max_length: expected-a-whole"),
        ("train.max_length=long", "train.max_length: expected-a-whole"),
        ("train.max_tokens_per_microbatch=0", "train.max_tokens_per_microbatch: expected-a-whole"),
        ("train.truncation=cut", "train.truncation: expected"),
        ("train.group_pairs=some", "train.group_pairs: expected-true-or"),
        ("train.seed=-1", "train.seed: expected-a-whole"),
        ("train.data_seed=x", "train.data_seed: expected-a-whole"),
        ("train.dataloader_num_workers=-1", "train.dataloader_num_workers: expected-a-whole"),
        ("train.log_level=loud", "train.log_level: expected-one-of"),
        ("train.deepspeed=/nowhere/zero3.json", "train.deepspeed: not-used-here"),
        ("train.use_liger_kernel=true", "train.use_liger_kernel: needs-a-gpu"),
        ("train.objective_kwargs.beta=1", "train.objective_kwargs: set-hyperparameters-by"),
        ("train.model_init_kwargs.dtype=x", "train.model_init_kwargs: model"),
        ("train.disable_tqdm=true", "train.disable_tqdm: this-package-has"),
        # evaluate, analyze, report
        ("evaluate.benchmarks=null", "evaluate.benchmarks: a-valid-dictionary"),
        ("evaluate.benchmarks.easy.dataset=/nowhere/t.jsonl", "evaluate.benchmarks.easy.dataset: no-such-file"),
        ("evaluate.benchmarks.easy.limit=0", "evaluate.benchmarks.easy.limit: greater-than-or"),
        ("evaluate.benchmarks.easy.template=nope", "evaluate.benchmarks.easy.template: expected-one-of"),
        ("evaluate.benchmarks.other.benchmark=gsm9k", "evaluate.benchmarks.other.benchmark: expected-one-of"),
        ("evaluate.benchmarks.other.limit=3", "evaluate.benchmarks.other: expected-a-known"),
        (
            "evaluate.benchmarks.../up.dataset=x.jsonl",
            "evaluate.benchmarks.: expected-a-name; evaluate.benchmarks..: unknown-key",
        ),
        (
            "evaluate.prompt_column=q",
            "evaluate.prompt_column: unknown-key",
        ),
        ("evaluate.max_new_tokens=0", "evaluate.max_new_tokens: greater-than-or"),
        ("evaluate.batch_size=many", "evaluate.batch_size: expected-a-number"),
        ("evaluate.seeds=[a]", "evaluate.seeds.0: a-valid-integer"),
        ("evaluate.temperature=0", "evaluate.temperature: greater-than-or"),
        ("analyze.pairs=0", "analyze.pairs: greater-than-or"),
        ("analyze.beta=0", "analyze.beta: greater-than"),
        ("analyze.sampel=3", "analyze.sampel: unknown-key"),
        ("report.examples=-1", "report.examples: greater-than-or"),
    ],
    "judged": [
        ("responses=/nowhere/r.parquet", "responses: no-such-file"),
        (
            'responses="{run}/sample/responses.parquet"',
            "responses: not-in-the",
        ),
        (
            'evaluate.chat.arena.baseline="{run}/chat-benchmarks/b.jsonl"',
            "evaluate.chat.arena.baseline: not-in-the",
        ),
        ('evaluate.chat.mt.questions="{run}/name/q.jsonl"', "evaluate.chat.mt.questions: not-in-the"),
        (
            'evaluate.chat.mt.questions="{run}/"',
            "evaluate.chat.mt.questions: the-run-folder",
        ),
        ("judge.model=null", "judge.model: a-valid-string"),
        ("judge.aspects=[]", "judge.aspects: list-should-have"),
        ("judge.aspects=[kindness]", "judge.rubrics: needed-for-kindness"),
        ("judge.rubrics.honesty=/nowhere/h.txt", "judge.rubrics.honesty: no-such-file"),
        ("judge.system=/nowhere/s.jinja", "judge.system: no-such-file"),
        ("judge.layout=/nowhere/l.jinja", "judge.layout: no-such-file"),
        ("judge.server.api_key_env=sk-123", "judge.server.api_key_env: expected-the-name"),
        ("judge.server.api_key_env=NO_SUCH_KEY_HERE", "judge.server: the-environment-variable"),
        (
            "judge.server.base_url=localhost",
            "judge.server.base_url: expected-an-http; judge.server: the-environment-variable",
        ),
        ("judge.server.concurrency=0", "judge.server.concurrency: greater-than-or"),
        ("judge.server.max_trys=3", "judge.server.max_trys: unknown-key"),
        ("judge.attempts=0", "judge.attempts: greater-than-or"),
        ("judge.when_spent=beg", "judge.when_spent: input-should-be"),
        ("judge.temperature=-1", "judge.temperature: greater-than-or"),
        ("evaluate.chat.mt.questions=/nowhere/q.jsonl", "evaluate.chat.mt.questions: no-such-file"),
        ("evaluate.chat.mt.judg=x", "evaluate.chat.mt.judg: unknown-key"),
        ("evaluate.chat.mt.judge=null", "evaluate.chat.mt.judge: a-valid-string"),
        ("evaluate.chat.mt.references=/nowhere/r.jsonl", "evaluate.chat.mt.references: no-such-file"),
        ("evaluate.chat.arena.baseline=/nowhere/b.jsonl", "evaluate.chat.arena.baseline: no-such-file"),
        ("evaluate.chat.alpaca.top_logprobs=1", "evaluate.chat.alpaca.top_logprobs: greater-than-or"),
        ("evaluate.chat.alpaca.gamed_baselines=/nowhere/g.csv", "evaluate.chat.alpaca.gamed_baselines: no-such-file"),
        ("evaluate.chat.mt.benchmark=mt_bensch", "evaluate.chat.mt: input-tag"),
        ("evaluate.chat.mt.bootstrap=1", "evaluate.chat.mt.bootstrap: greater-than-or"),
        ("evaluate.chat.mt.server.api_key_env=NO_SUCH_KEY_HERE", "evaluate.chat.mt.server: the-environment-variable"),
        (
            "evaluate.server.concurency=2",
            "evaluate.chat.alpaca.server.concurency: unknown-key; evaluate.chat.arena.server.concurency: unknown-key; "
            "evaluate.chat.mt.server.concurency: unknown-key; evaluate.server.concurency: unknown-key",
        ),
    ],
    "imported": [
        ("pairs.dataset=/nowhere/p.jsonl", "pairs.dataset: no-such-file"),
        ("pairs.dataset=data/nowhere.parquet", "pairs.dataset: no-such-file"),
        ("pairs.limit=0", "pairs.limit: greater-than-or"),
        ("pairs.chosen_kye=c", "pairs.chosen_kye: unknown-key"),
        ("pairs=file.jsonl", "pairs: a-valid-dictionary"),
        ("train.reference_point=other", "train.reference_point: input-should-be"),
        ("train.desirable_weight=-1", "train.desirable_weight: greater-than-or"),
        ("train.report_to=mlflow", "train.report_to: mlflow-needs-a"),
    ],
}
TABLE["rounds"] = [
    ("rounds.count=0", "rounds.count: greater-than-or"),
    ("rounds.count=null", "rounds.count: a-valid-integer"),
    ("rounds.prompts=half", "rounds.prompts: input-should-be"),
    ("rounds.prompts=0", "rounds.prompts: input-should-be"),
    ("rounds.start=zero", "rounds.start: input-should-be"),
    ("rounds.reference=last", "rounds.reference: input-should-be"),
    ("rounds.reference=behavior", "rounds.reference: kto-needs-the"),
    ("rounds.optimizer=kept", "rounds.optimizer: input-should-be"),
    ("rounds={count: 2, optimizer: carried, start: model}", "rounds.optimizer: its-state-belongs"),
    ("rounds.schedule=whole", "rounds.schedule: input-should-be"),
    ("rounds.rest=0", "rounds.rest: greater-than-or"),
    ("rounds={count: 2, rest: 1}", "rounds.rest: with-prompts"),
    ("rounds={count: 2, prompts: 5, rest: 1, stop: {gain: true}}", "rounds.rest: not-with-stop"),
    ("rounds.replay={}", "rounds.replay.share: required"),
    ("rounds.replay.share=1", "rounds.replay.share: less-than"),
    ("rounds.stop.kl=0", "rounds.stop.kl: greater-than"),
    ("rounds.stop.length=1", "rounds.stop.length: greater-than"),
    ("sample=null", "verify: nothing-to-verify; pair: nothing-to-pair; rounds: nothing-to-repeat"),
    ("train=null", "rounds: nothing-to-repeat"),
    ('sample.models=[{name_or_path: "{run}/pretrain/a", dtype: float32}]', "sample.models: each-round"),
    ('responses="{run}/world/test.jsonl"', "responses: each-round-makes"),
    ('pairs.dataset="{run}/world/test.jsonl"', "pairs: each-round-makes"),
    (
        "sample={engine: openai, server: {base_url: http://127.0.0.1:9/v1}, prompts: {answer_column: answer}}",
        "sample.server: a-server-does",
    ),
]
CASES: list[Case] = [(recipe, override, said) for recipe, cases in TABLE.items() for override, said in cases]


def recipe_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.yaml"
    chat = folder.with_name(f"{folder.name}-chat")
    chat.mkdir(exist_ok=True)
    for file in ("alpaca_eval", "arena_hard", "arena_hard_baseline", "mt_bench"):
        (chat / f"{file}.jsonl").touch()
    text = yaml.safe_dump({"name": name, "output_dir": str(folder / "run"), **RECIPES[name]})
    path.write_text(text.replace("CHAT/", f"{chat}/"))
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_table_when_counted_then_it_has_every_section() -> None:
    assert len(CASES) >= 200 and len(set(CASES)) == len(CASES)
    sections = {said.split(":")[0].split(".")[0] for _, _, said in CASES}
    assert set().union(*RECIPES.values()) <= sections


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_of_the_table_when_nothing_is_wrong_then_its_first_stage_runs(name: str, tmp_path: Path) -> None:
    """So that what the others are refused for is their mistake: all but `world` is taken out once it is checked."""
    from regretless.runs.pipeline import run_recipe
    from regretless.runs.preflight import recipe_problems
    from regretless.runs.recipe import load_recipe

    recipe = load_recipe(recipe_file(tmp_path, name), [], recipe_problems)
    assert set(run_recipe(recipe, only=["world"]).outcomes) == {"world"}


@pytest.mark.parametrize(("name", "override", "said"), CASES, ids=[f"{name}: {text}" for name, text, _ in CASES])
def test_mistake_when_a_recipe_has_it_then_it_is_refused_by_its_key_before_anything_is_written(
    name: str,
    override: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    # Ray is an extra: without it, cases of a cluster would have one more problem.
    monkeypatch.setattr("regretless.workflow.cluster.find_spec", lambda name: name)
    assert run("run", recipe_file(tmp_path, name), override) == 2
    message = capsys.readouterr().err
    problems = [Problem(line.removeprefix("  - ")) for line in message.splitlines() if line.startswith("  - ")]
    assert "; ".join(f"{problem.key}: {problem.code}" for problem in problems) == said, message
    golden(f"{name}: {override}", "\n".join(problems).replace(str(tmp_path), "FOLDER"))
    assert "Traceback" not in message
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.yaml"], "something was written"


def test_mistakes_of_all_sections_when_made_together_then_one_message_lists_every_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = {
        "seed=one": "seed",
        "trian=1": "trian",
        "world.prompts=0": "world.prompts",
        "pretrain.a.learning_rate=fast": "pretrain.a.learning_rate",
        "pretrain.a.data=/nowhere/d.jsonl": "pretrain.a.data",
        "model.name_or_path=/nowhere/model": "model.name_or_path",
        "prompts.mine.limit=0": "prompts.mine.limit",
        "sample.n=0": "sample.n",
        "sample.models=[{name_or_path: /nowhere/m}]": "sample.models.0.name_or_path",
        "verify.verifier=maths": "verify.verifier",
        "pair.rule=random": "pair.rule",
        "mask.tokenizer=/nowhere/t": "mask.tokenizer",
        "inspect.sample=-1": "inspect.sample",
        "train.learning_rate=-1": "train.learning_rate",
        "train.optim=banana": "train.optim",
        "train.report_to=mlflow": "train.report_to",
        "train.methods.dpo.beta=0": "train.methods.dpo.beta",
        "train.lr_scheduler_kwargs.foo=1": "train.lr_scheduler_kwargs",
        "evaluate.benchmarks.easy.dataset=/nowhere/t.jsonl": "evaluate.benchmarks.easy.dataset",
        "analyze.pairs=0": "analyze.pairs",
        "report.examples=-1": "report.examples",
    }
    assert run("run", recipe_file(tmp_path, "sampled"), *together) == 2
    message = capsys.readouterr().err
    assert f"{len(together)} problem(s)" in message, message
    assert [key for key in together.values() if f"  - {key}: " not in message] == []


@pytest.mark.parametrize(
    "text", ["name: x\ntrain: {}\ntrain: {objective: dpo}\n", "name: [x", "- name\n", "a: !!python/x 1"]
)
def test_file_that_is_no_settings_when_run_then_it_is_one_message(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert run("run", tmp_path / "r.yaml") == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "r.yaml") in message and "Traceback" not in message


VERBS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "sample": (
        ["--prompts", "/nowhere/p.jsonl", "--model", "/nowhere/m", "--output", "out", "n=0", "promt_column=q"],
        (
            "  - n: ",
            "  - promt_column: unknown key",
            "  - prompts.dataset: no such",
            "  - models.0.name_or_path: no such",
        ),
    ),
    "sample ": (
        ["--output", "out", "prompt_column=q"],
        ("mean prompts.prompt_column?", "  - prompts: required"),
    ),
    "verify": (
        ["--responses", "/nowhere/r.jsonl", "verifier=x"],
        ("  - --output: required", "  - --responses: no such file", "  - verifier: expected"),
    ),
    "judge": (["--responses", "/nowhere/r", "--output", "o", "model=j"], ("  - --responses: no such", "  - server: ")),
    "pair": (["--output", "o", "rule=x"], ("  - --responses: required", "  - rule: ")),
    "mask": (
        ["--pairs", "/nowhere/p", "--output", "o", "tokenizer=/nowhere/t"],
        ("--pairs: no", "  - tokenizer: no"),
    ),
    "inspect": (
        ["--pairs", "/nowhere/p", "--model", "/nowhere/m", "--output", "o", "model.dtyp=x"],
        ("  - --pairs: no such", "  - model.dtyp: unknown key"),
    ),
    "train": (
        [
            *("--pairs", "/nowhere/p.jsonl", "--model", "/nowhere/m", "--output", "o"),
            *(
                "objective=dpo",
                "learning_rate=fast",
                "bta=1",
                "max_steps=0",
                "report_to=mlflow",
                "lr_scheduler_kwargs={foo: 1}",
            ),
        ],
        (
            *(
                "  - --pairs: no such",
                "  - model.name_or_path: no such",
                "  - learning_rate: expected a number above 0",
            ),
            *("  - bta: unknown for dpo; did you mean beta?", "  - max_steps: ", "  - report_to: mlflow"),
        ),
    ),
    "evaluate": (
        ["--model", "/nowhere/m", "--benchmark", "a=/nowhere/t.jsonl", "--output", "o", "prompt_colum=q", "seeds=[x]"],
        (
            *("  - prompt_colum: unknown key", "  - seeds.0: "),
            "  - model.name_or_path: no such",
        ),
    ),
    "analyze": (
        ["--pairs", "/nowhere/p", "--model", "/nowhere/m", "--policy", "a=/nowhere/a", "--output", "o", "pairs=0"],
        ("  - --policy a: no such folder", "  - pairs: ", "  - --pairs: no such", "  - model.name_or_path: no such"),
    ),
    "report": (["/nowhere/run", "examples=-1"], ("/nowhere/run: no such run folder", "  - examples: ")),
    "world": (["test=0"], ("  - --output: required", "  - test: ", "  - policies: required")),
}


@pytest.mark.parametrize("verb", VERBS)
def test_mistakes_of_a_verb_when_made_together_then_one_message_lists_every_one(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    arguments, said = VERBS[verb]
    assert run(verb.strip(), *arguments) == 2
    message = capsys.readouterr().err
    assert [part for part in said if part not in message] == [], message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("learning_rate", bad) for bad in ("fast", -1, float("nan"))),
        *(("max_steps", bad) for bad in (0, -2)),
        *(("num_train_epochs", bad) for bad in (-1, 0)),
        *(("per_device_train_batch_size", 0), ("optim", "banana"), ("report_to", "mlflow"), ("lr_scheduler_type", "x")),
    ],
)
def test_training_arguments_in_python_when_wrong_then_they_are_refused_by_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"1 problem\(s\)\n  - {name}: ") as caught:
        PreferenceConfig(output_dir=str(tmp_path / "out"), **{name: value})
    assert json.dumps(caught.value.problems)
