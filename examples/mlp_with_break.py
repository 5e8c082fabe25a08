"""An MLP that decides in Python, on the data, what to do next: an eager break between two graphs.

``rescale`` reads a number back to the host, which no graph can. Marked as an eager break it cuts the graph in
two, and runs anew, on live data, at every replay. Run it: ``python examples/mlp_with_break.py``; check it:
``gapless check examples/mlp_with_break.py:make``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gapless import Input, eager_break, graphed, num_real

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 2.0


@eager_break
def rescale(h: Tensor) -> Tensor:
    """Shrink the whole batch if any real row is too large. Rows behind the real ones are padding."""
    largest = float(h[: int(num_real("rows"))].abs().max())
    return h * (LIMIT / largest) if largest > LIMIT else h.clone()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(rescale(self.first(x).relu()))


def make():
    """The net with graphs for up to 32 rows."""
    net = Net().eval().requires_grad_(False).to(DEVICE)
    made = graphed(net, inputs={"x": Input(dims={0: "rows"})}, sizes=[4, 8, 32])
    return made.capture(torch.randn(5, 16, device=DEVICE))


def main() -> dict:
    with make() as made:
        for count in (1, 4, 7, 32):
            for scale in (0.1, 1.0, 30.0):  # both sides of the limit
                x = torch.randn(count, 16, device=DEVICE) * scale
                result = made(x)
                assert torch.equal(result, made.padded_eager(x))
                torch.testing.assert_close(result, made.eager(x), atol=1e-4, rtol=1e-4)
        made.verify().raise_if_failed()
        return made.report()


if __name__ == "__main__":
    from gapless.graphs.report_html import render_text

    print(render_text(main()))
