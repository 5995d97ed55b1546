"""Take pictures of a run's report: those of docs/gallery.md, or some of them under another name.

    python docs/make_gallery.py runs/quickstart
    python docs/make_gallery.py runs/gsm8k-small real-model results explorer

Needs the development tools (selenium), chromium and chromedriver.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from regretless.core.terminal import console
from regretless.reporting.report import ReportConfig, run

FIGURES = Path(__file__).resolve().parent / "figures"
MARGIN = 12
"""Pixels around what a picture shows."""


class Picture(NamedTuple):
    """A part of the page as it looks in a window."""

    name: str
    shows: str
    """CSS selectors of the first and the last element in the picture."""
    width: int = 1000
    scheme: str = "light"
    height: int = 1600
    """Most pixels from top to bottom."""


PICTURES = (
    Picture("explorer", "#tokens, #token-pairs"),
    Picture("explorer-dark", "#tokens, #token-pairs", scheme="dark"),
    Picture("results", "#results"),
    Picture("examples", "#examples"),
    Picture("training", "#training .legend, #training .figures"),
    Picture("phone", "header, #tokens", width=390),
)


def main(run_dir: Path, prefix: str = "gallery", *names: str) -> None:
    """Write docs/figures/<prefix>-<name>.webp for each picture, or for those of the given names."""
    with tempfile.TemporaryDirectory() as folder:
        run(ReportConfig(), run_dir, Path(folder))
        browser = _browser(Path(folder) / "profile")
        try:
            for picture in PICTURES:
                if names and picture.name not in names:
                    continue
                path = FIGURES / f"{prefix}-{picture.name}.webp"
                path.write_bytes(_take(browser, (Path(folder) / "report.html").as_uri(), picture))
                console.print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        finally:
            browser.quit()


def _browser(profile: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def _take(browser: webdriver.Chrome, address: str, picture: Picture) -> bytes:
    size = {"width": picture.width, "height": picture.height, "deviceScaleFactor": 1, "mobile": picture.width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": picture.scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)
    # Tokens are shaded once they are in the window.
    script = "document.querySelector(arguments[0]).scrollIntoView(); setTimeout(arguments[1], 500)"
    browser.execute_async_script(script, picture.shows)
    top, bottom = browser.execute_script(
        """
        const boxes = [...document.querySelectorAll(arguments[0])].map(element => element.getBoundingClientRect());
        return [Math.min(...boxes.map(box => box.top)), Math.max(...boxes.map(box => box.bottom))]
          .map(edge => edge + window.scrollY);
        """,
        picture.shows,
    )
    top = max(0, top - MARGIN)
    clip = {"x": 0, "y": top, "width": picture.width, "height": min(picture.height, bottom + MARGIN - top), "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "webp", "quality": 80, "captureBeyondViewport": True, "clip": clip}
    )
    return base64.b64decode(shot["data"])


if __name__ == "__main__":
    if len(sys.argv) < 2 or not {picture.name for picture in PICTURES}.issuperset(sys.argv[3:]):
        sys.exit(
            "usage: python docs/make_gallery.py RUN [PREFIX PICTURE ...]; RUN: the folder of a finished run with "
            f"evaluate and analyze; pictures: {', '.join(picture.name for picture in PICTURES)}"
        )
    main(Path(sys.argv[1]), *sys.argv[2:])
