"""The experiment "Rounds beside TRL" of docs/experiments.md: rounds, and TRL's online trainers, in the embedded world.

    python experiments/rounds_vs_trl.py run runs/rounds-vs-trl --seeds 0 1 2
    python experiments/rounds_vs_trl.py table

The first makes, for each seed, the world and the base model of studies/rounds.yaml, and trains each arm: eight rounds
of this package, and TRL's GRPOTrainer and OnlineDPOTrainer, the latter also without its ties (two responses of equal
reward, the first of which it trains as the better one). Every arm draws some 12,000 responses to the same 1500 prompts,
and takes 48 optimizer steps (GRPO 47). Each arm's learning rate is the one of `RATES` with the best Pass@1 on the first
seed's validation problems. After a kill the same command goes on. Its end is experiments/measured/rounds_vs_trl.csv,
which the second prints as tables, with the predictions. Needs `pip install .[bench]`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from real_regret import prediction_table
from replay_age import estimate
from rounds_world import NEW_TOKENS, OUTSIDE, WORLD, commands, regretless
from theory_common import table

MEASURED = Path(__file__).parent / "measured" / "rounds_vs_trl.csv"
OURS = {"repo": 0.3, "dpo": 0.1, "sft": None}
"""Methods and their β: that of a search in a world of one round, and TRL's default."""
THEIRS = ("grpo", "online_dpo", "online_dpo without ties")
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
RESPONSES, STEPS, WARMUP = 12_000, 48, 0.1
RANGES = {
    "T1": (-15.0, 5.0),
    "T2": (-10.0, 10.0),
    "T3": (-5.0, 20.0),
    "T4": (-2.0, 10.0),
    "T5": (1.0, 3.0),
}
"""Predicted ranges, as in docs/experiments.md."""
ROUNDS = [
    *("rounds.count=8", "rounds.optimizer=carried", "rounds.schedule=all", f"train.max_steps={STEPS // 8}"),
    *("train.lr_scheduler_type=linear", f"train.warmup_steps={WARMUP}"),
]


