"""Positions, slots and block tables made on a GPU, and whether the kernels behind see them in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels_cuda import LLAMA, generate, open_model
from torch import Tensor

from gapless.engine.graph_set import GraphSet
from gapless.engine.verify import verify_engine
from gapless.kernels.linear import small_linear
from gapless.kernels.norm import fused_embed_rms_norm
from gapless.kernels.rope_cache import rotate_into_cache
from gapless.kernels.step_arrays import write_step_arrays
from kernel_oracles import make_rope
from step_array_cases import MAX_BLOCK, StepCase, make_case

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def random_case(choice: random.Random, *, num_tokens: int, num_reqs: int, num_columns: int) -> StepCase:
    """Decodes, chunks and prompts, as many tokens as fit."""
    requests, room = [], choice.choice([num_tokens, num_tokens // 2 + 1])
    while room and len(requests) < num_reqs:
        new = choice.choice([1, 1, 1, min(room, 17), choice.randint(1, room)])
        requests.append((choice.randint(0, num_columns * BLOCK_SIZE - new), new))
        room -= new
    return make_case(
        requests,
        block_size=BLOCK_SIZE,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        num_columns=num_columns,
        seed=choice.randint(0, 1 << 30),
    )


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("num_reqs", [1, 7, 256, 300])
def test_every_entry_is_what_the_host_would_write(num_reqs: int, block_size: int) -> None:
    requests = [(37 * index % 900, 1 + index % 3) for index in range(num_reqs)]
    for pads in (0, 5):
        case = make_case(
            requests, block_size=block_size, num_tokens=2 * num_reqs + 1 + pads, num_reqs=num_reqs + pads,
            num_columns=64 + pads,
        )  # fmt: skip
        outputs = case.outputs("cuda")
        case.run(outputs)
        for made, expected in zip(outputs, case.expected, strict=True):
            assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("num_tokens", [16, 512, 4096])
def test_one_prompt_that_fills_the_bucket(num_tokens: int) -> None:
    case = make_case([(0, num_tokens)], block_size=16, num_tokens=num_tokens, num_reqs=256, num_columns=512)
    outputs = case.outputs("cuda")
    case.run(outputs)
    for made, expected in zip(outputs, case.expected, strict=True):
        assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("num_tokens", [8, 64, 1024])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_kernels_that_start_early_read_what_the_first_one_has_written(
    num_tokens: int, num_layers: int
) -> None:
    """The chain of a prefill graph up to the cache, replayed with ever other steps in its inputs: rotation
    reads positions and slots before its wait. Every replay leaves what the chain leaves with a full stop
    between any two kernels."""
    choice = random.Random(0)
    sizes = {"num_tokens": num_tokens, "num_reqs": min(num_tokens, 64), "num_columns": 64}
    cases = [random_case(choice, **sizes) for _ in range(24)]
    run, inputs, results = make_chain(cases[0], num_tokens, num_layers)
    run(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(False)

    def load(case: StepCase) -> None:
        for tensor, staged in zip(inputs, case.staged, strict=True):
            tensor.copy_(staged, non_blocking=True)

    wanted = []
    for case in cases:
        load(case)
        run(True)
        wanted.append([result.clone() for result in results])
    pinned = [tuple(tensor.pin_memory() for tensor in case.staged) for case in cases]
    for _ in range(20):
        order = choice.sample(range(len(cases)), len(cases))
        found: list[list[Tensor]] = []
        torch.cuda._sleep(200_000)
        for index in order:
            for tensor, staged in zip(inputs, pinned[index], strict=True):
                tensor.copy_(staged, non_blocking=True)
            graph.replay()
            found.append([result.clone() for result in results])
        for index, made in zip(order, found, strict=True):
            for one, other in zip(made, wanted[index], strict=True):
                assert torch.equal(one, other)


def make_chain(
    case: StepCase, num_tokens: int, num_layers: int
) -> tuple[Callable[[bool], None], list[Tensor], list[Tensor]]:
    """What runs the first kernel, embedding and norm, and then product and rotation by layer (``True``: with
    a stop behind every kernel); its inputs, and its results: what was made, rotated and cached."""
    num_heads, num_kv_heads, head_size, hidden_size = 8, 2, 128, 256
    inputs = [staged.to(DEVICE) for staged in case.staged]
    positions, slots, table = case.outputs("cuda")
    ids = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)
    no_rows, drawn = torch.zeros_like(ids), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    embedding = torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()
    weight_E = torch.ones(hidden_size, device=DEVICE).bfloat16()
    columns = (num_heads + 2 * num_kv_heads) * head_size
    weight = torch.randn(columns, hidden_size, device=DEVICE).bfloat16()
    rope = make_rope(head_size, num_positions=2048, dtype=torch.bfloat16, device="cuda")
    shape = (MAX_BLOCK + 1, BLOCK_SIZE, num_kv_heads, head_size)
    caches = torch.zeros(num_layers, 2, *shape, dtype=torch.bfloat16, device=DEVICE)
    rotated = torch.zeros(num_layers, num_tokens, num_heads, head_size, device=DEVICE).bfloat16()
    cached = torch.zeros(num_layers, 2, num_tokens, num_kv_heads, head_size, device=DEVICE).bfloat16()

    def run(stops: bool) -> None:
        stop = torch.cuda.synchronize if stops else lambda: None
        write_step_arrays(*inputs, positions, slots, table, BLOCK_SIZE)
        stop()
        _, normed = fused_embed_rms_norm(ids, no_rows, drawn, embedding, weight_E, 1e-6)
        stop()
        queries = []
        for k_cache, v_cache in caches:
            qkv = small_linear(normed, weight, None)
            stop()
            queries.append(rotate_into_cache(qkv, None, 0.0, rope, positions, slots, k_cache, v_cache))
            stop()
        torch.stack(queries, out=rotated)
        # What lies at the slots of real tokens, which then are empty again.
        at_slots = caches.flatten(2, 3).index_select(2, slots)
        cached.copy_(at_slots * (slots > 0)[:, None, None])
        caches.flatten(2, 3).index_fill_(2, slots.long(), 0)

    return run, inputs, [positions, slots, table, rotated, cached]


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["qwen3", "llama"])
def test_an_engine_draws_what_it_draws_with_all_made_on_the_host(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one token to two chunks, mixed steps among them; the last step's logits to the bit."""
    opened = open_model(tmp_path / "model", changes, "full", "full")
    assert opened.runner.graphs.makes_slots
    opened.runner.graphs.keeps_logits = True
    tokens, logits = generate(opened), opened.runner.graphs.logits.clone()
    assert not opened.runner.report()["eager"]
    assert verify_engine(opened, only_few_sizes=True).is_ok
    opened.runner.shutdown()
    monkeypatch.setattr(GraphSet, "_makes_slots", lambda self, prefill: False)
    host = open_model(tmp_path / "model", changes, "full", "full")
    assert not host.runner.graphs.makes_slots
    host.runner.graphs.keeps_logits = True
    assert generate(host) == tokens
    assert torch.equal(host.runner.graphs.logits, logits)
    host.runner.shutdown()
