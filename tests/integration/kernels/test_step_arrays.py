"""Positions, slots and block tables that a step makes on the device equal those that the host would stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import CONFIG, open_engine_of

from gapless.engine.build import OpenedEngine
from gapless.engine.core import EngineCore
from gapless.engine.graph_set import GraphSet
from gapless.engine.inputs import BatchBuilder, select_inputs, token_fields
from gapless.engine.runner import ModelRunner
from gapless.engine.step import PendingStep, ScheduledBatch
from gapless.engine.verify import verify_engine
from gapless.errors import ConfigError
from gapless.graphs.batch import BatchShape
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.modes import Phase
from gapless.graphs.runner import GraphRunner
from gapless.models import decoder
from gapless.sampling.params import SamplingParams
from step_array_cases import StepCase, make_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


def assert_made(case: StepCase) -> None:
    outputs = case.outputs()
    case.run(outputs)
    for made, expected in zip(outputs, case.expected, strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([], {"num_tokens": 0, "num_reqs": 0, "num_columns": 0}),
        ([], {"num_tokens": 40, "num_reqs": 3, "num_columns": 20}),
        ([(0, 1)], {}),
        ([(0, 33)], {"num_tokens": 33, "num_reqs": 33, "num_columns": 17}),
        ([(0, 300)], {"num_tokens": 512, "num_reqs": 256, "num_columns": 40}),
        ([(128, 128)], {"num_tokens": 128, "num_reqs": 64, "num_columns": 33}),
        ([(127, 2), (128, 1), (129, 31)], {"num_tokens": 35, "num_reqs": 5, "num_columns": 16}),
        ([(500, 1)] * 7 + [(0, 57)], {"num_tokens": 64, "num_reqs": 64, "num_columns": 40}),
        ([(3, 4), (0, 0), (9, 5)], {"num_tokens": 16, "num_reqs": 4, "num_columns": 4}),
    ],
)
def test_every_entry_is_what_the_host_would_write(
    requests: list[tuple[int, int]], sizes: dict[str, int], block_size: int
) -> None:
    assert_made(make_case(requests, block_size=block_size, **sizes))


@pytest.mark.parametrize("num_reqs", [255, 256, 257, 600])
def test_requests_may_be_more_than_are_looked_at_at_once(num_reqs: int) -> None:
    requests = [(index % 50, 1 + index % 2) for index in range(num_reqs)]
    assert_made(make_case(requests, block_size=16, num_tokens=2 * num_reqs, num_reqs=num_reqs + 3))


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=9),
    pads=st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 20)),
    block_size=st.sampled_from([16, 32]),
)
def test_any_step_in_any_bucket(
    requests: list[tuple[int, int]], pads: tuple[int, int, int], block_size: int
) -> None:
    case = make_case(requests, block_size=block_size)
    num_reqs, num_columns = case.expected[2].shape
    sizes = {
        "num_tokens": len(case.expected[0]) + pads[0],
        "num_reqs": num_reqs + pads[1],
        "num_columns": num_columns + pads[2],
    }
    assert_made(make_case(requests, block_size=block_size, **sizes))


def test_padding_is_what_the_schema_declares() -> None:
    fields = token_fields(max_blocks=4, vocab_size=9, max_num_reqs=2, makes_slots=True)
    pads = {field.name: field.pad for field in fields if field.is_made}
    assert pads == {"positions": 0, "slot_mapping": 0, "block_table": 0}


def test_shapes_that_do_not_go_together_are_refused() -> None:
    case = make_case([(0, 3), (2, 2)], block_size=16)
    outputs = case.outputs()
    with pytest.raises(ConfigError, match="2 lengths go with 3 starts and 2 rows"):
        case.run([*outputs[:2], outputs[2][:1]])
    with pytest.raises(ConfigError, match="5 positions, but 4 slots"):
        case.run([outputs[0], outputs[1][:4], outputs[2]])


class TodaysArrays:
    """Stages every prefill step once more, with everything made on the host."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, limits = runner, runner.graphs.limits
        sizes = {"max_num_reqs": limits.max_num_reqs, "max_blocks": limits.max_blocks}
        self.builder = BatchBuilder(
            block_size=limits.block_size, max_num_tokens=limits.max_num_tokens, **sizes
        )
        self.inputs = StaticInputs(
            token_fields(vocab_size=CONFIG["vocab_size"], **sizes),
            max_sizes=runner.graphs.prefill.inputs.max_sizes,
            torch_device=torch.device("cpu"),
        )
        self.num_compared = 0
        self.num_mixed = 0

    def compare(self, batch: ScheduledBatch) -> None:
        """Behind the step that ran ``batch``."""
        arrays = self.builder.build(replace(batch, run=None))
        found = self.runner.dispatcher.dispatch(BatchShape(query_lens=arrays.query_lens))
        if found.owner is not Phase.PREFILL:
            return
        prefill = self.runner.graphs.prefill
        made = prefill.inputs.views(prefill.sizes_of(found.descriptor))
        staged = self.inputs.views(made.sizes)
        self.inputs.load(staged, select_inputs(arrays.values, self.inputs))
        for name, tensor in staged.tensors.items():
            assert torch.equal(made[name], tensor), name
        self.num_compared += 1
        self.num_mixed += arrays.has_unknown


