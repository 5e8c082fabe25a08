"""Logits of a dummy model under one strategy, to be compared with those of plain torch operations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import BatchMaker
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.build import open_engine

STRATEGIES = {
    f"{prefill}+{decode}": {"cuda_graph_backend_prefill": prefill, "cuda_graph_backend_decode": decode}
    for prefill in ("full", "breakable", "tc_piecewise", "disabled")
    for decode in ("full", "breakable", "tc_piecewise", "disabled")
}
LENGTHS = (2, 5, 17, 33, 64, 100)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
"""Without sizes."""


def write_model(folder: Path, name: str, **sizes: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[name], "max_position_embeddings": 512, "eos_token_id": 2, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def logits_of(source: str, *, device: str, dtype: str, **options: Any) -> tuple[Tensor, Tensor]:
    """``[R, V]`` of the last token of each prompt, computed as a prefill step and as a decode step after all
    tokens but that one; nothing may fall back to an eager step unless its phase is disabled."""
    opened = open_engine(
        EngineConfig.from_sources(
            python={
                "model": source,
                "load_format": "dummy",
                "device": device,
                "dtype": dtype,
                "max_running_requests": 8,
                "chunked_prefill_size": 256,
                "kv_cache_tokens": 4096,
                "cuda_graph_bs_prefill": [32, 64, 128],
                "cuda_graph_bs_decode": [8],
                **options,
            }
        )
    )
    runner = opened.runner
    runner.graphs.keeps_logits = True
    rng = random.Random(0)
    vocab_size = opened.loaded.info.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
    maker = BatchMaker()
    found = []
    for num_left in (0, 1):
        sequences = [maker.sequence(prompt) for prompt in prompts]
        for sequence in sequences:
            _run(runner, maker, [(sequence, len(sequence.token_ids) - num_left)])
            if num_left == 0:
                found.append(_logits(runner, 1))
        if num_left:
            _run(runner, maker, [(sequence, 1) for sequence in sequences])
            found.append(_logits(runner, len(sequences)))
    report = runner.report()
    assert report["failures"] == []
    disabled = {
        phase for phase in ("prefill", "decode") if options.get(f"cuda_graph_backend_{phase}") == "disabled"
    }
    if not options.get("enforce_eager"):
        assert {row["phase"] for row in report["eager"]} - {"head"} == disabled, report["eager"]
    runner.shutdown()
    return torch.cat(found[:-1]), found[-1]


def torch_logits(
    source: str, *, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """The same without graphs, fused kernels and padding."""
    with monkeypatch.context() as patch:
        patch.setattr("gapless.models.decoder.has_fused_kernels", lambda device: False)
        return logits_of(source, device=device, dtype=dtype, enforce_eager=True)


def noise(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Root mean square and maximum of the difference, in standard deviations of the logits."""
    difference = (found.double() - expected.double()) / expected.double().std()
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


def _run(runner: Any, maker: BatchMaker, work: list[Any]) -> None:
    runner.execute(maker.batch(work))


def _logits(runner: Any, num_rows: int) -> Tensor:
    return runner._graphs.logits[:num_rows].float().cpu().clone()
