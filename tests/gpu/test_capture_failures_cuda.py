"""A start on a GPU, memory measured, where the largest sizes cannot be captured: they stay eager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels_cuda import CONFIG
from test_tail_cuda import first_logits
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.models.decoder import Decoder

pytestmark = pytest.mark.gpu

SIZES = [16, 64, 128, 256]


def start(folder: Path) -> OpenedEngine:
    """``kv_cache_tokens`` is left out, so the largest size of each phase is captured once to be measured.
    Other tests may hold memory of the same GPU at the same time."""
    folder.mkdir(exist_ok=True)
    num_free, num_bytes = torch.cuda.mem_get_info()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running_requests": 4,
        "chunked_prefill_size": 256,
        "gpu_memory_utilization": min(0.95, 1 - num_free / num_bytes + 0.2),
        "cuda_graph_bs_prefill": SIZES,
        "cuda_graph_bs_decode": [1, 2, 4],
    }
    return open_engine(EngineConfig.from_sources(python=options))


@pytest.mark.parametrize("bad", [{256}, {128}, {256, 128}, set(SIZES)], ids=str)
def test_a_start_survives_sizes_that_cannot_be_captured(
    tmp_path: Path, bad: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = start(tmp_path / "healthy")
    expected = first_logits(healthy)
    healthy.runner.shutdown()
    to_tail = Decoder.drawn_to_tail
    attempts = []

    def reads_from_host(self: Decoder, ids_T: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = to_tail(self, ids_T, *args, **kwargs)
        if len(ids_T) in bad:
            if torch.cuda.is_current_stream_capturing():
                attempts.append(len(ids_T))
            states[1].sum().item()
        return states

    monkeypatch.setattr(Decoder, "drawn_to_tail", reads_from_host)
    opened = start(tmp_path / "broken")
    assert sorted(attempts) == sorted(bad), "each is tried once"
    report = opened.runner.report()
    captured = {row["num_tokens"] for row in report["graphs"] if row["phase"] == "prefill"}
    assert captured == {*SIZES} - bad
    assert len(report["failures"]) == len(bad)
    assert all("states[1].sum().item()" in failure["message"] for failure in report["failures"][:1])
    for here, there in zip(first_logits(opened), expected, strict=True):
        # Another size, or none, multiplies by other kernels.
        assert float(((here - there) / there.std()).square().mean().sqrt()) < 0.05
    eager = {row["reason"] for row in opened.runner.report()["eager"] if row["phase"] == "prefill"}
    assert eager == ({"capture_failed"} if 256 in bad else set())
    opened.runner.shutdown()
