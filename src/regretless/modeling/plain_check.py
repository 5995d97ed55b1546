"""Test, on the model itself and before its first row, that padded plain rows give the model's own values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regretless.modeling.forward import plain, response_scores
from regretless.modeling.layout import Item
from regretless.modeling.model_check import NOISE, TOLERANCE, ModelCheck, Passed, Refused, run_check
from regretless.modeling.output_layer import head_of
from regretless.modeling.probe import hooked, windows_named
from regretless.modeling.rows import lay_out_rows, row_length

LONG = 70
"""Tokens of the longest sequence at least: more than the chunk of 64 in which recurrent layers are often computed."""
MOST = 300
"""Largest chunk or window beyond which a sequence of the check reaches."""

_passed: Passed = WeakKeyDictionary()


def check_plain(model: nn.Module, longest: int | None = None) -> None:
    """Raise ConfigError unless padded rows compute what the model computes for each sequence by itself.

    model, longest: as in `check_grouped`.

    Rows are padded behind their sequences, so this is correct for every model in which a token depends on no later one,
    whatever its layers are: attention of any kind, convolutions, recurrent states. Sequences of different lengths are
    computed in one batch:

    - A response's score has no gradient with respect to padding and to other rows, and has one to its own prompt.
    - What a token gets for its position stays the same when another row is as long as the longest sequence.
    - Log-probabilities are those that the model's own call gives for each sequence alone: to `TOLERANCE`; in lower
      precision each response's median difference is compared with that by rounding.
    """
    run_check(model, longest, PlainCheck, _passed, "cannot be trained or scored in rows of one sequence each: ")


class PlainCheck(ModelCheck):
    """The check of one model; `run` raises Refused."""

    beside = "is in the same batch"

    def run(self) -> None:
        """All parts, the exact ones first."""
        with self._reasons("a row"):
            head_of(self.inner)
        self._positions_of_one_sequence()
        items = self._sequences()
        with self._zeros_filled():
            self._no_leak_between(items)
        self._equal_to_alone(items)

    def _sequences(self) -> list[Item]:
        """Prompts and responses of different lengths, one longer than the chunks and windows of the configuration."""
        sizes = (size for size in windows_named(self.config) if size < min(self.longest, MOST))
        long = max(LONG, max(sizes, default=0) + 6)
        lengths = ((9, long - 9), (12, 3), (4, 20), (6, 9))
        return [(self._tokens(prompt), self._tokens(response)) for prompt, response in lengths]

    def _positions_of_one_sequence(self) -> None:
        sizes = {size for parameter in self.inner.parameters() for size in parameter.shape}
        count = next(number for number in itertools.count(67, 2) if number not in sizes)
        layout, _ = lay_out_rows([(self._tokens(5), self._tokens(count - 4))], "plain")
        layout = layout.to(self.device)
        positions = torch.arange(count, device=self.device)[None]
        with (
            self._reasons("a row of one sequence"),
            self._watch(positions) as seen,
            plain(self.model),
            torch.no_grad(),
        ):
            response_scores(self.model, layout)
        self._positions_stand_alone(seen, positions)

    def _no_leak_between(self, items: list[Item]) -> None:
        layout, places = lay_out_rows(items, "plain")
        layout = layout.to(self.device)
        with (
            self._reasons("a batch of padded rows"),
            self._cut_at_embeddings(layout.position_ids, rows=len(items)) as embeddings,
            plain(self.model),
            torch.enable_grad(),
        ):
            scores = response_scores(self.model, layout).logps
            if not embeddings:
                raise Refused("its input embeddings were not found, so that nothing can be said of what it mixes")
            for row, (item, index) in enumerate(zip(items, places, strict=True)):
                score = scores[index].sum()
                grads = torch.autograd.grad(score, embeddings, retain_graph=True, allow_unused=True)
                gradients = [grad for grad in grads if grad is not None]
                if not gradients or not all(bool(grad.isfinite().all()) for grad in gradients):
                    raise Refused("the gradient of a response's score is not finite")
                depends = torch.stack([(grad != 0).flatten(2).any(-1) for grad in gradients]).any(0)
                in_row = depends[row].clone()
                depends[row] = False
                if bool(depends.any()):
                    raise Refused("a response's score depends on tokens of other rows")
                # The last token's own score has no part in the row.
                if bool(in_row[row_length(item) :].any()):
                    raise Refused("a response's score depends on padding behind it: the model is not causal")
                if self._sees_later(scores, int(index[0]), embeddings, row, len(item[0])):
                    raise Refused("a token's score depends on the tokens after it: the model is not causal")
                if not bool(in_row[: len(item[0])].any()):
                    raise Refused("a response's score does not depend on its prompt")

    def _sees_later(self, scores: Tensor, first: int, embeddings: list[Tensor], row: int, prompt: int) -> bool:
        """Whether the first response token's score depends on the embeddings behind the prompt."""
        grads = torch.autograd.grad(scores[first], embeddings, retain_graph=True, allow_unused=True)
        return any(bool((grad[row, prompt:] != 0).any()) for grad in grads if grad is not None)

    def _equal_to_alone(self, items: list[Item]) -> None:
        attention = self.inner.config.get_text_config()._attn_implementation
        layout, places = lay_out_rows(items, "plain")
        with torch.no_grad():
            alone = [self._plain(item, attention) for item in items]
            with self._reasons("a batch of padded rows"), plain(self.model):
                batch = response_scores(self.model, layout.to(self.device)).logps
            together = [batch[index] for index in places]
            differences = [(got.double() - wanted.double()).abs() for got, wanted in zip(together, alone, strict=True)]
            allowed = TOLERANCE
            if self._is_exact():
                worst = max(float(difference.max()) for difference in differences)
            else:
                with self._rounded_everywhere():
                    again = [self._plain(item, attention) for item in items]
                noise = [
                    float((first.double() - second.double()).abs().median())
                    for first, second in zip(alone, again, strict=True)
                ]
                # Medians, because in one batch or the other a single token may take another expert.
                worst = max(float(difference.median()) for difference in differences)
                allowed = NOISE * max(noise) + 0.5 * self._step() * float(torch.cat(alone).double().std())
        if not worst <= allowed:
            raise Refused(
                f"log-probabilities in a batch of padded rows differ from those of each sequence alone by {worst:.2g} "
                f"nats (at most {allowed:.2g} expected)"
            )

    @contextlib.contextmanager
    def _rounded_everywhere(self) -> Iterator[None]:
        """Within the block, outputs of linear layers are rounded to a neighboring number."""
        numbers = torch.Generator().manual_seed(1)

        def neighbor(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor):
                return output
            steps = torch.randint(-1, 2, output.shape, generator=numbers).to(output) * self._step() / 2
            return output * (1 + steps)

        layers = [module for module in self.decoder.modules() if isinstance(module, nn.Linear)]
        with hooked([layer.register_forward_hook(neighbor) for layer in layers]):
            yield
