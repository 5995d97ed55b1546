"""Mistakes in settings, section by section: each is refused before any stage runs, and named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless.cli.app import main
from regretless.core.errors import ConfigError
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
}
Case = tuple[str, str, str]
"""Recipe, override, and what the message says: the key first, then more that it holds."""
TABLE: dict[str, list[tuple[str, str]]] = {
    "sampled": [
        # the recipe itself
        ("name=../x", "name: expected a name"),
        ("name=", "name: "),
        ("seed=-1", "seed: "),
        ("seed=one", "seed: "),
        ("seed=1.5", "seed: "),
        ("threads=0", "threads: "),
        ("threads=many", "threads: "),
        ("trian.objective=dpo", "trian: unknown key …did you mean train?"),
        ("smaple={}", "smaple: unknown key …did you mean sample?"),
        ("evaluation={}", "evaluation: unknown key …did you mean evaluate?"),
        ("learning_rate=1e-5", "learning_rate: unknown key"),
        ("output_dir=[a]", "output_dir: "),
        ("model=null", "model: required by inspect, train, evaluate, analyze"),
        ("sample=null", "verify: nothing to verify…pair: nothing to pair"),
        ("pair=null", "mask: no pairs to mask…inspect: no pairs…train: no pairs"),
        ("train=null", "analyze: no trained model"),
        ("train=dpo", "train: "),
        ("verify=[]", "verify: "),
        # world
        ("world.prompts=0", "world.prompts: "),
        ("world.test=none", "world.test: "),
        ("world.steps=[3,1]", "world.steps: expected fewest and most"),
        ("world.steps=[1]", "world.steps"),
        ("world.largest_amount=99", "world.largest_amount: "),
        ("world.policies=null", "world.policies: "),
        ("world.policies.a.demonstrations=0", "world.policies.a.demonstrations: "),
        ("world.policies.a.gives_as_plus=2", "world.policies.a.gives_as_plus: "),
        ("world.policies.a.off_by_on=0.1", "world.policies.a.off_by_on: unknown key …did you mean off_by_one?"),
        ("world.promts=3", "world.promts: unknown key …did you mean prompts?"),
        # pretrain
        ("pretrain.a.model=null", "pretrain.a.model: "),
        ("pretrain.a.data=null", "pretrain.a.data: "),
        ("pretrain.a.data=/nowhere/d.jsonl", "pretrain.a.data: no such file"),
        ('pretrain.a.data="{run}/world/demonstrations-b.jsonl"', "pretrain.a.data: …world produces prompts.jsonl"),
        ("pretrain.a.learning_rate=fast", "pretrain.a.learning_rate: expected a number above 0, got 'fast'"),
        ("pretrain.a.max_steps=0", "pretrain.a.max_steps: expected 1 to 1000000000000"),
        ("pretrain.a.objective=[sft,dpo]", "pretrain.a.objective: "),
        ("pretrain.a.optim=banana", "pretrain.a.optim: "),
        (
            "pretrain.a.model.architecture.model_type=qwen33",
            "pretrain.a.model.architecture.model_type: …mean qwen3",
        ),
        ("pretrain.a.model.architecture.hidden_sise=8", "pretrain.a.model.architecture: …did you mean hidden_size?"),
        ("pretrain.a.model.architecture.num_attention_heads=0", "pretrain.a.model.architecture: cannot be built"),
        ("pretrain.a.model.tokenizer=null", "pretrain.a.model.tokenizer: required next to architecture"),
        ('pretrain.a.model.tokenizer="{run}/world/tokeniser"', "pretrain.a.model.tokenizer: "),
        # model
        ("model.name_or_path=/nowhere/model", "model.name_or_path: no such file or folder: /nowhere/model"),
        ("model.name_or_path=./nowhere", "model.name_or_path: no such file"),
        ('model.name_or_path="{run}/pretrain/b"', "model.name_or_path: …pretrain produces a"),
        ("model.name_or_path=null", "model: expected either name_or_path or architecture, got neither"),
        ("model.architecture.model_type=qwen3", "model: expected either name_or_path or architecture, got both"),
        ("model.architecture={}", "model: "),
        ("model.adapter=/nowhere/adapter", "model.adapter: no such file"),
        ("model.dtype=int4", "model.dtype: "),
        ("model.dtyp=float32", "model.dtyp: unknown key …did you mean dtype?"),
        ("model.chat_template=chatml2", "model.chat_template: expected one of chatml"),
        ("model.tokenizer=/nowhere/tokenizer", "model.tokenizer: no such file"),
        ("model.trust_remote_code=perhaps", "model.trust_remote_code: "),
        # prompts, sample
        ("prompts.mine.dataset=/nowhere/p.jsonl", "prompts.mine.dataset: no such file"),
        ("prompts.mine.limit=0", "prompts.mine.limit: "),
        ("prompts.mine.template=maths", "prompts.mine.template: expected one of math"),
        ("prompts.mine.prompt_colum=q", "prompts.mine.prompt_colum: unknown key …did you mean prompt_column?"),
        ("prompts.a/b.dataset=p.jsonl", "prompts.a/b: expected a name"),
        ("sample.prompt_column=q", "sample.prompt_column: unknown key …did you mean prompts.prompt_column?"),
        ("sample.prompts=null", "sample.prompts: "),
        ("sample.prompts.dataset=nowhere.jsonl", "sample.prompts.dataset: no such file"),
        ("sample.models=[]", "sample.models: "),
        ("sample.models=[{name_or_path: /nowhere/m}]", "sample.models.0.name_or_path: no such file"),
        ("sample.engine=vlm", "sample.engine: expected one of transformers, vllm, openai"),
        ("sample.engine=vllm", "sample.engine: vllm is not installed; install regretless[vllm]"),
        ("sample.engine=openai", "sample.server: required by the engine openai"),
        ("sample.n=0", "sample.n: "),
        ("sample.temperature=0", "sample.n: with temperature 0"),
        ("sample.temperature=-1", "sample.temperature: "),
        ("sample.top_p=0", "sample.top_p: "),
        ("sample.top_p=1.5", "sample.top_p: "),
        ("sample.top_k=-1", "sample.top_k: "),
        ("sample.repetition_penalty=0", "sample.repetition_penalty: "),
        ("sample.max_new_tokens=0", "sample.max_new_tokens: "),
        ("sample.batch_size=0", "sample.batch_size: "),
        ("sample.max_prompt_tokens=0", "sample.max_prompt_tokens: "),
        ("sample.temperatur=1", "sample.temperatur: unknown key …did you mean temperature?"),
        # verify, pair, mask, inspect
        ("verify.verifier=maths", "verify.verifier: expected one of math"),
        ("verify.time_limit=0", "verify.time_limit: "),
        ("verify.workers=0", "verify.workers: "),
        ("pair.rule=random", "pair.rule: "),
        ("pair.max_correct=0", "pair.max_correct: "),
        ("pair.logps=both", "pair.logps: "),
        ("mask.count=-1", "mask.count: "),
        ("mask.count=some", "mask.count: "),
        ("mask.lengths=[]", "mask.lengths: "),
        ("mask.lengths=[0]", "mask.lengths.0: "),
        ("mask.tokenizer=/nowhere/tokenizer", "mask.tokenizer: no such file"),
        ("inspect.sample=-1", "inspect.sample: "),
        ("inspect.betas=[0]", "inspect.betas.0: "),
        ("inspect.truncation=cut", "inspect.truncation: "),
        ("inspect.behavior.name_or_path=/nowhere/m", "inspect.behavior.name_or_path: no such file"),
        # train: methods
        ("train.objective=dpu", "train.objective: expected one of repo, …did you mean dpo?"),
        ("train.objective=[]", "train.objective: "),
        ("train.objective=[dpo,dpo]", "train.objective: a method is named twice"),
        ("train.objective=3", "train.objective: "),
        ("train.methods.dpu.beta=1", "train.methods.dpu: expected one of …did you mean dpo?"),
        ("train.methods.dpo.bta=1", "train.methods.dpo.bta: unknown for dpo; did you mean beta?"),
        ("train.methods.dpo.foo_bar=1", "train.methods.dpo.foo_bar: unknown for dpo; `regretless objectives dpo` and "),
        ("train.methods.dpo.beta=0", "train.methods.dpo.beta: "),
        ("train.methods.ipo.beta=-1", "train.methods.ipo.beta: "),
        ("train.methods.dpo.learning_rate=-1", "train.methods.dpo.learning_rate: "),
        ("train.methods.dpo=3", "train.methods.dpo: "),
        ("train.beta=big", "train.beta: "),
        ("train.formulation=papers", "train.formulation: "),
        ("train.eta=0.2", "train.eta: repo, dpo has no such hyperparameter"),
        ("train.granularity=word", "train.granularity: "),
        ("train.learnin_rate=1", "train.learnin_rate: unknown for repo; did you mean learning_rate?"),
        ("train.evalpairs=8", "train.evalpairs: unknown for repo; did you mean eval_pairs?"),
        ("train.eval_pairs=-1", "train.eval_pairs: "),
        ("train.lora.r=0", "train.lora.r: "),
        ("train.lora.rank=8", "train.lora.rank: unknown key"),
        ("train.lora.dropout=1", "train.lora.dropout: "),
        ("train.lora=8", "train.lora: "),
        # train: arguments
        ("train.learning_rate=fast", "train.learning_rate: expected a number above 0, got 'fast'"),
        ("train.learning_rate=-1", "train.learning_rate: expected a number above 0, got -1"),
        ("train.learning_rate=.nan", "train.learning_rate: expected a number above 0, got nan"),
        ("train.learning_rate=.inf", "train.learning_rate: "),
        (
            "train.per_device_train_batch_size=0",
            "train.per_device_train_batch_size: expected a whole number",
        ),
        ("train.per_device_train_batch_size=2.5", "train.per_device_train_batch_size: "),
        ("train.pairs_per_step=0", "train.pairs_per_step: "),
        ("train.pairs_per_step=many", "train.pairs_per_step: "),
        ("train.methods.dpo.pairs_per_step=2.5", "train.methods.dpo.pairs_per_step: expected a whole number"),
        (
            "train.methods.dpo={pairs_per_step: 8, per_device_train_batch_size: 4}",
            "train.methods.dpo.per_device_train_batch_size: pairs_per_step says how many pairs a step has",
        ),
        ("train.processes=0", "train.processes: "),
        ("train.processes=some", "train.processes: "),
        (
            "train.processes=3",
            "train.pairs_per_step: 8 pairs cannot be divided equally by 3 processes; …or 2 processes",
        ),
        ("train.gradient_accumulation_steps=3", "train.pairs_per_step: 8 pairs …leave out gradient_accumulation_steps"),
        ("train.strategy=zero3", "train.strategy: "),
        ("cluster.train.workers=3", "train.pairs_per_step: 8 pairs cannot be divided equally by 3"),
        ("cluster.train.workers=[1,2]", "cluster.train.workers: expected one number"),
        ("train={strategy: fsdp2, fsdp: full_shard}", "train.fsdp: fsdp2 is the strategy here"),
        ("train.per_device_eval_batch_size=0", "train.per_device_eval_batch_size: "),
        ("train.gradient_accumulation_steps=0", "train.gradient_accumulation_steps: "),
        ("train.max_steps=0", "train.max_steps: expected 1 to 1000000000000, or -1"),
        (f"train.max_steps={10**30}", "train.max_steps: expected 1 to 1000000000000, or -1"),
        ("train.num_train_epochs=1e30", "train.num_train_epochs: expected a number above 0 and at most 1000000000000"),
        ("train.max_steps=-2", "train.max_steps: "),
        ("train.max_steps=true", "train.max_steps: "),
        (
            "train.num_train_epochs=-1",
            "train.num_train_epochs: expected a number above 0 and at most 1000000000000",
        ),
        ("train.num_train_epochs=0", "train.num_train_epochs: "),
        ("train.optim=banana", "train.optim: expected one of …'banana'"),
        ("train.optim=lomo", "train.optim: …lomo_optim"),
        ("train.lr_scheduler_type=cosin", "train.lr_scheduler_type: expected one of cosine"),
        ("train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_type: …min_lr"),
        ("train.lr_scheduler_kwargs.foo=1", "train.lr_scheduler_kwargs: …foo"),
        ("train.warmup_steps=-1", "train.warmup_steps: "),
        ("train.weight_decay=heavy", "train.weight_decay: "),
        ("train.adam_beta1=1", "train.adam_beta1: "),
        ("train.adam_beta2=-0.1", "train.adam_beta2: "),
        ("train.adam_epsilon=0", "train.adam_epsilon: "),
        ("train.max_grad_norm=-1", "train.max_grad_norm: "),
        ("train.bf16=maybe", "train.bf16: expected true or false"),
        ("train.gradient_checkpointing=2", "train.gradient_checkpointing: "),
        ("train.logging_steps=0", "train.logging_steps: "),
        ("train.save_steps=-5", "train.save_steps: "),
        ("train.save_strategy=sometimes", "train.save_strategy: expected one of"),
        ("train.save_total_limit=0", "train.save_total_limit: "),
        ("train.eval_strategy=epoch", "train.eval_strategy: no pairs are held out"),
        ("train.load_best_model_at_end=true", "train.load_best_model_at_end: "),
        ("train.report_to=mlflow", "train.report_to: mlflow needs a package: install mlflow"),
        ("train.report_to=[tensorbord]", "train.report_to: expected none, all, or of"),
        ("train.report_to=3", "train.report_to: "),
        ("train.max_length=0", "train.max_length: "),
        ("train.max_length=long", "train.max_length: "),
        ("train.max_tokens_per_microbatch=0", "train.max_tokens_per_microbatch: "),
        ("train.truncation=cut", "train.truncation: expected 'refuse' or 'keep_start'"),
        ("train.group_pairs=some", "train.group_pairs: "),
        ("train.seed=-1", "train.seed: "),
        ("train.data_seed=x", "train.data_seed: "),
        ("train.dataloader_num_workers=-1", "train.dataloader_num_workers: "),
        ("train.log_level=loud", "train.log_level: "),
        ("train.deepspeed=/nowhere/zero3.json", "train.deepspeed: "),
        ("train.use_liger_kernel=true", "train.use_liger_kernel: needs a GPU and a package"),
        ("train.objective_kwargs.beta=1", "train.objective_kwargs: set hyperparameters by their own names"),
        ("train.model_init_kwargs.dtype=x", "train.model_init_kwargs: "),
        ("train.disable_tqdm=true", "train.disable_tqdm: "),
        # evaluate, analyze, report
        ("evaluate.benchmarks=null", "evaluate.benchmarks: "),
        ("evaluate.benchmarks.easy.dataset=/nowhere/t.jsonl", "evaluate.benchmarks.easy.dataset: no such file"),
        ("evaluate.benchmarks.easy.limit=0", "evaluate.benchmarks.easy.limit: "),
        ("evaluate.benchmarks.easy.template=nope", "evaluate.benchmarks.easy.template: expected one of math"),
        ("evaluate.benchmarks.other.benchmark=gsm9k", "evaluate.benchmarks.other.benchmark: expected one of gsm8k"),
        ("evaluate.benchmarks.other.limit=3", "evaluate.benchmarks.other: expected a known benchmark's name"),
        ("evaluate.benchmarks.../up.dataset=x.jsonl", "evaluate.benchmarks"),
        (
            "evaluate.prompt_column=q",
            "evaluate.prompt_column: unknown key …mean benchmarks.<name>.prompt_column?",
        ),
        ("evaluate.max_new_tokens=0", "evaluate.max_new_tokens: "),
        ("evaluate.batch_size=many", "evaluate.batch_size: "),
        ("evaluate.seeds=[a]", "evaluate.seeds.0: "),
        ("evaluate.temperature=0", "evaluate.temperature: "),
        ("analyze.pairs=0", "analyze.pairs: "),
        ("analyze.beta=0", "analyze.beta: "),
        ("analyze.sampel=3", "analyze.sampel: unknown key …did you mean sample?"),
        ("report.examples=-1", "report.examples: "),
        ("report.figures.formats=[gif]", "report.figures.formats.0: "),
        ("report.figures.models=[ipo]", "report.figures.models: expected some of repo, dpo"),
        ("report.figures.pair=99", "report.figures.pair: "),
        ("report.figures.measure=det", "report.figures.measure: "),
    ],
    "judged": [
        ("responses=/nowhere/r.parquet", "responses: no such file"),
        (
            'responses="{run}/sample/responses.parquet"',
            "responses: not in the run folder, and this recipe has no section sample that could produce it",
        ),
        (
            'evaluate.chat.arena.baseline="{run}/chat-benchmarks/b.jsonl"',
            "evaluate.chat.arena.baseline: not in the run folder, and no stage makes chat-benchmarks; put it there",
        ),
        ('evaluate.chat.mt.questions="{run}/name/q.jsonl"', "evaluate.chat.mt.questions: …no stage makes name; put it"),
        (
            'evaluate.chat.mt.questions="{run}/"',
            "evaluate.chat.mt.questions: the run folder does not exist yet; expected a path in it that a stage makes",
        ),
        ("judge.model=null", "judge.model: "),
        ("judge.aspects=[]", "judge.aspects: "),
        ("judge.aspects=[kindness]", "judge.rubrics: needed for kindness"),
        ("judge.rubrics.honesty=/nowhere/h.txt", "judge.rubrics.honesty: no such file"),
        ("judge.system=/nowhere/s.jinja", "judge.system: no such file"),
        ("judge.layout=/nowhere/l.jinja", "judge.layout: no such file"),
        ("judge.server.api_key_env=sk-123", "judge.server.api_key_env: "),
        ("judge.server.api_key_env=NO_SUCH_KEY_HERE", "judge.server: …NO_SUCH_KEY_HERE is not set"),
        ("judge.server.base_url=localhost", "judge.server.base_url: "),
        ("judge.server.concurrency=0", "judge.server.concurrency: "),
        ("judge.server.max_trys=3", "judge.server.max_trys: unknown key …did you mean max_tries?"),
        ("judge.attempts=0", "judge.attempts: "),
        ("judge.when_spent=beg", "judge.when_spent: "),
        ("judge.temperature=-1", "judge.temperature: "),
        ("evaluate.chat.mt.questions=/nowhere/q.jsonl", "evaluate.chat.mt.questions: no such file"),
        ("evaluate.chat.mt.judg=x", "evaluate.chat.mt.judg: unknown key …did you mean judge?"),
        ("evaluate.chat.mt.judge=null", "evaluate.chat.mt.judge: "),
        ("evaluate.chat.mt.references=/nowhere/r.jsonl", "evaluate.chat.mt.references: no such file"),
        ("evaluate.chat.arena.baseline=/nowhere/b.jsonl", "evaluate.chat.arena.baseline: no such file"),
        ("evaluate.chat.alpaca.top_logprobs=1", "evaluate.chat.alpaca.top_logprobs: "),
        ("evaluate.chat.alpaca.gamed_baselines=/nowhere/g.csv", "evaluate.chat.alpaca.gamed_baselines: no such file"),
        ("evaluate.chat.mt.benchmark=mt_bensch", "evaluate.chat.mt: "),
        ("evaluate.chat.mt.bootstrap=1", "evaluate.chat.mt.bootstrap: "),
        ("evaluate.chat.mt.server.api_key_env=NO_SUCH_KEY_HERE", "evaluate.chat.mt.server: …is not set"),
        ("evaluate.server.concurency=2", "evaluate.server.concurency: unknown key …did you mean concurrency?"),
        ("report.figures={}", "report.figures: no token rewards to draw"),
    ],
    "imported": [
        ("pairs.dataset=/nowhere/p.jsonl", "pairs.dataset: no such file"),
        ("pairs.dataset=data/nowhere.parquet", "pairs.dataset: no such file"),
        ("pairs.limit=0", "pairs.limit: "),
        ("pairs.chosen_kye=c", "pairs.chosen_kye: unknown key …did you mean chosen_key?"),
        ("pairs=file.jsonl", "pairs: "),
        ("train.reference_point=other", "train.reference_point: "),
        ("train.desirable_weight=-1", "train.desirable_weight: "),
        ("train.report_to=mlflow", "train.report_to: mlflow needs a package"),
    ],
}
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
    name: str, override: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("run", recipe_file(tmp_path, name), override) == 2
    message = capsys.readouterr().err
    first, *others = said.split("…")
    lines = [line for line in message.splitlines() if line.startswith(f"  - {first}")]
    assert lines, message
    assert all(part in message for part in others), message
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