def train(world: Path, folder: Path, arm: str, rate: float, seed: int) -> tuple[Path, dict[str, float]]:
    """The folder of the model that an arm trains, and the CPU seconds that it took: in all, and in parts."""
    done, model = folder / "seconds.json", folder / ("train/" + arm if arm in OURS else "model")
    if done.exists():
        return model, json.loads(done.read_text(encoding="utf-8"))
    # A training that was killed is repeated whole: so its seconds are all of them.
    shutil.rmtree(folder, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if arm in OURS:
        beta = [] if OURS[arm] is None else [f"train.methods.{arm}.beta={OURS[arm]}"]
        of = [f"model.name_or_path={world}/pretrain/base", f"sample.prompts.dataset={world}/world/prompts.jsonl"]
        rates = [f"train.learning_rate={rate}", f"train.methods.{arm}.learning_rate={rate}"]
        settings = [*OUTSIDE, *of, *ROUNDS, *beta, *rates, f"train.objective={arm}", "evaluate=null", f"seed={seed}"]
        regretless(folder, *settings)
    else:
        folder.mkdir(parents=True)
        subprocess.run([sys.executable, __file__, "trl", arm, world, folder, str(rate), str(seed)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = {"all": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, **parts(folder)}
    done.write_text(json.dumps(seconds), encoding="utf-8")
    return model, seconds


def parts(folder: Path) -> dict[str, float]:
    """Seconds of sampling and of training: TRL's from its own process, this package's from the stages' records."""
    if (folder / "parts.json").exists():
        return dict(json.loads((folder / "parts.json").read_text(encoding="utf-8")))
    seconds = {"sample": 0.0, "train": 0.0}
    for file in (folder / "rounds").rglob("manifest.json"):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        for part in seconds:
            if part in manifest["stage"].split("/"):
                seconds[part] += manifest["seconds"]
    return seconds


def evaluated(world: Path, folder: Path, model: Path, problems: str) -> float:
    """Greedy Pass@1 in percent on the world's problems of a name."""
    off = [*OUTSIDE, "rounds=null", "sample=null", "verify=null", "pair=null", "train=null"]
    tested = f"evaluate.benchmarks.arithmetic.dataset={world}/world/{problems}.jsonl"
    regretless(folder, *off, f"model.name_or_path={model}", tested)
    (row,) = json.loads((folder / "evaluate" / "results.json").read_text(encoding="utf-8"))["rows"]
    return 100 * float(row["value"])


def run(root: Path, seeds: Sequence[int]) -> None:
    """Search the arms' learning rates on the first seed, train each arm on every seed, and write the table."""
    worlds = {seed: root / f"world-{seed}" for seed in seeds}
    for seed, world in worlds.items():
        nothing = ["rounds=null", "sample=null", "verify=null", "pair=null", "train=null", "evaluate=null"]
        regretless(world, *WORLD, "world.validation=300", *nothing, f"seed={seed}")
    rows: list[dict[str, Any]] = []
    for arm in (*OURS, *THEIRS):
        scores = {}
        for rate in RATES:
            folder = root / "search" / f"{arm}-{rate:g}".replace(" ", "-")
            model, _ = train(worlds[seeds[0]], folder, arm, rate, seeds[0])
            scores[rate] = evaluated(worlds[seeds[0]], folder / "validation", model, "validation")
        best = max(scores, key=lambda rate: scores[rate])
        for seed, world in worlds.items():
            name = f"{arm}-{best:g}" if seed == seeds[0] else f"{arm}-{seed}"
            folder = root / ("search" if seed == seeds[0] else "chosen") / name.replace(" ", "-")
            model, seconds = train(world, folder, arm, best, seed)
            value = evaluated(world, folder / "test", model, "test")
            rows.append({"arm": arm, "seed": seed, "rate": best, "value": value, **seconds})
            rows[-1]["validation"] = " ".join(f"{rate:g}:{score:.1f}" for rate, score in scores.items())
    for seed, world in worlds.items():
        value = evaluated(world, root / f"base-{seed}", world / "pretrain" / "base", "test")
        rows.append({"arm": "base", "seed": seed, "value": value})
    MEASURED.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(MEASURED, index=False, float_format="%.6g")


def tables(rows: pd.DataFrame) -> None:
    """Print each arm's Pass@1 and CPU seconds, means over the seeds, and the predictions."""
    shown = []
    for arm in ("base", *OURS, *THEIRS):
        of = rows[rows.arm == arm]
        value = f"{of.value.mean():.1f} ± {of.value.std():.1f}"
        rest = of["all"] - of["sample"] - of["train"]
        seconds = [f"{part.mean():.0f}" for part in (of["all"], of["sample"], of["train"], rest)]
        shown.append((arm, value, f"{of.rate.iloc[0]:g}", *seconds) if arm != "base" else (arm, value, *5 * [""]))
    print(table(["", "Pass@1 (%)", "learning rate", "CPU seconds", "sampling", "training", "rest"], shown) + "\n")
    for arm in (*OURS, *THEIRS):
        print(f"{arm}: validation by learning rate {rows[rows.arm == arm].validation.iloc[0]}")
    for arm in THEIRS[1:]:
        print(f"{arm}: {rows[rows.arm == arm].ties.mean():.2f} of the pairs are ties")
    of = rows.pivot(index="seed", columns="arm")
    value, seconds = of["value"], of["all"]
    found = {
        "T1": value["repo"] - value["grpo"],
        "T2": value["sft"] - value["grpo"],
        "T3": value["repo"] - value["online_dpo"],
        "T4": value["online_dpo without ties"] - value["online_dpo"],
        "T5": seconds["grpo"] / seconds["repo"],
    }
    print("\n" + prediction_table([(name, estimate(list(values))) for name, values in found.items()], RANGES))


def timed(function: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    """`function`, with its CPU seconds added to a part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.process_time() - started

    call.__name__ = getattr(function, "__name__", part)
    return call


def train_with_trl(arm: str, world: Path, folder: Path, rate: float, seed: int) -> None:
    """Train the base model of a world with one of TRL's online trainers; the model, and its parts' CPU seconds."""
    os.environ["WANDB_DISABLED"] = "true"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    from regretless.labeling.grading import grade

    torch.set_num_threads(1)
    seconds = {"sample": 0.0, "reward": 0.0, "train": 0.0}
    ties: list[bool] = []

    def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(grade(*texts).verdict == "correct") for texts in zip(completions, answer, strict=True)]
        half = len(rewards) // 2
        ties.extend(first == second for first, second in zip(rewards[:half], rewards[half:], strict=True))
        return rewards

    class WithoutTies(OnlineDPOTrainer):  # type: ignore[misc]
        """No gradient from two responses of equal reward: TRL's loss stays, and a tie adds a constant to it."""

        def _forward(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logps: torch.Tensor = super()._forward(model, *args, **kwargs)
            if logps.requires_grad:
                logps.register_hook(lambda gradient: gradient * self.unequal)
            return logps

        def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            rewards: torch.Tensor = super()._calculate_rewards_from_functions(*args, **kwargs)
            first, second = rewards.chunk(2)
            self.unequal = (first != second).repeat(2).to(rewards.dtype)[:, None]
            return rewards

    base = world / "pretrain" / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.generate = timed(model.generate, seconds, "sample")
    reward = timed(right, seconds, "reward")
    data = Dataset.from_json(str(world / "world" / "prompts.jsonl")).select_columns(["prompt", "answer"])
    shared: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "learning_rate": rate, "lr_scheduler_type": "linear", "warmup_steps": WARMUP,
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed, "save_strategy": "no", "report_to": "none",
        "logging_steps": STEPS, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    if arm == "grpo":
        config = GRPOConfig(
            **shared, num_generations=8, per_device_train_batch_size=256, max_steps=RESPONSES // 256 + 1,
            max_completion_length=NEW_TOKENS, steps_per_generation=1,
        )  # fmt: skip
        trainer = GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer)
    else:
        size = RESPONSES // 2 // STEPS
        config = OnlineDPOConfig(
            **shared, per_device_train_batch_size=size, max_steps=STEPS, max_new_tokens=NEW_TOKENS, max_length=512
        )
        kind = OnlineDPOTrainer if arm == "online_dpo" else WithoutTies
        reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        trainer = kind(
            model, reference, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
        )
    started = time.process_time()
    trainer.train()
    seconds["train"] = time.process_time() - started - seconds["sample"] - seconds["reward"]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if arm != "grpo":
        seconds["ties"] = sum(ties) / len(ties)
    (folder / "parts.json").write_text(json.dumps(seconds), encoding="utf-8")


def main() -> None:
    """Run the comparison, or print its tables."""
    parser, added = commands(__doc__)
    command = added.add_parser("trl", help="one training by TRL, which `run` starts")
    command.add_argument("arm", choices=THEIRS)
    command.add_argument("world", type=Path)
    command.add_argument("folder", type=Path)
    command.add_argument("rate", type=float)
    command.add_argument("seed", type=int)
    args = parser.parse_args()
    if args.command == "run":
        run(args.folder, args.seeds)
    elif args.command == "trl":
        train_with_trl(args.arm, args.world, args.folder, args.rate, args.seed)
    else:
        tables(pd.read_csv(MEASURED))


if __name__ == "__main__":
    main()
