"""The page in a real browser: headless Chromium, driven over WebDriver, on the file as a user opens it."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from run_helpers import HOSTILE, OBJECTIVES, TOKENS, analyzed
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from regretless.core.files import write_json
from regretless.reporting.explorer import SHADE_QUANTILE
from regretless.reporting.report import ReportConfig, run

Browser = webdriver.Chrome
DIGITS = 1e-3
"""The card has three decimals, of numbers that the page holds with four."""


@pytest.fixture(scope="module")
def content(finished_run: Path) -> dict[str, Any]:
    """What the analysis wrote."""
    return dict(json.loads((finished_run / "analyze" / "token_rewards.json").read_text()))


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the report."""
    folder = tmp_path_factory.mktemp("page")
    run(ReportConfig(), finished_run, folder)
    return (folder / "report.html").as_uri()


@pytest.fixture
def opened(browser: Browser, page: str) -> Browser:
    """The browser with the page just loaded and the rewards of the first pair in view."""
    open_page(browser, page)
    choose(browser, "measure", "reward")
    choose(browser, "pair", "0")
    return browser


def open_page(browser: Browser, address: str) -> None:
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what earlier pages said
    browser.get(address)
    browser.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
    browser.execute_script("document.querySelector('form.controls').scrollIntoView()")
    WebDriverWait(browser, 30).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#token-pairs .t"))


def tokens_of(browser: Browser, pair: int, side: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, f"#token-pairs article:nth-child({pair + 1}) .{side} .t")


def choose(browser: Browser, name: str, value: str) -> None:
    """Set a control of the explorer as a user does."""
    elements = browser.find_elements(By.NAME, name)
    if elements[0].tag_name == "select":
        Select(elements[0]).select_by_value(value)
    else:
        next(element for element in elements if element.get_attribute("value") == value).click()


def card(browser: Browser) -> dict[str, str]:
    """Rows of the card of one token: name to number."""
    rows = browser.find_elements(By.CSS_SELECTOR, "#token-card tr")
    return {
        row.find_element(By.TAG_NAME, "th").text: row.find_element(By.CSS_SELECTOR, "td:last-child").text
        for row in rows
    }


def nats(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace("−", "-"))


def levels(tokens: list[WebElement]) -> list[int]:
    """Steps of the color scale, −8…8, that tokens are shaded with."""
    found = []
    for token in tokens:
        classes = str(token.get_attribute("class")).split()
        size = next((int(name[1:]) for name in classes if name[0] == "k"), 0)
        found.append(-size if "n" in classes else size)
    return found


def expected_levels(values: list[float], scale: float) -> list[float]:
    return [8 * max(-1, min(1, value / scale)) for value in values]


def test_page_when_opened_then_nothing_fails_and_nothing_is_fetched(browser: Browser, page: str) -> None:
    open_page(browser, page)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    # The browser's own pages, such as a new tab's, may be among them; a data: address is its own content.
    assert [request for request in requests if not request.startswith(("chrome:", "data:"))] == [page]


