"""What the paper's five tables cost, on paper: GPU hours on H100s and dollars of judges, from counts and assumptions.

    python benchmarks/paper_cost.py                        # the table of docs/scale.md
    python benchmarks/paper_cost.py --gpus 32 --mfu 0.25   # other assumptions

Nothing is measured. Numbers of samples, epochs, pairs, budgets of tokens and prices are read from the recipes; sizes of
data sets are those of the paper; lengths and speeds are the assumptions below, which the table repeats. A GPU generates
as fast as it reads the weights and the cache of keys and values for each step, and trains at a share of its peak.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple, dataclass
from pathlib import Path

from regretless.core.text_cleaning import never_fail_to_print
from regretless.runs.recipe import Recipe, load_recipe
from regretless.servers.judge_client import JudgeAccess

RECIPES = Path(__file__).parents[1] / "recipes"
PEAK = 989e12
"""bf16 operations per second of an H100."""
BANDWIDTH = 3.35e12
"""Bytes per second of its memory."""
READING = 0.6
"""Share of that bandwidth that generation reaches."""
SEQUENCES = 256
"""Responses that a GPU generates at the same time."""
MATH_PROBLEMS = 7473 + 7500
"""Training problems of GSM8K and MATH."""
MATH_PAIRS, CHAT_PROMPTS = 63_000, 16_000
"""As in the paper."""
MATH_TEST = 1319 + 5000 + 500 + 40 + 272
CHAT_TEST = 805 + 500 + 160
"""Answers to AlpacaEval, Arena-Hard and both turns of MT-Bench."""
PROMPT, RESPONSE = 150, 400
"""Mean tokens, for mathematics and chat alike."""
LABEL = (2500, 700)
"""Tokens that a judge reads and writes to rate all responses to a prompt in one aspect, its reasoning included."""
ASPECTS = 4
VERDICTS = {"alpaca_eval": (805, 1500, 1), "arena_hard": (1000, 2500, 600), "mt_bench": (160, 1500, 300)}
"""Requests about one model's answers to a benchmark, and the tokens of one, read and written."""


@dataclass(frozen=True)
class Model:
    """Size of a model: billions of parameters, layers, and width of the keys of a layer."""

    billions: float
    layers: int
    keys: int

    @property
    def cache(self) -> int:
        """Bytes of keys and values per token, in bf16."""
        return self.layers * self.keys * 2 * 2


QWEN3_1B, QWEN3_4B = Model(1.72, 28, 1024), Model(4.02, 36, 1024)
LLAMA_8B = Model(8.03, 32, 1024)
MATH_WRITER = Model(7.62, 28, 512)
CHAT_WRITERS = [Model(1.54, 28, 256), MATH_WRITER, Model(14.77, 48, 1024), QWEN3_4B]


@dataclass(frozen=True)
class Cost:
    """GPU hours by kind of work, and dollars of judges."""

    sampling: float = 0.0
    training: float = 0.0
    evaluation: float = 0.0
    dollars: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """Hours of all kinds of work together."""
        return self.sampling + self.training + self.evaluation

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def generating(model: Model, responses: float) -> float:
    """GPU hours to generate responses: each step reads all weights, and the keys and values of all sequences."""
    context = PROMPT + RESPONSE / 2
    step = (2e9 * model.billions + SEQUENCES * context * model.cache) / (READING * BANDWIDTH)
    return responses * RESPONSE * step / SEQUENCES / 3600


def training(model: Model, recipe: Recipe, methods: list[str], tokens: float, mfu: float) -> float:
    """GPU hours to train an adapter with each method, on the distinct tokens of an epoch.

    A step computes forward, forward again (checkpointing), and backward through activations; the reference is computed
    once for all epochs.
    """
    assert recipe.train is not None
    epochs = [recipe.train.values_for(method)["num_train_epochs"] for method in methods]
    return sum(tokens * 2e9 * model.billions * (3 * count + 1) for count in epochs) / (mfu * PEAK) / 3600


