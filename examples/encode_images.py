"""Image encoders of Transformers (CLIP, SigLIP, DINOv2) as graphs: any number of images, a few sizes.

The models are Transformers' own, from small configs with random weights. Images of one shape need no adapter
but ``ImageBatch``: a call's images are packed into the cheapest captured budgets, and each image gets rows
that are its own. The attention is registered by name, because Transformers asks whether a CUDA graph is being
captured and would take another kernel then. Run it: ``python examples/encode_images.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from gapless import ImageBatch, encoder_graphs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES, intermediate_size=96)),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**SIZES, intermediate_size=96)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)),
}


def full_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What Transformers calls: ``[B, H, T, D]`` in, ``[B, T, H, D]`` out, every token attending to all."""
    assert mask is None
    attended = scaled_dot_product_attention(query, key, value, scale=options.get("scaling"))
    return attended.transpose(1, 2).contiguous(), None


def make_encoder(name: str) -> ImageBatch:
    """The encoder called ``name``: an image to a pooled vector and the states of its patches."""
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False).to(DEVICE)
    AttentionInterface.register("full_attention", full_attention)
    model.set_attn_implementation("full_attention")

    def encode(images: Tensor) -> tuple[Tensor, Tensor]:
        result = model(pixel_values=images)
        return result.pooler_output, result.last_hidden_state

    return ImageBatch(forward_images=encode, item_shape=(3, 32, 32), device=DEVICE)


def make_images(count: int) -> list[Tensor]:
    return list(torch.rand(count, 3, 32, 32, device=DEVICE))


def main() -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in MODELS:
        with encoder_graphs(make_encoder(name), device=DEVICE, max_tokens=8, smallest_budget=1) as encoder:
            for count in (1, 2, 3, 5, 8, 11):
                images = make_images(count)
                for mine, padded, alone in zip(
                    encoder.run(images), encoder.padded_eager(images), encoder.eager(images), strict=True
                ):
                    for row, same, close in zip(mine, padded, alone, strict=True):
                        assert torch.equal(row, same)
                        torch.testing.assert_close(row, close, atol=1e-4, rtol=1e-4)
            report = encoder.report()
        waste = report["encoder"]["padding_share"]
        runs = ", ".join(f"{step['count']} of {step['bucket']}" for step in report["steps"])
        print(f"{name}: replays {runs}; padding {waste:.0%}")
    return report


if __name__ == "__main__":
    main()
