"""Decode attention begins with keys of earlier steps while the product that makes this step's still runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata, Rotation
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.kernels.linear import small_linear

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, HIDDEN = 16, 8, 128, 16, 1024
ROUNDS = 30


@dataclass
class Step:
    """A product and attention, which norms, rotates and stores its heads, as a layer has them in a row."""

    hidden: Tensor
    weight: Tensor
    norm_weight: Tensor
    rope: Tensor
    positions: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    out: Tensor

    def run(self, *, apart: bool) -> Tensor:
        """``apart``: nothing begins before what is ahead of it has ended."""
        pause = torch.cuda.synchronize if apart else lambda: None
        qkv = small_linear(self.hidden, self.weight, None)
        pause()
        rotation = Rotation(self.norm_weight, 1e-6, self.rope, self.positions)
        caches = self.k_cache, self.v_cache
        backend, scale = TritonPagedBackend(), HEAD_SIZE**-0.5
        backend.attend_rotating(qkv, rotation, *caches, self.out, self.metadata, scale=scale, window=None)
        return self.out

    def fill(self, lengths: Tensor) -> None:
        """New activations and contexts; where this step's keys will be is NaN now."""
        self.hidden.normal_()
        self.metadata.seq_lens.copy_(lengths)
        last = lengths - 1
        self.positions.copy_(last)
        rows = torch.arange(len(lengths), device="cuda")
        blocks = self.metadata.block_table[rows, last // BLOCK_SIZE]
        self.metadata.slot_mapping.copy_(blocks * BLOCK_SIZE + last % BLOCK_SIZE)
        for cache in (self.k_cache, self.v_cache):
            cache.view(-1, KV_HEADS, HEAD_SIZE)[self.metadata.slot_mapping.long()] = torch.nan


def make_step(num_reqs: int, max_keys: int) -> Step:
    columns = -(-max_keys // BLOCK_SIZE)
    num_blocks = 1 + num_reqs * columns
    cache = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device="cuda").bfloat16()
    table = 1 + torch.randperm(num_blocks - 1, device="cuda").view(num_reqs, columns)
    angles = torch.arange(max_keys, device="cuda")[:, None] * 0.01 * torch.arange(1, 65, device="cuda")
    return Step(
        hidden=torch.empty(num_reqs, HIDDEN, device="cuda").bfloat16(),
        weight=torch.randn((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN, device="cuda").bfloat16() / 32,
        norm_weight=torch.rand(HEADS + KV_HEADS, HEAD_SIZE, device="cuda").bfloat16() + 0.5,
        rope=torch.stack((angles.cos(), angles.sin()), 1).bfloat16(),
        positions=torch.zeros(num_reqs, device="cuda", dtype=torch.int64),
        k_cache=cache[0],
        v_cache=cache[1],
        metadata=AttentionMetadata(
            query_start_loc=torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32),
            seq_lens=torch.ones(num_reqs, device="cuda", dtype=torch.int32),
            block_table=table.int(),
            slot_mapping=torch.zeros(num_reqs, device="cuda", dtype=torch.int32),
            max_query_len=1,
            max_seq_len=max_keys,
        ),
        out=torch.empty(num_reqs, HEADS, HEAD_SIZE, device="cuda").bfloat16(),
    )


@pytest.mark.parametrize("num_reqs", [1, 8, 16, 32, 64, 128, 256])
def test_a_replay_reads_no_key_of_its_step_before_it_is_there(num_reqs: int) -> None:
    torch.manual_seed(num_reqs)
    max_keys = 400
    step = make_step(num_reqs, max_keys)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        step.fill(torch.full((num_reqs,), 170, device="cuda", dtype=torch.int32))
        step.run(apart=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.run(apart=False)
        for _ in range(ROUNDS):
            lengths = torch.randint(1, max_keys + 1, (num_reqs,), device="cuda", dtype=torch.int32)
            lengths[0] = 1  # nothing of an earlier step
            step.fill(lengths)
            step.out.fill_(torch.nan)
            graph.replay()
            replayed = step.out.clone()
            hidden = step.hidden.clone()
            step.fill(lengths)
            step.hidden.copy_(hidden)
            expected = step.run(apart=True)
            assert not replayed.isnan().any()
            assert torch.equal(replayed, expected)
