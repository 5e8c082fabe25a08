"""Two GPUs that hold a model together: NCCL and one-shot sums inside graphs, dying ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "parallel"))

from forked_ranks import greedy, tokens_of, write_model

from gapless import LLM, SamplingParams
from gapless.errors import ConfigError, GaplessError

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


@pytest.fixture(scope="module", params=STRATEGIES)
def two(request: pytest.FixtureRequest, source: str) -> Iterator[LLM]:
    with LLM(source, tensor_parallel_size=2, **OPTIONS, **STRATEGIES[request.param]) as llm:
        yield llm


def test_graphs_give_what_padded_eager_gives(two: LLM):
    report = two.report()
    assert not report["failures"]
    assert {row["phase"] for row in report["graphs"]} >= {"prefill", "decode"}
    two.reset_prefix_cache()
    two.reset_report()
    tokens = tokens_of(two, PROMPTS, greedy(24))
    assert not two.report()["eager"]
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


def test_logits_are_those_of_one_gpu_up_to_the_noise_of_the_dtype(source: str):
    found = []
    for ranks in (1, 2):
        with LLM(source, tensor_parallel_size=ranks, dtype="bfloat16", **OPTIONS) as llm:
            tokens_of(llm, PROMPTS, greedy(1))
            found.append(llm.runner.graphs.logits[: len(PROMPTS)].float().cpu().clone())
    difference = (found[1] - found[0]) / found[0].std()
    assert float(difference.square().mean().sqrt()) < 0.05


def test_how_sums_are_made_is_reported(two: LLM):
    assert two.report()["startup"]["ranks"]["sums_by"].startswith(("one kernel up to", "NCCL only"))


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_dead_rank_ends_the_engine(source: str, when: str):
    with LLM(source, tensor_parallel_size=2, **OPTIONS) as llm:
        (rank,) = llm.runner.worker_pids
        stream = llm.stream(PROMPTS[0], greedy(400))
        if when == "busy":
            next(stream)
        os.kill(rank, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(GaplessError, match="rank 1 was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - start < 10


def test_more_ranks_than_gpus_are_refused(source: str):
    with pytest.raises(ConfigError, match="GPUs that are visible"):
        LLM(source, tensor_parallel_size=8 if torch.cuda.device_count() < 8 else 16, **OPTIONS)
