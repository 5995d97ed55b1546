"""The stages of a run, in their order: a file each, with everything that is this stage's. Light to import."""

from regretless.runs.stages import (
    analyze,
    evaluate,
    inspect,
    judge,
    mask,
    pair,
    pairs,
    pretrain,
    prompts,
    report,
    rollout,
    rounds,
    sample,
    train,
    verify,
    world,
)
from regretless.runs.stages.stage import STAGES, Listing, Run, Session, Stage, do_units, stages_of

for _module in (
    *(world, pretrain, prompts, sample, verify, judge, rollout, pair, pairs, mask),
    *(inspect, train, rounds, evaluate, analyze, report),
):
    STAGES[_module.STAGE.name] = _module.STAGE

__all__ = ["STAGES", "Listing", "Run", "Session", "Stage", "do_units", "stages_of"]
