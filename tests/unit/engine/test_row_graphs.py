"""Ladders of the row stages: the head's own, powers of two for sampling; what serves when one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import BatchMaker, open_tiny

from gapless.engine.row_graphs import RowGraphs
from gapless.engine.runner import ModelRunner
from gapless.graphs.modes import Phase
from gapless.graphs.report import StepLog


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), ()),
        ((1,), (1,)),
        ((1, 2, 4, 8, 16, 24, 32, 40), (1, 2, 4, 8, 16, 32, 40)),
        ((3, 7), (1, 2, 4, 7)),
        (tuple(range(8, 257, 8)), (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_sampling_uses_powers_of_two_up_to_the_largest(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert RowGraphs(sizes, StepLog()).sampling_sizes == expected


@pytest.fixture(scope="module")
def runner_of_eleven(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return open_tiny(
        tmp_path_factory.mktemp("tiny"),
        max_running_requests=11,
        kv_cache_tokens=1024,
        cuda_graph_bs_decode=[1, 3, 5, 11],
    ).runner


@pytest.mark.parametrize("num_reqs", range(1, 12))
def test_every_number_of_rows_is_served_by_the_next_size_of_its_stage(
    runner_of_eleven: ModelRunner, num_reqs: int
) -> None:
    runner = runner_of_eleven
    runner.reset_report()
    maker = BatchMaker(temperature=1.0)
    runner.execute(maker.batch([(maker.sequence([1, 2]), 2) for _ in range(num_reqs)]))
    buckets = {step["phase"]: step["bucket"] for step in runner.report()["steps"]}
    assert buckets[Phase.HEAD] == next(size for size in (1, 3, 5, 11) if size >= num_reqs)
    assert buckets[Phase.SAMPLE] == next(size for size in (1, 2, 4, 8, 11) if size >= num_reqs)
    assert [row for row in runner.report()["eager"] if row["phase"] in (Phase.HEAD, Phase.SAMPLE)] == []


def test_the_head_runs_on_sampled_rows_alone(tmp_path: Path) -> None:
    """A mixed step of two unfinished chunks, a whole prompt and a decode samples two of its four requests."""
    runner = open_tiny(tmp_path).runner
    maker = BatchMaker()
    decoding = maker.sequence([1, 2])
    decoding.token_ids += runner.execute(maker.batch([(decoding, 2)])).token_ids
    runner.reset_report()
    first, second, whole = maker.sequence([3] * 9), maker.sequence([4] * 9), maker.sequence([5, 6, 7])
    result = runner.execute(maker.batch([(decoding, 1), (first, 4), (second, 5), (whole, 3)]))
    assert len(result.token_ids) == 2
    found = {step["phase"]: (step["bucket"], step["count"]) for step in runner.report()["steps"]}
    assert found == {Phase.PREFILL: (16, 1), Phase.HEAD: (2, 1)}

    runner.reset_report()
    assert runner.execute(maker.batch([(first, 4), (second, 2)])).token_ids == []
    assert [step["phase"] for step in runner.report()["steps"]] == [Phase.PREFILL], "nothing drawn, no head"
