"""Sampling from an OpenAI-compatible server: chat or completions, with the log-probabilities that it returns."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from regretless.core.errors import BudgetError, ConfigError, RegretlessError, ServerError
from regretless.core.files import fingerprint
from regretless.core.terminal import print_note
from regretless.core.text_cleaning import one_line
from regretless.core.top_logps import packed_top
from regretless.data.codec import codec_of
from regretless.data.columns import LogpsKind, Text, text_key
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, eos_token_ids, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.base import Completion, PromptsUnansweredError, Provenance
from regretless.sampling.engine_settings import SamplingParams, SamplingServer, check_top_kind
from regretless.sampling.openai_logprobs import (
    PROBE_TEMPERATURE,
    PROBE_TOP_P,
    Meaning,
    kind_of,
    meaning_of,
)
from regretless.sampling.stop_strings import StopStrings, before_stop, first_of, wholly_before
from regretless.servers.ask import MOST_FAILURES, MOST_REFUSALS
from regretless.servers.limits import Budget, Spending
from regretless.servers.reply import CUTS, NO_LOGPS, SPECIAL_TOKEN, UNREPORTED, BadReplyError, Reply, id_in
from regretless.servers.reply_store import ReplyStore
from regretless.servers.transport import Client, Unanswered

PROBES = ("Name any animal.", "Pick a number from 1 to 100.", "Begin a story with one word.")
"""Asked one after another until the first token's likeliest values are far enough apart to tell what they mean."""
PROBE_TOP = 5
"""Most likely tokens to request when two are needed: vLLM replaces the last one by the sampled token."""
SEED_RANGE = 2**31
"""Servers accept seeds of 32 bits with sign."""
SERVER_STOPS = 4
"""Stop strings that OpenAI's own servers accept."""
SHOWN_LENGTH = 60
LONGEST_TOKEN = 64
"""Bytes of text that a server's list of tokens may lack at a stop string: the beginning of one more token."""
LACKS_LOGPS = (
    "the server returns no log-probabilities; start it so that it does, or set server.logprobs: false for data without "
    "them (for repo_det and the baselines)"
)


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt as it is sent; its length is in tokens if they are known, else in characters."""

    text: Text
    ids: list[int] | None

    def __len__(self) -> int:
        if self.ids is not None:
            return len(self.ids)
        return len(self.text) if isinstance(self.text, str) else sum(len(message["content"]) for message in self.text)

    @property
    def beginning(self) -> str:
        """The beginning of the text, or of the last message, in quotation marks."""
        last = self.text if isinstance(self.text, str) else self.text[-1]["content"]
        return f'"{textwrap.shorten(one_line(last[: 2 * SHOWN_LENGTH]), SHOWN_LENGTH, placeholder="…")}"'


@dataclass(frozen=True)
class _Cut:
    """A reply before its first stop string."""

    text: str
    count: int | None
    """Number of tokens wholly before the stop string; None if it is unknown."""
    tokens: list[bytes] | None
    """These tokens, and what of the text is behind them; None if they need no comparison with the text."""


@dataclass
class _Failures:
    """Prompts without a response, each counted once however many responses it should get."""

    problems: dict[int, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Keys of the prompts that the server refuses: further responses are not asked for."""
    named: set[str] = field(default_factory=set)
    """Keys of the prompts in `problems`."""
    in_a_row: Counter[bool] = field(default_factory=Counter)
    """Number since the last response: of refusals (True), and of prompts whose tries all failed (False)."""

    def add(self, number: int, prompt: ServerPrompt, error: Unanswered) -> None:
        key = text_key(prompt.text)
        if key in self.refused:
            return
        if error.is_refusal:
            self.refused.add(key)
        if key not in self.named:
            self.named.add(key)
            self.problems[number] = f"{prompt.beginning}: {error}"
        self.in_a_row[error.is_refusal] += 1

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row[True] >= MOST_REFUSALS or self.in_a_row[False] >= MOST_FAILURES


def _end_in(tokens: bytes, text: bytes) -> int | None:
    """Where a text ends in that of its tokens, up to a token behind them; None if the two differ.

    Servers may leave out white space at the text's start.
    """
    start = len(tokens) - len(tokens.lstrip()) if text == text.lstrip() else 0
    inner = tokens[start:]
    fits = inner.startswith(text) or (text.startswith(inner) and len(text) - len(inner) < LONGEST_TOKEN)
    return start + len(text) if fits else None