def test_explorer_when_opened_then_it_shows_the_runs_own_method_on_the_pair_where_the_responses_differ_most(
    browser: Browser, finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    file = tmp_path / "run" / "analyze" / "token_rewards.json"
    content = json.loads(file.read_text())
    leading = json.loads(json.dumps(content["pairs"][0])) | {"pair_id": "leading"}
    for response, value in zip(leading["responses"], (2.0, -2.0), strict=True):
        response["policies"]["repo"]["regret"] = [value] * len(response["tokens"])
        response["policies"]["repo"]["logps"] = [value] * len(response["tokens"])
    content["policies"] = {name: content["policies"][name] for name in ("dpo", "repo", "repo_det")}
    for pair in (*content["pairs"], leading):
        for response in pair["responses"]:
            response["policies"] = {name: response["policies"][name] for name in content["policies"]}
    content["pairs"].insert(2, leading)
    file.write_text(json.dumps(content))
    run(ReportConfig(), tmp_path / "run", tmp_path)
    open_page(browser, (tmp_path / "report.html").as_uri())
    shown = [
        Select(browser.find_element(By.NAME, name)).first_selected_option.text for name in ("policy", "measure", "pair")
    ]
    assert shown[:2] == ["repo", "RePO: regret term"]
    assert shown[2].startswith("3 · original")
    articles = browser.find_elements(By.CSS_SELECTOR, "#token-pairs article")
    assert [article.is_displayed() for article in articles] == [False, False, True, False]
    assert any(levels(tokens_of(browser, 2, "rejected")))
    section = browser.find_element(By.CSS_SELECTOR, "main section")
    assert section.get_attribute("id") == "tokens"

    previous, following = browser.find_elements(By.CSS_SELECTOR, ".pair button")
    following.click()
    assert [article.is_displayed() for article in articles] == [False, False, False, True]
    assert browser.find_element(By.ID, "token-news").get_attribute("textContent") == "Pair 4 of 4"
    assert not following.is_enabled() and browser.switch_to.active_element == previous
    previous.click()
    assert Select(browser.find_element(By.NAME, "pair")).first_selected_option.text == shown[2]
    assert articles[2].is_displayed()


def test_token_when_pointed_at_then_its_numbers_are_those_of_the_analysis(
    opened: Browser, content: dict[str, Any]
) -> None:
    response, place = content["pairs"][0]["responses"][1], 4
    scores = response["policies"]["repo"]
    ActionChains(opened).move_to_element(tokens_of(opened, 0, "rejected")[place]).perform()
    shown = card(opened)
    assert {name: nats(text) for name, text in shown.items()} == pytest.approx(
        {
            "repo": scores["logps"][place],
            "reference": response["reference"][place],
            "behavior": response["behavior"][place],
            "weight": response["weights"][place],
            "reward (local term)": scores["reward"][place],
            "long-horizon term": scores["long_horizon"][place],
            "regret term": scores["regret"][place],
        },
        abs=DIGITS,
    )
    assert all(text.endswith(" nats") for name, text in shown.items() if name != "weight")
    title = opened.find_element(By.CSS_SELECTOR, "#token-card p").text.split("\n")
    assert title == [response["tokens"][place], f"token {place + 1} of {len(response['tokens'])}"]
    ActionChains(opened).move_to_element(opened.find_element(By.NAME, "policy")).perform()
    assert not opened.find_element(By.ID, "token-card").is_displayed()


@pytest.mark.parametrize(
    ("option", "measure"), [("reward", "reward"), ("regret", "regret"), ("horizon", "long_horizon")]
)
@pytest.mark.parametrize("policy", ["repo", "dpo"])
def test_shading_when_objective_and_model_are_chosen_then_it_is_that_of_their_values(
    opened: Browser, content: dict[str, Any], option: str, measure: str, policy: str
) -> None:
    choose(opened, "measure", option)
    choose(opened, "policy", str(OBJECTIVES.index(policy)))
    known = [
        abs(value)
        for pair in content["pairs"]
        for response in pair["responses"]
        for scores in response["policies"].values()
        for value in scores[measure] or ()
    ]
    scale = float(np.quantile(known, SHADE_QUANTILE))  # common to all pairs and models, so that colors compare
    assert opened.find_element(By.CSS_SELECTOR, ".scale .high").text == f"+{float(f'{scale:.2g}'):g} nats"
    assert float(opened.find_element(By.ID, "tokens").get_attribute("data-full-shade") or "nan") == pytest.approx(
        scale, abs=2e-4
    ), "but for the page's four decimals"
    for side, response in zip(("chosen", "rejected"), content["pairs"][0]["responses"], strict=True):
        values = response["policies"][policy][measure]
        shown = levels(tokens_of(opened, 0, side))
        assert shown == pytest.approx(expected_levels(values, scale), abs=0.51)
        assert any(shown) and len(set(shown)) > 4
        total = opened.find_element(By.CSS_SELECTOR, f"#token-pairs article:first-child .{side} .head .sum")
        assert nats(total.text.removeprefix("Σ ")) == pytest.approx(sum(values), abs=0.01)


def test_shading_when_normalized_then_values_are_in_units_of_the_response(
    opened: Browser, content: dict[str, Any]
) -> None:
    choose(opened, "scale", "normalized")
    values = content["pairs"][0]["responses"][0]["policies"]["repo"]["reward"]
    unit = math.sqrt(sum(value**2 for value in values) / len(values))
    tokens = tokens_of(opened, 0, "chosen")
    assert levels(tokens) == pytest.approx(expected_levels([value / unit for value in values], 2), abs=0.51)
    assert opened.find_element(By.CSS_SELECTOR, ".scale .high").text == "+2.0 × RMS"
    ActionChains(opened).move_to_element(tokens[3]).perform()
    assert nats(card(opened)["shaded value"]) == pytest.approx(values[3] / unit, abs=2 * DIGITS)


def test_shading_when_compared_with_another_model_then_the_reward_is_between_the_two(
    opened: Browser, content: dict[str, Any]
) -> None:
    choose(opened, "against", str(OBJECTIVES.index("dpo")))
    scores = content["pairs"][0]["responses"][0]["policies"]
    ActionChains(opened).move_to_element(tokens_of(opened, 0, "chosen")[2]).perform()
    shown = card(opened)
    between = scores["repo"]["logps"][2] - scores["dpo"]["logps"][2]
    assert nats(shown["reward (local term)"]) == pytest.approx(between, abs=DIGITS)
    assert {"repo", "dpo", "reference", "behavior"} <= set(shown)
    choose(opened, "policy", str(OBJECTIVES.index("dpo")))
    assert not any(levels(tokens_of(opened, 0, "chosen")))


def test_units_when_regret_was_measured_then_it_stands_beside_what_methods_read_into_the_chosen_model(
    opened: Browser,
) -> None:
    def rows(pair: int) -> list[list[str]]:
        choose(opened, "pair", str(pair))
        found = opened.find_elements(By.CSS_SELECTOR, f"article:nth-child({pair + 1}) .chosen .units tbody tr")
        return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in found]

    number = OBJECTIVES.index("dpo")
    choose(opened, "policy", str(number))
    read = [f"{1 + number + value:.2f}" for value in (-0.5, 0.25, 8.0)]  # behind the base model's
    assert rows(0) == [
        ["1–3", "0.00 (−0.25 to 2.00)", "0.12", "−0.12", *read],
        ["4–6", "1.50 (−0.25 to 2.00)", "0.12", "1.38", *read],
    ]
    assert rows(1)[0][-3:] == [read[0], "unknown", read[2]]  # its behavior policy is unknown
    assert "α = 0.5" in opened.find_element(By.CSS_SELECTOR, "article:nth-child(2) .units caption").text


