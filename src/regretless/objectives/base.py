"""The base of all objectives: inputs, output, and checks."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.core.setting_list import Setting, settings_of
from regretless.core.settings import Section, setting_error
from regretless.objectives.continued import Continued
from regretless.objectives.listed import Listed
from regretless.objectives.modifiers import Importance, importance_weights, tail_weights

INPUTS = frozenset(
    {
        *("reference", "behavior", "top_logps", "continuations", "reference_kl"),
        *("steps", "units", "z_ref", "rejected", "future"),
    }
)
"""Inputs that an objective may have beyond `policy` and `mask`; any other name is one of the data's `token_numbers`."""

REMEDIES: Mapping[str, str] = {
    "reference": "token log-probabilities under the frozen reference model; pass Logps(reference=...)",
    "behavior": "token log-probabilities under the policy that generated each response, and the data has none; "
    "re-score the responses with the model that generated them, or use the objective repo_det, which needs none (and "
    "leave out importance and reference=behavior)",
    "top_logps": "the most likely tokens of the policy that generated each response in each context, and the data has "
    "none; sample with top_logps, or set estimator=sampled",
    "continuations": "continuations of the responses' beginnings by the policy that generated them, and the data has "
    "none; run rollout with keep_continuations, or set estimator=sampled",
    "reference_kl": "KL(reference || policy) over the full vocabulary at every token; pass Logps(reference_kl=...)",
    "steps": "the step index of every token; pass Logps(steps=...) or set granularity=token",
    "future": "1 for every token that is stored behind the cut of its response, 0 for the others; pass "
    "Logps(future=...) or set horizon=cut",
    "z_ref": "the mean log-ratio of mismatched prompt/response pairs; pass Logps(z_ref=...) or set "
    "reference_point=paired",
}
"""For each optional input: what it is, and what to do if it is missing."""


