"""What objectives accept: padding, repeated rows, missing inputs, malformed pairs, settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import OBJECTIVES, Logps, Objective, Output, build, hyperparameter_names
from regretless.objectives.base import MODIFIERS

PAIRS = torch.tensor([[0, 1], [0, 2], [1, 2]])
NAMES = [name for name in OBJECTIVES if not build(name).token_numbers]
"""Objectives that need nothing of the data that other data do not have; the others bring tests of their own."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [float("nan"), float("inf"), float("-inf"), -7.0])
def test_padding_of_any_value_adds_neither_value_nor_gradient(
    name: str, padding: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    results = []
    for filler in (0.0, padding):
        batch = make_batch([5, 2, 3], padding=filler)
        output = build(name)(Logps(**batch, z_ref=0.1), PAIRS)
        gradients = torch.autograd.grad(output.loss, [batch["policy"], batch["reference_kl"]], allow_unused=True)
        results.append((output.pair_losses.tolist(), [grad.tolist() for grad in gradients if grad is not None]))
        for gradient in gradients:
            assert gradient is None or (gradient[~batch["mask"]] == 0).all()
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_when_moved_to_the_right_of_the_row_score_the_same(
    name: str, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    lengths = [5, 2, 3]
    batch = make_batch(lengths)
    right = {
        key: torch.stack([row.roll(5 - length) for row, length in zip(value, lengths, strict=True)])
        for key, value in batch.items()
    }
    expected = build(name)(Logps(**batch, z_ref=0.1), PAIRS).pair_losses
    torch.testing.assert_close(build(name)(Logps(**right, z_ref=0.1), PAIRS).pair_losses, expected)


@pytest.mark.parametrize("name", NAMES)
def test_rows_shared_by_pairs_give_the_gradient_of_separate_copies(
    name: str, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch([5, 2, 3])
    shared = build(name)(Logps(**batch, z_ref=0.1), PAIRS)
    (gradient,) = torch.autograd.grad(shared.loss, batch["policy"])
    copies = {key: value[PAIRS.flatten()] for key, value in batch.items()}
    apart = build(name)(Logps(**copies, z_ref=0.1), torch.arange(6).reshape(3, 2))
    (expected,) = torch.autograd.grad(apart.loss, batch["policy"])
    torch.testing.assert_close(shared.pair_losses, apart.pair_losses)
    torch.testing.assert_close(gradient, expected)


def test_half_precision_is_computed_in_float32(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    batch = {key: value if key == "mask" else value.bfloat16() for key, value in make_batch([5, 2, 3]).items()}
    output = build("repo")(Logps(**batch), PAIRS)
    assert output.loss.dtype == torch.float32
    assert output.loss.isfinite()


def test_reference_and_behavior_never_receive_gradient(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    batch = make_batch([5, 2, 3])
    for name in ("reference", "behavior"):
        batch[name].requires_grad_()
    output = build("repo")(Logps(**batch), PAIRS)
    gradients = torch.autograd.grad(output.loss, [batch["reference"], batch["behavior"]], allow_unused=True)
    assert gradients == (None, None)


def test_response_without_tokens_is_refused_by_row() -> None:
    mask = torch.tensor([[True, False], [False, False], [False, False]])
    with pytest.raises(ValueError, match=r"responses \[1, 2\] have no token"):
        Logps(torch.zeros(3, 2), mask=mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": torch.zeros(3)}, r"expected shape \(responses, tokens\)"),
        ({"reference": torch.zeros(3, 1)}, r"Logps.reference: expected \(2, 2\) as policy, got \(3, 1\)"),
        ({"mask": torch.ones(2)}, r"Logps.mask: expected \(2, 2\)"),
        ({"mask": torch.full((2, 2), 0.5)}, "expected only 0 and 1"),
    ],
)
def test_logps_of_wrong_form_are_refused(changes: dict[str, Tensor], message: str) -> None:
    values = {"policy": torch.zeros(2, 2), "mask": torch.ones(2, 2), **changes}
    with pytest.raises(ValueError, match=message):
        Logps(**values)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (torch.zeros(0, 2, dtype=torch.long), r"shape \(P ≥ 1, 2\), got \(0, 2\)"),
        (torch.tensor([0, 1]), r"got \(2,\)"),
        (torch.tensor([[0]]), r"got \(1, 1\)"),
        (torch.tensor([[0, 2]]), r"rows 0…2, but Logps has rows 0…1"),
        (torch.tensor([[0, -1]]), r"rows -1…0"),
        (torch.tensor([[0.0, 1.0]]), "expected integer pairs"),
    ],
)
def test_malformed_pairs_are_refused(pairs: Tensor, message: str) -> None:
    logps = Logps(torch.zeros(2, 2), mask=torch.ones(2, 2), reference=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=message):
        build("dpo")(logps, pairs)


@pytest.mark.parametrize(
    ("name", "missing", "remedy"),
    [
        ("repo", "behavior", "with the model that generated them, or use the objective repo_det"),
        ("repo_det", "reference", "frozen reference model"),
        ("tdpo", "reference_kl", "over the full vocabulary"),
        ("dpo", "reference", "frozen reference model"),
    ],
)
def test_missing_input_when_needed_is_named_with_its_remedy(
    name: str, missing: str, remedy: str, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch([5, 2, 3])
    del batch[missing]
    assert missing in build(name).needs
    with pytest.raises(DataError, match=f"{name} needs `{missing}`: .*{remedy}"):
        build(name)(Logps(**batch), PAIRS)


@pytest.mark.parametrize("name", NAMES)
def test_needs_when_taken_at_their_word_are_enough(name: str, make_batch: Callable[..., dict[str, Tensor]]) -> None:
    objective = build(name)
    batch = make_batch([5, 2, 3])
    given = {key: batch[key] for key in {"policy", "mask", *objective.needs} & batch.keys()}
    output = objective(Logps(**given, z_ref=0.1 if "z_ref" in objective.needs else None), PAIRS)
    assert output.loss.isfinite()


def test_build_with_bad_settings_reports_all_of_them_together() -> None:
    with pytest.raises(ConfigError) as error:
        build("repo", beta=0, formulation="appendix", sft_weight=True, discount=1.5, gamma=1)
    message = str(error.value)
    assert message.startswith("objective repo: 5 problem(s)")
    for part in ("beta: input should be greater than 0 (got 0)", "formulation:", "sft_weight:", "discount:", "gamma:"):
        assert part in message
    with pytest.raises(ConfigError, match=r"objective: expected one of repo, repo_det, .*dpo.*; got 'ppo'"):
        build("ppo")
    with pytest.raises(ConfigError, match="beta: input should be a finite number"):
        build("dpo", beta=float("inf"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_when_built_from_its_own_listing_is_the_default(name: str) -> None:
    listing = OBJECTIVES[name].hyperparameters()
    assert hyperparameter_names(name) == (*MODIFIERS, *listing)
    assert all(entry.type and entry.meaning for entry in listing.values())
    defaults: dict[str, Any] = {key: entry.default for key, entry in listing.items()}
    assert build(name, **defaults) == build(name)
    assert build(name).name == name


def test_hyperparameter_types_when_listed_show_bounds_and_choices() -> None:
    listing = OBJECTIVES["repo"].hyperparameters()
    assert listing["beta"].type == "number > 0"
    assert listing["discount"].type == "number ≥ 0, ≤ 1 or null"
    assert listing["formulation"].type == "paper or released"


def test_objectives_when_imported_bring_torch_and_not_transformers() -> None:
    code = "import sys, regretless.objectives; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


ANY_OUTPUT: Any = Output
"""The class for values that are none of its types."""


class _Returning(Objective):
    """An objective of somebody's own, with the output that a test gives it."""

    name = "mine"
    make: Any

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        found: Output = self.make(logps.policy.sum(dim=1), pairs)
        return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows, pairs: rows[pairs[:, 0]], "compute returned Tensor; return an Output"),
        (lambda rows, pairs: Output(rows.mean()), r"pair_losses: expected shape \(2,\).* or \(2, 2\).*; got \(\)"),
        (lambda rows, pairs: Output(rows), r"pair_losses: expected shape \(2,\).*; got \(3,\)"),
        (lambda rows, pairs: Output(rows.detach()[pairs[:, 0]]), "no gradient reaches logps.policy"),
        (lambda rows, pairs: ANY_OUTPUT(list(rows)), "pair_losses: expected a tensor of real numbers, got list"),
        (lambda rows, pairs: ANY_OUTPUT(rows[pairs[:, 0]] + 0j), "pair_losses: .*, got torch.complex128"),
        (lambda rows, pairs: ANY_OUTPUT(rows, rewards=rows.tolist()), "rewards: .*, got list"),
        (lambda rows, pairs: ANY_OUTPUT(rows, rewards=rows.detach().numpy()), "rewards: .*, got ndarray"),
        (lambda rows, pairs: ANY_OUTPUT(rows, rows=[0]), "rows: expected a tensor of row numbers, got list"),
        (
            lambda rows, pairs: Output(rows[pairs[:, 0]], rewards=rows[pairs[:, 0]].detach()),
            r"rewards: expected shape \(3,\), one for each row of logps; got \(2,\)",
        ),
    ],
)
def test_output_of_another_form_is_refused(
    make: Callable[[Tensor, Tensor], Any], message: str, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    with pytest.raises(ConfigError, match=f"^mine: .*{message}"):
        _Returning(make=make)(Logps(**make_batch([5, 2, 3])), torch.tensor([[0, 1], [0, 2]]))


class _Saying(Objective):
    """An objective of somebody's own, with the properties that a test gives it."""

    name = "mine"
    says: Any = None
    zero: Any = None

    @property
    def needs(self) -> frozenset[str]:
        return super().needs if self.says is None else self.says  # type: ignore[no-any-return]

    @property
    def zero_point(self) -> Any:
        return self.zero

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        return Output(logps.log_ratio()[pairs[:, 0]])


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        (
            {"says": ["reference", "rejected"]},
            r"`needs` of mine: expected a frozenset of names, got \['reference', 'rej",
        ),
        ({"says": {1}}, r"`needs` of mine: expected a frozenset of names, got \{1\}"),
        ({"zero": "pairs"}, r"`zero_point` of mine: expected mismatched, paired or None, got 'pairs'"),
    ],
)
def test_property_of_another_form_is_refused(
    properties: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "mine", _Saying)
    with pytest.raises(ConfigError, match=message):
        build("mine", **properties)
    assert build("mine", says={"behavior": 1}.keys()).required == {"behavior"}


def test_value_of_a_token_when_the_report_has_none_of_that_name_then_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OBJECTIVES, "mine", _Saying)
    monkeypatch.setattr(_Saying, "token_value", "advantage")
    with pytest.raises(ConfigError, match="`token_value` of mine: expected reward, regret or det, got 'advantage'"):
        build("mine")


