"""Images in an engine on fused kernels (interpreted): what unfused ones give, also one step ahead.

A prefill step with media embeds and merges before the first fused kernel, so tokens that only the device
knows take another way into it than without media.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from media_engine import media_prompt, open_media_engine

from gapless.engine.build import OpenedEngine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.models import decoder
from gapless.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

PROMPTS = {
    "image": media_prompt([1, 2], (b"aaaa", 2, 3), [3]),
    "text": [5, 6, 7],
    "late": media_prompt([4] * 3, (b"bbbb", 2, 2), (b"cccc", 1, 2)),
}
OPTIONS = {
    "max_running_requests": 2,
    "chunked_prefill_size": 8,
    "cuda_graph_bs_prefill": [8],
    "cuda_graph_bs_decode": [1, 2],
    "cuda_graph_backend_prefill": "full",
    "cuda_graph_backend_decode": "full",
}


def generate(opened: OpenedEngine) -> dict[str, tuple[int, ...]]:
    """Two at a time, so that the third one's prefill shares steps with tokens that were just drawn."""
    core = EngineCore(opened.runner)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        params = SamplingParams(temperature=0.0, max_tokens=2 + index % 2, ignore_eos=True, detokenize=False)
        core.add_request(name, prompt, params)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    assert {output.outputs[0].error for output in last.values()} == {None}
    return {name: tuple(last[name].outputs[0].token_ids) for name in PROMPTS}


def test_media_steps_on_fused_kernels_draw_what_unfused_ones_draw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = generate(open_media_engine(tmp_path / "unfused", **OPTIONS)[0])
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    opened, _ = open_media_engine(tmp_path / "fused", **OPTIONS)
    assert opened.loaded.model.has_fused_kernels
    opened.runner.max_steps_ahead = 1
    assert generate(opened) == expected
    assert not opened.runner.report()["eager"]
