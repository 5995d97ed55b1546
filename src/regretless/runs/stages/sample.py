"""Stage `sample`: responses of the behavior models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Stage
from regretless.runs.stages.tiny import TOKENIZER, behavior_of, has_data, made_here, trained_name
from regretless.workflow.run_folder import RUN, Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe
    from regretless.sampling.sample import SampleConfig

MINIATURE = {"max_new_tokens": 16, "batch_size": 256}
"""Settings of sampling in miniature."""


class Sample(Stage["SampleConfig"]):
    """Answers prompts."""

    name = "sample"
    writes = ("responses.parquet", "responses.parts", "refused.jsonl")
    work = "regretless.sampling.sample"
    about = "Answer prompts with a behavior model, with the log-probability of every token."
    reads = "prompts, a behavior model"
    makes = "responses with token log-probabilities"
    flags = ("prompts", "model")
    optional = ("prompts", "model")
    result = RESPONSES

    def units(self, config: SampleConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses of all models."""
        from regretless.sampling.sample import KEEPS

        # Whatever the pairs can be used for does not change the responses.
        recipe = run.recipe
        task = {"config": config, "policy": recipe.model if recipe.train is not None else None}
        yield [run.unit(self, self.place, dump(config), task, need=Need("sample"), keeps=KEEPS)]

    def problems(self, config: SampleConfig, machine: Machine) -> None:
        """Problems of the engine and of its server."""
        from regretless.sampling.engines import ENGINES

        super().problems(config, machine)
        machine.under(f"{self.name}.engine", ENGINES.find(config.engine).check)
        if config.server is None:
            return
        machine.under(self.name, config.server.api_key)
        for number, model in enumerate(config.models):
            setting = f"{self.name}.models.{number}"
            machine.path_or_hub(f"{setting}.tokenizer", model.tokenizer, "model")
            if model.name_or_path is None or model.adapter is not None:
                machine.add(setting, "expected the model's name on the server in name_or_path, and no adapter")

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Problems of the world, answered by pretrained models."""
        if not has_data(recipe):
            return section
        values = section or {}
        behavior, is_judged = behavior_of(recipe), recipe.judge is not None
        here = [model.model_dump(exclude_unset=True) for model in behavior if made_here(model)]
        prompts = {"dataset": f"{RUN}/world/prompts.jsonl", "answer_column": "answer"}
        template = values.get("prompts", {}).get("template")
        return {
            **values,
            **{"n": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
            **MINIATURE,
            **({"n": values["n"]} if is_judged and "n" in values else {}),
            **({"engine": "transformers", "server": None} if "engine" in values else {}),
            "prompts": {**prompts, "template": template} if is_judged else prompts,
            # Name the tokenizer: for some families transformers does not load the one in the model's folder.
            "models": here
            or [{"name_or_path": f"{RUN}/pretrain/{trained_name(one)}", "tokenizer": TOKENIZER} for one in behavior],
            "max_prompt_tokens": None,
        }


STAGE = Sample()
