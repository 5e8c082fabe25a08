"""The examples: modules that are not ours run as graphs and equal eager, in seconds, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loaded_scripts import load_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    return load_script(EXAMPLES / f"{name}.py")


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*STRATEGIES, "openai_client", "openai_vision"}


STRATEGIES = {
    "decoder_layers": "full",
    "vision_transformer": "full",
    "diffusion_blocks": "full",
    "mlp_with_break": "breakable",
    "encode_images": "full",
    "encode_any_size": "full",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_example_equals_eager_and_replays(name: str) -> None:
    report = load(name).main()
    assert report["failures"] == []
    assert {graph["strategy"] for graph in report["graphs"]} == {STRATEGIES[name]}
    assert sum(step["count"] for step in report["steps"]) >= 4
    reasons = {row["reason"] for row in report["eager"]}
    assert reasons <= {"padded_eager", "larger_than_largest"}


def test_the_vit_runs_the_same_attention_while_a_cuda_graph_is_captured(monkeypatch) -> None:
    """Transformers makes a mask of ones then, for which SDPA would pick another kernel: other last bits."""
    import torch
    from transformers.utils import import_utils

    example = load("vision_transformer")
    model, images = example.make_model(), example.make_images(3)
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(example, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with torch.no_grad():
        model(images)
    assert masks == [None, None]  # one per layer


def test_python_of_the_guide_runs_from_top_to_bottom() -> None:
    guide = (EXAMPLES.parent / "docs" / "graphs.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.+?)```", guide, flags=re.DOTALL)
    assert len(snippets) >= 5
    names: dict[str, Any] = {"__name__": "guide"}
    for snippet in snippets:
        exec(snippet, names)
    assert names["report"].is_ok
