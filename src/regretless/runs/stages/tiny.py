"""What stages share in a smoke run (`runs.miniature`): the embedded world's easiest problems, and tiny models."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from regretless.workflow.run_folder import RUN

if TYPE_CHECKING:
    from regretless.modeling.load import ModelConfig
    from regretless.runs.recipe import Recipe

TOKENIZER = f"{RUN}/world/tokenizer"
BEHAVIOR = "behavior"
"""Name prefix of the behavior models that are trained when the recipe trains none itself: one for each architecture
class."""
STEPS_OF_A_PROBLEM, LARGEST_AMOUNT = (1, 1), 1
WORLD = {
    "prompts": 32,
    "test": 8,
    "validation": 0,
    "longer_test": 0,
    "steps": STEPS_OF_A_PROBLEM,
    "prompt_steps": None,
    "longer_steps": None,
    "largest_amount": LARGEST_AMOUNT,
}
NOTE = "smoke run: tiny models, toy data; its numbers mean nothing"


def has_data(recipe: Recipe) -> bool:
    """True if the recipe has responses or pairs, from whatever."""
    return recipe.sample is not None or recipe.responses is not None or recipe.pairs is not None


def behavior_of(recipe: Recipe) -> list[ModelConfig]:
    """The models that write responses: the recipe's; if it starts from data, one like the policy."""
    if recipe.sample is not None:
        return recipe.sample.models
    assert recipe.model is not None  # no stage of a recipe can use data without a model
    return [recipe.model]


def made_here(model: ModelConfig) -> bool:
    """True if the run makes the model."""
    return model.name_or_path is not None and model.name_or_path.startswith(RUN)


def model_in_miniature(model: ModelConfig) -> dict[str, Any]:
    """A model of the recipe's own world unchanged; any other as its architecture with random weights."""
    return model.model_dump(exclude_unset=True) if made_here(model) else tiny(model)


def tiny(model: ModelConfig) -> dict[str, Any]:
    """A model of the same architecture class at a tiny size, with random weights."""
    from regretless.world.tiny_models import shrink
    from regretless.world.tokenizer import build_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        architecture = shrink(model, tokenizer=folder).architecture
    return {"architecture": architecture, "tokenizer": TOKENIZER}


def trained_name(model: ModelConfig) -> str:
    """Name of the pretrained model that stands for a behavior model."""
    return f"{BEHAVIOR}-{tiny(model)['architecture']['model_type']}"
