"""A Transformers ViT that classifies batches of any number of images, as one graph per batch size.

The model is Transformers' own, with random weights; it returns a dataclass, and so does the graph. Its
attention is registered by name, because Transformers asks whether a CUDA graph is being captured: while it
is, full attention gets a mask of ones that it does not get otherwise, and SDPA picks another kernel.
Run it: ``python examples/vision_transformer.py``; check it: ``gapless check
examples/vision_transformer.py:make``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, ViTConfig, ViTForImageClassification

from gapless import Input, graphed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_labels=5,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval().requires_grad_(False).to(DEVICE)
    AttentionInterface.register("full_attention", full_attention)  # masks are made for known names only
    model.set_attn_implementation("full_attention")
    return model


def full_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What Transformers calls: ``[B, H, T, D]`` in, ``[B, T, H, D]`` out, every token attending to all."""
    assert mask is None
    attended = scaled_dot_product_attention(query, key, value, scale=options.get("scaling"))
    return attended.transpose(1, 2).contiguous(), None


def make_images(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, device=DEVICE)


def make():
    """The model with graphs for up to 8 images."""
    model = make_model()
    made = graphed(model, inputs={"pixel_values": Input(dims={0: "images"})}, sizes=[1, 2, 4, 8])
    return made.capture(make_images(3))


def main() -> dict:
    with make() as made:
        for count in (1, 2, 3, 5, 8, 9):
            images = make_images(count)
            result, expected = made(images), made.fn(images)
            assert type(result) is type(expected)
            torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=1e-4)
            if count <= 8:
                assert torch.equal(result.logits, made.padded_eager(images).logits)
        made.verify().raise_if_failed()
        return made.report()


if __name__ == "__main__":
    from gapless.graphs.report_html import render_text

    print(render_text(main()))
