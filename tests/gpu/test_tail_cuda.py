"""On a GPU: prefill that stops behind the last layer's attention, and the head that does the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_kernels_cuda import LLAMA, generate, open_model
from torch import Tensor

from gapless.engine.core import EngineCore
from gapless.engine.graph_set import GraphSet
from gapless.engine.verify import verify_engine
from gapless.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 100, 255, 300)


def first_logits(opened: Any) -> list[Tensor]:
    """Of the first token behind each prompt alone; the longest one comes in two chunks."""
    core, found = EngineCore(opened.runner), []
    opened.runner.graphs.keeps_logits = True
    for length in LENGTHS:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        core.add_request(str(length), [(length + 31 * i) % 8000 for i in range(length)], params)
        while core.has_unfinished():
            core.step()
        found.append(opened.runner.graphs.logits[0].clone())
    return found


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["qwen3", "llama"])
def test_logits_are_those_of_whole_layers_up_to_the_noise_of_the_dtype(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(tmp_path / "model", changes, "full", "full")
    assert opened.runner.graphs.has_tail
    found = first_logits(opened)
    generate(opened)
    assert not opened.runner.report()["eager"], "every step ran as a graph"
    assert verify_engine(opened, only_few_sizes=True).is_ok
    opened.runner.shutdown()
    monkeypatch.setattr(GraphSet, "_has_tail", lambda self, prefill, decode: False)
    whole = open_model(tmp_path / "model", changes, "full", "full")
    for here, there in zip(found, first_logits(whole), strict=True):
        noise = ((here - there) / there.std()).square().mean().sqrt()
        assert float(noise) < 0.05
    whole.runner.shutdown()
