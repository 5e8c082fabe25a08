"""Verification of the engine: right graphs pass, a wrong weight, key or cache is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import BatchMaker
from tiny_model import open_tiny as open_engine

from gapless.engine.build import OpenedEngine
from gapless.engine.verify import verify_engine
from gapless.errors import GraphError
from gapless.graphs.batch import BatchShape
from gapless.graphs.check_report import CheckReport
from gapless.graphs.dispatcher import Dispatch, Dispatcher, EagerReason
from gapless.graphs.modes import Phase, RuntimeMode

STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "breakable": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "breakable"},
    "tc_piecewise": {"cuda_graph_backend_prefill": "tc_piecewise"},
    "FULL": {"compilation_config": {"cudagraph_mode": "FULL"}},
}


def open_tiny(folder: Path, **options: Any) -> OpenedEngine:
    return open_engine(folder, **{"chunked_prefill_size": 8, "max_running_requests": 2, **options})


def failed(report: CheckReport) -> set[tuple[str, str]]:
    return {(failure.target, failure.check) for failure in report.failures}


@pytest.fixture(params=STRATEGIES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenedEngine:
    return open_tiny(tmp_path, **STRATEGIES[request.param])


def test_every_phase_passes_and_the_engine_goes_on_as_before(opened: OpenedEngine) -> None:
    def step() -> list[int]:
        maker = BatchMaker()
        return opened.runner.execute(maker.batch([(maker.sequence([1, 2, 3]), 3)])).token_ids

    before = step()
    ledger = opened.runner.report()["graphs"]
    report = verify_engine(opened)
    assert report.is_ok, str(report)
    targets = {result.target for result in report.results}
    assert {"prefill", "decode", "head", "sample", "sample_filtered"} <= targets
    checked = [r for r in report.results if r.check == "equals padded eager" and r.target == "prefill"]
    assert len({r.subject.split(" in ")[-1].split(",")[0] for r in checked}) >= 2
    assert opened.runner.report()["graphs"] == ledger
    assert step() == before


def test_few_sizes_are_the_smallest_a_middle_and_the_largest(tmp_path: Path) -> None:
    report = verify_engine(open_tiny(tmp_path, chunked_prefill_size=20), only_few_sizes=True)
    looked_up = [
        r.subject.split(",")[0] for r in report.results if r.check == "lookup" and r.target == "prefill"
    ]
    assert looked_up == ["tokens=20", "tokens=12", "tokens=4"]


def test_a_cache_with_few_blocks_is_enough(tmp_path: Path) -> None:
    """Batches are as large as the blocks allow: 4 blocks of 16 tokens for 8 requests and 40 tokens."""
    limits = {"kv_cache_tokens": 64, "max_running_requests": 8, "chunked_prefill_size": 40}
    opened = open_tiny(tmp_path, **limits, cuda_graph_bs_prefill=[4, 40], cuda_graph_bs_decode=[1, 8])
    report = verify_engine(opened, only_few_sizes=True)
    assert report.is_ok, str(report)


def test_many_requests_do_not_write_over_what_another_batch_has_in_the_cache(tmp_path: Path) -> None:
    """160 requests of some 16 tokens need more blocks than there are tokens for; the small batch around them
    still reads what it had in the cache."""
    limits = {"kv_cache_tokens": 16_384, "max_running_requests": 160, "chunked_prefill_size": 2560}
    opened = open_tiny(tmp_path, **limits, cuda_graph_bs_prefill=[4, 2560], cuda_graph_bs_decode=[1])
    report = verify_engine(opened, only_few_sizes=True)
    assert report.is_ok, str(report)


def test_weights_rebound_under_the_graphs_are_found(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path)
    for module in opened.loaded.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter * 1.5, requires_grad=False)
    report = verify_engine(opened)
    assert {("prefill", "equals padded eager"), ("decode", "equals padded eager")} <= failed(report)
    assert "model.blocks.1.mlp_norm.weight: " in str(report), "what moved names itself"


def test_a_weight_that_moved_with_equal_contents_is_named(tmp_path: Path) -> None:
    """Every result is still right while the old one lives; what is loaded next would be read by no graph."""
    opened = open_tiny(tmp_path)
    norm = opened.loaded.model.blocks[1].mlp_norm
    kept = norm.weight
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    report = verify_engine(opened)
    assert not report.is_ok
    assert {name for _, name in failed(report)} == {"addresses", "addresses afterwards"}
    assert kept.data_ptr() != norm.weight.data_ptr()
    assert "model.blocks.1.mlp_norm.weight: " in str(report)


def test_what_a_backend_let_go_of_since_the_capture_is_no_error(tmp_path: Path) -> None:
    """It plans each step anew, and what it kept for the last one may be gone."""
    opened = open_tiny(tmp_path)
    noted = opened.runner.graphs.captured_model
    assert noted is not None
    record = next(iter(noted.tensors.values()))
    noted.tensors["model.blocks.0.attention.core.backend.of_a_step"] = record
    report = verify_engine(opened)
    assert report.is_ok, str(report)
    noted.tensors["model.blocks.0.of_the_model"] = record
    assert "model.blocks.0.of_the_model: the tensor is no longer there" in str(verify_engine(opened))


def test_a_key_that_dispatch_no_longer_finds_is_an_error(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path)
    dispatcher = opened.runner.dispatcher
    dispatcher.drop(dispatcher.capture_descriptors(Phase.PREFILL)[0], phase=Phase.PREFILL)
    assert failed(verify_engine(opened)) == {("prefill", "lookup")}


def test_without_graphs_there_is_nothing_to_check(tmp_path: Path) -> None:
    report = verify_engine(open_tiny(tmp_path, enforce_eager=True))
    assert {str(result.status) for result in report.results} == {"skipped"}


@pytest.mark.parametrize("options", [{}, {"max_model_len": 7, "chunked_prefill_size": 20}])
def test_dummy_batches_are_legal_and_of_the_kind_their_key_says(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Lengths between 1 and the model's, every slot and block in the sink, exactly uniform for decode."""
    opened = open_tiny(tmp_path, **options)
    graphs, limits = opened.runner.graphs, opened.runner.graphs.limits
    for row in graphs.store.ledger:
        if row.key.phase not in (Phase.PREFILL, Phase.DECODE):
            continue
        descriptor = row.key.descriptor
        part = graphs.prefill if row.key.phase is Phase.PREFILL else graphs.decode
        values = {name: np.asarray(value) for name, value in part.dummy(descriptor).items()}
        lens = np.diff(values["query_start_loc"])
        assert lens.sum() == descriptor.num_tokens
        assert lens.min() >= 1
        assert lens.max() <= limits.max_model_len
        assert len(lens) <= descriptor.num_reqs
        if descriptor.uniform:
            assert len(set(lens)) == 1
            assert len(lens) == descriptor.num_reqs
        assert (values["seq_lens"] == lens).all()
        assert values["block_table"].shape[1] <= limits.max_blocks
        assert not values["block_table"].any()
        assert values["slot_mapping"].max() < limits.block_size
        assert values["positions"].max() < limits.max_model_len
        assert values["input_ids"].max() < opened.runner.vocab_size


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_start_whose_dispatcher_misses_a_captured_graph_is_an_error(
    phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every captured graph is looked up once through the public path before the engine is ready."""
    dispatch = Dispatcher.dispatch

    def forgetful(self: Dispatcher, shape: BatchShape) -> Dispatch:
        found = dispatch(self, shape)
        if found.phase is phase and shape.num_tokens == 2:
            return Dispatch(mode=RuntimeMode.NONE, phase=phase, reason=EagerReason.LARGER_THAN_LARGEST)
        return found

    monkeypatch.setattr(Dispatcher, "dispatch", forgetful)
    sizes = {"cuda_graph_bs_prefill": [2, 8], "cuda_graph_bs_decode": [1, 2]}
    with pytest.raises(GraphError, match=f"captured .*{phase.name}.* but a batch of exactly that size"):
        open_tiny(tmp_path, **sizes)
