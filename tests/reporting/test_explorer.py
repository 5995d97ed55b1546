"""What the regret explorer opens on."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from regretless.core import plugins
from regretless.objectives import OBJECTIVES
from regretless.reporting.explorer import explorer

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin"
VALUES = {"logps": [-1.0, -2.0], "reward": [0.1, 0.2], "long_horizon": [0.0, 0.5], "regret": [0.1, 0.7]}


@pytest.fixture(autouse=True)
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the example plug-in, and a method of another package with RePO's terms."""
    text = "from regretless.objectives import RePO\n\n\nclass Steep(RePO):\n    name = 'steep'\n"
    (tmp_path / "steep_method.py").write_text(text, encoding="utf-8")
    for folder in (PLUGIN, tmp_path):
        monkeypatch.syspath_prepend(folder)
    values = {"exponential": "regretless_example:Exponential", "steep": "steep_method:Steep", "absent": "no_module:A"}
    points = {name: [EntryPoint(name, value, "regretless.objectives")] for name, value in values.items()}
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "objectives" else {})
    monkeypatch.setattr(OBJECTIVES, "_parts", dict(OBJECTIVES._parts))  # which keeps those that it has imported


@pytest.mark.parametrize(
    ("trained", "model", "value"),
    [
        ({"mine": "exponential", "dpo": "dpo", "other": "steep"}, "other", "regret"),
        ({"dpo": "dpo", "repo_det": "repo_det"}, "repo_det", "det"),
        ({"mine": "exponential", "dpo": "dpo"}, "mine", "reward"),
        ({"a": "absent", "b": "uninstalled"}, "a", "reward"),
    ],
)
def test_explorer_when_objectives_come_from_plugins_then_it_opens_on_the_first_regret_term(
    trained: dict[str, str], model: str, value: str
) -> None:
    response = {"tokens": ["a", "b"], "names": ["a", "b"], "reference": [-1.0, -2.0], "behavior": [-1.0, -3.0]}
    responses = [
        response | {"side": side, "weights": [0.0, 1.0], "policies": dict.fromkeys(trained, VALUES)}
        for side in ("chosen", "rejected")
    ]
    pair = {"kind": "verified", "prompt": "2 + 2?", "responses": responses}
    content = {"beta": 1.0, "reference": "base", "policies": dict.fromkeys(trained, "m"), "pairs": [pair]}
    opening = explorer(content, "", trained, pairs=1, tokens=10)["opening"]
    assert opening == {"policy": list(trained).index(model), "measure": value, "pair": 0}