def judging(config: JudgeAccess, requests: float, read: float, written: float) -> float:
    """Dollars for requests of so many tokens each, at the recipe's prices."""
    dollars = config.server.cost(round(requests * read), round(requests * written))
    assert dollars is not None
    return dollars


def tables(mfu: float) -> dict[str, Cost]:
    """The cost of each table; what an earlier one has sampled, judged or trained is not paid again."""
    math = load_recipe(RECIPES / "math" / "qwen3-1.7b.yaml")
    chat = load_recipe(RECIPES / "ultrafeedback" / "qwen3-1.7b.yaml")
    assert math.sample is not None and chat.judge is not None and chat.evaluate is not None
    methods = ["repo", "repo_det", "dpo", "ipo", "rpo", "kto", "tdpo"]
    # Four pairs of a problem share its prompt and its four responses; a masked response is the beginning of one.
    math_tokens = MATH_PAIRS / 4 * (PROMPT + 4 * RESPONSE)
    chat_tokens = CHAT_PROMPTS * (PROMPT + 2 * RESPONSE)
    asked = {name: config for name, config in chat.evaluate.chat.items() if config.benchmark in VERDICTS}
    of_one_model = sum(judging(config, *VERDICTS[config.benchmark]) for config in asked.values())
    small = [QWEN3_1B, QWEN3_4B]

    def train(models: list[Model], recipe: Recipe, names: list[str], tokens: float) -> float:
        return sum(training(model, recipe, names, tokens, mfu) for model in models)

    def answer(models: list[Model], each: float) -> float:
        return sum(generating(model, each) for model in models)

    return {
        "1: chat, Qwen3": Cost(
            answer(CHAT_WRITERS, CHAT_PROMPTS),
            train(small, chat, methods, chat_tokens),
            answer(small, CHAT_TEST * (len(methods) + 1)),
            judging(chat.judge, CHAT_PROMPTS * ASPECTS, *LABEL) + of_one_model * (len(methods) + 1) * len(small),
        ),
        "2: mathematics, Qwen3": Cost(
            generating(MATH_WRITER, MATH_PROBLEMS * math.sample.n),
            train(small, math, methods, math_tokens),
            answer(small, MATH_TEST * (len(methods) + 1)),
        ),
        "3: mathematics, Llama": Cost(
            0.0,
            train([LLAMA_8B] * 2, math, methods[1:], math_tokens),
            answer([LLAMA_8B] * 2, MATH_TEST * len(methods)),
        ),
        "4: masked pairs": Cost(
            0.0,
            train(small, math, ["repo", "dpo"], math_tokens),
            answer(small, MATH_TEST * 2),
        ),
        "11: five seeds": Cost(0.0, 0.0, answer(small, MATH_TEST * len(methods) * 5)),
    }


def main() -> None:
    """Print the table."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--mfu", type=float, default=0.35, help="share of the peak that training reaches")
    arguments = parser.parse_args()
    found = tables(arguments.mfu)
    rows = {**found, "all": sum(found.values(), Cost())}
    print("| table | sampling | training | evaluation | GPU hours | hours on", arguments.gpus, "GPUs | judges |")
    print("|---|---|---|---|---|---|---|")
    for name, cost in rows.items():
        kinds = (cost.sampling, cost.training, cost.evaluation, cost.gpu_hours, cost.gpu_hours / arguments.gpus)
        print(f"| {name} |", " | ".join(f"{hours:.1f}" for hours in kinds), f"| ${cost.dollars:,.0f} |")
    print(
        f"\nassumed: {RESPONSE} tokens a response and {PROMPT} a prompt; generation of {SEQUENCES} responses at a time "
        f"at {READING:.0%} of an H100's memory bandwidth; training at {arguments.mfu:.0%} of its bf16 peak; a judge "
        f"reads {LABEL[0]} tokens and writes {LABEL[1]} for one aspect of a prompt's responses"
    )


if __name__ == "__main__":
    main()
