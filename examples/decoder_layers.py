"""The layer stack of a Transformers decoder, for prompts of any length, as one graph per size.

The layers are Transformers' own, unchanged. Rows are tokens; padding lies behind the prompt, where causal
attention never looks, so a pad value of 0 is right. Run it: ``python examples/decoder_layers.py``; check it:
``gapless check examples/decoder_layers.py:make``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from gapless import Input, graphed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layers(nn.Module):
    """``hidden [1, T, E], positions [1, T] -> [1, T, E]``."""

    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.layers, self.norm, self.rope = model.layers, model.norm, model.rotary_emb

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotation = self.rope(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, attention_mask=None)
        return self.norm(hidden)


def make_layers() -> Layers:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=256, attn_implementation="sdpa",
    )  # fmt: skip
    return Layers(LlamaModel(config)).eval().requires_grad_(False).to(DEVICE)


def make_prompt(num_tokens: int) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(1, num_tokens, 64, device=DEVICE)
    return hidden, torch.arange(num_tokens, device=DEVICE)[None]


def make():
    """The layers with graphs for prompts of up to 48 tokens."""
    made = graphed(
        make_layers(),
        inputs={
            # A masked weight of 0 times NaN would be NaN, so padding must be finite here.
            "hidden": Input(dims={1: "tokens"}, poison=(1e4, -1e4)),
            "positions": Input(dims={1: "tokens"}, low=0, high=256),
        },
        sizes=[8, 16, 48],
    )
    return made.capture(*make_prompt(20))


def main() -> dict:
    with make() as made:
        for num_tokens in (1, 5, 8, 17, 40, 60):
            prompt = make_prompt(num_tokens)
            result = made(*prompt)
            torch.testing.assert_close(result, made.fn(*prompt), atol=1e-4, rtol=1e-4)
            if num_tokens <= 48:
                assert torch.equal(result, made.padded_eager(*prompt)), (
                    "a replay is the padded run, bit for bit"
                )
        made.verify().raise_if_failed()
        return made.report()


if __name__ == "__main__":
    from gapless.graphs.report_html import render_text

    print(render_text(main()))