def serve(opened: OpenedEngine) -> list[list[int]]:
    """Prompts in chunks, with a prefix that is found in the cache, beside requests that decode."""
    shared = np.random.default_rng(0).integers(97, size=18).tolist()
    prompts = [[5, 6, 7], [*shared, 1], [*shared, 2, 3], [8] * 9]
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    tokens: dict[str, list[int]] = {}
    num_cached = 0
    waiting = [(str(index), prompt) for index, prompt in enumerate(prompts)]
    while waiting or core.has_unfinished():
        if waiting:
            core.add_request(*waiting.pop(0), params)
        for output in core.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            num_cached = max(num_cached, output.num_cached_tokens)
    assert num_cached == 16
    return [tokens[str(index)] for index in range(len(prompts))]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_an_engine_reads_and_leaves_what_it_would_with_all_made_on_the_host(
    num_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_engine_of(tmp_path / "device", "full", "full")
    assert opened.runner.graphs.makes_slots
    opened.runner.graphs.keeps_logits = True
    opened.runner.max_steps_ahead = num_ahead
    todays, launch = TodaysArrays(opened.runner), opened.runner.launch

    def launch_and_compare(batch: ScheduledBatch) -> PendingStep:
        pending = launch(batch)
        todays.compare(batch)
        return pending

    monkeypatch.setattr(opened.runner, "launch", launch_and_compare)
    tokens = serve(opened)
    assert todays.num_compared >= 6
    assert todays.num_mixed >= num_ahead, "some token of a mixed step is known to the device only"

    monkeypatch.setattr(GraphSet, "_makes_slots", lambda self, prefill: False)
    host = open_engine_of(tmp_path / "host", "full", "full")
    host.runner.graphs.keeps_logits = True
    host.runner.max_steps_ahead = num_ahead
    assert not host.runner.graphs.makes_slots
    assert serve(host) == tokens
    assert torch.equal(host.runner.graphs.logits, opened.runner.graphs.logits)
    layers = [engine.loaded.model.attention_layers() for engine in (opened, host)]
    for here, there in zip(*layers, strict=True):
        for made, expected in zip(here.caches, there.caches, strict=True):
            assert torch.equal(made[1:], expected[1:])


@pytest.mark.usefixtures("fused")
def test_a_step_of_single_tokens_may_run_as_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose hidden states are wanted, which comes with positions and slots of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=1, pooling="last", detokenize=False)

    def embed(folder: Path) -> list[float]:
        opened = open_engine_of(folder, "full", "full")
        core = EngineCore(opened.runner)
        core.add_request("one", [5], params)
        (delta,) = core.step_deltas()
        wanted = {"phase": "prefill", "reason": "hidden_states", "count": 1}
        assert wanted in opened.runner.report()["eager"]
        assert delta.embedding is not None
        return delta.embedding

    made = embed(tmp_path / "device")
    monkeypatch.setattr(GraphSet, "_makes_slots", lambda self, prefill: False)
    assert embed(tmp_path / "host") == made


@pytest.mark.usefixtures("fused")
def test_its_graphs_are_verified_as_any_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those of a tail; and a check asks for the logits that it compares."""
    run, asked = GraphRunner.run, set()

    def run_and_note(self: GraphRunner, descriptor: Any, mode: Any, values: Any, **rest: Any) -> Any:
        if "needs_logits" in self.inputs.host_names:
            asked.add((self.phase, int(values["needs_logits"][0])))
        return run(self, descriptor, mode, values, **rest)

    monkeypatch.setattr(GraphRunner, "run", run_and_note)
    monkeypatch.setattr(GraphSet, "has_fused_sampling", False)  # the interpreter is slow
    opened = open_engine_of(tmp_path / "model", "full", "full")
    assert opened.runner.graphs.makes_slots
    assert opened.runner.graphs.has_tail
    report = verify_engine(opened, only_few_sizes=True)
    assert report.is_ok, str(report)
    assert asked == {(Phase.HEAD, 1), (Phase.DECODE, 1)}


@pytest.mark.parametrize(
    ("is_fused", "prefill"), [(False, "full"), (True, "breakable"), (True, "tc_piecewise")]
)
def test_everything_else_keeps_its_arrays(
    is_fused: bool, prefill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: is_fused)
    graphs = open_engine_of(tmp_path / "model", prefill, "full").runner.graphs
    assert not graphs.makes_slots
    fields: dict[str, Any] = {field.name: field for field in graphs.prefill.inputs.fields}
    assert "packed_tables" not in fields
    assert fields["slot_mapping"].is_staged
