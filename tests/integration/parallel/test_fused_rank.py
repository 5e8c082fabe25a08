"""The parts of a model on the fused kernels (interpreted): sums lie where the plain forward has them.

The ranks are threads of this process, which meet in every sum.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from checkpoints import TINY
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.graphed import Input, graphed
from gapless.kernels.norm import add_rms_norm_into
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.parallel import collectives
from gapless.parallel.collectives import sum_add_rms_norm
from gapless.parallel.shard import WHOLE, Shard
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with two GPUs tests/gpu covers the compiled kernels"
)

CPU = torch.device("cpu")
SIZE = 2


class ThreadGroup:
    """Stands for a ``RankGroup``."""

    breaks = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, partial: Tensor) -> None:
        partial.copy_(sum(self._meeting.exchange(self._rank, partial.clone())))

    def sum_add_rms_norm(self, partial: Tensor, *others: Any) -> None:
        self.all_reduce(partial)
        add_rms_norm_into(partial, *others)

    def gather_columns(self, local: Tensor, num_columns: int) -> Tensor:
        return torch.cat(self._meeting.exchange(self._rank, local.clone()), dim=1)[:, :num_columns]


class Meeting:
    """Where values are exchanged. Only one rank computes at a time: the interpreter of Triton has state."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(SIZE, timeout=60)
        self._values: dict[int, Tensor] = {}

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self._values[rank] = value
        self.turn.release()
        self._barrier.wait()
        everything = [self._values[r] for r in range(SIZE)]
        self._barrier.wait()
        self.turn.acquire()
        return everything


DENSE: dict[str, Any] = {**TINY, "vocab_size": 51, "intermediate_size": 40, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "head_dim": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}


def run(raw: dict[str, Any], shard: Shard, *, fused: bool) -> tuple[Tensor, Tensor]:
    """Hidden states of ids drawn on the device, and logits."""
    config = parse_config(raw, source="test")
    model = Decoder(config, max_positions=64, dtype=torch.float32, device=CPU, shard=shard)
    fill_dummy_weights(model, seed=0)
    model.has_fused_kernels = fused
    layer = model.attention_layers()[0]
    batch = make_batch(
        [(0, 4), (3, 1)],
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
    )
    for layer in model.attention_layers():
        layer.bind(TorchReferenceBackend(), torch.zeros_like(batch.k_cache), torch.zeros_like(batch.v_cache))
    with use_forward_context(ForwardContext(batch=batch.metadata)), torch.no_grad():
        hidden = model.hidden_states_of_drawn(
            torch.tensor([5, 6, 50, 7, 0], dtype=torch.int32),
            torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32),
            drawn_rows_T=torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32),
            drawn_R=torch.tensor([49, 0]),
        )
        return hidden, model.head(hidden)


@pytest.mark.parametrize("raw", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("fused", [False, True])
def test_two_parts_together_are_the_whole(
    raw: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(raw, WHOLE, fused=fused)
    meeting, results = Meeting(), {}
    monkeypatch.setattr(collectives, "_groups", {70 + r: ThreadGroup(meeting, r) for r in range(SIZE)})

    def work(rank: int) -> None:
        with meeting.turn:
            results[rank] = run(raw, Shard(rank=rank, size=SIZE, group=70 + rank), fused=fused)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(SIZE):
        found: Any = results[rank]
        for mine, wanted in zip(found, expected, strict=True):
            assert float((mine - wanted).abs().max()) <= 1e-4
        assert torch.equal(found[1], results[0][1]), "logits must be the same bits on all ranks"


@pytest.mark.parametrize("strategy", ["full", "tc_piecewise"])
def test_a_sum_with_its_norm_is_held_by_a_graph_or_cut_out(strategy: Any, monkeypatch) -> None:
    """What it writes to is made by the graph before it, so that nothing is handed over behind a cut."""
    sums = []

    class Doubling(ThreadGroup):
        def __init__(self) -> None: ...

        def all_reduce(self, partial: Tensor) -> None:
            sums.append(partial.shape[0])
            partial.mul_(2)

    monkeypatch.setattr(collectives, "_groups", {70: Doubling()})
    shard, weight_E = Shard(rank=0, size=2, group=70), torch.rand(16) + 0.5

    def forward(hidden_TE: Tensor) -> Tensor:
        total_TE, normed_TE = hidden_TE, hidden_TE
        for _ in range(2):
            partial_TE = normed_TE * 3 + 1
            total_TE, normed_TE = sum_add_rms_norm(partial_TE, total_TE, weight_E, 1e-5, shard)
        return total_TE + normed_TE

    split_ops = collectives.ALL_REDUCE_OPS if strategy == "tc_piecewise" else ()
    inputs = {"hidden_TE": Input(dims={0: "tokens"})}
    with torch.no_grad():
        made = graphed(forward, inputs=inputs, strategy=strategy, sizes=[2, 4], split_ops=split_ops)
        made.capture(torch.randn(3, 16))
        for num_tokens in (4, 2, 4):
            hidden_TE = torch.randn(num_tokens, 16)
            wanted = forward(hidden_TE)
            sums.clear()
            assert torch.equal(made(hidden_TE), wanted)
            assert sums == [num_tokens] * 2