def local_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model on a server, if its settings name one; the server's model name is no path or hub id."""
    return load_tokenizer(config) if config.tokenizer is not None else None


class OpenAIEngine:
    """Engine on a server, for the model of that name (`name_or_path`).

    Raises ConfigError for settings that the server does not support.
    """

    context: int | None = None

    def __init__(self, config: ModelConfig, params: SamplingParams) -> None:
        if config.name_or_path is None or config.adapter is not None or params.server is None:
            raise ConfigError(
                f"model {config.label}: the engine openai needs the server's name for it in name_or_path; "
                "remove architecture and adapter"
            )
        self.config, self.model, self.params = config, config.name_or_path, params
        self.server: SamplingServer = params.server.model_copy(
            update={"base_url": params.server.base_urls.get(self.model, params.server.base_url)}
        )
        # Settings that OpenAI's servers lack; all others are taken for vLLM-like ones.
        elsewhere = self.server.address is not None
        self.extensions = elsewhere if self.server.extensions is None else self.server.extensions
        if not self.extensions and (params.top_k or params.repetition_penalty != 1):
            raise ConfigError(
                f"model {self.model}: this server has no top_k and no repetition_penalty; set top_k: 0 and "
                "repetition_penalty: 1, or server.extensions: true if it has"
            )
        if not self.extensions and len(params.stop) > SERVER_STOPS:
            raise ConfigError(
                f"model {self.model}: this server takes at most {SERVER_STOPS} stop strings, and stop has "
                f"{len(params.stop)}; remove some, or set server.extensions: true if it takes more"
            )
        if params.top_logps and not (self.extensions and self.server.logprobs):
            raise ConfigError(
                f"model {self.model}: top_logps needs the ids of the most likely tokens, which a server returns that "
                "has vLLM's parameter return_tokens_as_token_ids; set top_logps: 0, or server.extensions and "
                "server.logprobs to true if it has"
            )
        if config.chat_template_kwargs and self.server.endpoint == "chat":
            raise ConfigError(
                f"model {self.model}: chat_template_kwargs are for a chat template that is applied here, and endpoint: "
                "chat has the server's own; set endpoint: completions and the model's tokenizer"
            )
        # Where responses come from, and what requests have cost.
        self.tokenizer = local_tokenizer(config)
        self.provenance = Provenance(
            model=config.label,
            revision=None,
            dtype=None,
            engine="openai",
            tokenizer=None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer),
        )
        self.spent = Spending()
        self.replies: Path | None = None
        self._counted: dict[Path, Spending] = {}
        """Spending according to each file of replies, as far as it is part of `spent`."""
        # Oddities of replies: counted here, and noted once at the end.
        self._unfamiliar: Counter[str] = Counter()
        """Responses that were counted as cut for a finish_reason that is not a known one."""
        self._unreported = 0
        """Responses without log-probabilities because the server reports those of likely tokens alone."""
        self._unplaced = 0
        """Responses without tokens because these do not show where the stop string begins."""
        self._unsaid = 0
        """Responses that the model or a stop string ended, the server does not say which."""

    @cached_property
    def kind(self) -> LogpsKind | None:
        """What the server's log-probabilities are; None if there are none.

        Found out when it is first needed, so that the requests for it count against a budget that earlier runs have
        spent a part of. Raises ConfigError if it cannot be determined.
        """
        return self._find_kind() if self.server.logprobs else None

    def encode(self, prompt: Text) -> ServerPrompt:
        """A prompt as it is sent. Raises ConfigError if the endpoint does not accept it."""
        if self.server.endpoint == "chat":
            if isinstance(prompt, str):
                raise ConfigError(
                    "server.endpoint: chat needs messages, and the prompts are plain texts; set prompts.template "
                    "(user, assistant, math), or endpoint: completions"
                )
            return ServerPrompt(prompt, None)
        if self.tokenizer is not None:
            return ServerPrompt(prompt, encode_prompt(self.tokenizer, prompt))
        if not isinstance(prompt, str):
            raise ConfigError(
                "server.endpoint: completions needs plain texts, and the prompts are messages; set the model's "
                "tokenizer in models.tokenizer, whose chat template writes them, or set endpoint: chat"
            )
        return ServerPrompt(prompt, None)

    def encode_ids(self, ids: Sequence[int]) -> ServerPrompt:
        """The prompt of these token ids. Raises ConfigError unless the server is sent token ids."""
        if self.server.endpoint == "chat" or self.tokenizer is None:
            raise ConfigError(
                "server.endpoint: responses are continued from their token ids, which only endpoint: completions "
                "sends, for a model whose settings name a tokenizer"
            )
        return ServerPrompt(self.tokenizer.decode(ids), list(ids))

    def with_params(self, params: SamplingParams) -> Self:
        """This engine with other settings of sampling, which are checked again; what is spent counts for both."""
        if params == self.params:
            return self
        other = type(self)(self.config, params)
        other.spent, other.replies, other._counted = self.spent, self.replies, self._counted
        return other

    def with_replies(self, file: Path) -> Self:
        """This engine with a file for replies, which are not asked for again, and for what all requests cost.

        What earlier runs have spent according to the file counts against the budget, once.
        """
        other = copy.copy(self)
        other.replies = file
        if file not in self._counted:
            with ReplyStore(file) as store:
                self._counted[file] = store.spent(self.model)
            self.spent.add(self._counted[file])
        return other

    def forget(self, prompts: Sequence[ServerPrompt], seeds: Sequence[int]) -> None:
        """Remove the replies to these requests from the file of replies: their responses are stored elsewhere."""
        with self._store() as store:
            if store is not None:
                store.remove(self._key(self._request(*asked)) for asked in zip(prompts, seeds, strict=True))

    def generate(self, prompts: Sequence[ServerPrompt], seed: int) -> list[Completion]:
        """One response to each prompt, in order, each from a seed of its own. Raises what `stream` raises."""
        seeds = [int(fingerprint([seed, row])[:15], 16) for row in range(len(prompts))]
        completions = dict(self.stream(prompts, seeds))
        return [completions[row] for row in range(len(prompts))]

    def stream(self, prompts: Sequence[ServerPrompt], seeds: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        """One response to each prompt, with its position, as they come, `server.concurrency` at a time.

        Raises PromptsUnansweredError when the server refuses some or gives no reply to them, after all others;
        ServerError when the server cannot be used, BudgetError when the budget is used up, both after the requests
        under way.
        """
        # Not in the event loop: the requests for it have a loop of their own.
        _ = self.kind
        with self._store() as store, asyncio.Runner() as runner:
            answers = self._answers(prompts, seeds, store)

            async def following() -> tuple[int, Completion] | None:
                return await anext(answers, None)

            try:
                while (answer := runner.run(following())) is not None:
                    yield answer
            finally:
                runner.run(answers.aclose())
                self._note_oddities()

    async def _answers(
        self, prompts: Sequence[ServerPrompt], seeds: Sequence[int], store: ReplyStore | None
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        failures = _Failures()
        stopped: RegretlessError | None = None
        waiting = iter(range(len(prompts)))
        running: dict[asyncio.Task[Completion], int] = {}
        async with self._client(store) as client:
            while True:
                # Requests under way finish in any case: they are already paid for.
                while len(running) < self.server.concurrency and stopped is None and not failures.are_too_many:
                    number = next(waiting, None)
                    if number is None:
                        break
                    if text_key(prompts[number].text) not in failures.refused:
                        task = asyncio.create_task(self._answer(client, store, prompts[number], seeds[number]))
                        running[task] = number
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number = running.pop(task)
                    try:
                        completion = task.result()
                    except Unanswered as error:
                        failures.add(number, prompts[number], error)
                        if error.reason == NO_LOGPS:
                            stopped = stopped or ServerError(LACKS_LOGPS)
                    except RegretlessError as error:
                        stopped = stopped or error
                    else:
                        failures.in_a_row.clear()
                        yield number, completion
        if stopped is not None:
            raise self._stop(stopped)
        if failures.problems:
            raise self._unanswered(failures, prompts)

    async def _answer(self, client: Client, store: ReplyStore | None, prompt: ServerPrompt, seed: int) -> Completion:
        """The response to one request, from the file of replies if it is there. Only a usable reply is stored."""
        body = self._request(prompt, seed)
        key = self._key(body)
        kept = None if store is None else store.get(key)
        if kept is not None:
            # Written by another version of this package, perhaps.
            with contextlib.suppress(BadReplyError, ServerError):
                return self._completion(prompt, Reply(kept, self.server.endpoint, body))
        sent = body if self.server.send_seed else {name: value for name, value in body.items() if name != "seed"}
        reply = await client.ask(self.server.endpoint, sent, self.params.max_new_tokens, self._check_ids)
        completion = self._completion(prompt, reply)
        if store is not None:
            store.put(key, f"{prompt.beginning} seed {body['seed']}", reply.text, self.server.named_address)
        return completion

    def _stop(self, error: RegretlessError) -> RegretlessError:
        where = ""
        if isinstance(error, BudgetError) and self.replies is not None:
            where = (
                f"\nearlier runs are included, as counted in {self.replies}, where the replies of unfinished parts are "
                "kept too; the same command with a larger budget resumes from there"
            )
        return type(error)(f"model {self.model}: {error}{where}")

    def _unanswered(self, failures: _Failures, prompts: Sequence[ServerPrompt]) -> PromptsUnansweredError:
        count, total = len(failures.problems), len({text_key(prompt.text) for prompt in prompts})
        early = "; there were so many in a row that no more were sent" if failures.are_too_many else ""
        kept = "" if self.replies is None else "All other replies are kept. "
        # A server that does not accept a parameter refuses every request.
        advice = self._advice() if failures.refused and (early or count == total) else ""
        return PromptsUnansweredError(
            f"model {self.model}: {count} of {total} prompts got no response{early}:",
            failures.problems,
            f"{kept}{advice}Check the server, shorten these prompts or remove them, and run again.",
        )

    def _advice(self) -> str:
        """What to set if the server refuses a parameter; empty if there is nothing to set."""
        server = self.server
        parameters = {
            "server.extensions: false": ", ".join(self._shape(0, 1.0)),
            "server.send_seed: false": "seed" if server.send_seed else "",
            "server.logprobs: false": "logprobs" if server.logprobs else "",
            "stop: []": "stop" if self.params.stop else "",
            "another server.limit_parameter": server.limit_parameter if server.endpoint == "chat" else "",
        }
        settings = [f"{setting} ({names})" for setting, names in parameters.items() if names]
        return f"For a parameter that it does not accept, set {' or '.join(settings)}. " if settings else ""

    def _note_oddities(self) -> None:
        if self._unreported:
            print_note(
                f"model {self.model}: {self._unreported} responses have no log-probabilities, because the server "
                f"reports {UNREPORTED:g} for an unlikely token, which stands for an unknown value; repo cannot use them"
            )
            self._unreported = 0
        if self._unplaced:
            print_note(
                f"model {self.model}: {self._unplaced} responses have no log-probabilities, because their tokens do "
                "not show where the stop string begins, so repo cannot use them; models.tokenizer may help"
            )
            self._unplaced = 0
        if self._unsaid:
            print_note(
                f"model {self.model}: the server does not say of {self._unsaid} responses whether the model or a stop "
                "string ended them; they count as ended by the model, so training on their text puts an end token there"
            )
            self._unsaid = 0
        if self._unfamiliar:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(self._unfamiliar.items()))
            print_note(
                f"model {self.model}: responses with an unfamiliar finish_reason were counted as cut: {reasons}; "
                "they are trained without an end, so check what the server means by it"
            )
            self._unfamiliar.clear()

    def _request(self, prompt: ServerPrompt, seed: int) -> dict[str, Any]:
        """The request for a response; its seed tells it apart from others, also where it is not sent."""
        params = self.params
        drawn: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
        shape = self._shape(params.top_k, params.repetition_penalty)
        stop = {"stop": params.stop} if params.stop else {}
        drawn |= {**shape, **stop, "seed": seed % SEED_RANGE}
        return self._body(prompt, params.max_new_tokens, drawn, top=params.top_logps)

    def _key(self, body: Mapping[str, Any]) -> str:
        """Key of a request in the file of replies: of all that says what its reply is, and what it means."""
        return fingerprint([self.server.address, self.server.endpoint, self.kind, self.provenance.tokenizer, body])

    def _store(self) -> contextlib.AbstractContextManager[ReplyStore | None]:
        return contextlib.nullcontext() if self.replies is None else ReplyStore(self.replies)

    def _client(self, store: ReplyStore | None) -> Client:
        """A client whose requests count against the budget, and in the file of replies."""
        if store is None:
            return Client(self.server, Budget(self.server, self.spent))
        ledger, counted = store.ledger(self.model), self._counted[store.path]
        return Client(self.server, Budget(self.server, self.spent, ledger, counted))

    def _shape(self, top_k: int, repetition_penalty: float) -> dict[str, Any]:
        """Parameters beyond OpenAI's own. All are sent: vLLM reads omitted ones from the checkpoint's settings."""
        if not self.extensions:
            return {}
        off = -1
        ids = {"return_token_ids": True, **({"return_tokens_as_token_ids": True} if self.params.top_logps else {})}
        return {"top_k": top_k or off, "min_p": 0.0, "repetition_penalty": repetition_penalty, **ids}

    def _body(self, prompt: ServerPrompt, most_tokens: int, drawn: dict[str, Any], top: int = 0) -> dict[str, Any]:
        """A request; `top`: number of most likely tokens to return for each position."""
        if self.server.endpoint == "chat":
            body = {"model": self.model, "messages": prompt.text, self.server.limit_parameter: most_tokens, **drawn}
            logprobs: dict[str, Any] = {"logprobs": True, **({"top_logprobs": top} if top else {})}
        else:
            written = prompt.text if prompt.ids is None else prompt.ids
            body = {"model": self.model, "prompt": written, "max_tokens": most_tokens, **drawn}
            logprobs = {"logprobs": max(top, 1)}
        return {**body, **logprobs} if self.server.logprobs else body

    def _check_ids(self, reply: Reply) -> None:
        """Raise BadReplyError for an id that the configured tokenizer does not have: it has no text."""
        ids = reply.choice.ids
        if self.tokenizer is not None and ids and max(ids) >= (size := len(self.tokenizer)):
            detail = f"{max(ids)}, and the tokenizer {self.provenance.tokenizer} has {size}; set the model's own"
            raise BadReplyError("token id beyond the vocabulary", detail)

    def _completion(self, prompt: ServerPrompt, reply: Reply) -> Completion:
        choice = reply.choice
        if reply.thoughts and self.server.logprobs:
            raise ServerError(
                "the server removes the model's thoughts from the text but not from the "
                "log-probabilities; start it without a reasoning parser, or set server.logprobs: false"
            )
        if self.server.logprobs and choice.logps is None:
            detail = "a filter of the server ended the answer before its first token"
            raise Unanswered("no text", detail, is_refusal=True)
        cut = self._cut(reply)
        problem = reply.text_problem if cut is None else reply.problem_between(cut.tokens, cut.text)
        if self.server.logprobs and problem is not None:
            raise ServerError(
                f"the log-probabilities do not belong to the text: {problem}; something in the "
                "server changes the text and not them (a parser of tool calls or reasoning, stop strings of its own): "
                "start it without that, or set server.logprobs: false"
            )
        # Ids that include thoughts do not match a text that does not.
        ids = None if reply.thoughts else choice.ids
        logps = choice.logps
        if logps is not None and UNREPORTED in logps:
            self._unreported += 1
            logps = None
        if cut is None and not reply.has_ended and reply.finish_reason not in CUTS:
            self._unfamiliar[reply.finish_reason or "null"] += 1
        # Log-probabilities of a draw exist where something was drawn from the reported distribution.
        has_draw = self.params.temperature > 0 and (self.kind == "sampled" or self.params.is_plain)
        completion = Completion(
            text=reply.content,
            token_ids=ids,
            logps=logps,
            sampled_logps=logps if has_draw else None,
            # A response that a filter ended, for example, is as incomplete as one that reached the limit.
            finish_reason="stop" if reply.has_ended else "length",
            logps_kind=None if logps is None else self.kind,
            prompt_token_ids=prompt.ids or reply.prompt_token_ids,
            tokens=None if ids is not None else choice.strings,
            token_bytes=self._token_bytes(reply, ids),
            top_logps=None if logps is None or ids is None else self._top(reply),
            top_logps_kind=self.params.top_logps_kind if self.params.top_logps else None,
        )
        if cut is not None:
            return before_stop(completion, cut.count, cut.text)
        if self.params.stop and reply.ended_at(self.params.stop) is None and not self._ends_itself(reply):
            self._unsaid += 1
        return completion

    def _token_bytes(self, reply: Reply, ids: list[int] | None) -> list[int] | None:
        """Bytes of each token of a reply, by the tokenizer or as the server says; None if unknown."""
        if self.tokenizer is not None and ids:
            codec = codec_of(self.tokenizer)
            return codec.token_bytes(ids, codec.decode([tuple(ids)], special=False)[0])
        tokens = reply.choice.written
        if not tokens or (ids is not None and len(ids) != len(tokens)):
            return None
        is_end = self._ends_itself(reply) and not reply.content.encode().endswith(tokens[-1])
        return [*map(len, tokens[:-1]), 0 if is_end else len(tokens[-1])]

    def _top(self, reply: Reply) -> bytes | None:
        """The lists of a reply as a column holds them. Raises ServerError for one that lacks some, or their ids."""
        count = self.params.top_logps
        if not count:
            return None
        listed = [
            [(number, each.logprob) for each in tops[:count] if (number := id_in(each.token)) is not None]
            for tops in reply.choice.listed
        ]
        if len(listed) != len(reply.choice.ids or ()) or any(len(tops) != count for tops in listed):
            raise ServerError(
                f"top_logps: expected the ids of {count} tokens in the place of each one, and the server does not "
                "return as many; lower top_logps (OpenAI's limit, and vLLM's by default, is 20), or set it to 0"
            )
        # What JSON has for −∞.
        return packed_top([[(i, -math.inf if logp <= UNREPORTED else logp) for i, logp in tops] for tops in listed])

    def _ends_itself(self, reply: Reply) -> bool:
        """Whether the last token is one that ends a response."""
        ids, written = reply.choice.ids, reply.choice.written
        if ids and self.tokenizer is not None:
            return ids[-1] in eos_token_ids(self.tokenizer)
        return written is not None and len(written) > 0 and SPECIAL_TOKEN.fullmatch(written[-1]) is not None

    def _cut(self, reply: Reply) -> _Cut | None:
        """What of a reply is before its first stop string; None if no stop string ended it.

        Servers cut the text, and most leave the tokens as they are.
        """
        strings, choice = self.params.stop, reply.choice
        if not strings:
            return None
        last = -1 if self._ends_itself(reply) else None
        if self.tokenizer is not None and choice.ids and not reply.thoughts:
            cut = StopStrings(self.tokenizer, strings).cut(choice.ids[:last])
            if cut is not None:
                return _Cut(cut[1], cut[0], None)
        start = first_of(reply.content, strings)
        text, tokens = reply.content[:start], (choice.written or [])[:last]
        joined = b"".join(tokens)
        at = first_of(joined, [string.encode() for string in strings])
        if at is None and start is None and not reply.ended_at(strings):
            return None
        if at is not None and len(text.encode()) > at:
            text = joined[:at].decode(errors="replace")
        elif at is None:
            at = _end_in(joined, text.encode())
        if at is None or choice.written is None:
            self._unplaced += self.server.logprobs
            return _Cut(text, None, None)
        count = wholly_before(tokens, at)
        rest = joined[sum(map(len, tokens[:count])) : at] if at <= len(joined) else text.encode()[-(at - len(joined)) :]
        return _Cut(text, count, [*tokens[:count], rest])

    def _find_kind(self) -> LogpsKind:
        meaning = None if self.params.is_plain else self._find_meaning()
        try:
            kind = kind_of(self.params, self.server.logprobs_mode, meaning)
            check_top_kind(self.params, kind, "server")
            return kind
        except ConfigError as error:
            raise ConfigError(f"model {self.model}: {error}") from None

    def _find_meaning(self) -> Meaning | None:
        """What the server's log-probabilities reflect, by the first probe that shows it; None if none does."""
        return next(filter(None, map(self._meaning_at, PROBES)), None)

    def _meaning_at(self, probe: str) -> Meaning | None:
        """Request one token twice, once with a changed distribution: do the server's log-probabilities change too?"""
        chat: Text = [{"role": "user", "content": probe}]
        prompt = ServerPrompt(chat if self.server.endpoint == "chat" else probe, None)
        settings = ({"temperature": 1.0, "top_p": 1.0}, {"temperature": PROBE_TEMPERATURE, "top_p": PROBE_TOP_P})
        shape = self._shape(0, 1.0)
        bodies = [self._body(prompt, 1, {**drawn, **shape}, top=PROBE_TOP) for drawn in settings]
        try:
            replies = asyncio.run(self._probe(bodies))
        except RegretlessError as error:
            raise self._stop(error) from None
        except Unanswered as error:
            if error.reason == NO_LOGPS:
                raise self._stop(ServerError(LACKS_LOGPS)) from None
            if not error.is_refusal:
                raise ServerError(f"model {self.model}: the server does not answer: {error}") from None
            # Some servers reject what this needs: a limit of one token, alternatives.
            return None
        neutral, shaped = ([top.logprob for top in reply.choice.likeliest] for reply in replies)
        return meaning_of(neutral, shaped)

    async def _probe(self, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
        """The replies to requests for one token. Raises Unanswered for the first one without a reply."""
        with self._store() as store:
            async with self._client(store) as client:
                return [await client.ask(self.server.endpoint, body, 1) for body in bodies]
