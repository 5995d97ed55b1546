"""Settings that the chat benchmarks share."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from regretless.core.settings import Seed
from regretless.evaluation.chat.files import is_remote, local_path
from regretless.evaluation.chat.judge_prompts import JudgeTemplate
from regretless.evaluation.conditions import answers_folder
from regretless.sampling.engine_settings import StopSetting
from regretless.servers.judge_client import JudgeAccess


class ChatBenchmarkConfig(JudgeAccess):
    """An LLM-judged benchmark: its questions, how they are answered, and the judge."""

    file_settings: ClassVar[tuple[str, ...]] = ("questions", "judge_prompt")
    """Settings that name a file."""

    questions: str
    """Questions of the benchmark: a .jsonl, .json or .parquet file, or `hf://datasets/<owner>/<name>/<file>`."""
    limit: int | None = Field(default=None, ge=1)
    """Most questions to ask, from the start. With a limit, the results are not comparable with published ones."""
    template: Literal["user", "assistant"] = "user"
    """How a question becomes a prompt: `user` sends it alone, `assistant` adds the system message "You are a helpful
    assistant."."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Most tokens in an answer. An answer that is cut is judged as it is, and counted."""
    stop: StopSetting = Field(default=[])
    """Texts that end an answer, as in `sample`: a pretrained model may go on with a question of its own."""
    judge: str
    """Name of the judge model on its server."""
    judge_prompt: str | None = None
    """File with the judge's prompt, in place of this package's own; the benchmark's published file can be used."""
    temperature: float | None = Field(default=0, ge=0)
    """Sampling temperature of the judge; null sends none, which OpenAI's reasoning models require."""
    max_reply_tokens: int = Field(default=4096, ge=1)
    """Most tokens in a judge's reply, reasoning included. A reply that is cut cannot be read."""
    bootstrap: int = Field(default=1000, ge=100)
    """Number of bootstrap resamples, for confidence intervals that have no formula."""
    seed: Seed = 0
    """Random seed for the order in which the judge sees two answers, for the bootstrap, and for sampled answers."""

    @property
    def judge_name(self) -> str:
        """Name of the judge on its server."""
        return self.judge

    def files(self) -> dict[str, Path]:
        """Local files, besides the responses, that the result depends on, keyed by their setting."""
        named = {name: getattr(self, name) for name in self.file_settings}
        return {name: Path(path).expanduser() for name, path in named.items() if path and not is_remote(path)}

    def fetch(self) -> None:
        """Download remote files, check for the judge's API key and read the templates, so that errors appear before
        hours of other work. Raises ConfigError."""
        self.server.api_key()
        for name in self.file_settings:
            where = getattr(self, name)
            if where and is_remote(where):
                local_path(where)
        self.templates()

    @abstractmethod
    def templates(self) -> dict[str, JudgeTemplate]:
        """Judge templates, by name. Raises ConfigError for a file that cannot be used."""

    @property
    def answers(self) -> str:
        """Name of the folder of its answers."""
        return answers_folder(self.model_dump(mode="json"))
