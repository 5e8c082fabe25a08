"""Two GPUs that hold a model together: NCCL and one-shot sums inside graphs, dying ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import greedy, tokens_of, write_model

from gapless import LLM, SamplingParams
from gapless.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1001,
    "max_position_embeddings": 512,
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cuda",
    "max_running_requests": 8,
    "chunked_prefill_size": 128,
    "kv_cache_tokens": 4096,
    "cuda_graph_bs_prefill": [16, 128],
    "cuda_graph_bs_decode": [1, 4, 8],
}
PROMPTS = [[1, 2, 3, 4], list(range(40)), [7] * 60]
STRATEGIES: dict[str, dict[str, Any]] = {
    name: {"cuda_graph_backend_prefill": name, "cuda_graph_backend_decode": name}
    for name in ("full", "breakable", "tc_piecewise")
}
STRATEGIES["breaks at sums"] = {**STRATEGIES["breakable"], "break_at_all_reduce": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


# Before the tests that share an engine: a process holds one of several ranks at a time.
def test_logits_are_those_of_one_gpu_up_to_the_noise_of_the_dtype(source: str):
    found = []
    for ranks in (1, 2):
        with LLM(source, tensor_parallel_size=ranks, dtype="bfloat16", **OPTIONS) as llm:
            llm.runner.graphs.keeps_logits = True
            tokens_of(llm, PROMPTS, greedy(1))
            found.append(llm.runner.graphs.logits[: len(PROMPTS)].float().cpu().clone())
    difference = (found[1] - found[0]) / found[0].std()
    assert float(difference.square().mean().sqrt()) < 0.05


EXPERTS: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "head_dim": None,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 200,
    "shared_expert_intermediate_size": 256,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_that_two_gpus_share_are_those_of_one(strategy: str, tmp_path: Path):
    """Slices of 100 are padded. Every strategy equals padded eager, and both ranks count the same tokens."""
    source = write_model(tmp_path, **EXPERTS)
    found = []
    for ranks in (1, 2):
        options = {**OPTIONS, **STRATEGIES[strategy], "count_expert_tokens": True, "dtype": "bfloat16"}
        if ranks == 1:
            options.pop("break_at_all_reduce", None)
        with LLM(source, tensor_parallel_size=ranks, **options) as llm:
            llm.runner.max_steps_ahead = 0  # a step ahead would count tokens that are dropped
            llm.runner.graphs.keeps_logits = True
            tokens_of(llm, PROMPTS, greedy(1))
            found.append(llm.runner.graphs.logits[: len(PROMPTS)].float().cpu().clone())
            if ranks == 1:
                continue
            llm.reset_prefix_cache()
            llm.reset_report()
            tokens = tokens_of(llm, PROMPTS, greedy(16))
            report = llm.report()
            assert not report["failures"]
            assert not report["eager"]
            assert llm.runner.reports_of_others()[0]["experts"] == report["experts"]
            llm.reset_prefix_cache()
            with llm.padded_eager():
                assert tokens_of(llm, PROMPTS, greedy(16)) == tokens
    # The median row: one whose router stands on the edge between two experts may fall to either side.
    difference_R = ((found[1] - found[0]) / found[0].std()).square().mean(1).sqrt()
    assert float(difference_R.median()) < 0.05


def test_a_process_may_have_one_engine_after_another(source: str):
    """Its other ranks are fresh processes each time, with which it has to find the handles of memory."""
    sums_by, seconds = [], []
    for _ in range(3):
        start = time.monotonic()
        with LLM(source, tensor_parallel_size=2, enforce_eager=True, **OPTIONS) as llm:
            sums_by.append(llm.report()["startup"]["ranks"]["sums_by"])
        seconds.append(time.monotonic() - start)
    assert len({"no symmetric memory" in how for how in sums_by}) == 1, sums_by
    assert max(seconds) < 60, (seconds, sums_by)


@pytest.fixture(scope="module", params=STRATEGIES)
def two(request: pytest.FixtureRequest, source: str) -> Iterator[LLM]:
    with LLM(source, tensor_parallel_size=2, **OPTIONS, **STRATEGIES[request.param]) as llm:
        yield llm


def test_graphs_give_what_padded_eager_gives(two: LLM):
    assert not two.report()["failures"]
    two.reset_prefix_cache()
    two.reset_report()
    tokens = tokens_of(two, PROMPTS, greedy(24))
    report = two.report()
    assert not report["eager"]
    # Where both phases are piecewise of one strategy, the graphs of prefill serve decode too.
    assert {row["phase"] for row in report["steps"]} >= {"prefill", "decode"}
    two.reset_prefix_cache()
    with two.padded_eager():
        assert tokens_of(two, PROMPTS, greedy(24)) == tokens


def test_ranks_draw_the_same_tokens_on_their_own_devices(two: LLM):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, top_p=0.9, detokenize=False)
    two.reset_prefix_cache()
    first = tokens_of(two, PROMPTS, params)
    two.reset_prefix_cache()
    assert tokens_of(two, PROMPTS, params) == first
    assert two.runner.reports_of_others()[0]["steps"] == two.report()["steps"]


def test_how_sums_are_made_is_reported(two: LLM):
    assert two.report()["startup"]["ranks"]["sums_by"].startswith(("one kernel up to", "NCCL only"))


DYING = """
import os, signal, time
from gapless import LLM, SamplingParams
from gapless.errors import GaplessError
llm = LLM({source!r}, tensor_parallel_size=2, **{options!r})
(rank,) = llm.runner.worker_pids
params = SamplingParams(temperature=0.0, max_tokens=400, detokenize=False, ignore_eos=True)
stream = llm.stream([1, 2, 3], params)
if {is_busy}:
    next(stream)
os.kill(rank, {signal})
start = time.monotonic()
try:
    list(stream)
except GaplessError as error:
    print(time.monotonic() - start, error)
llm.shutdown()
"""


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "rank 1 was killed by SIGKILL"), (signal.SIGSTOP, "hangs; GAPLESS_RANK_TIMEOUT")],
    ids=["killed", "hangs"],
)
def test_a_rank_that_is_lost_ends_the_engine(source: str, is_busy: bool, number: int, message: str):
    """In a process of its own, whose NCCL is of no use afterwards."""
    code = DYING.format(source=source, options=OPTIONS, is_busy=is_busy, signal=int(number))
    environ = {**os.environ, "GAPLESS_RANK_TIMEOUT": "20"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False, env=environ
    )
    seconds, _, said = result.stdout.strip().rpartition("\n")[2].partition(" ")
    assert message in said, result.stderr
    assert float(seconds) < (10 if number == signal.SIGKILL else 30)
    assert result.returncode == 0, result.stderr


def test_more_ranks_than_gpus_are_refused(source: str):
    with pytest.raises(ConfigError, match="GPUs that are visible"):
        LLM(source, tensor_parallel_size=8 if torch.cuda.device_count() < 8 else 16, **OPTIONS)