FIELDS = ("mask", "reference", "behavior", "reference_kl", "steps", "units", "future")
"""Fields of `Logps` of the shape of `policy`."""
SATURATED = 10.0
"""Margin (nats) beyond which a log-sigmoid loss has practically no gradient left, or as good as all it can have."""
NO_ROW = -1
"""In place of a row behind the last rejected response of a list."""
SINGLE_LOSSES = "has losses of single responses, which have no flipped form"
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, eq=False)
class Logps:
    """Token log-probabilities of R distinct responses, padded to T tokens. All tensors are (R, T), in nats.

    Values off the mask are replaced by zero on construction, so padding (NaN and infinity included) adds neither
    value nor gradient. Half precision is raised to float32; all but `policy`, that of `top_logps` and of
    `continuations`, and `reference_kl` is detached.

    Raises ValueError for shapes that differ, a mask that is not 0/1, and a response without a token.
    """

    policy: Tensor
    """log π_θ(o_s | q, o_<s) of the policy in training."""
    _: KW_ONLY
    mask: Tensor
    """True at the tokens of the response, end of sequence included if it was generated."""
    reference: Tensor | None = None
    """The same tokens under the frozen reference model."""
    behavior: Tensor | None = None
    """The same tokens under the policy that generated the response."""
    top_logps: Listed | None = None
    """Log-probabilities of the most likely tokens of that policy in each context; those of the policy have gradient."""
    continuations: Continued | None = None
    """What that policy wrote behind beginnings of the responses when it was asked again, with log-probabilities."""
    reference_kl: Tensor | None = None
    """KL(π_ref ‖ π_θ) over the full vocabulary at each position, with gradient."""
    steps: Tensor | None = None
    """Integer step of each token, counted from 0 within the response; read only on the mask."""
    units: Tensor | None = None
    """Integer unit of each token, counted from 0 within the response, where a response is by a policy with another
    tokenizer: `behavior` then has a unit's log-probability at its last token. Given only if `reads_units`."""
    future: Tensor | None = None
    """1 at the tokens stored behind the cut of a response, which are only the future of those before it, else 0."""
    token_numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """Further numbers of each token by name, as the data has them (`Side.token_numbers`)."""
    z_ref: Tensor | float | None = None
    """Scalar: the mean log-ratio over the responses that the objective's `zero_point` selects."""

    def __post_init__(self) -> None:
        if self.policy.dim() != 2:
            raise ValueError(f"Logps.policy: expected shape (responses, tokens), got {tuple(self.policy.shape)}")
        tensors = {name: getattr(self, name) for name in FIELDS}
        tensors |= {f"token_numbers.{name}": values for name, values in self.token_numbers.items()}
        if self.top_logps is not None:
            tensors |= {f"top_logps.{name}": getattr(self.top_logps, name)[..., 0] for name in ("behavior", "policy")}
        for name, value in tensors.items():
            if value is not None and value.shape != self.policy.shape:
                raise ValueError(
                    f"Logps.{name}: expected {tuple(self.policy.shape)} as policy, got {tuple(value.shape)}"
                )
        mask = self.mask
        if mask.dtype != torch.bool:
            if not ((mask == 0) | (mask == 1)).all():
                raise ValueError("Logps.mask: expected only 0 and 1")
            mask = mask.bool()
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"Logps.mask: responses {empty} have no token; drop them before scoring")

        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        object.__setattr__(self, "mask", mask)
        for name, trained in (("policy", True), ("reference", False), ("behavior", False), ("reference_kl", True)):
            value = getattr(self, name)
            if value is not None:
                value = value if trained else value.detach()
                object.__setattr__(self, name, value.to(dtype).masked_fill(~mask, 0.0))
        if (top := self.top_logps) is not None:
            off = ~mask.unsqueeze(-1)
            behavior, policy = top.behavior.detach().to(dtype), top.policy.to(dtype)
            top = replace(top, behavior=behavior.masked_fill(off, 0.0), policy=policy.masked_fill(off, 0.0))
            object.__setattr__(self, "top_logps", top)
        if self.continuations is not None:
            object.__setattr__(self, "continuations", self.continuations.in_type(dtype))
        numbers = {name: row.detach().to(dtype).masked_fill(~mask, 0.0) for name, row in self.token_numbers.items()}
        object.__setattr__(self, "token_numbers", numbers)

    @property
    def compared(self) -> Tensor:
        """The tokens of the response itself, (R, T) bool: those on the mask that are not `future`."""
        return self.mask if self.future is None else self.mask & (self.future == 0)

    def of_compared(self, values: Tensor) -> Tensor:
        """Values of tokens (R, T), with 0 behind each response's cut."""
        return values if self.future is None else values.masked_fill(~self.compared, 0.0)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, (R,) long; without those behind its cut."""
        return self.compared.sum(dim=1)

    def log_ratio(self) -> Tensor:
        """Σ_s (log π_θ − log π_ref) of each response, (R,) nats. Raises ConfigError without `reference`."""
        if self.reference is None:
            raise ConfigError(
                "Logps.log_ratio: expected `reference`, got None; pass Logps(reference=...), and name it in the "
                "property `needs` of an objective that reads it"
            )
        # Subtract before summing: per token the two are close, so float32 retains digits that two long sums would lose.
        return self.of_compared(self.policy - self.reference).sum(dim=1)

    def nll(self, reduction: Literal["sum", "mean"]) -> Tensor:
        """Negative log-likelihood of each response, (R,) nats: over its tokens, summed or averaged.

        Raises ConfigError for another `reduction`.
        """
        if reduction not in ("sum", "mean"):
            raise ConfigError(f"Logps.nll: expected reduction sum or mean, got {reduction!r}")
        total = -self.of_compared(self.policy).sum(dim=1)
        return total if reduction == "sum" else total / self.lengths


@dataclass(frozen=True, eq=False)
class Output:
    """Result of an objective for P pairs over R responses. Raises ConfigError for values that are no such tensors."""

    pair_losses: Tensor
    """(P,) nats; (P, 2) for methods with separate losses for chosen and rejected."""
    scores: Tensor | None = None
    """(R,) nats, with gradient: the score in the preference model, for methods that score responses."""
    rewards: Tensor | None = None
    """(R,) nats, detached: the implicit reward, for logging. None for methods without rewards."""
    rows: Tensor | None = None
    """(P, 2) rows of `scores` and `rewards` of each pair, where a response has other ones in each of its pairs."""
    loss: Tensor = field(init=False)
    """Scalar: the mean of all entries of `pair_losses`."""

    def __post_init__(self) -> None:
        optional = {name: getattr(self, name) for name in ("scores", "rewards", "rows")}
        given = {"pair_losses": self.pair_losses} | {name: each for name, each in optional.items() if each is not None}
        problems = [
            f"{name}: expected a tensor of {'row numbers' if name == 'rows' else 'real numbers'}, got {_kind(value)}"
            for name, value in given.items()
            if not _is_real(value)
            or (name == "pair_losses" and not value.is_floating_point())
            or (name == "rows" and value.is_floating_point())
        ]
        if problems:
            raise ConfigError(f"Output: {'; '.join(problems)}")
        object.__setattr__(self, "loss", self.pair_losses.mean())

    def pair_rewards(self, pairs: Tensor) -> Tensor | None:
        """Rewards of the two responses of each pair, (P, 2) nats; `pairs` are those that the objective was given."""
        return None if self.rewards is None else self.rewards[pairs if self.rows is None else self.rows]


class Objective(Section):
    """A loss over pairs of responses. Its fields are its hyperparameters; calling it computes the loss.

    Calling takes `logps` and the pairs (P, 2) long (row of the chosen, row of the rejected; rows may repeat). Methods
    without a rejected side also take (P, 1), and never read the second column. With `soft_labels` it also takes the
    `preferences` (P,), probabilities that the chosen response is the better one. A method of your own has a `name`, its
    hyperparameters as fields, `needs` where they differ, and `compute`. The fields below modify any method.

    A method of `lists` takes (P, 1 + K): of each list the chosen row, then its 1 to K rejected ones, and then −1.

    The loss of a pair must not depend on the other pairs of a call: the trainer computes a step in parts, whose pairs
    change with `max_tokens_per_microbatch`, and takes the mean over the whole step.

    Raises DataError if an input in `required` is missing, ValueError for malformed pairs, ConfigError if `compute`
    reads an input that `needs` does not name, or returns something else than an `Output` for these pairs and rows.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """The method's name in words, for a model's card."""
    paper: ClassVar[str] = ""
    """Where it was published, as `arXiv:…`."""
    formula: ClassVar[str] = ""
    """The loss, a line for each quantity; π, r and m are the log-probabilities of the token s under policy, reference
    and behavior policy (nats), ⁺ is the chosen response and ⁻ the rejected one."""

    token_value: ClassVar[Literal["reward", "regret", "det"]] = "reward"
    """What the report shades a token by: its reward, its regret term, or that with a deterministic behavior policy."""
    rewards_means: ClassVar[bool] = False
    """Whether the reward is the mean log-probability of a response's tokens: less weight of some would raise it."""
    works_with: ClassVar[Mapping[str, str]] = {}
    """Hyperparameter → the one without which it has no effect."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Modifier that the method cannot have → why, as the rest of a sentence about the method."""
    lists: ClassVar[bool] = False
    """Whether it compares a chosen response with any number of rejected ones at once: then the trainer makes one list
    of all pairs of a prompt that have one chosen response, and `pairs` may have more columns (see the class)."""

    reference: Literal["model", "behavior"] = "model"
    """Policy that log-ratios are relative to: the reference model, or the behavior policy that generated the responses,
    whose log-probabilities the data has, so that no reference is computed."""
    ld_alpha: Fraction = 1.0
    """Weight α of the tokens of a response beyond the length of the pair's other response (LD-DPO); 1 leaves them as
    they are."""
    importance: Importance = "none"
    """Weight of a pair's loss: `none`, or the product of its responses' clipped probability ratios of policy to
    behavior policy, each the ratio of an average token (`mean`, as in WPO) or of the whole response (`sum`)."""
    importance_clip: Positive = 1.0
    """Largest probability ratio of a response; used with `importance` only."""
    soft_labels: bool = False
    """Whether a pair's loss is p times its own plus 1 − p times that of the flipped pair, p being the probability that
    the chosen response is the better one, `preference_probability` in the data."""

    @model_validator(mode="after")
    def _check_modifiers(self) -> Self:
        problems = {
            name: f"has no effect without {other}; set {other} too, or leave it out"
            for name, other in {"importance_clip": "importance", **self.works_with}.items()
            if name in self.model_fields_set and other not in self.model_fields_set
        }
        if self.reference == "behavior":
            if "reference" not in self.needs:
                problems["reference"] = f"{self.name} has no reference with these settings; leave it out"
            elif blocking := sorted({"reference_kl", "z_ref"} & self.needs):
                problems["reference"] = (
                    f"{self.name} needs the reference model itself for `{blocking[0]}`; leave it out"
                )
            elif self.zero_point is not None:
                problems["reference"] = f"{self.name} needs the reference model itself for its zero point; leave it out"
        if self.ld_alpha != 1:
            if "rejected" not in self.needs:
                problems["ld_alpha"] = f"{self.name} reads no rejected response to compare lengths with; leave it out"
            elif self.zero_point is not None:
                problems["ld_alpha"] = f"the zero point of {self.name} is that of whole responses; leave it out"
            elif "continuations" in self.needs:
                problems["ld_alpha"] = "it weighs the tokens of responses, not of their continuations; leave it out"
            elif self.rewards_means:
                problems["ld_alpha"] = (
                    f"{self.name} divides by the length of a response and has no reference, so that a smaller "
                    "weight of its last tokens would raise the reward of the longer response; leave it out"
                )
        if self.soft_labels and "rejected" not in self.needs:
            problems["soft_labels"] = f"{self.name} reads no rejected response to prefer; leave it out"
        elif self.soft_labels and self.zero_point is not None:
            problems["soft_labels"] = f"{self.name} {SINGLE_LOSSES}; leave it out"
        problems |= {
            name: f"{self.name} {why}; leave it out"
            for name, why in self.refuses.items()
            if getattr(self, name) != Objective.model_fields[name].default
        }
        if problems:
            errors = [setting_error((key,), text, getattr(self, key)) for key, text in problems.items()]
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Inputs beyond `policy` and `mask` that `compute` reads: of `INPUTS`, or `token_numbers`."""
        return frozenset({"reference", "rejected"})

    @property
    def reads_units(self) -> bool:
        """Whether `compute` reads `Logps.units`, so that `behavior` may be known of spans of several tokens alone."""
        return False

    @property
    def missing(self) -> Mapping[str, float]:
        """Inputs of the data that a pair may lack, and the value that every token of its two responses then has."""
        return {}

    @property
    def required(self) -> frozenset[str]:
        """Inputs that calling the objective requires: those that it `needs`, as the modifiers change them."""
        behavior = frozenset({"behavior"})
        found = self.needs
        if self.reference == "behavior":
            found = found - {"reference"} | behavior
        return found if self.importance == "none" else found | behavior

    @property
    def token_numbers(self) -> frozenset[str]:
        """Required inputs that come from the data as `token_numbers`."""
        return self.required - INPUTS

    @property
    def zero_point(self) -> Literal["mismatched", "paired"] | None:
        """The responses of a step whose mean log-ratio the trainer passes as `Logps.z_ref`, if any.

        `mismatched`: prompts with responses to other prompts; `paired`: the responses of the step's own pairs.
        """
        return None

    def check_properties(self) -> Self:
        """This objective. Raises ConfigError if `needs`, `zero_point` or `token_value` is not as documented."""
        needs: Any = self.needs
        if not (isinstance(needs, Set) and all(isinstance(name, str) for name in needs)):
            raise ConfigError(f"property `needs` of {self.name}: expected a frozenset of names, got {needs!r:.100}")
        if self.zero_point not in (None, "mismatched", "paired"):
            raise ConfigError(
                f"property `zero_point` of {self.name}: expected mismatched, paired or None, got {self.zero_point!r}"
            )
        if self.token_value not in ("reward", "regret", "det"):
            raise ConfigError(f"`token_value` of {self.name}: expected reward, regret or det, got {self.token_value!r}")
        return self

    def __call__(self, logps: Logps, pairs: Tensor, preferences: Tensor | None = None) -> Output:
        present = {"rejected", *(logps.token_numbers.keys() - INPUTS)}
        present |= {name for name in REMEDIES if getattr(logps, name, None) is not None}
        missing = sorted(self.required - present)
        if missing:
            raise DataError("; ".join(f"{self.name} needs `{name}`: {_remedy(name)}" for name in missing))
        pairs = self._checked(pairs, logps)
        given = replace(logps, reference=logps.behavior) if self.reference == "behavior" else logps
        if self.ld_alpha == 1:
            output = self._labeled(given, pairs, preferences)
        else:
            rows = torch.arange(pairs.numel(), device=pairs.device).view_as(pairs)
            output = self._labeled(_without_long_tails(given, pairs, self.ld_alpha), rows, preferences)
            output = replace(output, rows=rows)
        if self.importance != "none":
            assert logps.behavior is not None
            weights = importance_weights(
                logps.policy, logps.behavior, logps.mask, self.importance, self.importance_clip
            )[pairs]
            # A loss for each side has the weight of that side.
            weights = weights if output.pair_losses.dim() == 2 else weights.prod(dim=1)
            output = replace(output, pair_losses=output.pair_losses * weights)
        return output

    def _labeled(self, logps: Logps, pairs: Tensor, preferences: Tensor | None) -> Output:
        """What `compute` returns; with `soft_labels`, the losses are the means over both directions of each pair."""
        output = self._checked_output(logps, pairs)
        if not self.soft_labels:
            return output
        share = torch.tensor([]) if preferences is None else preferences.to(output.pair_losses)
        if share.shape != (len(pairs),) or not ((share >= 0) & (share <= 1)).all():
            raise DataError(
                f"{self.name}: soft_labels needs a probability from 0 to 1 for each of {len(pairs)} pairs, got "
                f"{share.tolist()!s:.100}; pass preferences"
            )
        if output.pair_losses.dim() == 2:
            raise ConfigError(f"{self.name} {SINGLE_LOSSES}; leave out soft_labels")
        flipped = self._checked_output(logps, pairs.flip(1)).pair_losses
        return replace(output, pair_losses=share * output.pair_losses + (1 - share) * flipped)

    @abstractmethod
    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        """The method itself: losses of pairs (P, 2) of rows of `logps`, both checked."""

    def _checked_output(self, logps: Logps, pairs: Tensor) -> Output:
        """What `compute` returns. A loss of another shape would be averaged, and trained, without a word."""
        try:
            output: Any = self.compute(logps, pairs)
        except (TypeError, AttributeError) as error:
            absent = [name for name in REMEDIES if getattr(logps, name) is None]
            if "NoneType" not in str(error) or not absent:
                raise
            raise ConfigError(
                f"{self.name}: compute failed: {error}; it was given no {', no '.join(absent)}; the property `needs` "
                "has to name the inputs that compute reads"
            ) from error
        except ConfigError as error:  # of Output or Logps, which do not know the method
            raise ConfigError(f"{self.name}: compute failed: {error}") from error
        if not isinstance(output, Output):
            raise ConfigError(f"{self.name}: compute returned {type(output).__name__}; return an Output(losses)")
        count, rows = len(pairs), len(logps.policy)
        losses = tuple(output.pair_losses.shape)
        of_rows = (rows if output.rows is None else output.rows.numel(),)
        problems = []
        if losses not in {(count,), tuple(pairs.shape)}:
            problems.append(
                f"pair_losses: expected shape {(count,)}, one loss for each pair, or {tuple(pairs.shape)}, one for "
                f"each of its responses; got {losses}"
            )
        elif logps.policy.requires_grad and torch.is_grad_enabled() and not output.pair_losses.requires_grad:
            problems.append("pair_losses: no gradient reaches logps.policy; compute them from it, without detach")
        problems += [
            f"{name}: expected shape {of_rows}, one for each row of logps; got {tuple(values.shape)}"
            for name, values in (("scores", output.scores), ("rewards", output.rewards))
            if values is not None and tuple(values.shape) != of_rows
        ]
        if problems:
            raise ConfigError(f"{self.name}: compute returned an Output that cannot be used: {'; '.join(problems)}")
        return output

    def _checked(self, pairs: Tensor, logps: Logps) -> Tensor:
        pairs = torch.as_tensor(pairs, device=logps.policy.device)
        widths = (2,) if "rejected" in self.needs else (1, 2)
        if self.lists and pairs.dim() == 2:
            widths = (max(2, pairs.shape[1]),)
        if pairs.dim() != 2 or pairs.shape[1] not in widths or pairs.shape[0] == 0:
            raise ValueError(f"{self.name}: expected pairs of shape (P ≥ 1, {widths[-1]}), got {tuple(pairs.shape)}")
        if pairs.dtype == torch.bool or pairs.is_floating_point():
            raise ValueError(f"{self.name}: expected integer pairs (rows of Logps), got {pairs.dtype}")
        pairs = pairs[:, : widths[0]].long()
        rows, others = logps.policy.shape[0], pairs[:, 2:]
        named = torch.cat([pairs[:, :2].flatten(), others[others != NO_ROW]])
        if named.min() < 0 or named.max() >= rows:
            raise ValueError(
                f"{self.name}: pairs name rows {int(named.min())}…{int(named.max())}, but Logps has rows 0…{rows - 1}"
            )
        return pairs

    @classmethod
    def hyperparameters(cls) -> dict[str, Setting]:
        """Type with bounds, default and meaning of every hyperparameter but `MODIFIERS`, in order of declaration."""
        return {setting.key: setting for setting in settings_of(cls) if setting.key not in MODIFIERS}

    @staticmethod
    def modifiers() -> dict[str, Setting]:
        """The same of the hyperparameters that every objective has."""
        return {setting.key: setting for setting in settings_of(Objective)}


MODIFIERS = tuple(Objective.model_fields)
"""Hyperparameters that every objective has, in order."""


def _without_long_tails(logps: Logps, pairs: Tensor, alpha: float) -> Logps:
    """Each pair's responses as rows of their own, tokens beyond the shorter one's length weighted with `alpha`.

    All log-probabilities and divergences get the weight, so sums over tokens do; counts of tokens stay.
    """
    rows = pairs.flatten()
    mask = logps.mask[rows]
    weights = tail_weights(mask, alpha, logps.policy.dtype)

    top = logps.top_logps

    def weighted(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows] * weights

    return Logps(
        logps.policy[rows] * weights,
        mask=mask,
        reference=weighted(logps.reference),
        behavior=weighted(logps.behavior),
        top_logps=top and replace(top, behavior=top.behavior[rows], policy=top.policy[rows], weights=weights),
        reference_kl=weighted(logps.reference_kl),
        steps=None if logps.steps is None else logps.steps[rows],
        units=None if logps.units is None else logps.units[rows],
        future=None if logps.future is None else logps.future[rows],
        token_numbers={name: values[rows] for name, values in logps.token_numbers.items()},
        z_ref=logps.z_ref,
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex() and value.dtype != torch.bool


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _remedy(name: str) -> str:
    return REMEDIES.get(name, f"a number per token; the data has to hold it as token_numbers.{name}{similar(name)}")


def similar(name: str) -> str:
    """A question for the end of a message about a token number: whether one of `INPUTS` was meant."""
    close = difflib.get_close_matches(name, INPUTS, n=1)
    return f" (or is the input {close[0]!r} meant, in `needs`?)" if close else ""


def margins(values: Tensor, pairs: Tensor) -> Tensor:
    """Value of the chosen minus value of the rejected, (P,). values: (R,); pairs: (P, 2)."""
    chosen, rejected = values[pairs].unbind(dim=1)
    return chosen - rejected
