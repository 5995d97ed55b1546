"""Checks on a model itself, before its first row, whether shared-prefix rows are correct for it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import gpu_attention
from regretless.modeling.compiled_layers import is_compiled
from regretless.modeling.forward import (
    attention_by,
    causal_model,
    grouped,
    response_scores,
)
from regretless.modeling.kept_models import original_of
from regretless.modeling.layout import Ids, Item, lay_out
from regretless.modeling.output_layer import decoder_of, head_input_in_one_piece, head_of, replaced_forward
from regretless.modeling.prefix_tree import SHARED_AT_LEAST
from regretless.modeling.probe import (
    LOCAL,
    Call,
    are_positions,
    context_advice,
    hooked,
    own_positions,
    special_ids,
    tensors_in,
    windows_named,
)
from regretless.modeling.recurrent import CONTINUES, forked_states, recurrent_layers

TOLERANCE = 1e-4
"""Nats by which a log-probability may differ from the model's own, in float32."""
NOISE = 4
"""In lower precision: multiple of the median difference between two layouts of the model's own computation."""
STATES_EXACT, STATES_ROUNDED = 1e-4, 0.2
"""Greatest `state_error` of a recurrent layer, in float32 and in lower precision."""
DECAY, SLOW = "A_log", 0.05
"""Parameter with the logarithms of a recurrent layer's rates of decay; the greatest rate in the check (nats a step)."""
SHORT = 64
"""Windows up to this size are checked in one row with everything else; longer ones in a row of their own."""
CONTEXT = 2048
"""Longest sequence if neither the caller nor the model's configuration names one."""
THROUGH = "through transformers' attention interface"

CANNOT_SHARE = "cannot be trained or scored in rows that share prompts: "

Passed = WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], int]]
"""Length up to which a model has passed, keyed by device and precision."""
_passed: Passed = WeakKeyDictionary()


class Refused(Exception):
    """A property of the model that the pass which is checked does not support."""


def check_grouped(model: nn.Module, longest: int | None = None) -> None:
    """Raise ConfigError unless shared-prefix rows compute what the model computes for each sequence by itself.

    model: where it will compute (device, type of weights, autocast, sharding). It is called through its wrappers, by
    all processes where it is sharded; one that has passed there for such lengths is not checked again, nor is another
    copy of a model that stays loaded, with the same layers.
    longest: tokens of the longest sequence to come, for windows that no sequence fills do not matter; None: as many as
    the model's context.

    First what is exact and needs no tolerance, nor weights that do much:

    - No active adapter acts only behind its invocation tokens (aLoRA): peft looks for these once in a row.
    - With attention replaced by one in which a token sees only itself, and each token a sequence for recurrent layers,
      no layer's output for a token has a gradient with respect to another token. Else the first layer that mixes is
      named.
    - The gradient that passes from responses to their prompt through a recurrent layer's states is that of a whole
      sequence (`state_error`; with a tolerance, and with states that decay slowly, so that they show).
    - What a token gets for its position stays the same when another token stands at the end of the longest sequence.
    - In each layer attention's mask, as the model itself makes it, is causal within the window that attention is told,
      and attention is told nothing that the shared-prefix attention does not know.
    - A response's score has no gradient with respect to other responses and prompts, and has one to its own prompt.
    - By the attention that the model is configured with, a token's score has no gradient with respect to later tokens.

    Then log-probabilities of several prompts and responses in a row, some longer than each window, are compared with
    the model's own, by its own attention: to `TOLERANCE`; in lower precision (bf16, TF32) each response's median
    difference with that between two layouts of the model's own.
    """
    run_check(model, longest, ModelCheck, _passed, CANNOT_SHARE)


def run_check(model: nn.Module, longest: int | None, check: type[ModelCheck], passed: Passed, refusal: str) -> None:
    """Run a check unless the model has passed it there for such lengths; `refusal` begins the reason of an error."""
    inner = causal_model(model)
    original, layers = original_of(inner)
    place, length = (*place_of(model, inner), layers), longest_sequence(inner, longest)
    lengths = passed.setdefault(original, {})
    if lengths.get(place, -1) >= length:
        return
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode(False):
            check(model, inner, length).run()
    except Refused as refused:
        raise ConfigError(f"{type(inner).__name__}: {refusal}{refused}") from refused.__cause__
    finally:
        for module, was in training.items():
            module.training = was
    lengths[place] = length


