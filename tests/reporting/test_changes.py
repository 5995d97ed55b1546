"""The section on what training changed: the numbers of the stage's files, in words and charts."""

from __future__ import annotations

import re
from pathlib import Path

from regretless.core.files import read_json
from regretless.reporting.changes import changes
from regretless.reporting.collect import COMPARISONS, collect
from regretless.reporting.report import ReportConfig, run


def test_section_when_the_stage_ran_then_each_file_is_a_part_with_its_numbers(
    finished_run: Path, tmp_path: Path
) -> None:
    run(ReportConfig(), finished_run, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="changes"')[1].split("</section>")[0]
    assert section.count("<h3>") == len(COMPARISONS)
    assert section.count("<svg") == 4  # drift, gradients, calibration, regret
    files = {name: read_json(finished_run / "analyze" / f"{name}.json") for name in COMPARISONS}
    row = files["score_distance"]["models"][0]
    cells = f"{row['value']:.3g}", f"{row['low']:.3g} to {row['high']:.3g}"
    assert re.search(rf"base – repo</th><td[^>]*>{cells[0]}</td><td[^>]*>{cells[1]}<", section)
    found = files["calibration"]["policies"]["dpo"]
    assert f">{found['ece']:.3g}<" in section and f">{found['brier']['value']:.3g}<" in section
    end = files["drift"]["policies"]["dpo"]["points"][-1]["rejected"]["change"]["value"]
    assert f">{end:.3g}<".replace("-", "−") in section
    for method, name in (("dpo", "DPO"), ("repo", "RePO")):
        known = files["regret_calibration"]["policies"]["repo"][method]["units"]["wrong"]["0.1"]
        label = f"repo, {name}, wrong, units, α = 0.1</th><td[^>]*>"
        assert re.search(f"{label}{known['value']:.3g}<".replace("-", "−"), section)
    assert section.count("dpo, step 30") == section.count("dpo, step 60") == 1


def test_section_when_calibration_found_no_held_out_pairs_then_the_other_parts_stay(finished_run: Path) -> None:
    data = collect(finished_run, examples=0, seed=0)
    without = {**data.comparisons, "calibration": {"observed": "", "policies": {}}}
    titles = [part["title"] for part in changes(without, {})]
    assert len(titles) == 5 and not any(title.startswith("Calibration") for title in titles)