def test_repo_det_when_chosen_then_the_behavior_policy_is_left_out(opened: Browser, content: dict[str, Any]) -> None:
    choose(opened, "measure", "det")
    choose(opened, "pair", "1")
    response = content["pairs"][1]["responses"][0]  # its behavior policy is unknown
    scores, weight = response["policies"]["repo"], response["weights"]
    ActionChains(opened).move_to_element(tokens_of(opened, 1, "chosen")[5]).perform()
    assert nats(card(opened)["RePO_det term"]) == pytest.approx(
        scores["reward"][5] + weight[5] * scores["logps"][5], abs=2 * DIGITS
    )
    assert card(opened)["regret term"] == card(opened)["behavior"] == "unknown"
    choose(opened, "measure", "regret")
    assert not any(levels(tokens_of(opened, 1, "chosen")))
    choose(opened, "pair", "0")
    assert any(levels(tokens_of(opened, 0, "chosen")))


def test_sides_when_one_is_chosen_then_the_other_is_hidden(opened: Browser) -> None:
    places = {
        side: opened.find_element(By.CSS_SELECTOR, f"article:first-child .side.{side}")
        for side in ("chosen", "rejected")
    }
    assert places["chosen"].location["y"] == places["rejected"].location["y"]  # side by side
    for side in ("rejected", "chosen"):
        choose(opened, "sides", side)
        assert [name for name, place in places.items() if place.is_displayed()] == [side]


