"""Secrets on every way in, looked for at every way out: all files of a run, and all that it prints."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless.cli import app
from regretless.core.errors import ConfigError, DataError
from regretless.core.secrets import hide, is_secret
from regretless.core.settings import Section, dump
from regretless.core.terminal import terminal
from regretless.runs import pipeline
from regretless.runs.recipe import load_recipe, parse_recipe
from regretless.studies.job import Job, run_job
from regretless.training.arguments import PreferenceConfig
from regretless.training.processes import train_in_processes, write_failure
from regretless.training.task import arguments_of, task_of
from regretless.training.trainer import PreferenceTrainer
from regretless.workflow.children import Children, Ended, Event

SECRET = "Planted5ecret0fThisTest"
TOKEN = {"hub_token": SECRET}


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """Writes a recipe that trains on existing pairs; its run folder is `run` beside it."""
    sides = [" ".join(side) for side in itertools.product("123", repeat=3)]
    rows = [{"prompt": f"{n} +", "chosen": sides[n], "rejected": sides[-n - 1]} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"objective": ["dpo", "ipo"], "lora": {"r": 4}, "pairs_per_step": 4, "max_steps": 2, "save_steps": 1}

    def write(values: dict[str, Any]) -> Path:
        base = {
            "name": "run",
            "threads": 1,
            "output_dir": str(tmp_path / "run"),
            "model": {"name_or_path": str(model)},
            "pairs": {"dataset": str(tmp_path / "pairs.jsonl")},
            "report": {},
            **values,
            "train": {**train, **values.get("train", {})},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(base))
        return tmp_path / "recipe.yaml"

    return write


@pytest.fixture
def run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs a command: its exit code, and all that it and its processes print. No file of theirs has the secret."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main(list(words))
        printed = "".join(capfd.readouterr())
        written = {path for path in tmp_path.rglob("*") if path.is_file()}
        written -= {tmp_path / "recipe.yaml", tmp_path / "study.yaml"}
        leaks = [str(path.relative_to(tmp_path)) for path in written if SECRET.encode() in path.read_bytes()]
        assert leaks == [] and SECRET not in printed, printed
        return int(ended.value.code or 0), printed

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train": TOKEN}, []),
        ({}, [f"train.hub_token={SECRET}"]),
        ({"train": {"methods": {"dpo": TOKEN}}}, ["parallel=2"]),
        ({"train": {**TOKEN, "processes": 2, "objective": "dpo"}}, []),
        ({"cluster": {"runtime_env": {"env_vars": {"HF_TOKEN": SECRET}}}}, ["plan"]),
    ],
)
def test_run_with_a_secret_when_it_ends_then_no_file_and_no_message_has_it_and_it_is_done(
    tmp_path: Path,
    recipe: Callable[..., Path],
    run: Callable[..., tuple[int, str]],
    values: dict[str, Any],
    words: list[str],
) -> None:
    path = recipe(values)
    if words == ["plan"]:
        assert run("plan", str(path), "--json")[0] == 0
        return
    assert run("run", str(path), *words)[0] == 0
    assert (tmp_path / "run" / "train" / "dpo" / "training_args.bin").is_file()
    assert (tmp_path / "run" / "report.html").is_file() or list((tmp_path / "run").rglob("*.html"))
    # Another token is no other training; the recipe that the run folder keeps gives the same one without any.
    other = [word.replace(SECRET, "An0therPlantedSecret") for word in words]
    for again in ([str(path), *other], [str(tmp_path / "run" / "recipe.yaml"), "--output-dir", str(tmp_path / "run")]):
        code, printed = run("run", *again)
        assert code == 0 and "train/dpo: unchanged" in printed, printed


@pytest.mark.slow
def test_study_with_a_secret_when_it_ends_then_no_file_and_no_message_has_it(
    tmp_path: Path, recipe: Callable[..., Path], run: Callable[..., tuple[int, str]]
) -> None:
    recipe({"report": None})
    study = {
        "name": "study",
        "recipe": "recipe.yaml",
        "seeds": {"training": [1]},
        "settings": {"train.hub_token": SECRET},
        "output_dir": "run",
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    code, printed = run("study", "study.yaml")
    assert code == 0, printed
    assert list(tmp_path.rglob("training_args.bin"))


def test_token_when_it_is_a_setting_then_it_reaches_the_trainer_and_processes_but_no_task_file(
    tmp_path: Path, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe(recipe({"train": {"methods": {"dpo": TOKEN}}}), [])
    assert loaded.train is not None
    assert arguments_of(loaded.train, "dpo", tmp_path / "a", 1).hub_token == SECRET
    assert arguments_of(loaded.train, "ipo", tmp_path / "a", 1).hub_token is None
    started: list[dict[str, Any]] = []

    def popen(command: list[str], **options: Any) -> None:
        started.append({"command": command, **options})
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    task = task_of(loaded.train, "dpo", loaded.model, "pairs", tmp_path, None)
    with pytest.raises(KeyboardInterrupt):
        train_in_processes(task, 2, tmp_path / "processes", loaded.train.environment("dpo"))
    (call,) = started
    assert call["env"]["HF_TOKEN"] == SECRET and SECRET not in str(call["command"])
    assert SECRET not in (tmp_path / "processes" / "task.json").read_text()


def test_arguments_in_python_when_they_have_secrets_then_they_are_used_and_not_saved(
    tmp_path: Path, model: Path
) -> None:
    loading = {"token": SECRET, "dtype": "float32"}
    args = PreferenceConfig(
        str(tmp_path), objective="dpo", hub_token=SECRET, report_to="none", model_init_kwargs=loading, use_cpu=True
    )
    data = [{"prompt": "1 +", "chosen": "2", "rejected": "3"}]
    trainer = PreferenceTrainer(str(model), args=args, train_dataset=data)
    trainer.save_model()
    assert SECRET not in args.to_json_string()
    assert trainer.args is args and args.hub_token == SECRET and args.loading() == loading
    leaks = [path.name for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert (tmp_path / "training_args.bin").is_file() and leaks == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *((f"train.{key}={SECRET}", "unknown for dpo") for key in ("hf_token", "token", "use_auth_token", "api-key")),
        (f"judge.api-key={SECRET}", "unknown key (got (hidden))"),
        (f"sample.server.api_key={SECRET}", "hidden"),
        (f"train.hub_tokn=hf_{SECRET}{SECRET}", "unknown for dpo"),
        (f"judge.parameters={{user: x, extra: {{apiKey: {SECRET}}}}}", "extra (server.api_key_env names"),
        (f"model.name_or_path=s3://me:{SECRET}@host/model", "s3://(hidden)@host/model"),
        (f"judge.server.base_url=http://localhost:1/v1#key={SECRET}", "without user, password, query or fragment"),
        (f"judge.server.base_url=http://me:{SECRET}@localhost/v1", "without user, password, query or fragment"),
        (f"pairs.dataset=https://host/pairs.jsonl?sig={SECRET}", "sig=(hidden)"),
    ],
)
def test_setting_with_a_secret_when_it_is_refused_then_the_message_hides_it(
    recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str], settings: str, said: str
) -> None:
    # Existing pairs take the place of stages that would make some.
    path = recipe({} if settings.startswith(("train", "pairs", "model")) else {"pairs": None, "judge": {"model": "m"}})
    with pytest.raises(SystemExit) as ended:
        app.main(["run", str(path), settings])
    printed = "".join(capsys.readouterr())
    assert ended.value.code != 0 and SECRET not in printed and said in printed, printed


def test_secret_when_an_error_repeats_its_value_then_message_and_traceback_hide_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "val-of-the-environment")

    def fail(*_: Any) -> None:
        raise KeyError(f"{SECRET} val-of-the-environment")

    class Open(Section):
        options: dict[str, Any]

    Open.parse({"options": {"password": SECRET}}, "")
    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit):
        app.main([])
    printed = "".join(capsys.readouterr())
    assert "Traceback" in printed and "KeyError: '(hidden) (hidden)'" in printed


def test_secret_when_a_process_fails_with_it_or_it_is_printed_then_report_and_terminal_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    # What a job of a study prints of a library's error, and what a child process sends with one.
    job = Job("run: dpo", parse_recipe({"name": "x", "output_dir": str(tmp_path / "run")}, "x"), [], tmp_path, tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(pipeline, "do_stages", fail_with_secret)
    with pytest.raises(KeyError):
        run_job(job, 1)
    assert SECRET not in (said := capsys.readouterr().err) and "KeyError: '(hidden) password=(hidden)'" in said
    ended: list[Event] = []
    with Children([]) as children:
        children.start("one", int, SECRET)
        while children:
            ended += children.events()
    (failed,) = [event.error for event in ended if isinstance(event, Ended)]
    assert failed is not None and "int() with base 10: '(hidden)'" in str(failed.__cause__)
    for rank, error in enumerate((ConfigError(SECRET, [f"train.x: {SECRET}"]), DataError(SECRET), KeyError(SECRET))):
        write_failure(tmp_path, error, rank)
        report = (tmp_path / f"failed-{rank}.json").read_text()
        assert SECRET not in report and "(hidden)" in report
    printed = io.StringIO()
    terminal(file=printed, width=200).print(f"row 1 has {SECRET}, row 2 has none")
    assert printed.getvalue() == "row 1 has (hidden), row 2 has none\n"


def fail_with_secret(*_: Any) -> None:
    """Work of a job that meets a library's error."""
    raise KeyError(f"{SECRET} password=of-another-program")