def test_log_probabilities_when_asked_for_what_they_lack_then_the_reason_is_given(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    given = make_batch([5, 2])
    del given["reference"]
    with pytest.raises(ConfigError, match=r"^mine: compute failed: Logps.log_ratio: expected `reference`.*`needs`"):
        _Saying(says={"rejected"})(Logps(**given), torch.tensor([[0, 1]]))
    with pytest.raises(ConfigError, match=r"Logps\.nll: expected reduction sum or mean, got 'avg'"):
        Logps(**given).nll("avg")  # type: ignore[arg-type]


class _Reading(Objective):
    """An objective that reads the behavior policy, and says in `needs` what a test tells it."""

    name = "mine"
    says: frozenset[str]

    @property
    def needs(self) -> frozenset[str]:
        return self.says | {"rejected"}

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        return Output((logps.policy - logps.behavior).sum(dim=1)[pairs[:, 0]])


def test_input_that_needs_does_not_name_or_misspells_is_asked_for(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    given = make_batch([5, 2])
    behavior = given.pop("behavior")
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(
        ConfigError, match=r"^mine: compute failed: .*it was given no behavior, no .*`needs` has to name"
    ):
        _Reading(says=frozenset())(Logps(**given), pairs)
    with pytest.raises(DataError, match=r"token_numbers.behaviour \(or is the input 'behavior' meant, in `needs`\?\)"):
        _Reading(says=frozenset({"behaviour"}))(Logps(**given, behavior=behavior), pairs)
    assert torch.isfinite(_Reading(says=frozenset({"behavior"}))(Logps(**given, behavior=behavior), pairs).loss)
    # A fault of another kind stays what it is.
    with pytest.raises(TypeError, match="unsupported"):
        _Returning(make=lambda rows, pairs: rows + "text")(Logps(**given, behavior=behavior), pairs)
