"""The page as a browser's parser sees it: complete, self-contained, and with model text as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_helpers import HOSTILE, TOO_LONG, answers, finish

from regretless.core.errors import DataError
from regretless.core.files import write_json, write_jsonl
from regretless.data.columns import Verdict
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.reporting.collect import FinishedStage, collect
from regretless.reporting.report import ReportConfig, run
from regretless.reporting.views import busy_seconds, stage_rows, tables
from regretless.runs.stages import STAGES

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Elements with their attributes and text; fails on a tag that does not close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str | None = None) -> str:
        return "".join(text for inside, text in self.texts if tag in (None, inside))


def report(run_dir: Path, output: Path, **settings: object) -> Page:
    run(ReportConfig(**settings), run_dir, output)
    return Page((output / "report.html").read_text(encoding="utf-8"))


def embedded(page: Page) -> Any:
    """Data of the explorer; the first script of the page."""
    return json.loads(next(text for inside, text in page.texts if inside == "script"))


def test_report_when_a_run_is_finished_then_every_section_shows_its_numbers(finished_run: Path, tmp_path: Path) -> None:
    page = report(finished_run, tmp_path)
    text = page.text()
    assert "".join(page.text("h1")).strip() == "quickstart", "the recipe's name, not that of the folder"
    for part in (
        f"refused because · {TOO_LONG}",
        "+37.0",
        "66.0 – 78.0",
        "318,264",
        "dropped · all correct",
        "Loss",
        "300 pairs; chosen above rejected",
    ):
        assert part in text
    assert "Solved by training" in text and "Broken by training" in text
    assert len(page.all("svg")) == 1 + 6 + 4 + 3
    assert not any(attributes.get("class") == "missing" for attributes in page.all("p"))


def test_report_when_a_run_has_rounds_then_their_curves_times_and_one_prompts_answers_are_shown(
    finished_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))

    def estimate(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.125, "high": value + 0.125}

    lines = [
        {"round": number, "method": method, "pass_at_1": estimate(0.25 * number), "kl_to_start": estimate(-0.5)}
        | {"effective_share": 0.75, "mismatch": 0.001, "saturated": None, "pairs": 12, "replayed": 3, "steps": 4}
        for method in ("repo", "dpo")
        for number in (1, 2)
    ]
    write_jsonl(run / "rounds/rounds.jsonl", lines)
    for place, seconds in (("1/sample", 7.0), ("1/train/repo", 2.0), ("2/repo/sample", 5.0), ("2/dpo/sample", 6.0)):
        (run / "rounds" / place).mkdir(parents=True)
        finish(run / "rounds" / place, f"rounds/{place}", {"responses": 8}, seconds)
    for place, right in (("1", 0.2), ("2/repo", 0.9)):
        (run / "rounds" / place / "verify").mkdir(parents=True)
        write_records(run / "rounds" / place / "verify/responses.parquet", answers(place, right))
    history = json.loads((run / "train/repo/trainer_state.json").read_text())["log_history"]
    for number, place in ((1, "1/train/repo"), (2, "2/repo/train/repo")):
        log = [{**history[step - 1], "loss": number + step / 8} for step in (2, 4)]
        write_json(run / "rounds" / place / "trainer_state.json", {"log_history": [*log, history[-1]]})
    logs = collect(run, examples=0, seed=0).logs
    assert [(line["step"], line["loss"]) for line in logs["repo"]] == [(2, 1.25), (4, 1.5), (6, 2.25), (8, 2.5)]
    page = report(run, tmp_path)
    text = page.text()
    marks = [line for line in page.all("line") if line.get("class") == "mark"]
    assert len(marks) == 6, "one in each chart of the training"
    for part in ("0.25 [0.125, 0.375]", "−0.5 [−0.625, −0.375]"):
        assert part in text
    assert [page.text("h4").count(f"round {number}") for number in (1, 2, 3)] == [1, 1, 0]
    # Pass@1, KL, effective sample size and mismatch; no round has a number of saturated pairs.
    assert len(page.all("svg")) == 1 + 6 + 4 + 3 + 4 and "mean distance. Above 0.1 a run ends." in text
    cells = [text.strip() for inside, text in page.texts if inside == "td"]
    start = cells.index("7.0")
    assert cells[start : start + 8] == ["7.0", "2.0", "5.0", "–", "7.0", "–", "6.0", "–"]
    stages = [(row.name, row.seconds) for row in stage_rows(collect(run, examples=0, seed=0, places=["rounds"]).stages)]
    assert stages[:2] == [("rounds/1", 9.0), ("rounds/2", 11.0)]
    assert "Rounds" in page.text("h2") and "Rounds" not in report(finished_run, tmp_path / "plain").text("h2")


def test_report_when_model_text_is_html_then_it_shows_as_text_and_no_script_joins(
    finished_run: Path, tmp_path: Path
) -> None:
    page = report(finished_run, tmp_path, examples=1000)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    # Data that no browser runs, then four scripts that the policy knows by their hashes.
    assert [script.get("type") for script in page.all("script")] == ["application/json", None, None, None, None]
    own = [text for inside, text in page.texts if inside == "script"][1:]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src " + " ".join(
        f"'sha256-{digest}'" for digest in digests
    )
    assert page.text("div").count(HOSTILE) == 4  # four models' answers to one problem
    assert "17" not in page.text("b")


def test_report_when_an_earlier_version_kept_secrets_in_the_run_folder_then_the_page_has_none(
    finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    secrets = {"hub_token": "Planted5ecret", "note": "hf_" + "a1" * 17, "data": "http://me:Planted5ecret@host/x"}
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "train": {**recipe["train"], **secrets}}))
    manifest = json.loads((run / "train" / "dpo" / "manifest.json").read_text())
    manifest["settings"] |= {"train": secrets}
    (run / "train" / "dpo" / "manifest.json").write_text(json.dumps(manifest))
    text = report(run, tmp_path / "page").text()
    assert "Planted5ecret" not in text and secrets["note"] not in text
    assert text.count("http://(hidden)@host/x") == 2, "the recipe's and the stage's"


def test_report_when_opened_then_it_refers_to_nothing_outside_itself(finished_run: Path, tmp_path: Path) -> None:
    page = report(finished_run, tmp_path)
    assert not {"link", "img", "iframe", "base", "object"} & {tag for tag, _ in page.elements}
    identifiers = {attributes.get("id") for _, attributes in page.elements}
    for _, attributes in page.elements:
        assert "src" not in attributes
        if "href" in attributes:
            assert str(attributes["href"]).removeprefix("#") in identifiers
    assert "url(" not in page.text("style") and "@import" not in page.text("style")


def test_report_when_read_aloud_then_tables_and_figures_are_named_and_headings_do_not_skip(
    finished_run: Path, tmp_path: Path
) -> None:
    page = report(finished_run, tmp_path)
    assert len(page.all("caption")) == len(page.all("table")) > 4
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in page.all("svg"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_report_when_tokens_were_analyzed_then_the_page_holds_their_numbers_and_texts_unchanged(
    finished_run: Path, tmp_path: Path
) -> None:
    page = report(finished_run, tmp_path, token_pairs=2)
    data = embedded(page)
    content = json.loads((finished_run / "analyze" / "token_rewards.json").read_text())
    assert data["models"] == list(content["policies"])
    assert (len(data["pairs"]), data["hidden"]) == (2, 1)
    for pair, analyzed in zip(data["pairs"], content["pairs"], strict=False):
        for shown, response in zip(pair["responses"], analyzed["responses"], strict=True):
            assert "".join(shown["tokens"]) == response["text"] + "<eos>"
            assert shown["special"] == [len(response["tokens"]) - 1]
            assert shown["reference"] == pytest.approx(response["reference"], abs=1e-4)
            assert shown["weights"] == pytest.approx(response["weights"], abs=1e-4)
            assert shown["logps"][2] == pytest.approx(response["policies"]["dpo"]["logps"], abs=1e-4)
    assert data["pairs"][0]["responses"][0]["behavior"] == pytest.approx(
        content["pairs"][0]["responses"][0]["behavior"], abs=1e-4
    )
    assert data["pairs"][1]["responses"][0]["behavior"] is None
    assert data["pairs"][1]["prompt"] == [{"role": "user", "content": HOSTILE}]


def test_prompts_when_they_have_tool_calls_then_examples_and_explorer_show_them(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    prompt = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
    ]
    tokens = json.loads((tmp_path / "run/analyze/token_rewards.json").read_text())
    tokens["pairs"][0]["prompt"] = prompt
    (tmp_path / "run/analyze/token_rewards.json").write_text(json.dumps(tokens))
    for file in (tmp_path / "run/evaluate").glob("*/arithmetic/responses.parquet"):
        write_records(file, [replace(row, prompt=prompt) for row in read_responses(file)[0]])
    page = report(tmp_path / "run", tmp_path)
    texts = ['{"name": "add", "arguments": {"a": 2}}', "name: add\n4"]
    pair = embedded(page)["pairs"][0]
    assert ([message["content"] for message in pair["prompt"]], pair["label"]) == (texts, "name: add 4")
    assert all(text in page.text("div") for text in texts)


def test_navigation_when_read_then_it_has_the_sections_in_the_order_of_the_page(
    finished_run: Path, tmp_path: Path
) -> None:
    report(finished_run, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="#(\w+)">([^<]*)</a>', text.split("<nav")[1].split("</nav>")[0])
    headings = re.findall(r'<h2 id="h-(\w+)">([^<]*)</h2>', text)
    assert links == headings
    assert [anchor for anchor, _ in links][:3] == ["tokens", "results", "examples"]


def test_changes_when_a_table_is_long_then_it_is_folded(finished_run: Path, tmp_path: Path) -> None:
    report(finished_run, tmp_path)
    changes = (tmp_path / "report.html").read_text(encoding="utf-8").split('<section id="changes"')[1]
    calibration = json.loads((finished_run / "analyze" / "calibration.json").read_text())["policies"]
    rows = sum(len(result["bins"]) for result in calibration.values())
    assert rows > 8
    folded = re.search(rf"<details><summary>By confidence: {rows} rows</summary>(.*?)</details>", changes, re.DOTALL)
    assert folded is not None and folded[1].count("<tr>") == rows + 1
    assert "Predicted confidence and observed accuracy." in re.sub(
        r"<details>.*?</details>", "", changes, flags=re.DOTALL
    )


def test_examples_when_several_models_were_trained_then_base_and_own_are_side_by_side_and_the_others_folded(
    finished_run: Path, tmp_path: Path
) -> None:
    report(finished_run, tmp_path)
    examples = (tmp_path / "report.html").read_text(encoding="utf-8").split('<section id="examples"')[1]
    examples = examples.split("</section>")[0]
    articles = examples.split("<article>")[1:]
    assert len(articles) == 2
    for article, verdicts in zip(articles, (["wrong", "correct"], ["correct", "wrong"]), strict=True):
        shown, others = article.split("<details>")
        model = r'<h4><span class="key c\d"></span>(\w+)</h4><span class="verdict (\w+)">'
        assert re.findall(model, shown) == list(zip(["base", "repo"], verdicts, strict=True))
        assert [name for name, _ in re.findall(model, others)] == ["repo_det", "dpo"]


def test_examples_when_no_verdict_changed_then_answers_are_shown_all_the_same(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    for folder in (tmp_path / "run" / "evaluate").iterdir():
        for file in folder.glob("*/responses.parquet"):
            write_records(file, [replace(row, verdict=Verdict.WRONG) for row in read_responses(file)[0]])
    report(tmp_path / "run", tmp_path)
    examples = (tmp_path / "report.html").read_text(encoding="utf-8").split('<section id="examples"')[1]
    assert "Same verdict before and after" in examples.split("</section>")[0]


def test_folder_of_a_single_training_when_reported_then_the_page_has_its_curves(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run / "train" / "dpo", tmp_path / "mine")
    data = collect(tmp_path / "mine", examples=1, seed=0)
    assert [stage.name for stage in data.stages] == ["train/mine"] and data.main_model == "mine"
    assert data.logs.keys() == {"mine"} and data.logs["mine"]
    report(tmp_path / "mine", tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "mine" in page.split('<section id="training"')[1].split("</section>")[0]


def harness_row(label: str, metric: str, value: float, **numbers: object) -> dict[str, object]:
    names = {"benchmark": "ifeval", "label": label, "metric": metric, "n": 541, "value": value}
    unknown = dict.fromkeys(("low", "high", "gain", "gain_low", "gain_high"))
    return names | unknown | numbers


def test_report_when_the_harness_ran_then_shares_are_in_percent_and_other_metrics_on_their_scale(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    rows = [
        harness_row("base", "bleu", 20.5, low=20.0, high=21.0),
        harness_row("base", "prompt_level_strict_acc", 0.5, low=0.46, high=0.54),
        harness_row("repo", "bleu", 22.0, low=21.5, high=22.5, gain=1.5, gain_low=1.0, gain_high=2.0),
        harness_row(
            "repo", "prompt_level_strict_acc", 0.45, low=0.41, high=0.49, gain=-0.05, gain_low=-0.1, gain_high=0.0
        ),
    ]
    file = tmp_path / "run" / "evaluate" / "results.json"
    note = "gsm8k: seed-41 of repo not in the mean over seeds: temperature is 0.7 in seed-42; 1.0 in seed-41"
    file.write_text(json.dumps({"rows": [], "seeds": [], "left_out": [note], "chat": [], "harness": rows}))
    page = report(tmp_path / "run", tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8").split('<section id="results"')[1]
    cells = [
        re.findall(r"<t[dh][^>]*>(?:<span.*?</span>)?(.*?)</t[dh]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", html.split("</section>")[0], re.DOTALL)
    ]
    assert [row for row in cells if row[0].startswith(("bleu", "prompt_level"))] == [
        ["bleu", "base", "20.50", "20.00 – 21.00", "541", "–", "–"],
        ["bleu", "repo", "22.00", "21.50 – 22.50", "541", "+1.50", "+1.00 to +2.00"],
        ["prompt_level_strict_acc (%)", "base", "50.0", "46.0 – 54.0", "541", "–", "–"],
        ["prompt_level_strict_acc (%)", "repo", "45.0", "41.0 – 49.0", "541", "−5.0", "−10.0 to +0.0"],
    ]
    assert any("bleu: base 20.50; repo 22.00" in str(svg["aria-label"]) for svg in page.all("svg"))
    assert note in page.text()
    assert "Nothing was evaluated" not in page.text()


def chat_row(label: str, metric: str, **numbers: object) -> dict[str, object]:
    names = {"benchmark": "mt_bench", "label": label, "judge": "judge <b>1</b>", "metric": metric, "unit": "1–10"}
    unknown = dict.fromkeys(("value", "standard_error", "low", "high", "gain", "gain_low", "gain_high"))
    return {**names, **unknown, "n": 80, "failed": 0, "cut": 2, "requests": 160, "dollars": 0.5, **numbers}


def test_report_when_a_judge_was_asked_then_each_metric_has_its_error_its_failures_and_what_it_cost(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    gain = {"gain": -0.25, "gain_low": -0.5, "gain_high": 0.0}
    rows = [
        chat_row("repo", "score", value=6.125, standard_error=0.21, low=5.7, high=6.55, failed=3, **gain),
        chat_row("repo", "category_math", failed=3),
        chat_row("base", "score", value=6.375, standard_error=0.2, low=5.97, high=6.78),
    ]
    file = tmp_path / "run" / "evaluate" / "results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat": rows}))
    page = report(tmp_path / "run", tmp_path)
    assert "mt_bench, judged by judge <b>1</b> in 320 requests, about $1.00." in page.text()
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    cells = [
        re.findall(r"<t[dh][^>]*>(?:<span.*?</span>)?(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*)</tr>", html)
    ]
    assert [row for row in cells if "1–10" in row[0]] == [
        ["score (1–10)", "base", "6.38", "0.20", "5.97 – 6.78", "80", "–", "–", "0", "2"],
        ["score (1–10)", "repo", "6.12", "0.21", "5.70 – 6.55", "80", "−0.25", "−0.50 to +0.00", "3", "2"],
        ["category math (1–10)", "repo", "–", "–", "– – –", "80", "–", "–", "3", "2"],
    ]
    assert any("score (1–10): base 6.38; repo 6.12" in str(svg["aria-label"]) for svg in page.all("svg"))


def test_report_when_nothing_ran_then_every_section_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = report(tmp_path / "empty", tmp_path)
    assert sum(attributes.get("class") == "missing" for attributes in page.all("p")) == len(page.all("section")) == 8
    # With nothing to explore, the explorer's place is at the end.
    assert page.all("section")[-1]["id"] == "tokens"


@pytest.mark.parametrize("part", ["evaluate", "train", "inspect", "analyze", "train/dpo/pair_scores.jsonl"])
def test_report_when_one_part_is_missing_then_the_others_show(finished_run: Path, tmp_path: Path, part: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    if (copy / part).is_dir():
        shutil.rmtree(copy / part)
    else:
        (copy / part).unlink()
    text = report(copy, tmp_path).text()
    assert "318,264" in text
    assert ("Nothing was evaluated" in text) == (part == "evaluate")
    assert ("No model was trained" in text) == (part == "train")


def test_report_when_a_file_is_broken_then_the_error_names_it(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "inspect" / "inspect.json").write_text('{"pairs": 1')
    with pytest.raises(DataError, match=r"inspect\.json: not valid JSON"):
        run(ReportConfig(), tmp_path / "run", tmp_path)


def test_report_when_a_run_is_long_then_the_page_stays_small(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    train = tmp_path / "run" / "train"
    state = json.loads((train / "dpo" / "trainer_state.json").read_text())
    line = state["log_history"][0]
    state["log_history"] = [line | {"step": step} for step in range(5000)]
    (train / "dpo" / "trainer_state.json").write_text(json.dumps(state))
    row = '{"pair_id": "1", "chosen_reward": 1.5, "rejected_reward": 0.5}\n'
    (train / "dpo" / "pair_scores.jsonl").write_text(row * 20_000)
    tokens = json.loads((tmp_path / "run" / "analyze" / "token_rewards.json").read_text())
    for response in tokens["pairs"][0]["responses"]:
        for values in (response, *response["policies"].values()):
            for key, value in values.items():
                if isinstance(value, list):
                    values[key] = value * 200
    (tmp_path / "run" / "analyze" / "token_rewards.json").write_text(json.dumps(tokens))
    data = embedded(report(tmp_path / "run", tmp_path, tokens=100))
    assert [response["hidden"] for response in data["pairs"][0]["responses"]] == [2500, 4900]
    assert len(data["pairs"][0]["responses"][0]["tokens"]) == 100
    assert (tmp_path / "report.html").stat().st_size < 1_500_000


def test_stage_rows_when_an_evaluation_has_many_passes_then_they_are_one_row(finished_run: Path) -> None:
    places = [stage.place for stage in STAGES.values()]
    stages = collect(finished_run, examples=0, seed=0, places=places).stages
    rows = stage_rows(stages)
    names = ["world", "pretrain/base", "pretrain/behavior", "sample", "verify", "pair"]
    names += ["train/repo", "train/repo_det", "train/dpo", "evaluate", "analyze"]
    assert [row.name for row in rows] == names
    (evaluate,) = [row for row in rows if row.name == "evaluate"]
    assert evaluate.counts == {"responses": 800, "tokens": 20_840, "cut": 0}
    assert evaluate.seconds == pytest.approx(8.0)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(stage.seconds for stage in stages))
    assert all("eval_loss" not in row.counts for row in rows)


def test_seconds_of_stages_when_some_ran_at_the_same_time_then_that_time_counts_once() -> None:
    def stage(seconds: float, finished: str) -> FinishedStage:
        return FinishedStage("train/x", seconds, f"2026-01-01T00:{finished}+0000", {}, {}, {})

    alone, within, beside, later = stage(60, "05:00"), stage(20, "04:50"), stage(60, "05:30"), stage(10, "09:00")
    assert busy_seconds([alone, within, beside, later]) == 60 + 30 + 10
    assert busy_seconds([later, beside, alone]) == 100
    assert busy_seconds([]) == 0


def test_report_when_a_recipe_has_dropped_a_stage_then_what_was_set_aside_does_not_show(
    finished_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_run, run_dir)
    (run_dir / "unused" / "train").mkdir(parents=True)
    (run_dir / "train" / "repo_det").rename(run_dir / "unused" / "train" / "repo_det")
    names = [stage.name for stage in collect(run_dir, examples=0, seed=0).stages]
    assert "train/dpo" in names and not [name for name in names if name.endswith("train/repo_det")]


def test_tables_when_entries_are_mappings_then_each_is_a_row_of_one_table() -> None:
    found = tables(
        {
            "n": 3,
            "notes": ["x"],
            "tokens": {"all": 5, "why": {"a.b": 2}},
            "kinds": {"x": {"q": {"p50": 2}}, "y": {"k": 1}},
            "nothing": {"x": {"q": None}, "y": {"k": None}},
        }
    )
    assert [(table["caption"], table["columns"]) for table in found] == [
        ("Numbers", ["", "value"]),
        ("Tokens: pair by pair, or each distinct one once", ["", "value"]),
        ("kinds", ["", "q · p50", "k"]),
    ]
    assert found[1]["rows"] == [["all", 5], ["why · a.b", 2]]
    assert found[2]["rows"] == [["x", 2, None], ["y", None, 1]]
