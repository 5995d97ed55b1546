"""Values of each token of a few responses for the trained policies: implicit rewards and the terms of the regret."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from regretless.analysis.regret_calibration import Reading
from regretless.core.files import read_json, write_json
from regretless.core.settings import Section, Seed
from regretless.data.codec import Tokenizer
from regretless.data.pair_source import PairSource
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.layout import Ids, own_ids
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.modeling.scoring import score_responses
from regretless.objectives import repo_weights

Vector = NDArray[np.float64]

INCOMPLETE = "\ufffd"
"""What the bytes of an incomplete character decode to."""
CONTEXT = 32
"""Tokens that are decoded before a token whose text is asked for."""
REWARDS = "token_rewards.json"
UNITS = {
    "reference": "nats: log-probability of the token under the reference",
    "behavior": "nats: log-probability of the token under the policy that generated the response; null where unknown",
    "weights": "how often RePO's double sum over future tokens counts the token (paper's formula)",
    "logps": "nats: log-probability of the token under the policy",
    "reward": "nats: beta (logps - reference), the implicit reward, which is also the regret's local term",
    "long_horizon": "nats: beta weights (logps - behavior), the token's part in the regret's long-horizon term",
    "regret": "nats: reward + long_horizon, the token's full term; null where the behavior policy is unknown",
}
"""Meaning of every number in token_rewards.json. A response's RePO score (paper's formula) is the sum of `regret`."""


class TokenRewardsConfig(Section):
    """Responses to analyze token by token."""

    pairs: int = Field(default=4, ge=1)
    """Number of pairs to analyze token by token, from different prompts where there are enough. Masked pairs are used
    only if there are too few others."""
    masked: int = Field(default=2, ge=0)
    """Number of masked pairs to analyze token by token in addition, if the data has any."""
    seed: Seed = 0
    """Random seed for the pairs that are analyzed."""
    beta: float = Field(default=1.0, gt=0)
    """Factor of all rewards. At 1 they are log-ratios, which can be compared across policies trained with different
    β."""


def run(
    config: TokenRewardsConfig,
    pairs: Path,
    reference: ModelConfig,
    policies: Mapping[str, ModelConfig],
    output: Path,
    template: str | None = "plain",
    read: Sequence[Reading] = (),
) -> dict[str, Any]:
    """Score a few pairs token by token under the reference and each policy, into `output`/token_rewards.json.

    For each response (chosen and rejected): `tokens`, the text that each token adds, concatenated in `text`; `names`,
    the tokens as in the vocabulary; and the numbers of `UNITS`, one per token; and, of a response that is in `read`,
    the measured regret of its units (`measured`). All policies must have the reference's tokenizer, as models trained
    from it do.

    Raises DataError if no pair can be used, ConfigError if a model cannot be loaded.
    """
    # The pairs, and the scores of their responses.
    tokenizer = load_tokenizer(reference)
    source = PairSource.read(pairs, template)
    chosen = _choose(config, source, tokenizer)
    source.check(chosen)
    items = [(pair.prompt_ids, side.ids) for pair in chosen for side in pair.sides]
    reference_logps = _score(reference, items, "reference")
    policy_logps = {name: _score(model, items, name) for name, model in policies.items()}

    # The numbers of each response, in the order of the scores.
    of_id: dict[str | None, Reading] = {one.response.response_id: one for one in read}
    entries = []
    index = 0
    for pair in chosen:
        assert pair.row is not None
        responses = []
        for (name, row), side in zip(pair.row.sides.items(), pair.sides, strict=True):
            scored = {policy: logps[index] for policy, logps in policy_logps.items()}
            # A unit's log-probability says nothing of its tokens.
            behavior = side.without_units().values.get("behavior")
            values = _values(config.beta, reference_logps[index], behavior, scored)
            known = of_id.get(row.id)
            units = {} if known is None else known.of_side(pair.prompt_ids, side, config.beta)
            responses.append({"side": name, **_texts(tokenizer, side.own), **values, **units})
            index += 1
        entries.append({"pair_id": pair.pair_id, "kind": pair.kind, "prompt": pair.row.prompt, "responses": responses})
    content = {
        "units": UNITS,
        "beta": config.beta,
        "reference": reference.label,
        "policies": {name: model.label for name, model in policies.items()},
        "pairs": entries,
    }
    write_json(output / REWARDS, content)
    return {"pairs": len(entries), "tokens": sum(len(own_ids(ids)) for _, ids in items), "policies": len(policies)}


def token_table(source: str | Path) -> Any:
    """A pandas DataFrame with a row for each token of each response under each policy, from token_rewards.json.

    source: that file, or a folder of `analyze` or of a run. Columns: `pair_id`, `kind`, `side`, `policy`, `position`
    (from 0), `token` (the text that it adds), `name` (as in the vocabulary), and the numbers of `UNITS`: `reference`,
    `behavior`, `weights`, `logps`, `reward`, `long_horizon`, `regret`, NaN where unknown.
    Raises DataError if there is no such file.
    """
    import pandas as pd

    path = Path(source)
    places = (path, path / REWARDS, path / "analyze" / REWARDS)
    content = read_json(next((place for place in places if place.is_file()), places[1]))
    parts = []
    for pair in content["pairs"]:
        for response in pair["responses"]:
            of_response = {
                **{"pair_id": pair["pair_id"], "kind": pair["kind"], "side": response["side"]},
                **{"position": range(len(response["tokens"])), "token": response["tokens"], "name": response["names"]},
                **{name: response[name] for name in ("reference", "behavior", "weights")},
            }
            parts += [
                pd.DataFrame({**of_response, "policy": policy, **scores})
                for policy, scores in response["policies"].items()
            ]
    numbers = dict.fromkeys(UNITS, "float64")
    return pd.concat(parts, ignore_index=True).astype(numbers) if parts else pd.DataFrame(columns=list(numbers))


def _choose(config: TokenRewardsConfig, source: PairSource, tokenizer: Tokenizer) -> list[TokenizedPair]:
    """The usable pairs to analyze, in random order."""
    pairs = source.pairs
    order = random.Random(config.seed).sample(range(len(pairs)), len(pairs))
    of_prompt: Counter[tuple[bool, str | None]] = Counter()
    turns: dict[int, int] = {}
    for index in order:
        key = pairs[index].kind == "masked", pairs[index].prompt_id
        turns[index] = of_prompt[key]
        of_prompt[key] += 1
    order.sort(key=turns.__getitem__)

    def usable(*, masked: bool) -> Iterator[TokenizedPair]:
        # One pair at a time: a few of many are needed.
        for index in order:
            if (pairs[index].kind == "masked") == masked:
                yield from source.tokenize(tokenizer, pairs=[pairs[index]], need_logps=True)

    originals = list(itertools.islice(usable(masked=False), config.pairs))
    return originals + list(itertools.islice(usable(masked=True), config.pairs - len(originals) + config.masked))


def _score(config: ModelConfig, items: Sequence[tuple[Ids, Ids]], name: str) -> list[NDArray[np.float32]]:
    # Only one model is in memory at a time.
    return score_responses(load_model(config), items, description=f"token rewards: {name}")


def _values(
    beta: float,
    reference: NDArray[np.float32],
    behavior: Sequence[float] | None,
    policies: Mapping[str, NDArray[np.float32]],
) -> dict[str, Any]:
    length = len(reference)
    weights: Vector = repo_weights(torch.tensor([length]), length)[0].numpy()
    scored = {}
    for name, logps in policies.items():
        policy = logps.astype(np.float64)
        reward = beta * (policy - reference)
        horizon = None if behavior is None else beta * weights * (policy - np.asarray(behavior))
        scored[name] = {
            "logps": _numbers(policy),
            "reward": _numbers(reward),
            "long_horizon": None if horizon is None else _numbers(horizon),
            "regret": None if horizon is None else _numbers(reward + horizon),
        }
    return {
        "reference": _numbers(reference.astype(np.float64)),
        "behavior": None if behavior is None else _numbers(np.asarray(behavior, dtype=np.float64)),
        "weights": _numbers(weights),
        "policies": scored,
    }


def _numbers(values: Vector) -> list[float]:
    return [round(float(value), 6) for value in values]


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    pieces = text_pieces(tokenizer, ids)
    return {"text": "".join(pieces), "tokens": pieces, "names": tokenizer.convert_ids_to_tokens(list(ids))}


def text_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text that each token adds to the decoded text; concatenated, they are the text without special tokens.

    A special token adds nothing. If several tokens share a character, the last of them adds it.
    """
    pieces: list[str] = []
    start, decoded = 0, ""
    for count in range(1, len(ids) + 1):
        text = _decoded(tokenizer, ids[start:count])
        if count < len(ids):
            # The rest of the character comes with later tokens.
            text = text.rstrip(INCOMPLETE)
        pieces.append(text[len(decoded) :])
        decoded = text if len(text) > len(decoded) else decoded
        if count - start >= 2 * CONTEXT and len(text) == len(decoded):
            # From here on with few tokens before: the time would grow with the square of the length.
            start = count - CONTEXT
            decoded = _decoded(tokenizer, ids[start:count]).rstrip(INCOMPLETE)
    return pieces


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
