"""RePO_det: RePO for data whose behavior policy is unknown (arXiv:2606.09124, §6)."""

from __future__ import annotations

from typing import ClassVar, Literal

from regretless.objectives.repo import RePO


class RePODet(RePO):
    """RePO with a Dirac behavior policy: each response counts as written with probability one, so m_s = 0."""

    name: ClassVar[str] = "repo_det"
    title: ClassVar[str] = "RePO_det: RePO with a deterministic behavior policy"
    paper: ClassVar[str] = "arXiv:2606.09124"
    formula: ClassVar[str] = (
        "score = β Σ_s [ (1 + w_s) π_s − c r_s ] (formulation=paper; released: divided by T)\n"
        "w_s = H_{T−1} − H_{T−s} (formulation=paper), H_T − H_{T−s} (released)\n"
        "loss = −log σ(score⁺ − λ score⁻) + sft_weight · mean_s(−π_s⁺)"
    )
    token_value: ClassVar[Literal["reward", "regret", "det"]] = "det"
    uses_behavior: ClassVar[bool] = False
    # No setting: nothing of a behavior policy is estimated.
    estimator: ClassVar[Literal["sampled"]] = "sampled"  # type: ignore[misc]
