"""Seconds until a command answers, until training is imported, and until its first step ends.

    python benchmarks/startup.py

Each row is measured in fresh processes. The training has 100 pairs of word problems and a random Qwen3-shaped model of
two layers, in the trainer's own defaults; its seconds begin when everything is imported and the model is made.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from spread import spread

from regretless.core.text_cleaning import never_fail_to_print
from regretless.world.problems import Faults, Generator, solve

TAB = ["env", "_REGRETLESS_COMPLETE=complete_bash", "COMP_WORDS=regretless train learning_r", "COMP_CWORD=2"]
"""Bash at a Tab behind the words; the command follows."""
IMPORTS = "import regretless; regretless.PreferenceTrainer, regretless.PreferenceConfig"
TRAINING = """
import json, sys, tempfile, time
begin = time.perf_counter()
from regretless import PreferenceConfig, PreferenceTrainer
from regretless.world.tokenizer import build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
tokenizer = build_tokenizer()
config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24)
model = AutoModelForCausalLM.from_config(config)
pairs = json.load(sys.stdin)
ready = time.perf_counter()

class First(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("SECONDS", json.dumps({"imports": ready - begin, "step": time.perf_counter() - ready}))
        control.should_training_stop = True

with tempfile.TemporaryDirectory() as folder:
    args = PreferenceConfig(output_dir=folder, objective="dpo", report_to="none", disable_tqdm=True, use_cpu=True)
    PreferenceTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer, callbacks=[First()]).train()
"""


def word_problems(count: int) -> list[dict[str, str]]:
    """Pairs of a right and a wrong solution."""
    rng = random.Random(0)
    generator = Generator((2, 4), 9)
    wrong = Faults(off_at_end=1.0)
    problems = [generator.draw(rng, set()) for _ in range(count)]
    return [
        {
            "prompt": problem.prompt,
            "chosen": solve(problem, Faults(), rng),
            "rejected": solve(problem, wrong, rng),
        }
        for problem in problems
    ]


def seconds(command: list[str]) -> float:
    """Wall time of a process."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def command_line() -> str:
    """The installed command, which a shell asks for completions."""
    return str(Path(sys.executable).with_name("regretless"))


def first_step(python: str, pairs: str) -> dict[str, float]:
    """Seconds of a training's imports, and from there to the end of its first step."""
    done = subprocess.run([python, "-c", TRAINING], input=pairs, text=True, check=True, capture_output=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS "))
    told: dict[str, float] = json.loads(line.removeprefix("SECONDS "))
    return told


def main() -> None:
    """Measure, and print a table."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = range(parser.parse_args().repeats)
    python = sys.executable
    rows = {
        "`regretless --help`": [python, "-m", "regretless", "--help"],
        "`regretless recipes`": [python, "-m", "regretless", "recipes"],
        "`regretless dpo --help`": [python, "-m", "regretless", "dpo", "--help"],
        "`regretless settings`": [python, "-m", "regretless", "settings"],
        "Tab behind `regretless train learning_r`": [*TAB, command_line()],
        "`import regretless`, and its trainer": [python, "-c", IMPORTS],
    }
    found = {name: [seconds(command) for _ in repeats] for name, command in rows.items()}
    pairs = json.dumps(word_problems(100))
    told = [first_step(python, pairs) for _ in repeats]
    found["training on 100 pairs: imports and model"] = [one["imports"] for one in told]
    found["training on 100 pairs: from there to the end of the first step"] = [one["step"] for one in told]
    print("| | seconds |\n|---|---|")
    for name, values in found.items():
        print(f"| {name} | {spread(values)} |")


if __name__ == "__main__":
    main()
