"""Draws of the sampling kernels under Triton's interpreter: token by token those of the torch functions.

Chunks, splitters and the list are shrunk, so that small vocabularies have several chunks and overflow the
list. A cut-off of top-p where rounding decides differs between any two orders of summation; the seeds here
meet none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.engine.graph_set import INVALID_TOKEN
from gapless.errors import ConfigError
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.ops import implementation_of
from gapless.kernels import sample as module
from sampling_cases import make_params, random_logits

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"),
]
KINDS = ["normal", "bfloat16", "ties", "impossible", "equal", "one possible", "none possible", "infinite"]
FILTERS: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 5},
    "top_k above the size": {"top_k": 5000},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "top_p just below 1": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    "one": {"top_k": 1},
    "none": {},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_SAMPLES", 32)
    monkeypatch.setattr(module, "_SEARCH_TILE", 64)
    monkeypatch.setattr(module, "NUM_SPLITTERS", 8)
    monkeypatch.setattr(module, "LIST_SIZE", 64)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_filters_keep_what_the_oracle_keeps(filters: dict[str, float]) -> None:
    logits = random_logits(2, 100, "normal", seed=len(filters))
    params = make_params(2, **filters)  # type: ignore[arg-type]
    assert torch.equal(params.draw(logits), params.expected(logits))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_logits(kind: str) -> None:
    logits = random_logits(2, 100, kind)
    params = make_params(2, temperature=[0.9, 1.5], top_k=[30, 0], top_p=[0.9, 0.6], min_p=[0.0, 0.03])
    assert torch.equal(params.draw(logits), params.expected(logits))
    assert torch.equal(params.draw(logits, filtered=False), params.expected(logits, filtered=False))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 200])
def test_vocabularies_of_any_size(size: int) -> None:
    logits = random_logits(2, size, "normal", seed=size)
    params = make_params(2, top_k=[7, 0], top_p=[1.0, 0.8], first_seed=size)
    assert torch.equal(params.draw(logits), params.expected(logits))
    assert torch.equal(params.draw(logits, filtered=False), params.expected(logits, filtered=False))


def test_a_full_list_changes_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(2, 140, "ties", seed=4)
    params = make_params(2, top_k=[90, 0], top_p=[1.0, 0.8])
    drawn = []
    for size in (64, 1):
        monkeypatch.setattr(module, "LIST_SIZE", size)
        drawn.append(params.draw(logits))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], params.expected(logits))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_ties_at_the_cut_go_to_the_lower_ids(top_k: int) -> None:
    logits = torch.full((40, 130), -5.0)
    logits[:, [20, 70, 129]] = 2.0
    kept = {20, 70, 129} if top_k == 3 else set([20, 70][:top_k])
    drawn = make_params(40, top_k=top_k).draw(logits[:3])
    assert set(drawn.tolist()) <= kept
    expected = make_params(40, top_k=top_k).expected(logits)
    assert set(expected.tolist()) == kept


def test_rows_of_all_sorts_do_not_disturb_each_other() -> None:
    logits = random_logits(6, 130, "normal", seed=9)
    logits[1, 128] = torch.nan
    logits[4, 0] = torch.nan
    params = make_params(
        6,
        temperature=[1.0, 1.0, 0.0, 0.5, 0.0, 1.0],
        top_k=[4, 5, 6, 0, 0, 0],
        top_p=[1.0, 0.5, 0.5, 1.0, 1.0, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.2, 0.0, 0.0],
    )
    expected = params.expected(logits)
    assert expected[[1, 4]].tolist() == [INVALID_TOKEN, INVALID_TOKEN]
    assert expected[2] == logits[2].argmax()
    assert torch.equal(params.draw(logits), expected)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = random_logits(3, 100, "normal", seed=2)
    params = make_params(3, top_k=[9, 0, 50], top_p=[1.0, 0.8, 0.6])
    together = params.draw(logits)
    for row in range(3):
        alone = {name: getattr(params, name)[row : row + 1] for name in params.__slots__}
        assert type(params)(**alone).draw(logits[row : row + 1]) == together[row]


def test_frequencies_follow_the_softmax() -> None:
    count = 60
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]]).expand(count, -1).contiguous()
    tokens = make_params(count, first_seed=3).draw(logits, filtered=False)
    observed = np.bincount(tokens.numpy(), minlength=4)
    expected = torch.softmax(logits[0].double(), -1).numpy() * count
    assert (((observed - expected) ** 2) / expected).sum() < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_recorded_draw_follows_its_inputs(device: EmulatedDevice) -> None:
    logits = random_logits(2, 100, "normal")
    params = make_params(2, top_k=[3, 0], top_p=[1.0, 0.5])
    tokens = torch.zeros(2, dtype=torch.int64)
    device.begin_segment(device.new_pool())
    params.draw_into(tokens, logits)
    segment = device.end_segment()
    assert segment.num_nodes == 1
    for seed in (5, 6):
        logits.copy_(random_logits(2, 100, "ties", seed=seed))
        params.seed_R.add_(1)
        segment.replay()
        assert torch.equal(tokens, params.expected(logits))


@pytest.mark.parametrize(("filtered", "num_kernels", "num_scratch"), [(True, 8, 9), (False, 3, 3)])
def test_a_draw_is_its_kernels_and_allocations(
    filtered: bool, num_kernels: int, num_scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy, no cast, no fill: each would be a node of every sampling graph."""
    launched: list[str] = []
    monkeypatch.setattr(module, "launch", lambda kernel, *rest: launched.append(kernel.__name__))
    params, tokens = make_params(2, top_k=5), torch.empty(2, dtype=torch.int64)
    logits = random_logits(2, 100, "normal")

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    filters = (params.top_k_R, params.top_p_R, params.min_p_R) if filtered else (None, None, None)
    draw = implementation_of(module.draw_tokens)
    assert draw is not None
    with Seen() as seen:
        draw(logits, tokens, INVALID_TOKEN, params.temperature_R, params.seed_R, params.index_R, *filters)
    assert len(launched) == num_kernels
    assert seen.names == ["aten::empty.memory_format"] * num_scratch


def test_an_empty_batch_launches_nothing() -> None:
    assert make_params(0).draw(torch.zeros(0, 9)).shape == (0,)


def test_a_vocabulary_beyond_the_limit_is_refused() -> None:
    logits = torch.zeros(1, 1).expand(1, module.MAX_VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match="vocabularies of up to 1048576"):
        make_params(1).draw_into(torch.zeros(1, dtype=torch.int64), logits)
