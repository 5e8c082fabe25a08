"""A Transformers ViT that classifies batches of any number of images, as one graph per batch size.

The model is Transformers' own, with random weights; it returns a dataclass, and so does the graph. Run it:
``python examples/vision_transformer.py``; check it: ``gapless check examples/vision_transformer.py:make``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from gapless import Input, graphed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_labels=5,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval().requires_grad_(False).to(DEVICE)
    # Attention by name: SDPA picks its kernel at run time, so it need not be the same one under capture.
    model.set_attn_implementation("eager")
    return model


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
