"""Ranks that start at once: forked from a process that has imported everything.

A fresh interpreter imports torch for seconds. Everything else is as in real life: processes of their own,
inherited sockets, gloo between them.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import gapless.engine.ranks
from gapless import LLM, SamplingParams
from gapless.engine.rank_worker import main

Main = Callable[[int, int, int], None]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["gapless.engine.build", "gapless.engine.step_mirror"])

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""Vocabulary and intermediate size divide by neither 2 nor 4 ranks in the first case."""
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "kv_cache_tokens": 512,
    "cuda_graph_bs_prefill": [8, 32],
    "cuda_graph_bs_decode": [1, 4],
}


class ForkedRank:
    """A ``RankProcess``."""

    def __init__(self, target: Main, rank: int, commands: int, lifeline: int) -> None:
        arguments = (target, rank, DupFd(commands), DupFd(lifeline))
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(target: Main, rank: int, commands: Any, lifeline: Any) -> None:
    target(rank, commands.detach(), lifeline.detach())


@contextmanager
def forked(target: Main = main) -> Iterator[None]:
    """Inside the block other ranks are forked, and run ``target``."""
    real = gapless.engine.ranks.start_rank
    gapless.engine.ranks.start_rank = lambda *args: ForkedRank(target, *args)
    try:
        yield
    finally:
        gapless.engine.ranks.start_rank = real


def write_model(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(folder)


def open_llm(source: str, ranks: int, target: Main = main, **options: Any) -> LLM:
    with forked(target):
        return LLM(source, tensor_parallel_size=ranks, **{**OPTIONS, **options})


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, params)
    errors = [o.outputs[0].error for o in outputs if o.outputs[0].error]
    assert not errors
    return [o.outputs[0].token_ids for o in outputs]


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, **params)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
