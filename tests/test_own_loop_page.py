"""docs/own_loop.md: its code next to the trainer, and what it loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from regretless import PreferenceConfig, PreferenceTrainer
from tiny_model import save_tiny_model

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "own_loop.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(NAME,) = set(re.findall(r'"(Qwen/[^"]+)"', PAGE))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder with the name of the page's model, in float64."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path(NAME))
    AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float64).save_pretrained(NAME)


class Gradients(TrainerCallback):
    """The gradients of the last step of a training."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.last = {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.usefixtures("model")
def test_loop_of_the_page_when_run_then_losses_gradients_and_weights_are_those_of_the_trainer() -> None:
    names: dict[str, Any] = {}
    for number, example in enumerate(EXAMPLES, 1):
        exec(compile(example, f"docs/own_loop.md, example {number}", "exec"), names)

    batch = re.findall(r'pair\("(.*)", "(.*)", "(.*)"\)', EXAMPLES[0])
    rows = [
        {"prompt": prompt.replace("\\n", "\n"), "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in batch
    ]
    gradients = Gradients()
    trainer = PreferenceTrainer(
        AutoModelForCausalLM.from_pretrained(NAME),
        args=PreferenceConfig(
            objective="dpo",
            beta=0.1,
            max_steps=3,
            per_device_train_batch_size=len(rows),
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=rows,
        processing_class=names["tokenizer"],
        callbacks=[gradients],
    )
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(rows) == 3 and logged == pytest.approx(names["losses"], rel=1e-6) and logged[0] > logged[2]
    # The trainer stores log-probabilities of the reference in float32.
    trained = dict(trainer.model.named_parameters())
    for name, weight in names["policy"].named_parameters():
        torch.testing.assert_close(gradients.last[name], weight.grad, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(trained[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("model")
def test_loop_of_the_page_when_run_alone_then_three_folders_and_no_data_libraries_are_loaded() -> None:
    end = (
        "import sys\n"
        "print({name.split('.')[1] for name in sys.modules if name.startswith('regretless.')})\n"
        "print({'datasets', 'pyarrow', 'openai', 'typer'} & set(sys.modules))\n"
    )
    program = "\n".join([*EXAMPLES, end])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders, libraries = map(eval, done.stdout.splitlines()[-2:])
    assert folders == {"core", "modeling", "objectives"}
    assert libraries == set()
