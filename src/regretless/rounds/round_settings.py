"""Settings of the stage rounds."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from regretless.core.files import fingerprint
from regretless.core.settings import Section, Seed


class ReplayConfig(Section):
    """Pairs of earlier rounds among those that a round trains on."""

    share: float = Field(gt=0, lt=1)
    """Share of a round's pairs that are drawn at random from earlier rounds' pairs. It is smaller where these have too
    few. The first round has none."""
    most_age: int | None = Field(default=None, ge=1)
    """Age of the oldest pairs, in rounds; any age by default. With 1, pairs of the round before are replayed."""


class StopConfig(Section):
    """When a method's rounds end before `count`. The model of the round that is measured last is its result."""

    kl: float | None = Field(default=None, gt=0)
    """Largest KL divergence of a round's writer to the recipe's model, in nats per response."""
    length: float | None = Field(default=None, gt=1)
    """Largest mean length of a round's responses, as a multiple of the first round's."""
    gain: bool = False
    """End where Pass@1 of a round's writer (a judge's score, without verdicts) is not above that of the round before:
    where the 95 % interval of the difference covers 0. No prompt of the two has been trained on, so `prompts` may not
    be `all`."""

    @property
    def is_set(self) -> bool:
        """Whether rounds may end early."""
        return self != StopConfig()


class RoundsConfig(Section):
    """Rounds of sampling, verdicts, pairs and training, each with the model that the round before has trained.

    The sections from `sample` to `train` are the settings of every round. Each method of `train` has its own chain of
    rounds. The first round's responses and pairs are shared: the recipe's model writes them for all methods.
    """

    count: int = Field(ge=1)
    """Number of rounds."""
    prompts: Literal["disjoint", "all"] | Annotated[int, Field(ge=1, strict=True)] = "disjoint"
    """Prompts of a round, of those that `sample.prompts` names: `disjoint` divides them among the rounds at random;
    `all` asks every prompt in every round; a number takes so many in each round, none twice until fewer are left.
    With `all` or a number, a finished run can be extended by more rounds, and repeats nothing (see `schedule`)."""
    rest: int | None = Field(default=None, ge=1)
    """Rounds in which a prompt is not asked whose last responses were not both right and wrong, for it became too easy,
    or stayed too hard: they gave no pair of verdicts. By default every prompt of a round is asked. Each method has
    prompts of its own then, and a round as many fewer as rest. With `prompts` `all` or a number."""
    start: Literal["previous", "model"] = "previous"
    """Model that the training of a round starts from: that of the round before (`previous`), or the recipe's `model`
    again and again, so that only the writer of the responses improves."""
    reference: Literal["start", "previous", "behavior"] = "start"
    """Reference of a method that reads one: the recipe's `model` in every round (`start`, as in TRL); the model of the
    round before, which wrote this round's responses (`previous`); or the log-probabilities that come with each response
    (`behavior`), which of replayed pairs are those of their own writer, and which take no pass of a reference model."""
    optimizer: Literal["fresh", "carried"] = "fresh"
    """Optimizer of a round: a new one, or with the state that it had at the end of the round before (`carried`), such
    as Adam's means of gradients. For rounds of few steps."""
    schedule: Literal["each", "all"] = "each"
    """Schedule of the learning rate that `train` says: a whole one in every round (`each`), or one over `count` equal
    parts, a round each (`all`), with warmup at its beginning alone. With `all`, a run cannot be extended."""
    replay: ReplayConfig | None = None
    """Train on pairs of earlier rounds, too; by default on those of the round alone."""
    stop: StopConfig = StopConfig()
    """Bounds at which a method's rounds end early; none by default."""
    measured: int = Field(default=256, ge=2)
    """Most responses of a round that two models re-score: the recipe's, for the KL divergence to it, and the one that
    the round has trained, for the effective sample size. They are drawn at random."""
    seed: Seed = 0
    """Random seed of the prompts' order, of replayed pairs and of measured responses."""

    @model_validator(mode="after")
    def _replay_has_a_reader(self) -> Self:
        if self.replay is not None and self.count == 1:
            raise ValueError("replay: one round has no earlier pairs; leave it out, or set a larger count")
        return self

    @model_validator(mode="after")
    def _gain_on_other_prompts(self) -> Self:
        if self.stop.gain and self.prompts == "all":
            raise ValueError(
                "stop.gain: with prompts=all, a round's prompts are those that the rounds before have trained on; set "
                "prompts to disjoint or to a number"
            )
        return self

    @model_validator(mode="after")
    def _rest_changes_which_prompts(self) -> Self:
        if self.rest is not None and self.prompts == "disjoint":
            raise ValueError("rest: with prompts=disjoint no prompt is asked twice; set prompts to all or to a number")
        if self.rest is not None and self.stop.gain:
            raise ValueError(
                "rest: not with stop.gain, which compares rounds by prompts that no earlier result has chosen"
            )
        return self

    @model_validator(mode="after")
    def _carried_to_the_same_weights(self) -> Self:
        if self.optimizer == "carried" and self.start == "model":
            raise ValueError(
                "optimizer: its state belongs to the weights that it has trained, and with start=model a round begins "
                "at others; set fresh"
            )
        return self

    @property
    def parts(self) -> int | None:
        """Number of parts that the prompts are divided into; None if it does not depend on the number of rounds."""
        return self.count if self.prompts == "disjoint" else None


def seed_of(seed: int, number: int) -> int:
    """Seed of a round: the recipe's in the first, so that one round is the recipe without rounds; then derived ones."""
    return seed if number == 1 else int(fingerprint([seed, number])[:8], 16)