def test_keyboard_when_used_then_focus_moves_token_by_token_and_is_read_out(
    opened: Browser, content: dict[str, Any]
) -> None:
    last = opened.find_elements(By.NAME, "sides")[0]
    last.send_keys(Keys.TAB)
    assert opened.switch_to.active_element.accessible_name == "Save the chosen response as an SVG file"
    opened.switch_to.active_element.send_keys(Keys.TAB)
    chosen = tokens_of(opened, 0, "chosen")
    assert opened.switch_to.active_element == chosen[0]
    opened.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.NULL)
    ActionChains(opened).send_keys(Keys.ARROW_RIGHT).perform()
    assert opened.switch_to.active_element == chosen[2]
    assert [token.get_attribute("tabindex") for token in chosen] == ["-1", "-1", "0", *["-1"] * (len(chosen) - 3)]
    response = content["pairs"][0]["responses"][0]
    news = opened.find_element(By.ID, "token-news")
    assert news.get_attribute("aria-live") == "polite"
    reward = f"{response['policies']['repo']['reward'][2]:+.3f}".replace("-", "−")
    said = str(news.get_attribute("textContent"))
    assert said.startswith("“-”, token 3 of 13: ") and f"reward (local term) {reward} nats" in said
    assert opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"

    ActionChains(opened).send_keys(Keys.ARROW_DOWN).perform()
    below = opened.switch_to.active_element
    assert below.location["y"] > chosen[2].location["y"] and below == chosen[8]
    ActionChains(opened).send_keys(Keys.END).perform()
    assert opened.switch_to.active_element == chosen[-1] and chosen[-1].text == "<eos>"
    assert opened.find_element(By.ID, "token-card").is_displayed()
    ActionChains(opened).send_keys(Keys.ESCAPE).perform()
    assert not opened.find_element(By.ID, "token-card").is_displayed()
    # The table of measured units, which may scroll, and the button that saves.
    ActionChains(opened).send_keys(Keys.TAB, Keys.TAB, Keys.TAB).perform()
    assert opened.switch_to.active_element == tokens_of(opened, 0, "rejected")[0]


def test_hostile_texts_when_shown_then_they_stay_text(opened: Browser) -> None:
    tokens = tokens_of(opened, 0, "rejected")
    texts = opened.execute_script("return arguments[0].map(token => token.textContent)", tokens)
    assert texts == [text or "<eos>" for text in TOKENS["rejected"]]
    point = """
        return arguments[0].map(token => {
          token.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
          const title = document.querySelector("#token-card bdi");
          return [title.textContent, title.children.length];
        });
    """
    visible = [text.replace("\n", "↵").replace("\t", "⇥") for text in texts]
    assert opened.execute_script(point, tokens) == [[text, 0] for text in visible]
    assert opened.execute_script("return document.querySelectorAll('img, #tokens b, #tokens i').length") == 0
    assert opened.execute_script("return [typeof window.broken, document.scripts.length]") == ["undefined", 5]
    prompt = opened.find_element(By.CSS_SELECTOR, "#token-pairs article:nth-child(2) .prompt .text")
    assert prompt.get_attribute("textContent") == f"user{HOSTILE}"
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_response_when_saved_then_the_picture_has_its_texts_on_their_colors(opened: Browser, downloads: Path) -> None:
    choose(opened, "measure", "regret")
    opened.find_element(By.CSS_SELECTOR, ".side.rejected button").click()
    saved = downloads / "repo-regret-rejected.svg"
    # Chromium holds the name with an empty file until the download is whole, and then replaces it.
    WebDriverWait(opened, 20).until(lambda _: saved.exists() and saved.stat().st_size > 0)
    picture = ElementTree.parse(saved).getroot()
    space = "{http://www.w3.org/2000/svg}"
    group = picture.find(f"{space}g")
    assert group is not None
    texts = [str(text.text) for text in group.findall(f"{space}text")]
    kept = "".join(text or "<eos>" for text in TOKENS["rejected"]).replace("\n", "↵")
    assert "".join(texts).replace("\u2028", "") == kept.replace("\u2028", "")
    preserved = {text.get("{http://www.w3.org/XML/1998/namespace}space") for text in group.findall(f"{space}text")}
    assert preserved == {"preserve"}  # a token's leading space has its place
    fills = {rect.get("fill") for rect in group.findall(f"{space}rect")}
    assert len(fills) > 4
    titles = [text.text for text in picture.findall(f"{space}text")]
    assert titles[0] == "repo against reference · RePO: regret term · rejected response"
    assert str(titles[2]).endswith(" nats")


