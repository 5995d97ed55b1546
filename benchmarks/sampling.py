"""Tokens per second of the sample stage against a bare loop over the same loaded engine, on the same requests.

    python benchmarks/sampling.py                    # transformers, and vLLM where it is installed
    python benchmarks/sampling.py --engine vllm      # one of them

The stage is everything that `sample` does with a loaded model: encoding, sampling, log-probabilities, decoding, and the
files. Bare `generate` has left padding, batches sorted by length, and decoded texts; a second bare loop also computes
the two log-probabilities of each token from `output_logits` and `output_scores`, as the stage records them. It draws
from a generator of its own, so its responses are others of the same distribution; with --greedy they are the same.
Bare vLLM is one call of `LLM.generate` with all requests, each with its own seed and logprobs=0, without texts, from
the stage's seeds. The share of responses with equal tokens is printed. All sides are measured in turn in one process;
of the repeats' ratios the median, least and greatest are printed. A random model's response ends at each token with
probability about 1 / max_new_tokens, so a third of them are cut.

Beside the loops of transformers run the matrix products that the stage's own loop needed: those of all linear layers,
of the prompts' tokens and of as many rows as were alive in each step, and of the output layer, and nothing else. They
take the least time that a loop could.

With --model the model is a real one, its prompts are read from --questions (JSON lines with `question`, as GSM8K has
them), and --lora puts a small random adapter of this rank on all its linear layers; the stage with the base model runs
beside that.

On a GPU the shape is that of Qwen3-1.7B in bfloat16, with n = 8 and 512 tokens. On a CPU the model is small, in
float32; with OMP_NUM_THREADS=1 each engine computes with one thread, vLLM's in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# vLLM reads them when it is imported: one thread that it does not pin to a core, and addresses of this machine only.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import pyarrow.parquet as pq
import torch
import transformers
from peft import LoraConfig, get_peft_model
from sides import QWEN3_1_7B, SMALL_QWEN3
from spread import spread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from regretless.core.text_cleaning import never_fail_to_print
from regretless.data.columns import Text
from regretless.data.prompts import PromptRow
from regretless.modeling.decoding import Decoder
from regretless.modeling.forward import causal_model
from regretless.modeling.load import ModelConfig, load_model
from regretless.sampling.engine_settings import SamplingParams, VllmOptions
from regretless.sampling.engines import ENGINES, EngineKind
from regretless.sampling.job import SampleWork, finish
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.sampling.vllm_engine import VllmEngine

TokenLists = list[list[int]]


class BareTransformers(TransformersEngine):
    """The engine, with plain `model.generate` beside it."""

    def bare(self, prompts: Sequence[Text], params: SamplingParams, with_logps: bool = False) -> TokenLists:
        """Token ids of n responses to each prompt, in the order of prompts, by plain `model.generate`."""
        tokenizer, draws = self.tokenizer, params.temperature > 0
        encoded = [ids for ids in map(self.encode, prompts) for _ in range(params.n)]
        order = sorted(range(len(encoded)), key=lambda row: -len(encoded[row]))
        names = ["repetition_penalty", *(["temperature", "top_k", "top_p"] if draws else [])]
        settings = transformers.GenerationConfig(
            **{name: getattr(params, name) for name in names},
            max_new_tokens=params.max_new_tokens,
            do_sample=draws,
            eos_token_id=self.ends,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=with_logps,
            output_scores=with_logps,
        )
        found: TokenLists = [[] for _ in encoded]
        torch.manual_seed(0)
        for first in range(0, len(order), params.batch_size):
            rows = order[first : first + params.batch_size]
            padded = {"input_ids": [encoded[row] for row in rows]}
            batch = tokenizer.pad(padded, padding_side="left", return_tensors="pt")
            output = self.model.generate(**batch.to(self.model.device), generation_config=settings)
            drawn = output.sequences[:, batch["input_ids"].shape[1] :]
            if with_logps:
                for kept in (output.logits, output.scores):
                    logps = [step.log_softmax(-1).gather(1, drawn[:, [at]]) for at, step in enumerate(kept)]
                    torch.cat(logps, dim=1).tolist()
            tokenizer.batch_decode(drawn, skip_special_tokens=True)
            for row, ids in zip(rows, drawn.tolist(), strict=True):
                end = next((at for at, token in enumerate(ids) if token in self.ends), len(ids))
                found[row] = ids[: end + 1]
        return found


class SeededVllm(VllmEngine):
    """The engine, which notes the seeds of the stage's requests."""

    def stream(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Any:
        for prompt, group in itertools.groupby(zip(prompts, seeds, strict=True), key=lambda request: request[0]):
            self.seeds[tuple(prompt)] = [seed for _, seed in group]
        return super().stream(prompts, seeds)

    def bare(self, prompts: Sequence[str], params: SamplingParams) -> TokenLists:
        """Token ids of n responses to each prompt, in the order of prompts, by one call of `LLM.generate`."""
        from vllm import SamplingParams as Request

        encoded = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        common = {name: getattr(params, name) for name in names} | {"max_tokens": params.max_new_tokens}
        common |= {"stop_token_ids": self.ends, "logprobs": 0, "detokenize": False}
        requests = [(ids, seed) for ids in encoded for seed in self.seeds[tuple(ids)]]
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [Request(seed=seed, **common) for _, seed in requests],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def checkpoint(folder: Path, shape: dict[str, Any], vocabulary: int, dtype: torch.dtype, mean_tokens: int) -> None:
    """A Qwen3 with random weights and a tokenizer of words; one of `mean_tokens` tokens ends a response."""
    words = {name: number for number, name in enumerate(["<pad>", "<end>", *(f"w{n}" for n in range(2, vocabulary))])}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = WhitespaceSplit()
    ends = list(range(1, vocabulary, mean_tokens))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=vocabulary, eos_token_id=ends, bos_token_id=None, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    model.save_pretrained(folder)


def stage(engine: Any, name: str, model: ModelConfig, prompts: Sequence[Text], params: SamplingParams) -> TokenLists:
    """Token ids of all responses, by the sample stage with an engine that is loaded already."""
    ENGINES[name] = EngineKind(lambda *_: engine)
    rows = [PromptRow(str(number), prompt) for number, prompt in enumerate(prompts)]
    with TemporaryDirectory() as folder:
        work = SampleWork([model], rows, params, Path(folder) / "responses.parquet")
        finish([work])
        return list(pq.read_table(work.output, columns=["token_ids"])["token_ids"].to_pylist())


class Products:
    """The matrix products of the stage's last run by the loop of `modeling.decoding`."""

    def __init__(self, model: Any) -> None:
        self.head = causal_model(model).get_output_embeddings().weight
        linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self.layers = [weight for weight in linear if weight is not self.head]
        self.passes: list[tuple[bool, int]] = []
        """Of each pass whether it is the output layer's, and its rows."""

    def note(self) -> None:
        """From now on, note the passes of the loop."""
        hidden, logits = Decoder._hidden, Decoder.logits

        def layers_noted(decoder: Decoder, tokens: Sequence[int], *rest: Any, **options: Any) -> torch.Tensor:
            self.passes.append((False, len(tokens)))
            return hidden(decoder, tokens, *rest, **options)

        def head_noted(decoder: Decoder, states: torch.Tensor) -> torch.Tensor:
            self.passes.append((True, len(states)))
            return logits(decoder, states)

        Decoder._hidden, Decoder.logits = layers_noted, head_noted  # type: ignore[method-assign]

    def compute(self) -> None:
        """Compute the products of all passes."""
        numbers: dict[tuple[int, int], torch.Tensor] = {}
        with torch.inference_mode():
            for is_head, rows in self.passes:
                for weight in [self.head] if is_head else self.layers:
                    key = rows, weight.shape[1]
                    if key not in numbers:
                        numbers[key] = torch.randn(key, dtype=weight.dtype, device=weight.device)
                    torch.mm(numbers[key], weight.t())
        if self.head.device.type == "cuda":
            torch.cuda.synchronize()


def measure(
    sides: dict[str, Callable[[], TokenLists]], repeats: int, untimed: int, reset: Callable[[], Any]
) -> dict[str, Any]:
    """Tokens per second of every side in every repeat, in turn, and the tokens of each; the first rounds untimed."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, TokenLists] = {}
    for number, repeat in enumerate(range(1 - untimed, repeats + 1)):
        # In turn forwards and backwards, so that no side always comes behind the same other one.
        for name in list(sides)[:: -1 if number % 2 else 1]:
            reset()
            start = time.perf_counter()
            found[name] = sides[name]()
            seconds = time.perf_counter() - start
            if repeat > 0:
                speeds[name].append(sum(map(len, found[name])) / seconds)
                print(f"{name}: {speeds[name][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
        print(f"round {repeat} of {repeats}", file=sys.stderr, flush=True)
    return {"tokens_per_second": speeds, "tokens": found}


def asked(args: argparse.Namespace, vocabulary: int) -> list[Text]:
    """Prompts: questions for a real model, random words for one with random weights."""
    if args.model:
        lines = args.questions.read_text(encoding="utf-8").splitlines()[: args.prompts]
        return [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    numbers = random.Random(0)
    lengths = [max(4, round(numbers.gauss(100, 25))) for _ in range(4 if args.tiny else args.prompts)]
    return [" ".join(f"w{numbers.randrange(2, vocabulary)}" for _ in range(length)) for length in lengths]


def staged(engine: Any, name: str, run: Callable[[], TokenLists]) -> dict[str, Callable[[], TokenLists]]:
    """The stage and, where the loop of `modeling.decoding` does it, the products of its last run beside it."""
    if not getattr(engine, "decodes", False):
        return {f"stage, {name}": run}
    products = Products(engine.model)
    products.note()
    found: TokenLists = []

    def stage_noted() -> TokenLists:
        products.passes.clear()
        found[:] = run()
        return [*found]

    def products_alone() -> TokenLists:
        products.compute()
        return [*found]

    return {f"stage, {name}": stage_noted, f"products alone, {name}": products_alone}


def with_adapter(model: ModelConfig, rank: int, folder: Path) -> ModelConfig:
    """The model with a random adapter on all its linear layers, which is written into a folder."""
    adapter = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(load_model(model), adapter)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # with an adapter as large as its layers, a model would write other texts
            weight.data *= 0.03
    adapted.save_pretrained(folder)
    return model.model_copy(update={"adapter": str(folder)})


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["transformers", "vllm"], help="measure this one only")
    parser.add_argument("--tiny", action="store_true", help="few prompts and short responses of a tiny model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--greedy", action="store_true", help="temperature 0; then n is 1")
    parser.add_argument("--tokens", type=int, help="most tokens of a response")
    parser.add_argument("--model", help="folder of a real model, in bfloat16")
    parser.add_argument("--questions", type=Path, help="JSON lines with `question`, the prompts of a real model")
    parser.add_argument("--lora", type=int, metavar="RANK", help="with a random adapter on all linear layers")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    return parser.parse_args()


def main() -> None:
    """Measure the engines that are there and print their speeds and ratios."""
    never_fail_to_print()
    args = arguments()
    gpu = torch.cuda.is_available() and not args.tiny
    shape, vocabulary, tokens = (QWEN3_1_7B, 151_936, 512) if gpu else (SMALL_QWEN3, 8192, 128)
    if args.tiny:
        shape, vocabulary, tokens = shape | {"num_hidden_layers": 1}, 512, 16
    tokens, n = args.tokens or tokens, 1 if args.greedy else args.n
    prompts = asked(args, vocabulary)
    wanted = [args.engine] if args.engine else ["transformers", "vllm"]
    names = [name for name in wanted if name != "vllm" or importlib.util.find_spec("vllm")]
    if not names:
        raise SystemExit("vllm is not installed here: pip install regretless[vllm]")
    with TemporaryDirectory() as folder:
        model = ModelConfig(name_or_path=args.model or folder, dtype="bfloat16" if args.model else "auto")
        if not args.model:
            checkpoint(Path(folder), shape, vocabulary, torch.bfloat16 if gpu else torch.float32, tokens)
        base, model = model, with_adapter(model, args.lora, Path(folder) / "adapter") if args.lora else model
        options = VllmOptions(max_model_len=1024, gpu_memory_utilization=0.6, engine_args={"enforce_eager": not gpu})
        sides: dict[str, Callable[[], TokenLists]] = {}
        resets: list[Callable[[], Any]] = []
        for name in names:
            params = SamplingParams(
                engine=name,
                n=n,
                max_new_tokens=tokens,
                vllm=options if name == "vllm" else None,
                temperature=0 if args.greedy else 0.7,
            )
            engine: Any = {"transformers": BareTransformers, "vllm": SeededVllm}[name](model, params)
            engine.seeds = {}
            sides |= staged(engine, name, lambda e=engine, n=name, p=params: stage(e, n, model, prompts, p))
            if args.lora and name == "transformers":
                alone = TransformersEngine(base, params)
                sides[f"without adapter, {name}"] = lambda e=alone, p=params: stage(e, "base", base, prompts, p)
            sides[f"bare, {name}"] = lambda e=engine, p=params: e.bare(prompts, p)
            # A real vocabulary's logits of all steps do not fit into memory.
            if name == "transformers" and not args.model:
                sides["bare with logps, transformers"] = lambda e=engine, p=params: e.bare(prompts, p, True)
            elif name == "vllm":
                resets.append(engine.llm.reset_prefix_cache)
        # Minutes a round, a real model's first seconds do not show.
        found = measure(sides, args.repeats, 0 if args.model else 1, lambda: [reset() for reset in resets])
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {args.repeats} repeats; ", end="")
    print(
        f"{len(prompts)} prompts × {n} responses of at most {tokens} tokens, {args.model or f'{vocabulary:,} words'}\n"
    )
    report(found, names)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def report(found: dict[str, Any], names: Sequence[str]) -> None:
    """Print the tables of speeds and ratios."""
    speeds = found["tokens_per_second"]
    print("| side | tokens | tokens/s | same responses as the stage |\n|---|---|---|---|")
    for side, values in speeds.items():
        mine, own = found["tokens"][side], found["tokens"]["stage, " + side.split(", ")[1]]
        same = sum(a == b for a, b in zip(mine, own, strict=True)) / len(own)
        print(f"| {side} | {sum(map(len, mine)):,} | {spread(values, '.0f')} | {same:.0%} |")
    pairs = [(f"stage, {name}", side) for name in names for side in speeds if name in side and side[:5] != "stage"]
    if len(names) == 2:
        pairs.append(("stage, vllm", "stage, transformers"))
    print("\n| ratio of tokens/s | |\n|---|---|")
    for over, under in pairs:
        ratios = [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]
        print(f"| {over} ÷ {under} | {spread(ratios, '.3f')} |")


if __name__ == "__main__":
    main()