def place_of(model: nn.Module, inner: PreTrainedModel) -> tuple[Any, ...]:
    """Where and how a model computes: device, types of weights and autocast, wrapper, compiled or not."""
    kind = inner.device.type
    automatic = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return kind, inner.dtype, automatic, type(model).__name__, is_compiled(inner)


def longest_sequence(inner: PreTrainedModel, longest: int | None) -> int:
    """`longest`, or tokens of the model's context."""
    return longest or getattr(inner.config.get_text_config(decoder=True), "max_position_embeddings", None) or CONTEXT


@dataclass
class _Seen:
    """Records of the hooks in one pass."""

    embeddings: list[Tensor] = field(default_factory=list)
    """Leaves in place of the outputs of embeddings of the tokens."""
    numbers: list[tuple[str, bool, Tensor]] = field(default_factory=list)
    """Name of a module, whether this is what it gave (else: what it was given), and a number made of it."""
    positional: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Modules without parameters that were given positions, with their arguments."""
    calls: list[Call] = field(default_factory=list)
    """Calls of attention."""
    forks: list[tuple[nn.Module, float]] = field(default_factory=list)
    """Recurrent layers with their `state_error`."""


class ModelCheck:
    """One check of one model; `run` raises Refused."""

    beside = "shares the row, and a prompt that short and long responses share cannot have both"
    """What is wrong with positions that depend on the longest sequence."""

    def __init__(self, model: nn.Module, inner: PreTrainedModel, longest: int) -> None:
        self.model, self.inner, self.longest = model, inner, longest
        self.config = inner.config.get_text_config(decoder=True)
        self.decoder = decoder_of(inner)
        self.recurrent = recurrent_layers(inner)
        self.names = {module: name for name, module in inner.named_modules()}
        self.device = inner.device
        self.numbers = torch.Generator().manual_seed(0)
        special = special_ids(inner.config) | special_ids(self.config)
        self.vocabulary = torch.tensor([token for token in range(self._token_count()) if token not in special])

    def run(self) -> None:
        """All parts. Raises Refused; a model whose numbers are not finite is told from one that mixes tokens."""
        try:
            self._run()
        except Refused:
            if not self._is_finite():
                raise Refused(
                    "its log-probabilities are not finite numbers: check the weights and their type"
                ) from None
            raise

    def _is_finite(self) -> bool:
        """False if the model's own log-probabilities of some tokens are not finite; True if it cannot compute them."""
        with contextlib.suppress(Refused), torch.no_grad():
            return bool(self._plain((self._tokens(6), self._tokens(7)), "eager").isfinite().all())
        return True

    def _run(self) -> None:
        """The exact parts first: their messages are the most precise."""
        self._no_invocation()
        with self._reasons("a row"):
            head_of(self.inner)
        with self._zeros_filled(), self._slow_decays():
            calls = self._mixes_only_in_attention()
        windows = {call.window for call in calls if call.window} | windows_named(self.config)
        reach = max((window for window in windows if window < self.longest), default=0)
        # A recurrent layer is often computed in chunks of 64 tokens.
        reach = max(reach, SHORT) if self.recurrent else reach
        self._known_arguments(calls)
        self._no_leak(min(reach, SHORT))
        self._causal_itself()
        self._equal(self._items(min(reach, SHORT)), calls, "eager")
        if reach > SHORT:
            # Eager attention would take memory for each pair of positions in each head.
            attention = "sdpa" if self.inner._supports_sdpa else "eager"
            self._equal(self._long_items(reach), calls, attention)

    def _token_count(self) -> int:
        """Tokens that the model knows; a configuration of several models (PI0) may leave the number to theirs."""
        count: int | None = getattr(self.config, "vocab_size", None)
        if count is None:
            with self._reasons("a row"):
                count = getattr(self.inner.get_input_embeddings(), "num_embeddings", None)
        if count is None:
            raise Refused(
                "neither its configuration (vocab_size) nor its input embeddings say how many tokens it knows"
            )
        return count

    # --- rows --------------------------------------------------------------------------------------------------------

    def _tokens(self, count: int) -> Ids:
        chosen = torch.randint(len(self.vocabulary), (count,), generator=self.numbers)
        return tuple(self.vocabulary[chosen].tolist())

    def _items(self, reach: int) -> list[Item]:
        """Two prompts with two responses each, and two more to one of them that share a beginning.

        One prompt, responses of each prompt, and the two with their prompt are longer than `reach`.
        """
        size = max(reach, 8) + 3
        first, second = self._tokens(size), self._tokens(5)
        items = [
            (first, self._tokens(size + 2)),
            (first, self._tokens(7)),
            (second, self._tokens(size + 6)),
            (second, self._tokens(6)),
        ]
        shared = self._tokens(SHARED_AT_LEAST)
        prompt = first if size > SHARED_AT_LEAST else second  # with the short one, they are longer than `reach` as well
        return [*items, (prompt, shared + self._tokens(6)), (prompt, shared + self._tokens(9))]

    def _long_items(self, reach: int) -> list[Item]:
        """A prompt longer than `reach`, followed by a short one."""
        first, second = self._tokens(reach + 5), self._tokens(7)
        return [(first, self._tokens(9)), (first, self._tokens(5)), (second, self._tokens(6))]

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _no_invocation(self) -> None:
        """No adapter is on in a part of a row: the check's own tokens would hardly invoke it."""
        for module in self.model.modules():
            if isinstance(module, PeftModel):
                for name in module.active_adapters:
                    if getattr(module.peft_config[name], "alora_invocation_tokens", None):
                        raise Refused(
                            f"what adapter {name!r} does depends on where its invocation tokens are "
                            "(alora_invocation_tokens), and peft looks for these once in a row"
                        )

    def _mixes_only_in_attention(self) -> list[Call]:
        """With attention that mixes nothing, nothing is mixed; returns the attention calls, in order."""
        sizes = {size for parameter in self.inner.parameters() for size in parameter.shape}
        # A size that nothing else has, so that the token dimension can be identified.
        count = next(number for number in itertools.count(67, 2) if number not in sizes)
        ids = torch.tensor([self._tokens(count)], device=self.device)
        positions = torch.arange(count, device=self.device)[None]
        token = count // 2

        def forward(**_: Any) -> Tensor:
            output = self.decoder(
                input_ids=ids, position_ids=positions, use_cache=False, calls=seen.calls, forks=seen.forks
            )
            hidden: Tensor = output.last_hidden_state
            return hidden

        def note(name: str, gave: bool, values: Any) -> None:
            for tensor in tensors_in(values):
                if tensor.requires_grad and tensor.dim() > 2 and tensor.shape[0] == 1 and count in tensor.shape[1:]:
                    states = tensor.select(list(tensor.shape).index(count, 1), token).float()
                    weights = torch.linspace(0.5, 1.5, states.numel(), device=states.device).reshape(states.shape)
                    seen.numbers.append((name, gave, (states * weights).sum()))

        with (
            self._reasons("a row whose attention comes from outside"),
            self._watch(positions, note) as seen,
            replaced_forward(self.inner, forward),
            attention_by(self.inner, LOCAL),
            forked_states(self.inner),
            torch.enable_grad(),
        ):
            self.model(input_ids=ids)
        if not seen.embeddings:
            raise Refused("its input embeddings were not found, so that nothing can be said of what it mixes")
        total = sum((value for _, _, value in seen.numbers), torch.zeros((), device=self.device))
        if not total.requires_grad:
            raise Refused("no layer's output depends on its token")
        if not self._others_are_zero(total, seen.embeddings, token):
            newer = "" if CONTINUES else " (recurrent layers can share rows with transformers 5.21 or newer)"
            raise Refused(f"{self._first_to_mix(seen, token)} mixes tokens, and not {THROUGH}{newer}")
        if not seen.calls and not self.recurrent:
            raise Refused(f"no layer attends {THROUGH}")
        allowed = STATES_EXACT if self._is_exact() else STATES_ROUNDED
        for layer, error in seen.forks:
            if not error <= allowed:
                raise Refused(f"{self._name(layer)} does not continue from the states behind earlier tokens")
        self._positions_stand_alone(seen, positions)
        return seen.calls

    def _others_are_zero(self, value: Tensor, embeddings: Sequence[Tensor], token: int) -> bool:
        """True if the gradient of `value` with respect to all tokens but `token` is exactly zero."""
        grads = torch.autograd.grad(value, embeddings, retain_graph=True, allow_unused=True)
        others = torch.arange(embeddings[0].shape[1], device=self.device) != token
        return not any(bool((grad[:, others] != 0).any()) for grad in grads if grad is not None)

    @contextlib.contextmanager
    def _zeros_filled(self) -> Iterator[None]:
        """Within the block, weights that are all zero become nonzero: a closed gate would hide a layer."""
        zeros = []
        for parameter in self.inner.parameters():
            weights = parameter.detach()
            weights = weights.to_local() if isinstance(weights, DTensor) else weights
            if weights.is_floating_point() and weights.numel() and not bool(weights.any()):
                zeros.append(weights)
        try:
            for weights in zeros:
                weights.copy_(torch.linspace(0.01, 0.02, weights.numel(), device=weights.device).view(weights.shape))
            torch.clear_autocast_cache()
            yield
        finally:
            for weights in zeros:
                weights.zero_()
            # Autocast keeps casted weights until the outermost block ends, and would compute on with the filled ones.
            torch.clear_autocast_cache()

    @contextlib.contextmanager
    def _slow_decays(self) -> Iterator[None]:
        """Within the block, recurrent states last: of a state that is gone, nothing shows whether a layer continued it.

        With few heads, or after training, all states of a layer may be gone after some tokens.
        """
        before = []
        for layer in self.recurrent:
            decay = getattr(layer, DECAY, None)
            if isinstance(decay, nn.Parameter):
                weights = decay.detach()
                weights = weights.to_local() if isinstance(weights, DTensor) else weights
                if weights.numel():
                    before.append((weights, weights.clone()))
        try:
            for weights, values in before:
                weights.copy_(values - values.max() + math.log(SLOW))
            yield
        finally:
            for weights, values in before:
                weights.copy_(values)

    def _first_to_mix(self, seen: _Seen, token: int) -> str:
        """The first and innermost module with unmixed input and mixed output."""
        clean: dict[str, bool] = {}
        for name, gave, value in seen.numbers:
            if gave and not clean.get(name, False):
                continue
            unmixed = self._others_are_zero(value, seen.embeddings, token)
            if gave and not unmixed:
                return self._name(self.inner.get_submodule(name))
            if not gave:
                clean[name] = unmixed and clean.get(name, True)
        return "a part of the model"

    def _positions_stand_alone(self, seen: _Seen, positions: Tensor) -> None:
        """The values of a position do not change if another token ends the longest sequence."""
        count = positions.shape[1]
        for name, module, args, kwargs in seen.positional:
            module = copy.deepcopy(module)  # some keep what they computed for the longest call
            # As they are, positions may be beyond the original context, with the last one moved or not; 0 and 1 are
            # within any.
            for others in (positions, positions % 2):
                with torch.no_grad():
                    before, after = (
                        tensors_in(
                            module(
                                *(_replaced(value, positions, new) for value in args),
                                **{key: _replaced(value, positions, new) for key, value in kwargs.items()},
                            )
                        )
                        for new in (others, self._moved(others))
                    )
                for was, now in zip(before, after, strict=True):
                    axes = [axis for axis, size in enumerate(was.shape) if size == count]
                    if axes and not torch.equal(was.narrow(axes[-1], 0, count - 1), now.narrow(axes[-1], 0, count - 1)):
                        raise Refused(
                            f"what {name} ({type(module).__name__}, rope_type {getattr(module, 'rope_type', 'unknown')}"
                            f") gives for a position changes when a sequence of {self.longest} tokens {self.beside}; "
                            f"{context_advice(self.config)}"
                        )

    def _moved(self, positions: Tensor) -> Tensor:
        """The positions with the last token at the end of the longest sequence."""
        moved = positions.clone()
        moved[..., -1] = self.longest - 1
        return moved

    def _known_arguments(self, calls: Sequence[Call]) -> None:
        """Attention receives nothing that the shared-prefix attention would ignore."""
        for call in calls:
            if call.extras:
                raise Refused(
                    f"{self._name(call.module)} gives attention {', '.join(call.extras)}, which is not known here"
                )

    def _no_leak(self, reach: int) -> None:
        """A response's score depends only on its prompt and itself, in the same pass as in training."""
        items = self._items(reach)
        layout, places = lay_out(items)
        layout = layout.to(self.device)
        with (
            self._reasons("a row with several prompts"),
            self._cut_at_embeddings(layout.position_ids) as embeddings,
            grouped(self.model),
            torch.enable_grad(),
        ):
            for target in (1, 2, 5):
                tokens, (prompt, _) = places[target], items[target]
                visible = own_positions(layout, int(layout.predict[tokens[-1]]))
                # A pass for each: compiled layers give up what they keep in the first backward pass.
                embeddings.clear()
                score = response_scores(self.model, layout).logps[tokens].sum()
                grads = torch.autograd.grad(score, embeddings, allow_unused=True)
                used = [(grad != 0).any(0).flatten(1).any(-1) for grad in grads if grad is not None]
                dense = torch.stack(used).any(0)
                leaks = dense.clone()
                leaks[visible] = False
                if leaks.any():
                    raise Refused(
                        f"a response's score depends on {int(leaks.sum())} tokens of other responses or prompts"
                    )
                if not dense[visible[: len(prompt)]].any():
                    raise Refused("a response's score does not depend on its prompt")

    def _causal_itself(self) -> None:
        """No token sees later ones by the model's configured attention, which may take other masks than eager does.

        SDPA and FlashAttention are given no mask for one sequence, and ask the layer whether it is causal.
        """
        attention = self.inner.config.get_text_config()._attn_implementation
        if attention in ("eager", "flex_attention"):
            return  # these are always given a mask
        prompt, response = item = self._tokens(6), self._tokens(7)
        positions = torch.arange(len(prompt + response), device=self.device)[None]
        try:
            with (
                self._reasons("a plain call", "it fails in"),
                self._cut_at_embeddings(positions) as embeddings,
                torch.enable_grad(),
            ):
                score = self._plain(item, attention)[0]
                grads = torch.autograd.grad(score, embeddings, allow_unused=True)
        except Refused:
            # Rows do not need an attention that cannot compute the model, such as SDPA with soft caps.
            return
        if any(bool((grad[:, len(prompt) :] != 0).any()) for grad in grads if grad is not None):
            raise Refused(f"by its own attention ({attention}), a token's score depends on the tokens after it")

    def _equal(self, items: Sequence[Item], calls: Sequence[Call], attention: str) -> None:
        """Log-probabilities are the model's own, and its masks those of causal attention within the layer's window."""
        with torch.no_grad():
            with self._masks(calls, max(len(prompt) + len(response) for prompt, response in items)):
                plain = [self._plain(item, attention) for item in items]
            layout, places = lay_out(items)
            with self._reasons("a row with several prompts"), grouped(self.model):
                row = response_scores(self.model, layout.to(self.device)).logps
            shared = [row[tokens] for tokens in places]
            differences = [(got.double() - wanted.double()).abs() for got, wanted in zip(shared, plain, strict=True)]
            if self._is_exact():
                worst = torch.stack([difference.max() for difference in differences]).max()
                right, allowed = worst <= TOLERANCE, TOLERANCE
            else:
                with self._rounded_otherwise(calls):
                    again = [self._plain(item, self._another(attention), spread=True) for item in items]
                noise = [(first.double() - second.double()).abs() for first, second in zip(plain, again, strict=True)]
                # Medians, because in one layout or the other a single token may take another expert.
                worst = torch.stack([difference.median() for difference in differences]).max()
                allowed = NOISE * max(float(values.median()) for values in noise)
                allowed += 0.5 * self._step() * float(torch.cat(plain).double().std())
                right = worst <= allowed
        if not right:
            raise Refused(
                f"log-probabilities differ from the model's own by {float(worst):.2g} nats (at most {allowed:.2g} "
                f"expected){self._why_not()}"
            )

    # --- the model's own computation ---------------------------------------------------------------------------------

    def _plain(self, item: Item, attention: str, *, spread: bool = False) -> Tensor:
        """The model's own log-probabilities of a response; `spread`: in a batch of two with further tokens after it."""
        prompt, response = item
        ids = torch.tensor([prompt + response], device=self.device)
        count = ids.shape[1]
        if spread:
            ids = torch.cat((ids, ids[:, :9]), dim=1).repeat(2, 1)
        tail = ids.shape[1] - len(prompt) + 1
        keeps = "logits_to_keep" in inspect.signature(self.inner.forward).parameters
        last = {"logits_to_keep": tail} if keeps else {}
        with (
            self._reasons("a plain call", "it fails in"),
            attention_by(self.inner, attention),
            head_input_in_one_piece(self.inner),
        ):
            logits = self.model(input_ids=ids, use_cache=False, **last).logits[0, -tail:][: len(response)]
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) : count, None])[:, 0]

    def _is_exact(self) -> bool:
        """True if the model computes in float32 or better throughout."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind) or self.inner.dtype not in (torch.float32, torch.float64):
            return False
        return kind == "cpu" or torch.get_float32_matmul_precision() == "highest"

    def _step(self) -> float:
        """Relative size of a rounding step in the precision of matrix products."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.inner.dtype
        tf32 = 2.0**-10
        return tf32 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps

    def _another(self, attention: str) -> str:
        """Another of the model's attention implementations, if it has one."""
        return {"eager": "sdpa", "sdpa": "eager"}[attention] if self.inner._supports_sdpa else attention

    @contextlib.contextmanager
    def _rounded_otherwise(self, calls: Sequence[Call]) -> Iterator[None]:
        """Within the block, a model with only one attention rounds its output to a neighboring number."""
        numbers = torch.Generator().manual_seed(1)

        def neighbor(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            steps = torch.randint(-1, 2, first.shape, generator=numbers).to(first) * self._step() / 2
            moved = first * (1 + steps)
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        modules = () if self.inner._supports_sdpa else {call.module: None for call in calls}
        with hooked([module.register_forward_hook(neighbor) for module in modules]):
            yield

    @contextlib.contextmanager
    def _masks(self, calls: Sequence[Call], length: int) -> Iterator[None]:
        """Within the block, masks of sequences of `length` tokens are compared with each layer's rule."""
        compared: set[tuple[int, int | None]] = set()

        def look(window: int | None) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                try:
                    mask = inspect.signature(module.forward).bind(*args, **kwargs).arguments["attention_mask"]
                except (KeyError, TypeError):
                    return
                if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] != length:
                    return
                # One mask serves many layers.
                if (id(mask), window) not in compared:
                    self._is_rule(module, mask[0], window)
                    compared.add((id(mask), window))

            return hook

        layers = {call.module: call.window for call in calls}
        with hooked(
            [module.register_forward_pre_hook(look(window), with_kwargs=True) for module, window in layers.items()]
        ):
            yield

    def _is_rule(self, module: nn.Module, mask: Tensor, window: int | None) -> None:
        at = torch.arange(mask.shape[-1], device=mask.device)
        distance = at[:, None] - at[None, :]
        rule = (distance >= 0) & (distance < (window or len(at)))
        sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool and bool((mask.masked_fill(~sees, 0) != 0).any()):
            raise Refused(f"{self._name(module)} adds a bias to attention's scores through the mask")
        if not bool((sees == rule).all()):
            told = "no window" if window is None else f"a window of {window} tokens"
            pair = (sees != rule).any(0).nonzero()[0].tolist()
            more = "sees" if bool(sees.any(0)[*pair]) else "does not see"
            raise Refused(
                f"{self._name(module)} tells attention {told}, but by its mask token {pair[0]} {more} token {pair[1]}"
            )

    def _why_not(self) -> str:
        """The step of the model's own pass that the shared-prefix pass lacks; empty if unknown."""
        if self._ignores_positions():
            return "; the model takes positions from the place in the row and not from position_ids"
        hidden: list[Tensor] = []
        ids = torch.tensor([self._tokens(9)], device=self.device)
        with torch.no_grad():
            with hooked([self.decoder.register_forward_hook(lambda module, args, output: hidden.append(output[0]))]):
                logits = self.model(input_ids=ids, use_cache=False).logits[0]
            # Inside `within` nothing is known to be wrong: a sharded output layer is not compared.
            head = head_of(self.inner)
            if isinstance(head.module, FSDPModule) or not hidden:
                return ""
            made = head.logits(hidden[-1][0])
        if made.shape != logits.shape or not torch.allclose(made.float(), logits.float(), atol=1e-3):
            return "; the model changes hidden states or logits around its output layer"
        return ""

    def _ignores_positions(self) -> bool:
        ids = torch.tensor([self._tokens(9)], device=self.device)
        outputs: list[Tensor] = []
        for positions in (torch.arange(9), torch.arange(9).flip(0)):
            calls: list[Call] = []
            inputs = {"input_ids": ids, "position_ids": positions[None].to(self.device), "calls": calls}

            def forward(inputs: dict[str, Any] = inputs, **_: Any) -> Any:
                return self.decoder(**inputs, use_cache=False).last_hidden_state

            with (
                torch.no_grad(),
                replaced_forward(self.inner, forward),
                attention_by(self.inner, LOCAL),
                forked_states(self.inner),
            ):
                outputs.append(self.model(input_ids=ids))
        return torch.equal(*outputs)

    # --- hooks -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cut_at_embeddings(self, positions: Tensor, *, rows: int = 1) -> Iterator[list[Tensor]]:
        """Within the block, gradients end at embeddings of rows with these positions, which are collected."""
        leaves: list[Tensor] = []
        count = positions.shape[1]
        shapes = ((rows, count), (rows, gpu_attention.padded_length(count)))  # on a GPU the row is padded

        def embedded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor) or output.dim() < 3 or tuple(output.shape[:2]) not in shapes:
                return output
            leaf = output.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()  # some models change it in place

        with hooked([module.register_forward_hook(embedded) for module in self._embeddings()]):
            yield leaves

    @contextlib.contextmanager
    def _watch(self, positions: Tensor, note: Callable[[str, bool, Any], None] = lambda *_: None) -> Iterator[_Seen]:
        """Within the block, tensors that pass through the model's modules are recorded; gradients end at embeddings."""
        positional: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = []

        def before(name: str, placed: bool) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                note(name, False, (args, kwargs))
                if placed and any(are_positions(value, positions) for value in (*args, *kwargs.values())):
                    positional.append((name, module, args, kwargs))

            return hook

        def after(name: str) -> Callable[..., None]:
            return lambda module, args, output: note(name, True, output)

        hooks, embeddings = [], {part for module in self._embeddings() for part in module.modules()}
        for name, module in self.inner.named_modules():
            if module in embeddings:
                continue
            without = next(module.parameters(), None) is None
            hooks.append(module.register_forward_pre_hook(before(name, without), with_kwargs=True))
            if module is not self.inner:
                hooks.append(module.register_forward_hook(after(name)))
        with self._cut_at_embeddings(positions) as leaves, hooked(hooks):
            yield _Seen(embeddings=leaves, positional=positional)

    def _embeddings(self) -> list[nn.Module]:
        """Modules that embed tokens or positions; an adapter around one, which may not call it, is one itself."""
        outer = self.inner.get_input_embeddings()
        within = set(outer.modules())
        others = [module for module in self.inner.modules() if isinstance(module, nn.Embedding)]
        return [outer, *(module for module in others if module not in within)]

    @contextlib.contextmanager
    def _reasons(self, what: str, verb: str = "it cannot compute") -> Iterator[None]:
        """Within the block, exceptions of the model become the reason of a rejection."""
        try:
            yield
        except (Refused, torch.OutOfMemoryError):
            raise
        # A model that cannot take such a row may raise anything.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise Refused(f"{verb} {what}: {type(error).__name__}: {lines[0]}") from error

    def _name(self, module: nn.Module) -> str:
        return f"{self.names.get(module, '?')} ({type(module).__name__})"


def _replaced(value: Any, positions: Tensor, new: Tensor) -> Any:
    """The value; if it holds positions, the new ones in their place."""
    return new[0].to(value).expand_as(value).clone() if are_positions(value, positions) else value
