"""Piecewise graphs on a GPU: the main cases of the emulated device, both compilers, Inductor's partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.errors import StaleAddressError
from gapless.graphs.capture import warm_up
from gapless.graphs.device import get_device
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward
from gapless.graphs.store import GraphStore
from gapless.graphs.wrapper import GraphWrapper
from piecewise_ops import ATTEND, FRESH, ROUTE, RUNS, Stack, step

pytestmark = pytest.mark.gpu

NONE, PIECEWISE, FULL = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL
SIZES = (64, 16, 4, 1)
WIDTH = 64
COMPILERS: dict[str, dict[str, Any]] = {
    "eager": {"compiler": "eager"},
    "inductor": {"compiler": "inductor"},
    "partition": {"compiler": "inductor", "use_inductor_graph_partition": True},
}


class Rig:
    """A model on the GPU with pieces captured for every size, and a full graph over the same pieces."""

    def __init__(self, op: str, *, num_layers: int = 5, **facts: Any) -> None:
        self.device = get_device("cuda")
        self.model = Stack(op=op, size=WIDTH, num_layers=num_layers).cuda()
        config = PiecewiseConfig(split_ops=(op,), **facts)
        self.forward = PiecewiseForward(self.model.forward, config=config, device=self.device)
        packed = torch.zeros(2 * max(SIZES), dtype=torch.int32, device="cuda")
        self.ids = {n: packed[n : 2 * n] for n in SIZES}

    def capture(self) -> Rig:
        """Into a new store."""
        self.store = GraphStore(self.device)
        self.out = self.store.output("out", (max(SIZES), WIDTH), torch.float32)
        self.total = self.store.output("total", (max(SIZES),), torch.float32)
        self.pieces = self._wrapper(self._run, PIECEWISE, Strategy.TC_PIECEWISE)
        self.whole = self._wrapper(self._sum, FULL, Strategy.FULL)
        self._warm_up(4, times=1)
        with torch.no_grad(), self.store.capturing():
            for n in SIZES:
                self._warm_up(n, times=self.device.num_warmups)
                for mode in (PIECEWISE, FULL):
                    with step(mode, n):
                        self.whole(self.ids[n])
        return self

    def call(self, n: int, mode: RuntimeMode, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        self.ids[n].copy_(torch.randint(16, (n,), generator=generator))
        with torch.no_grad(), self.device.stream_scope(), step(mode, n):
            return self.whole(self.ids[n]).clone()

    def _run(self, ids: Tensor) -> Tensor:
        return self.out[: len(ids)].copy_(self.forward(ids))

    def _sum(self, ids: Tensor) -> Tensor:
        return self.total[: len(ids)].copy_(self.pieces(ids).sum(-1))

    def _wrapper(self, fn: Any, mode: RuntimeMode, strategy: Strategy) -> GraphWrapper:
        return GraphWrapper(fn, runtime_mode=mode, phase=Phase.PREFILL, strategy=strategy, store=self.store)

    def _warm_up(self, n: int, *, times: int) -> None:
        with step(NONE, n):
            warm_up(lambda: self.whole(self.ids[n]), self.device, times)


@pytest.fixture(scope="module", params=[(c, op) for c in COMPILERS for op in (ATTEND, FRESH, ROUTE)], ids=str)
def rig(request: pytest.FixtureRequest):
    compiler, op = request.param
    made = Rig(op, **COMPILERS[compiler]).capture()
    yield made
    made.store.release()


@pytest.mark.parametrize("n", SIZES)
def test_pieces_and_full_graph_equal_padded_eager_on_new_inputs(rig: Rig, n: int) -> None:
    for seed in range(3):
        churn = [torch.full((n, WIDTH), float("nan"), device="cuda") for _ in range(3)]
        results = [rig.call(n, mode, seed) for mode in (PIECEWISE, FULL, NONE)]
        del churn
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[2])
        expected = rig.model(rig.ids[n]).sum(-1)
        torch.testing.assert_close(results[0], expected, rtol=1e-3, atol=1e-3)


def test_sizes_interleave(rig: Rig) -> None:
    for i, n in enumerate((64, 1, 16, 64, 4, 1, 64)):
        assert torch.equal(rig.call(n, PIECEWISE, 50 + i), rig.call(n, NONE, 50 + i))


def test_every_split_op_is_a_break_of_the_pieces_and_none_of_the_full_graph(rig: Rig) -> None:
    found = {(row.key.mode, row.num_breaks) for row in rig.store.ledger}
    assert found == {(PIECEWISE, 5), (FULL, 0)}
    assert {row.num_segments for row in rig.store.ledger if row.key.mode is FULL} == {1}


def test_one_trace_serves_every_size(rig: Rig) -> None:
    assert rig.forward.stats.num_traces == 1
    assert rig.forward.stats.num_distinct <= 3


def test_split_ops_run_at_every_replay(rig: Rig) -> None:
    RUNS.clear()
    rig.call(16, PIECEWISE, 0)
    rig.call(16, PIECEWISE, 1)
    assert sum(RUNS.values()) == 10
    RUNS.clear()
    rig.call(16, FULL, 0)
    assert sum(RUNS.values()) == 0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_parameter_that_moved_is_named_at_the_first_replay(compiler: str) -> None:
    rig = Rig(ATTEND, num_layers=2, **COMPILERS[compiler]).capture()
    layer = rig.model.layers[1]
    layer.gain = torch.nn.Parameter(layer.gain.clone(), requires_grad=False)
    with pytest.raises(StaleAddressError, match=r"layers\.1\.gain moved"):
        rig.call(4, PIECEWISE, 0)
    rig.store.release()


def test_a_second_capture_of_the_same_pieces_after_a_release() -> None:
    rig = Rig(ROUTE, num_layers=2).capture()
    rig.store.release()
    rig.capture()
    assert torch.equal(rig.call(16, PIECEWISE, 1), rig.call(16, NONE, 1))
    assert rig.forward.stats.num_traces == 1


@pytest.mark.parametrize("compiler", ["eager", "inductor", "partition"])
@pytest.mark.parametrize("decode", ["tc_piecewise", "full"])
def test_an_engine_gives_the_tokens_of_padded_eager(tmp_path: Path, compiler: str, decode: str) -> None:
    from tiny_model import BatchMaker, open_tiny

    graphs: dict[str, Any] = {
        "cuda_graph_backend_prefill": "tc_piecewise",
        "cuda_graph_backend_decode": decode,
        "kv_cache_tokens": 512,
    }
    if compiler == "partition":
        graphs["compilation_config"] = {"use_inductor_graph_partition": True}
    else:
        graphs["cuda_graph_tc_compiler"] = compiler
    runner = open_tiny(tmp_path, device="cuda", **graphs).runner

    def generate() -> list[list[int]]:
        maker = BatchMaker()
        sequences = [maker.sequence(list(range(1, n))) for n in (4, 9, 2, 14)]
        result = runner.execute(maker.batch([(s, len(s.token_ids)) for s in sequences]))
        made = [result.token_ids]
        for _ in range(6):
            for sequence, token in zip(sequences, result.token_ids, strict=True):
                sequence.token_ids.append(token)
            result = runner.execute(maker.batch([(s, 1) for s in sequences]))
            made.append(result.token_ids)
        return made

    tokens = generate()
    with runner.padded_eager():
        assert generate() == tokens
    report = runner.report()
    assert report["failures"] == []
    assert report["compile"]["recompilations"] == 0
    assert report["compile"]["distinct_pieces"] <= 4
    breaks = {row["breaks"] for row in report["graphs"] if row["strategy"] == "tc_piecewise"}
    assert breaks == {2}
    runner.shutdown()
