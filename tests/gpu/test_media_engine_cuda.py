"""Images and videos through whole engines on a GPU: graphs of encoder and decoder against eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gapless.llm import LLM
from gapless.sampling.params import SamplingParams
from vl_checkpoints import IMAGE_PROMPT, VIDEO_PROMPT, random_frames, random_image, write_vl_folder

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPTS: list[Any] = [
    "just some text",
    {
        "prompt": f"a {IMAGE_PROMPT} and {IMAGE_PROMPT}?",
        "multi_modal_data": {"image": [random_image(64, 60, seed=1), random_image(9, 130, seed=2)]},
    },
    {
        "prompt": f"watch {VIDEO_PROMPT} now",
        "multi_modal_data": {"video": random_frames(4, 24, 16, seed=3)},
    },
]
VIT = {
    "eager": {},
    "budget": {"enable_vit_cuda_graph": True, "vit_cuda_graph_budgets": [64, 256]},
    "exact": {"enable_vit_cuda_graph": True, "vit_cuda_graph_mode": "exact"},
}
SMALL = {
    "device": "cuda",
    "dtype": "float32",
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "max_total_tokens": 2048,
    "gpu_memory_utilization": 0.5,
}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vl_folder(tmp_path_factory.mktemp("vl") / request.param, request.param)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert {choice.error for output in outputs for choice in output.outputs} == {None}
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("vit", VIT)
@pytest.mark.parametrize("prefill", ["full", "breakable", "tc_piecewise", "disabled"])
def test_graphs_equal_padded_eager_under_every_strategy(folder: Path, prefill: str, vit: str) -> None:
    options = {**SMALL, **VIT[vit], "cuda_graph_backend_prefill": prefill}
    with LLM(str(folder), cuda_graph_bs_prefill=[8, 32], **options) as llm:
        graphs = answers(llm)
        report = llm.report()
        assert report["failures"] == []
        assert report["startup"]["memory"]["estimate"]["media_bytes"] > 0
        assert ("encoder" in {row["phase"] for row in report["steps"]}) == (vit != "eager")
        llm.reset_prefix_cache()
        with llm.padded_eager():
            assert answers(llm) == graphs
    with LLM(str(folder), enforce_eager=True, **SMALL) as plain:
        assert [tokens for tokens, _ in answers(plain)] == [tokens for tokens, _ in graphs]


def test_no_graph_is_captured_while_images_are_served_by_budgets(folder: Path) -> None:
    with LLM(str(folder), **SMALL, **VIT["budget"]) as llm:
        before = len(llm.report()["graphs"])
        for seed in range(6):
            picture = random_image(8 + 8 * seed, 64 - 8 * seed, seed=seed)
            llm.generate({"prompt": IMAGE_PROMPT + "?", "multi_modal_data": {"image": picture}}, PARAMS)
        assert len(llm.report()["graphs"]) == before
