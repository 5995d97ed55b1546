"""Recipes whose run folder is in an object store: a local S3 server, real processes, real kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from made_runs import made_run
from regretless.cli.app import app
from regretless.core.errors import ConfigError
from regretless.core.mirror import CACHE_VARIABLE, working_copy
from regretless.core.object_store import ObjectStore
from regretless.core.yaml_settings import read_yaml
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import load_recipe, parse_recipe
from regretless.smoke.miniature import smoke_recipe
from run_contents import contents, differences

RECIPE = Path(__file__).resolve().parents[1] / "kill_sweep.yaml"
START = (
    "import sys; from regretless.core import mirror; mirror.INTERVAL = 0.05; mirror.SHARE = 0\n"
    "from regretless.cli.app import main; main(sys.argv[1:])"
)
"""A process that uploads its unfinished work all the time, so that a test needs no minute."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a local S3 server."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty bucket that this process, and those that it starts, have credentials for."""
    import s3fs

    secret = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**secret, "AWS_ENDPOINT_URL": server, CACHE_VARIABLE: str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


def world(url: str, **rest: Any) -> dict[str, Any]:
    small = {"prompts": 3, "test": 2, "policies": {"p": {"demonstrations": 2}}}
    return {"name": "x", "output_dir": url, "world": small, **rest}


def download(url: str, folder: Path) -> Path:
    """Everything in the store, but for locks."""
    store = ObjectStore(url)
    for name in store.list():
        if not name.startswith(".locks/"):
            store.get(name, folder / name)
    return folder


def test_lock_when_two_create_it_then_the_store_grants_it_once(bucket: str) -> None:
    store = ObjectStore(f"{bucket}/x")
    assert store.create("lock", b"1") and not store.create("lock", b"2")
    assert store.read("lock") == b"1"


@pytest.mark.parametrize(
    ("url", "setting", "message"),
    [
        ("s3://no-such-bucket-here/x", {}, "cannot be used as a run folder: .*check the name of the bucket"),
        ("{bucket}/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot be used as a run folder: .*the network"),
        ("nonsense://bucket/x", {}, "cannot be used: ValueError: Protocol not known: nonsense"),
    ],
    ids=["bucket", "endpoint", "protocol"],
)
def test_store_when_it_cannot_be_used_then_it_is_an_error_of_the_configuration_next_to_the_others(
    url: str, setting: dict[str, str], message: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(world(url.format(bucket=bucket))))
    with pytest.raises(ConfigError, match=message):
        run_recipe(load_recipe(recipe))
    result = CliRunner().invoke(app, ["run", str(recipe), "world.prompts=-1"])
    assert isinstance(result.exception, ConfigError)
    assert len(result.exception.problems) == 2


def test_urls_when_given_where_files_are_expected_then_a_message_says_what_takes_them(
    bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/x"
    for arguments in (
        ["run", f"{url}/recipe.yaml"],
        ["verify", "--responses", "in.jsonl", "--output", f"{url}/out.jsonl"],
        ["verify", "--config", f"{url}/recipe.yaml"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ConfigError), arguments
        assert f"expected a path on this machine, got {url}/" in str(result.exception)
    result = CliRunner().invoke(app, ["pair", "--responses", f"{url}/in.parquet", "--output", str(tmp_path / "o")])
    assert "download it first" in str(result.exception)
    result = CliRunner().invoke(app, ["watch", url])
    assert "watch it on the machine that runs it" in str(result.exception)
    for bad in ("s3:/bucket/x", "s3://bucket", "https://bucket/x"):
        with pytest.raises(ConfigError, match="output_dir: "):
            parse_recipe(world(bad), "x")


def test_report_when_of_a_url_then_it_is_written_here_and_the_store_stays_as_it_is(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/runs/x"
    run_recipe(parse_recipe(world(url, report={}), "x"))
    before = ObjectStore(url).list()
    assert {"recipe.yaml", "world/manifest.json", "report/report.html"} <= before.keys()
    result = CliRunner().invoke(app, ["report", url, "--output", str(tmp_path / "page")])
    assert result.exit_code == 0, result.output
    assert "world" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert ObjectStore(url).list() == before
    assert "--output: required" in str(CliRunner().invoke(app, ["report", url]).exception)


def test_runs_at_urls_when_compared_then_they_are_read_from_the_store(bucket: str, tmp_path: Path) -> None:
    greedy = {"base": {"sums": [1, 0, 0, 0]}, "dpo": {"sums": [1, 1, 0, 0]}}
    made = made_run(tmp_path / "made", greedy)
    url = f"{bucket}/runs/made"
    store = ObjectStore(url)
    for file in sorted(path for path in made.rglob("*") if path.is_file()):
        store.put(file, file.relative_to(made).as_posix())
    other = made_run(tmp_path / "other", greedy, train={"seed": 1})
    command = ["compare", url, str(other), "--output", str(tmp_path / "page"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    content = json.loads(result.stdout)
    assert [run["path"] for run in content["runs"]] == [url, str(other)]
    assert [cell["value"] for cell in content["cells"]] == [25.0, 50.0]
    assert url in (tmp_path / "page" / "comparison.html").read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["compare", url, "--output", f"{bucket}/page"])
    assert "expected a path on this machine" in str(result.exception)


@pytest.mark.slow
def test_recipe_when_run_small_in_a_store_then_it_has_the_files_of_a_local_run_and_another_machine_finds_all_done(
    bucket: str, tmp_path: Path
) -> None:
    quickstart = RECIPE.parents[1] / "recipes" / "quickstart.yaml"
    here = smoke_recipe(load_recipe(quickstart, ["train.objective=dpo"]))
    there = smoke_recipe(load_recipe(quickstart, ["train.objective=dpo", f"output_dir={bucket}/runs/x"]))
    assert there.output_dir == f"{bucket}/runs/x-smoke"
    # The local run is where the working copy would be: some files of libraries name their folder.
    copy = working_copy(there.output_dir)
    run_recipe(here.model_copy(update={"output_dir": str(copy)}))
    expected = contents(Path(shutil.move(copy, tmp_path / "local")))
    run_recipe(there)
    assert differences(expected, contents(copy)) == []
    assert differences(expected, contents(download(there.output_dir, tmp_path / "stored"))) == []
    shutil.rmtree(tmp_path / "cache")
    again = run_recipe(there)
    assert {name for name, outcome in again.outcomes.items() if outcome.ran} == set()
    assert differences(expected, contents(copy)) == []


@pytest.mark.extended
@pytest.mark.slow
def test_run_when_killed_in_training_then_another_machine_goes_on_from_its_checkpoint_and_ends_with_equal_bytes(
    bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/runs/x"
    recipe = tmp_path / "recipe.yaml"
    values = read_yaml(RECIPE)
    del values["judge"], values["pair"]["rule"], values["evaluate"]["chat"]
    values["train"] |= {
        "num_train_epochs": 20,
        "pairs_per_step": 2,
        "eval_pairs": 0,
        "eval_strategy": "no",
    }
    recipe.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, "-c", START, "run", str(recipe), "--output-dir", url]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    subprocess.run(command, env=environment, check=True)
    copy = working_copy(url)
    expected = contents(copy)
    store = ObjectStore(url)
    store.delete(store.list())
    shutil.rmtree(tmp_path / "cache")

    process = subprocess.Popen(command, env=environment)
    checkpoints: list[str] = []
    while not checkpoints:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.02)
        found = store.list("train/repo")
        checkpoints = [name for name in found if name.endswith("trainer_state.json")]
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = store.list("train/repo")
    assert "train/repo/pending.json" in found and "train/repo/manifest.json" not in found
    shutil.rmtree(tmp_path / "cache")

    resumed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert "taken over from process" in resumed.stderr and "downloading" in resumed.stderr
    assert "sample: unchanged, skipped" in resumed.stderr
    first = json.loads((copy / "train" / "repo" / "training.log").read_text(encoding="utf-8").splitlines()[0])
    assert first["step"] > 0  # not from the start
    assert differences(expected, contents(copy)) == []
    assert differences(expected, contents(download(url, tmp_path / "stored"))) == []
