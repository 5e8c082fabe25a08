"""A stack of diffusion-transformer blocks (DiT, arXiv 2212.09748) in a denoising loop with a changing batch.

Images finish at different steps, so the batch shrinks while the loop runs; every step of it is a replay. Run
it: ``python examples/diffusion_blocks.py``; check it: ``gapless check examples/diffusion_blocks.py:make``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gapless import Input, graphed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, HEADS, PATCHES, CLASSES = 48, 4, 16, 10


class Block(nn.Module):
    """Attention and an MLP, both scaled, shifted and gated by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x_BPE: Tensor, condition_BE: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition_BE)[:, None].chunk(
            6, -1
        )
        x_BPE = x_BPE + gate_a * self._attend(_norm(x_BPE) * (1 + scale_a) + shift_a)
        return x_BPE + gate_m * self.mlp(_norm(x_BPE) * (1 + scale_m) + shift_m)

    def _attend(self, x_BPE: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x_BPE).chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Denoiser(nn.Module):
    """``patches [B, P, E], time [B], label [B] -> noise [B, P, E]``."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.labels = nn.Embedding(CLASSES, WIDTH)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, patches: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition = F.silu(self.time(_waves(time)) + self.labels(label))
        x = patches + self.position
        for block in self.blocks:
            x = block(x, condition)
        return _norm(x)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


def _waves(time: Tensor) -> Tensor:
    rates = torch.exp(torch.arange(WIDTH // 2, device=time.device) * (-math.log(1e4) / (WIDTH // 2)))
    angles = time[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def make_batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(count, PATCHES, WIDTH, device=DEVICE),
        torch.full((count,), 1.0, device=DEVICE),
        torch.randint(CLASSES, (count,), device=DEVICE),
    )


def make():
    """The denoiser with graphs for up to 6 images."""
    images = {"patches": Input(dims={0: "images"}), "time": Input(dims={0: "images"})}
    made = graphed(
        Denoiser().eval().requires_grad_(False).to(DEVICE),
        inputs={**images, "label": Input(dims={0: "images"}, low=0, high=CLASSES)},
        sizes=[1, 2, 4, 6],
    )
    return made.capture(*make_batch(3))


def denoise(model, patches: Tensor, label: Tensor, steps: list[int]) -> Tensor:
    """Image ``i`` takes ``steps[i]`` steps and leaves the batch."""
    patches = patches.clone()
    for step in range(max(steps)):
        active = torch.tensor([i for i, n in enumerate(steps) if n > step], device=DEVICE)
        time = torch.full((len(active),), 1.0 - step / max(steps), device=DEVICE)
        noise = model(patches[active], time, label[active])
        patches[active] = patches[active] - 0.1 * noise
    return patches


def main() -> dict:
    with make() as made:
        patches, _, label = make_batch(6)
        steps = [2, 7, 4, 7, 1, 5]
        result = denoise(made, patches, label, steps)
        torch.testing.assert_close(result, denoise(made.fn, patches, label, steps), atol=1e-4, rtol=1e-4)
        assert torch.equal(result, denoise(made.padded_eager, patches, label, steps))
        made.verify().raise_if_failed()
        return made.report()


if __name__ == "__main__":
    from gapless.graphs.report_html import render_text

    print(render_text(main()))
