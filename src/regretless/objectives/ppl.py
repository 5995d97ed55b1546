"""PPL: policy-labeled preference learning, RePO without a reference (arXiv:2505.06273)."""

from __future__ import annotations

from typing import ClassVar

from regretless.objectives.repo import RePO


class PPL(RePO):
    """RePO with c = 0: regret under entropy regularization, where π_s takes the place of π_s − r_s (appendix B)."""

    name: ClassVar[str] = "ppl"
    title: ClassVar[str] = "PPL: policy-labeled preference learning"
    paper: ClassVar[str] = "arXiv:2505.06273"
    formula: ClassVar[str] = (
        "score = β Σ_s [ (1 + w_s) π_s − w_s m_s ] (formulation=paper; released: divided by T)\n"
        "w_s = H_{T−1} − H_{T−s} (formulation=paper), H_T − H_{T−s} (released)\n"
        "loss = −log σ(score⁺ − λ score⁻) + sft_weight · mean_s(−π_s⁺)"
    )
    # No setting: with a reference it is RePO.
    reference_weight: ClassVar[float] = 0.0  # type: ignore[misc]
