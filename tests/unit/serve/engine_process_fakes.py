"""Engines for the engine process that need no model: openers that a spawned process can import.

``CountingRunner`` draws the token that follows from the prompt's first token and the position alone, so every
answer can be predicted (``expected_answer``) and a token that reached the wrong stream is seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from gapless.engine.core import EngineCore
from gapless.engine.step import ScheduledBatch, StepResult, TokenLogprob
from gapless.errors import ConfigError
from gapless.serve.engine_process import ReportProgress, ServedEngine
from gapless.serve.messages import EngineInfo

VOCAB_SIZE = 50_000
CRASHING_TOKEN = 49_999
"""A prompt that begins with it breaks its step."""
KILLING_TOKEN = 49_998
"""Ends the process on the spot, as a segmentation fault would."""
LOOP_BREAKING_TOKEN = 49_997
"""Makes the runner return something no loop can go on from."""


def token_at(first: int, position: int) -> int:
    return (first * 131 + position * 17) % 40_000


def expected_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [token_at(prompt[0], len(prompt) + i) for i in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step whose result is known already."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class WordTokenizer:
    """Token 12 is the text `` 12``."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in token_ids)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return " ".join(message["content"] for message in messages)


class CountingRunner:
    """See the module. ``step_s``: how long a step takes."""

    block_size = 16
    vocab_size = VOCAB_SIZE
    max_steps_ahead = 0
    media = None

    def __init__(self, *, max_num_reqs: int, num_blocks: int, step_s: float) -> None:
        self.max_num_reqs, self.num_blocks, self._step_s = max_num_reqs, num_blocks, step_s
        self.max_model_len = 4096
        self.max_num_batched_tokens = 8192
        self.is_shut_down = False

    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        if self._step_s:
            time.sleep(self._step_s)
        first_tokens = {entry.sequence.token_ids[0] for entry in batch.entries}
        if KILLING_TOKEN in first_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if LOOP_BREAKING_TOKEN in first_tokens:
            raise _BreaksTheLoop
        if CRASHING_TOKEN in first_tokens:
            raise RuntimeError("this prompt breaks its step")
        sampled = [entry for entry in batch.entries if entry.samples]
        tokens = [token_at(entry.sequence.token_ids[0], entry.end) for entry in sampled]
        logprobs = [
            None
            if entry.sequence.params.logprobs is None
            else [TokenLogprob(token, -0.5, 1)]
            + [TokenLogprob(i, -1.0 - i, i + 2) for i in range(entry.sequence.params.logprobs)]
            for entry, token in zip(sampled, tokens, strict=True)
        ]
        pooled = {
            position: [float(entry.end), float(sum(entry.sequence.token_ids))]
            for position, entry in enumerate(batch.entries)
            if entry.samples and entry.sequence.params.pooling
        }
        return CompletedStep(StepResult(token_ids=tokens, logprobs=logprobs, pooled=pooled))

    def padded_eager(self) -> Any:
        return nullcontext()

    def report(self) -> dict[str, Any]:
        return {"graphs": [{}, {}], "memory": {"pool_bytes": 7, "driver_bytes": 5, "capture_s": 0.5}}

    def reset_report(self) -> None:
        """Nothing is counted."""

    def shutdown(self) -> None:
        self.is_shut_down = True


class _BreaksTheLoop(BaseException):
    """Passes the core, which only catches what a step may raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFake:
    """An opener. ``error`` "user" or "program": it fails in that way instead."""

    max_num_reqs: int = 256
    num_blocks: int = 40_000
    step_s: float = 0.0
    open_s: float = 0.0
    error: str | None = None

    def __call__(self, progress: ReportProgress) -> ServedEngine:
        progress("weights", 1, 2)
        time.sleep(self.open_s)
        if self.error == "user":
            raise ConfigError("--max-model-len=1 is too short")
        if self.error == "program":
            raise ZeroDivisionError("a bug")
        progress("weights", 2, 2)
        core = make_core(max_num_reqs=self.max_num_reqs, num_blocks=self.num_blocks, step_s=self.step_s)
        return ServedEngine(core=core, info=make_info(core))


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenShowing:
    """An opener whose engine tells the values of environment variables as its configuration."""

    names: tuple[str, ...]

    def __call__(self, progress: ReportProgress) -> ServedEngine:
        core = make_core()
        config = {name: os.environ.get(name) for name in self.names}
        return ServedEngine(core=core, info=msgspec.structs.replace(make_info(core), config=config))


def make_core(*, max_num_reqs: int = 8, num_blocks: int = 1000, step_s: float = 0.0) -> EngineCore:
    runner = CountingRunner(max_num_reqs=max_num_reqs, num_blocks=num_blocks, step_s=step_s)
    return EngineCore(runner, tokenizer=WordTokenizer(), eos_token_ids=[VOCAB_SIZE - 1])


def make_info(core: EngineCore) -> EngineInfo:
    runner = core.runner
    return EngineInfo(
        model="fake",
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_running_requests=runner.max_num_reqs,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        eos_token_ids=[VOCAB_SIZE - 1],
        device="none",
        config={},
        plan={},
        startup_s=0.0,
    )
