"""Every objective against reference numbers: losses, scores and gradients in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.objectives import Logps, build

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "repo_code": ("repo", {"formulation": "released"}),
    "repo_det_code": ("repo_det", {"formulation": "released"}),
    "rpo": ("rpo", {"reduction": "sum"}),
    "tdpo1": ("tdpo", {"variant": "tdpo1"}),
}
RENAMED = {"lambda_w": "desirable_weight", "lambda_l": "undesirable_weight"}


def _padded(rows: list[list[float]], padding: float) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


@pytest.mark.parametrize(
    "label", ["repo", "repo_det", "repo_code", "repo_det_code", "dpo", "ipo", "rpo", "kto", "tdpo", "tdpo1"]
)
def test_objective_on_reference_vectors_gives_their_losses_scores_and_gradients(label: str, shared: Path) -> None:
    cases = json.loads((shared / "vectors" / "objectives.json").read_text(encoding="utf-8"))["cases"]
    found = [(case, entry) for case in cases for entry in case["expected"] if entry["objective"] == label]
    assert len(found) >= len(cases)
    name, extra = ALIASES.get(label, (label, {}))
    for case, entry in found:
        hyperparameters = {RENAMED.get(key, key): value for key, value in entry["hp"].items()}
        z_ref = hyperparameters.pop("z_ref", None)
        nan = float("nan")
        policy = _padded(case["policy"], nan).requires_grad_()
        mask = torch.arange(policy.shape[1]) < torch.tensor(case["lengths"]).unsqueeze(1)
        logps = Logps(
            policy,
            mask=mask,
            reference=_padded(case["ref"], nan),
            behavior=_padded(case["behavior"], nan),
            reference_kl=_padded(case["kl"], nan),
            z_ref=z_ref,
        )
        output = build(name, **hyperparameters, **extra)(logps, torch.tensor(case["pairs"]))
        output.loss.backward()

        exact: dict[str, Any] = {"rtol": 1e-9, "atol": 0.0}
        expected = torch.tensor(entry["pair_losses"], dtype=torch.float64)
        torch.testing.assert_close(output.pair_losses, expected, **exact)
        torch.testing.assert_close(output.loss, torch.tensor(entry["loss"], dtype=torch.float64), **exact)
        if entry.get("scores"):
            assert output.scores is not None
            torch.testing.assert_close(output.scores, torch.tensor(entry["scores"], dtype=torch.float64), **exact)
        assert policy.grad is not None
        assert (policy.grad[~mask] == 0).all()
        gradient = _padded(entry["grad_policy"], 0.0)
        # The reference gradients are central differences: good to about 1e-8 of the largest entry.
        assert (policy.grad - gradient).norm() <= 1e-5 * gradient.norm()
        torch.testing.assert_close(policy.grad, gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
