"""Unmodified Transformers decoders under piecewise graphs on a GPU, with our attention in their interface."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from served_transformers import CONFIGS, LAYERS, NONE, PIECEWISE, SIZES, VOCAB, Served

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[*((f, "eager") for f in CONFIGS), ("llama", "inductor")], ids=str)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    family, compiler = request.param
    # PyTorch's grouped product takes bfloat16 alone there.
    dtype = torch.bfloat16 if family == "qwen3_moe" else torch.float32
    made = Served(family, compiler, where="cuda", dtype=dtype)
    yield made
    made.store.release()


@pytest.mark.parametrize("n", SIZES)
def test_logits_equal_transformers_and_padded_eager_on_new_tokens(served: Served, n: int) -> None:
    is_narrow = served.model.dtype == torch.bfloat16
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        served.ids[n].copy_(torch.randint(VOCAB, (1, n), generator=generator))
        churn = [torch.full((n, VOCAB), torch.nan, device="cuda") for _ in range(3)]
        graph = served.run(n, PIECEWISE).clone()
        assert torch.equal(graph, served.run(n, NONE))
        del churn
        with torch.no_grad():
            expected = served.reference(served.ids[n], use_cache=False).logits[0]
        if is_narrow:
            noise = ((graph - expected) / expected.float().std()).float().square().mean().sqrt()
            assert float(noise) < 0.05
        else:
            torch.testing.assert_close(graph, expected, rtol=1e-3, atol=1e-3)


def test_each_layer_is_a_break_and_nothing_is_traced_again(served: Served) -> None:
    for n in SIZES:
        served.run(n, PIECEWISE)
    stats = served.forward.stats
    assert (stats.num_splits, stats.num_pieces) == (LAYERS, LAYERS + 1)
    assert stats.num_traces == (1 if served.compiler == "eager" else 2)
    assert {row.num_breaks for row in served.store.ledger} == {LAYERS}