def test_settings_when_stored_then_secrets_are_left_out_and_those_in_addresses_hidden() -> None:
    class Open(Section):
        options: dict[str, Any]

    values = {
        "hub_token": SECRET,
        "list": [{"password": SECRET}],
        "n": 1,
        "note": f"http://me:{SECRET}@h/?sig={SECRET}",
    }
    shown = {"list": [{}], "n": 1, "note": "http://(hidden)@h/?sig=(hidden)"}
    assert dump(Open.parse({"options": values}, "")) == {"options": shown}


def test_key_when_it_names_a_secret_then_it_is_one_whatever_its_spelling() -> None:
    secrets = "hf_token token use_auth_token api-key apiKey OPENAI_API_KEY client_secret Authorization train.hub_token"
    others = "pad_token eos_token max_tokens token_ids tokenizer api_key_env keys author token_numbers PWD"
    assert [key for key in secrets.split() if not is_secret(key)] == []
    assert [key for key in others.split() if is_secret(key)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://u:p/w@h:80/v1, now", "see http://(hidden)@h:80/v1, now"),
        ("postgres://u@h and a@b.c", "postgres://(hidden)@h and a@b.c"),
        ("s3://b/k?X-Amz-Signature=abc&a=1", "s3://b/k?X-Amz-Signature=(hidden)&a=1"),
        ('{"hf_token": "a b", "n": 1}', '{"hf_token": (hidden), "n": 1}'),
        ("api_key='a b', x=2; token=None", "api_key=(hidden), x=2; token=None"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer (hidden)"),
        ("train.hub_token: expected a text", "train.hub_token: expected a text"),
        ("sk-" + "a1" * 12 + " and hf_" + "b2" * 17, "(hidden) and (hidden)"),
        ("temperature=0.7, beta=0.1, 5 tokens: 3", "temperature=0.7, beta=0.1, 5 tokens: 3"),
    ],
)
def test_text_when_a_secret_shows_by_its_form_then_the_rest_stays(text: str, shown: str) -> None:
    assert hide(text) == shown
