"""Decoders with media at real widths: fused kernels against float32, and a captured step with other media."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention.base import AttentionBackend
from gapless.attention.registry import create_backend
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.capture import capture_program, warm_up
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device import get_device
from gapless.graphs.modes import Strategy
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from ragged_batches import make_batch

pytestmark = pytest.mark.gpu

TEXT: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "intermediate_size": 6144,
}
TOKENS = {
    "image_token_id": 8000,
    "video_token_id": 8001,
    "vision_start_token_id": 8002,
    "vision_end_token_id": 8003,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **TEXT,
        **TOKENS,
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "vision_config": {"out_hidden_size": 3584},
    },
    "qwen3_vl": {
        **TOKENS,
        "model_type": "qwen3_vl",
        "text_config": {
            **TEXT,
            "hidden_size": 4096,
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
            "rope_theta": 5000000.0,
        },
        "vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16]},
    },
}
REQUESTS = [(0, 60), (30, 1), (100, 20), (0, 0)]
NUM_TOKENS, NUM_REAL = 96, 81


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Step:
    """A model in bfloat16 and a padded ragged batch with media in it."""

    def __init__(self, family: str) -> None:
        config = parse_config(CONFIGS[family], source="test")
        self.model = Decoder(config, max_positions=256, dtype=torch.bfloat16, device=torch.device("cuda"))
        fill_dummy_weights(self.model, seed=0)
        info = self.model.info
        self.batch = make_batch(
            REQUESTS,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_size=info.head_size,
            pad_tokens=NUM_TOKENS - NUM_REAL,
            dtype=torch.bfloat16,
            device="cuda",
        )

    def bind(self, dtype: torch.dtype, backend: AttentionBackend | None = None) -> None:
        for layer in self.model.attention_layers():
            k_cache, v_cache = (c.to(dtype, copy=True) for c in (self.batch.k_cache, self.batch.v_cache))
            layer.bind(backend or TorchReferenceBackend(), k_cache, v_cache)

    def inputs(self, *, seed: int) -> list[Tensor]:
        """Token ids, positions, media rows, which rows are media, features; NaN where there are none."""
        info, generator = self.model.info, torch.Generator().manual_seed(seed)
        is_media_T = (torch.rand(NUM_TOKENS, generator=generator) < 0.5).int()
        media_TE = torch.randn(NUM_TOKENS, info.hidden_size, generator=generator)
        features_LTE = torch.randn(info.num_deepstack, NUM_TOKENS, info.hidden_size, generator=generator)
        values = [
            torch.randint(8000, (NUM_TOKENS,), generator=generator, dtype=torch.int32),
            torch.randint(4000, (3, NUM_TOKENS), generator=generator, dtype=torch.int32),
            media_TE.masked_fill(is_media_T[:, None] == 0, torch.nan).bfloat16(),
            is_media_T,
            features_LTE.masked_fill(is_media_T[None, :, None] == 0, torch.nan).bfloat16(),
        ]
        return [value.to("cuda") for value in values]

    def forward(self, ids: Tensor, positions: Tensor, media: Tensor, is_media: Tensor, f: Tensor) -> Tensor:
        dtype = self.model.embedding.dtype
        hidden_TE = self.model.embed_with_media(ids, media.to(dtype), is_media)
        return self.model.layers(hidden_TE, positions, f.to(dtype) if f.shape[0] else None, is_media)

    def context(self) -> Any:
        return use_forward_context(ForwardContext(batch=self.batch.metadata))


@pytest.mark.parametrize("family", CONFIGS)
def test_hidden_states_with_media_are_within_noise_of_the_torch_forward(family: str) -> None:
    """Both in bfloat16, against the torch forward in float32 with the same weights: equally far from it."""
    step = Step(family)
    inputs = step.inputs(seed=1)

    def hidden_states(dtype: torch.dtype, *, fused: bool) -> Tensor:
        step.bind(dtype)
        step.model.has_fused_kernels = fused
        with step.context():
            return step.forward(*inputs)[:NUM_REAL].double()

    assert step.model.has_fused_kernels
    fused = hidden_states(torch.bfloat16, fused=True)
    plain = hidden_states(torch.bfloat16, fused=False)
    step.model.float()
    exact = hidden_states(torch.float32, fused=False)
    assert exact.isfinite().all()
    fused_error, plain_error = (((x - exact).norm() / exact.norm()).item() for x in (fused, plain))
    print(f"{family}: relative error: fused {fused_error:.2e}, torch {plain_error:.2e}")
    assert fused_error < 1.2 * plain_error + 1e-3


@pytest.mark.parametrize("family", CONFIGS)
def test_a_captured_step_serves_other_media(family: str) -> None:
    step = Step(family)
    device = get_device("cuda")
    static = step.inputs(seed=0)
    step.bind(torch.bfloat16, create_backend("triton_paged", device_type="cuda"))
    with step.context():
        warm_up(lambda: step.forward(*static), device, times=2)
        program, out = capture_program(
            lambda: step.forward(*static), device=device, pool=device.new_pool(), strategy=Strategy.FULL
        )
        for seed in (1, 2):
            values = step.inputs(seed=seed)
            for buffer, value in zip(static, values, strict=True):
                buffer.copy_(value)
            program.replay()
            device.synchronize()
            assert torch.equal(out, step.forward(*values))
            assert out.isfinite().all()