def test_curves_when_in_focus_then_arrow_keys_read_their_values(opened: Browser, finished_run: Path) -> None:
    log = json.loads((finished_run / "train" / "repo" / "trainer_state.json").read_text())["log_history"]
    plot = opened.find_element(By.CSS_SELECTOR, "#training .plot")
    plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    said = str(plot.get_attribute("aria-valuetext"))
    assert said.startswith(f"step 2, repo: {log[1]['loss']:.4g}") and "dpo: " in said
    (tip,) = [tip for tip in plot.find_elements(By.CSS_SELECTOR, ".tip") if tip.is_displayed()]
    assert "step 2" in tip.text
    box = opened.find_element(By.CSS_SELECTOR, "[data-shows=c1]")
    box.click()
    assert plot.find_element(By.CSS_SELECTOR, ".line.c1").value_of_css_property("opacity") == "0.12"
    assert plot.find_element(By.CSS_SELECTOR, ".line.c2").value_of_css_property("opacity") == "1"


@pytest.mark.slow
def test_explorer_when_there_are_100_responses_of_1000_tokens_then_only_what_is_in_view_is_worked_on(
    browser: Browser, tmp_path: Path
) -> None:
    rng = random.Random(0)
    texts = [rng.choice([" the", " games", "\n", "4", " \\times", ".", "="]) for _ in range(1000)]
    pairs = [
        {
            "pair_id": str(n),
            "kind": "original",
            "prompt": "q",
            "responses": [analyzed(side, texts, rng) for side in ("chosen", "rejected")],
        }
        for n in range(50)
    ]
    policies = {name: name for name in OBJECTIVES}
    write_json(
        tmp_path / "run" / "analyze" / "token_rewards.json",
        {"units": {}, "beta": 1.0, "reference": "base", "policies": policies, "pairs": pairs},
    )
    run(ReportConfig(), tmp_path / "run", tmp_path)
    open_page(browser, (tmp_path / "report.html").as_uri())
    assert browser.execute_script("return document.querySelectorAll('#token-pairs article').length") == 50

    # Of 100 000 tokens, those near the window have an element, and only these are touched when the numbers change.
    switch = """
        const [value, done] = arguments, control = document.querySelector("[name=measure]");
        let changes = 0;
        const observer = new MutationObserver(records => { changes += records.length; });
        const area = document.querySelector("#token-pairs");
        observer.observe(area, { subtree: true, childList: true, attributes: true, characterData: true });
        control.value = value;
        control.dispatchEvent(new Event("change", { bubbles: true }));
        requestAnimationFrame(() => setTimeout(() => {
          observer.disconnect();
          done([changes, document.querySelectorAll("#token-pairs .t").length]);
        }));
    """
    for value in ("regret", "det", "reward"):
        changes, elements = browser.execute_async_script(switch, value)
        assert 0 < elements < 20_000
        assert 0 < changes < 3 * 20_000

    for pair in (48, 49):
        choose(browser, "pair", str(pair))
        assert len(tokens_of(browser, pair, "rejected")) == 1000
    # Only what is near the window has an element for each token.
    assert browser.execute_script("return document.querySelectorAll('#token-pairs .t').length") < 20_000
