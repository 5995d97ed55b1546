"""Cards of trained models, read back with the hub's own client: `ModelCard` and its metadata classes need no network.

`ModelCard.validate` asks the hub's server, so it is not called here; `test_upload.py` sees that request arrive.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from huggingface_hub.utils import validate_repo_id

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import OBJECTIVES
from regretless.training.model_card import (
    CARD,
    FACTS,
    PLACEHOLDER,
    Facts,
    Result,
    base_license,
    check_card,
    named,
    read_facts,
    render,
    update_card,
    write_card,
)

FOUND = Result("gsm8k", "Pass@1 (%), greedy", 1319, 61.5, (58.8, 64.1), 4.25, (1.5, 7.0), "openai/gsm8k")
FACTS_OF_A_RUN = Facts(
    name="Qwen3-1.7B-repo",
    objective="repo",
    title=OBJECTIVES["repo"].title,
    paper=OBJECTIVES["repo"].paper,
    formula=OBJECTIVES["repo"].formula,
    hyperparameters={"beta": 1.0, "discount": None},
    arguments={"learning_rate": 5e-6},
    adapter={"r": 32, "lora_alpha": 64},
    base="Qwen/Qwen3-1.7B",
    base_on_hub=True,
    architecture="Qwen3ForCausalLM",
    data={"data": "pairs.parquet", "pairs trained on": 1000, "behavior policy": "Qwen/Qwen3-1.7B"},
    datasets=["openai/gsm8k"],
    measured={"train_loss": 0.53},
    versions={"python": "3.11", "regretless": "0.1.0"},
    command="regretless train --model Qwen/Qwen3-1.7B --pairs pairs.parquet --output trained objective=repo",
    language="bash",
    license="apache-2.0",
)


def checked(text: str) -> dict[str, Any]:
    """The metadata of a card, after the checks of the hub's client that need no network."""
    card = ModelCard(text)
    values = card.data.to_dict()
    assert ModelCardData(**values).to_dict().keys() == values.keys()
    names = [values["base_model"]] if "base_model" in values else []
    for name in [*names, *values.get("datasets", [])]:
        validate_repo_id(name)
    if "model-index" in values:
        assert model_index_to_eval_results(values["model-index"])
    assert PLACEHOLDER not in text
    return values


def test_card_when_read_by_the_hubs_client_then_metadata_and_results_are_those_of_the_run() -> None:
    values = checked(render(dataclasses.replace(FACTS_OF_A_RUN, results=[FOUND])))
    assert values["base_model"] == "Qwen/Qwen3-1.7B"
    assert values["base_model_relation"] == "adapter"
    assert values["library_name"] == "peft"
    assert values["license"] == "apache-2.0"
    assert values["datasets"] == ["openai/gsm8k"]
    (result,) = ModelCard(render(dataclasses.replace(FACTS_OF_A_RUN, results=[FOUND]))).data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("openai/gsm8k", "pass@1", 61.5)


def test_card_when_written_then_it_shows_equation_settings_intervals_and_command() -> None:
    text = render(dataclasses.replace(FACTS_OF_A_RUN, results=[FOUND], report="report.html"))
    assert "| `gsm8k` | Pass@1 (%), greedy | 1319 | 61.50 [58.80, 64.10] | +4.25 [+1.50, +7.00] |" in text
    for line in (*OBJECTIVES["repo"].formula.splitlines(), FACTS_OF_A_RUN.command, "| `discount` | `null` |"):
        assert line in text
    assert "[report of the run](report.html)" in text
    assert "not been evaluated" not in text
    assert "No benchmark results are recorded with this model." in render(FACTS_OF_A_RUN)


@pytest.mark.parametrize("paper", ["ICML 2027", "https://example.org/paper"])
def test_card_of_a_method_that_appeared_elsewhere_than_on_arxiv_when_written_then_it_says_where(paper: str) -> None:
    assert "[arXiv:2606.09124](https://arxiv.org/abs/2606.09124)" in render(FACTS_OF_A_RUN)
    text = render(dataclasses.replace(FACTS_OF_A_RUN, title="Mine", paper=paper))
    assert f"Mine ({paper}).\n" in text and "arxiv.org" not in text


def test_card_of_a_local_base_without_license_when_read_then_its_metadata_is_valid_and_names_no_path() -> None:
    facts = dataclasses.replace(
        FACTS_OF_A_RUN, base="my model | x", base_on_hub=False, adapter=None, license=None, datasets=[]
    )
    values = checked(render(facts))
    assert "base_model" not in values
    assert values["license"] == "unknown"
    assert values["library_name"] == "transformers"
    assert "`my model   x` (Qwen3ForCausalLM), all weights" in render(facts)


