"""Settings that are written as options: the answer is the command to use."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from regretless.cli.app import main
from regretless.cli.flags import TRL, check_options
from regretless.core.errors import ConfigError
from regretless.modeling.load import ModelConfig
from regretless.runs.recipe import PairsSource
from regretless.training.arguments import PreferenceConfig
from regretless.training.train_config import LoraSettings, TrainConfig

OPTIONS = ("--pairs", "--model", "--output", "--config", "--help")


def answer(text: str, *, trains: bool = True) -> str:
    """The command that is printed for a command with unknown options."""
    with pytest.raises(ConfigError) as caught:
        check_options("regretless dpo", shlex.split(text), OPTIONS, trains=trains)
    return str(caught.value).splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (
            "--model_name_or_path m --dataset_name data --output_dir out --learning_rate 5e-7 --bf16 --max_steps=1",
            "--model m --pairs data --output out learning_rate=5e-7 bf16=true max_steps=1",
        ),
        (  # without further options, TRL's adapter is this one
            "--pairs p --no_remove_unused_columns --lora_r 8 --use_peft",
            "--pairs p lora.r=8 lora.alpha=32 lora.dropout=0.05 remove_unused_columns=false",
        ),
        ("--pairs p --use_peft false beta=0.2 --max-length 512", "--pairs p beta=0.2 max_length=512"),
        ("--pairs p --truncation_mode keep_start", "--pairs p truncation=keep_start"),
        ("--lora_target_modules q_proj v_proj", "'lora.target_modules=[q_proj,v_proj]'"),
    ],
)
def test_options_of_trl_when_answered_then_the_command_with_settings_is_printed(given: str, printed: str) -> None:
    assert answer(given) == f"regretless dpo {printed}"


def test_names_of_trl_when_compared_with_the_settings_then_each_exists() -> None:
    sections = {"lora": LoraSettings, "model": ModelConfig}
    arguments = PreferenceConfig.__dataclass_fields__
    for target in TRL.values():
        section, _, key = target.partition(".")
        known = {*sections[section].model_fields} if key else {*PairsSource.model_fields, *arguments}
        assert target in OPTIONS or (key or section) in known, target


def test_misspelled_option_when_given_then_the_parser_answers(capsys: pytest.CaptureFixture[str]) -> None:
    check_options("regretless dpo", ["--ouput", "out"], OPTIONS, trains=True)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--ouput", "out"])
    assert ended.value.code == 2 and "--output" in capsys.readouterr().err


def test_command_when_run_with_options_of_trl_then_it_ends_with_the_command_to_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(f"dpo --model_name_or_path m --dataset_name d --output_dir {tmp_path} --beta 0.2".split())
    assert ended.value.code == 2
    assert f"regretless dpo --model m --pairs d --output {tmp_path} beta=0.2" in capsys.readouterr().err


def test_adapter_when_set_by_the_names_of_trl_then_the_right_ones_are_said() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"use_peft": True, "lora_r": 8}, "train")
    assert str(caught.value).count("lora.r, lora.alpha") == 2 and "use_cpu" not in str(caught.value)


@pytest.mark.parametrize(
    ("losses", "instead"),
    [
        ("--loss_type sigmoid", "regretless dpo --pairs p"),
        ("--loss_type ipo --beta 0.2", "regretless ipo --pairs p beta=0.2 reduction=mean"),
        (
            "--loss_type sigmoid ipo --loss_weights 1 2",
            'regretless weighted_sum --pairs p \'terms=[{"objective": "dpo", "weight": 1.0}, '
            '{"objective": "ipo", "weight": 2.0, "reduction": "mean"}]\'',
        ),
        ("--loss_type bco_pair", "regretless dpo --pairs p loss_type=bco_pair"),
    ],
)
def test_loss_when_written_as_in_trl_then_the_command_that_is_printed_trains_it(losses: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options("regretless dpo", ["--pairs", "p", *losses.split()], OPTIONS, trains=True)
    assert str(caught.value).splitlines()[-1].strip() == instead
