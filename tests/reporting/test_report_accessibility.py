"""The page on phones and desktops, light and dark, for keyboards and screen readers, judged by axe-core in Chromium."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from regretless.reporting.report import ReportConfig, run

Browser = webdriver.Chrome

CHECK = """
    const done = arguments[0], faults = [];
    const root = document.documentElement;
    const wide = [...document.querySelectorAll("body *")].filter(element => {
      const box = element.getBoundingClientRect();
      // What overflows inside an area that scrolls, or is meant to be unseen, does not widen the page.
      if (element.matches(".unseen, option")) return false;
      return box.right > root.clientWidth + 1 && !element.parentElement.closest(".wide, pre, figure");
    });
    if (root.scrollWidth > root.clientWidth) faults.push("page-overflow");
    for (const element of wide.slice(0, 3)) faults.push(`page-overflow: ${element.outerHTML.slice(0, 60)}`);
    // axe-core does not know on what an SVG's text stands.
    const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
      .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    for (const text of document.querySelectorAll("figure svg text")) {
      const ends = [getComputedStyle(text).fill, getComputedStyle(text.closest("figure")).backgroundColor].map(light);
      const contrast = (Math.max(...ends) + 0.05) / (Math.min(...ends) + 0.05);
      if (contrast < 4.5) { faults.push(`svg-contrast ${contrast.toFixed(2)}: ${text.textContent}`); break; }
    }
    axe.run({ resultTypes: ["violations"] })
      .then(({ violations }) => done(faults.concat(violations.map(
        ({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(node => node.target.join(" ")).join(", ")}`))))
      .catch(error => done([`error: ${error}`]));
"""
"""Violations on the page, by axe-core's rules and by two of our own."""


@pytest.fixture(scope="module")
def axe() -> str:
    """The program axe-core, from a package that contains it; skipped without it, failed with CI set."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        message = "no axe-core: pip install --no-deps axe-playwright-python"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return (Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a report with every section, also that of the harness."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(finished_run, folder / "run")
    file = folder / "run" / "evaluate" / "results.json"
    results = json.loads(file.read_text())
    bounds = ("low", "high", "gain", "gain_low", "gain_high")
    scores = [{"benchmark": "ifeval", "metric": "acc", "n": 5, "value": 0.4, **dict.fromkeys(bounds)}]
    results["harness"] = [row | {"label": label} for row in scores for label in ("base", "repo")]
    file.write_text(json.dumps(results))
    run(ReportConfig(), folder / "run", folder)
    return (folder / "report.html").as_uri()


def open_page(browser: Browser, address: str, axe: str, width: int, scheme: str) -> None:
    """Load the page in a window of this width, with everything unfolded."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)
    assert browser.execute_script("return [innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [
        width,
        scheme == "dark",
    ]
    browser.execute_script("document.querySelectorAll('details').forEach(element => { element.open = true; })")
    # The sizes of what was unfolded are observed before the second frame.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    browser.execute_script(axe)


def faults(browser: Browser) -> list[str]:
    found: list[str] = browser.execute_async_script(CHECK)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        *((390, "light"), (390, "dark"), (800, "light"), (1400, "dark")),
        *(pytest.param(*more, marks=pytest.mark.extended) for more in ((800, "dark"), (1400, "light"))),
    ],
)
def test_page_when_checked_by_axe_then_there_is_no_violation(
    browser: Browser, page: str, axe: str, width: int, scheme: str
) -> None:
    open_page(browser, page, axe, width, scheme)
    assert faults(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 800])
def test_values_of_a_table_when_reasons_are_long_then_they_are_in_view(
    browser: Browser, page: str, axe: str, width: int
) -> None:
    open_page(browser, page, axe, width, "light")
    ends = browser.execute_script(
        "return [...document.querySelectorAll('#data .narrow td.number')].map("
        "cell => cell.getBoundingClientRect().right)"
    )
    assert len(ends) > 5 and max(ends) <= width


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_texts_of_charts_when_the_window_is_narrow_or_wide_then_they_are_read_and_smaller_than_headings(
    browser: Browser, page: str, axe: str, width: int
) -> None:
    open_page(browser, page, axe, width, "light")
    font, scale = (
        "parseFloat(getComputedStyle(text).fontSize)",
        "Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)",
    )
    sizes = browser.execute_script(
        f"return [...document.querySelectorAll('figure svg text:not(.tip *)')].map(text => {font} * {scale})"
    )
    headings = browser.execute_script(f"return [...document.querySelectorAll('h3, figcaption')].map(text => {font})")
    assert len(sizes) > 50 and min(sizes) >= 10 and max(sizes) <= min(headings)


PLANTED: dict[str, tuple[str, str]] = {
    "text too pale": ("color-contrast", "document.documentElement.style.setProperty('--muted', '#b0b0b0')"),
    "chart text too pale": ("svg-contrast", "document.documentElement.style.setProperty('--muted', '#b0b0b0')"),
    "control without a name": (
        "select-name",
        "document.querySelector('[name=measure]').parentElement.replaceWith(document.querySelector('[name=measure]'))",
    ),
    "heading skipped": ("heading-order", "document.querySelector('#tokens h2').outerHTML = '<h4>Explorer</h4>'"),
    "content outside landmarks": ("region", "document.body.insertAdjacentHTML('beforeend', '<p>Lost</p>')"),
    "table out of the keyboard's reach": (
        "scrollable-region-focusable",
        "document.querySelectorAll('.wide').forEach(area => area.removeAttribute('tabindex'))",
    ),
    "too wide": (
        "page-overflow",
        "document.querySelector('.lead').style.cssText = 'white-space: nowrap; width: 500px'",
    ),
}
"""Fault → the rule that has to find it, and how it is planted."""


@pytest.mark.slow
def test_checks_when_faults_are_planted_then_each_is_found(browser: Browser, page: str, axe: str) -> None:
    for fault, (rule, plant) in PLANTED.items():
        open_page(browser, page, axe, 390, "light")
        browser.execute_script(plant)
        found: list[Any] = faults(browser)
        assert [one for one in found if one.startswith(rule)], f"{fault}: {found}"