def test_facts_when_a_result_comes_later_then_the_card_gets_it_and_an_edited_card_stays(tmp_path: Path) -> None:
    write_card(tmp_path, FACTS_OF_A_RUN)
    assert read_facts(tmp_path) == Facts.from_json(json.loads(json.dumps(dataclasses.asdict(FACTS_OF_A_RUN))))
    assert update_card(tmp_path, results=[FOUND])
    assert "61.50" in (tmp_path / CARD).read_text()
    before = (tmp_path / FACTS).stat().st_mtime_ns, (tmp_path / CARD).stat().st_mtime_ns
    assert update_card(tmp_path, results=[FOUND])
    assert before == ((tmp_path / FACTS).stat().st_mtime_ns, (tmp_path / CARD).stat().st_mtime_ns)
    # As after a kill between the two files: the card is new, the facts are old.
    facts = (tmp_path / FACTS).read_bytes()
    assert update_card(tmp_path, results=[FOUND], report="../report.html")
    after = (tmp_path / FACTS).read_bytes(), (tmp_path / CARD).read_bytes()
    (tmp_path / FACTS).write_bytes(facts)
    assert update_card(tmp_path, results=[FOUND], report="../report.html")
    assert after == ((tmp_path / FACTS).read_bytes(), (tmp_path / CARD).read_bytes())
    (tmp_path / CARD).write_text((tmp_path / CARD).read_text() + "\nMy own words.\n")
    assert not update_card(tmp_path, results=[])
    assert "My own words." in (tmp_path / CARD).read_text()
    (tmp_path / FACTS).write_text('{"name": 3}')
    with pytest.raises(DataError, match=r"card\.json: not the facts of a card"):
        read_facts(tmp_path)


def test_card_with_placeholders_or_broken_metadata_when_checked_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no README\.md"):
        check_card(tmp_path)
    (tmp_path / CARD).write_text(f"---\nlicense: mit\n---\n{PLACEHOLDER}\n")
    with pytest.raises(ConfigError, match="More Information Needed"):
        check_card(tmp_path)
    (tmp_path / CARD).write_text("---\n- a list\n---\nText\n")
    with pytest.raises(ConfigError, match="metadata cannot be read"):
        check_card(tmp_path)


def test_license_when_the_base_model_has_a_card_then_it_is_that_ones(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("---\nlicense: other\nlicense_name: gemma\nlicense_link: https://x.y\n---\n")
    expected = {"license": "other", "license_name": "gemma", "license_link": "https://x.y"}
    assert base_license(str(tmp_path)) == expected
    (tmp_path / CARD).write_text("---\nlicense: unknown\n---\n")
    assert base_license(str(tmp_path)) == {}
    assert base_license("someone/not-in-the-cache") == {}


def test_name_of_a_path_when_shown_then_its_folders_are_left_out(tmp_path: Path) -> None:
    assert named(str(tmp_path)) == (tmp_path.name, False)
    assert named("/home/somebody/pairs.jsonl") == ("pairs.jsonl", False)
    assert named("openai/gsm8k") == ("openai/gsm8k", True)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_formula_of_an_objective_when_compared_then_its_page_has_the_same(name: str) -> None:
    kind = OBJECTIVES[name]
    page = (Path(__file__).parents[2] / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert page.splitlines()[0] == f"# {kind.title}"
    assert kind.paper in page
    squeezed = re.sub(r"\s+", "", page)
    (loss,) = [line for line in kind.formula.splitlines() if line.startswith("loss")][-1:]
    formula = re.sub(r"\s+", "", loss.removeprefix("loss = ").partition(" (reduction")[0].partition("mean of")[0])
    assert formula in squeezed, loss


def test_card_when_its_facts_look_like_markup_then_the_card_shows_their_characters() -> None:
    bad = '<b>x</b>|[a](https://e.org)\n---\n# "*y*"\n```'
    result = dataclasses.replace(FOUND, benchmark=bad, metric=bad, dataset=None)
    facts = dataclasses.replace(
        FACTS_OF_A_RUN, name=bad, title=bad, paper=f"arXiv:1 {bad}", formula=bad, base=bad, base_on_hub=False
    )
    facts = dataclasses.replace(facts, data={bad: bad}, results=[result], command=bad, license_name=bad)
    text = render(facts)
    assert checked(text)["model-index"][0]["name"] == bad
    _, _, body = text[4:].partition("\n---\n")
    shown = '\\<b\\>x\\</b\\>\\|\\[a\\](https\\://e.org) --- \\# "\\*y\\*" \\`\\`\\`'
    assert body.splitlines()[1] == f"# {shown}"
    fenced, prose = re.findall(r"^```.*?^```$", body, re.MULTILINE | re.DOTALL), body
    for block in fenced:
        prose = prose.replace(block, "")
    assert len(fenced) == 3
    prose = re.sub(r"(?<!\\)`[^`\n]*`", "", prose.replace("\\`", ""))  # without inline code
    assert not re.search(r"(?<!\\)(<b>|\[a\])", prose)
    headings = [line for line in prose.splitlines() if line.startswith("#")]
    assert [line for line in headings if "x" in line and "y" in line] == headings[:1]
