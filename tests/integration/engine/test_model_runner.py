"""The runner on the emulated device: graphs equal padded eager bit for bit, whatever size, mix and order."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB_SIZE, BatchMaker, open_tiny

from gapless.engine.build import OpenedEngine
from gapless.engine.runner import ModelRunner
from gapless.engine.step import StepResult
from gapless.errors import ConfigError, GaplessError, MemoryLimitError

STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full"},
    "breakable": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "breakable"},
    "breakable_prefill": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "full"},
    "tc_piecewise": {
        "cuda_graph_backend_prefill": "tc_piecewise",
        "cuda_graph_backend_decode": "tc_piecewise",
    },
    "compiled_full_decode": {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
}


BUCKETS = range(4, 33, 4)


def sizes_of(bucket: int) -> range:
    """Numbers of tokens that are padded to ``bucket``."""
    return range(bucket - 3, bucket + 1)


@pytest.fixture(scope="module", params=STRATEGIES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedEngine:
    return open_tiny(tmp_path_factory.mktemp("tiny"), **STRATEGIES[request.param])


def logits_of(runner: ModelRunner, result: StepResult) -> torch.Tensor:
    return runner._graphs.logits[: len(result.token_ids)].clone()


def run_twice(runner: ModelRunner, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Run what ``make`` does with graphs and in padded eager, on equal caches."""
    with_graphs = make()
    with runner.padded_eager():
        eager = make()
    return with_graphs, eager


def poison(runner: ModelRunner, on: bool) -> None:
    graphs = runner._graphs
    for part in (graphs.prefill, graphs.decode, graphs.head, graphs.sample, graphs.sample_filtered):
        part.inputs.poison = on


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_prefill_equals_padded_eager_at_every_size(opened: OpenedEngine, bucket: int) -> None:
    runner = opened.runner
    for num_tokens in sizes_of(bucket):
        tokens = random_tokens(random.Random(num_tokens), num_tokens)

        def step(tokens: list[int] = tokens) -> torch.Tensor:
            maker = BatchMaker()
            result = runner.execute(maker.batch([(maker.sequence(tokens), len(tokens))]))
            return logits_of(runner, result)

        graph, eager = run_twice(runner, step)
        assert torch.equal(graph, eager), num_tokens
        assert graph.isfinite().all(), num_tokens


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4])
def test_decode_equals_padded_eager_at_every_batch_size(opened: OpenedEngine, num_reqs: int) -> None:
    runner = opened.runner
    rng = random.Random(num_reqs)
    prompts = [random_tokens(rng, rng.randint(1, 7)) for _ in range(num_reqs)]

    def generate() -> list[Any]:
        maker = BatchMaker()
        sequences = [maker.sequence(prompt) for prompt in prompts]
        result = runner.execute(maker.batch([(s, len(s.token_ids)) for s in sequences]))
        collected = [logits_of(runner, result)]
        for _ in range(5):
            for sequence, token in zip(sequences, result.token_ids, strict=True):
                sequence.token_ids.append(token)
            result = runner.execute(maker.batch([(s, 1) for s in sequences]))
            collected.append(logits_of(runner, result))
        return collected

    graph, eager = run_twice(runner, generate)
    assert all(torch.equal(a, b) for a, b in zip(graph, eager, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_mixed_batches_with_interleaved_sizes_equal_padded_eager(opened: OpenedEngine, seed: int) -> None:
    """A, B, A over buckets, chunks and decodes in one batch, with allocator churn between the steps."""
    runner = opened.runner

    def play() -> list[torch.Tensor]:
        rng = random.Random(seed)
        maker, collected = BatchMaker(), []
        sequences = [maker.sequence(random_tokens(rng, rng.randint(1, 40))) for _ in range(4)]
        for _ in range(12):
            churn = [torch.full((rng.randint(1, 5000),), float("nan")) for _ in range(5)]
            chosen = rng.sample(sequences, rng.randint(1, 4))
            work = []
            for sequence in chosen:
                left = len(sequence.token_ids) - sequence.num_computed_tokens
                work.append((sequence, min(left, rng.randint(1, 8))))
            batch = maker.batch(work)
            result = runner.execute(batch)
            collected.append(logits_of(runner, result))
            for entry, token in zip(batch.sampled_entries, result.token_ids, strict=True):
                entry.sequence.token_ids.append(token)
            del churn
        return collected

    graph, eager = run_twice(runner, play)
    assert all(torch.equal(a, b) for a, b in zip(graph, eager, strict=True))


def poisoned_and_eager(
    runner: ModelRunner, play: Callable[[], list[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Graphs with poison in every pad region, beside padded eager with the declared padding."""
    poison(runner, True)
    try:
        poisoned = play()
    finally:
        poison(runner, False)
    with runner.padded_eager():
        eager = play()
    return zip(poisoned, eager, strict=True)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_prefill_with_poisoned_padding_equals_padded_eager_at_every_size(
    opened: OpenedEngine, bucket: int
) -> None:
    runner = opened.runner
    prompts = {n: random_tokens(random.Random(n), n) for n in sizes_of(bucket)}

    def play() -> list[torch.Tensor]:
        maker = BatchMaker()
        return [
            logits_of(runner, runner.execute(maker.batch([(maker.sequence(tokens), num_tokens)])))
            for num_tokens, tokens in prompts.items()
        ]

    assert all(torch.equal(poisoned, eager) for poisoned, eager in poisoned_and_eager(runner, play))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_mixed_steps_with_poisoned_padding_equal_padded_eager_at_every_size(
    opened: OpenedEngine, bucket: int
) -> None:
    """A decode, the rest of a chunked prompt and a new prompt in one step, then decodes of all three."""
    runner = opened.runner

    def play_one(num_tokens: int) -> list[torch.Tensor]:
        rng = random.Random(num_tokens)
        lengths = (rng.randint(1, 9), 5, num_tokens - 2)
        maker = BatchMaker()
        decode, chunked, new = (maker.sequence(random_tokens(rng, length)) for length in lengths)
        result = runner.execute(maker.batch([(decode, lengths[0]), (chunked, 4)]))
        collected = [logits_of(runner, result)]
        decode.token_ids += result.token_ids
        for work in ([(decode, 1), (chunked, 1), (new, lengths[2])], [(decode, 1), (chunked, 1), (new, 1)]):
            result = runner.execute(maker.batch(work))
            collected.append(logits_of(runner, result))
            for (sequence, _), token in zip(work, result.token_ids, strict=True):
                sequence.token_ids.append(token)
        return collected

    def play() -> list[torch.Tensor]:
        sizes = [n for n in sizes_of(bucket) if n > 2]  # one token of each of the three
        return [logits for num_tokens in sizes for logits in play_one(num_tokens)]

    assert all(torch.equal(poisoned, eager) for poisoned, eager in poisoned_and_eager(runner, play))


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4])
def test_decode_with_poisoned_padding_equals_padded_eager_at_every_batch_size(
    opened: OpenedEngine, num_reqs: int
) -> None:
    runner = opened.runner
    prompts = [random_tokens(random.Random(number), 2 * number + 1) for number in range(num_reqs)]

    def play() -> list[torch.Tensor]:
        maker = BatchMaker()
        sequences = [maker.sequence(prompt) for prompt in prompts]
        result = runner.execute(maker.batch([(s, len(s.token_ids)) for s in sequences]))
        collected = []
        for _ in range(3):
            for sequence, token in zip(sequences, result.token_ids, strict=True):
                sequence.token_ids.append(token)
            result = runner.execute(maker.batch([(s, 1) for s in sequences]))
            collected.append(logits_of(runner, result))
        return collected

    assert all(torch.equal(poisoned, eager) for poisoned, eager in poisoned_and_eager(runner, play))


def test_every_step_is_counted_as_a_replay_or_with_its_reason(opened: OpenedEngine) -> None:
    runner = opened.runner
    runner.reset_report()
    maker = BatchMaker()
    sequence = maker.sequence([5, 6, 7])
    result = runner.execute(maker.batch([(sequence, 3)]))
    sequence.token_ids += result.token_ids
    runner.execute(maker.batch([(sequence, 1)]))
    report = runner.report()
    counted = sum(step["count"] for step in report["steps"] if step["phase"] in ("prefill", "decode"))
    eager = sum(row["count"] for row in report["eager"] if row["phase"] in ("prefill", "decode"))
    assert counted + eager == 2
    if report["plan"]["prefill"]["strategy"] == "disabled":
        assert {"phase": "prefill", "reason": "phase_disabled", "count": 1} in report["eager"]
    else:
        assert eager == 0


def test_report_holds_plan_graphs_and_start_up(opened: OpenedEngine) -> None:
    report = opened.runner.report()
    assert report["failures"] == []
    assert report["graphs"], "the ledger lists every graph"
    assert {"phase", "strategy", "num_tokens", "capture_s", "pool_bytes"} <= report["graphs"][0].keys()
    assert report["startup"]["num_blocks"] == 33
    assert report["startup"]["attention_backend"] == "torch_reference"


def test_a_start_logs_its_plan_with_reasons_and_where_its_seconds_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gapless")
    opened = open_tiny(tmp_path, cuda_graph_bs_prefill=[8, 16], cuda_graph_bs_decode=[2, 99])
    plan = [record.message for record in caplog.records if record.name == "gapless.plan"]
    assert plan == opened.runner.plan.describe()
    assert any("99" in line for line in plan), "a size that was dropped"
    (said,) = [record.message for record in caplog.records if record.name == "gapless.engine.build"]
    assert re.fullmatch(r"start-up: load \S+ s, cache \S+ s, kernels \S+ s, capture \S+ s", said)


def test_a_chunk_that_ends_before_the_prompt_draws_nothing(opened: OpenedEngine) -> None:
    maker = BatchMaker()
    sequence = maker.sequence([1, 2, 3, 4, 5])
    assert opened.runner.execute(maker.batch([(sequence, 3)])).token_ids == []
    assert len(opened.runner.execute(maker.batch([(sequence, 2)])).token_ids) == 1


def test_one_token_chunk_among_decodes_draws_only_for_the_decodes(opened: OpenedEngine) -> None:
    maker = BatchMaker()
    long, short = maker.sequence([1, 2, 3]), maker.sequence([4])
    result = opened.runner.execute(maker.batch([(long, 1), (short, 1)]))
    alone = BatchMaker()
    expected = opened.runner.execute(alone.batch([(alone.sequence([1, 2]), 1), (alone.sequence([4]), 1)]))
    assert result.token_ids == expected.token_ids[-1:]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5}]
)
def test_sampled_tokens_equal_padded_eager_and_repeat_with_their_seed(
    opened: OpenedEngine, options: dict[str, Any]
) -> None:
    runner = opened.runner

    def draw() -> list[int]:
        maker = BatchMaker(temperature=0.9, **options)
        batch = maker.batch([(maker.sequence([i + 1, 2, 3]), 3) for i in range(3)])
        return runner.execute(batch).token_ids

    graph, eager = run_twice(runner, draw)
    assert graph == eager == draw()


def test_draws_do_not_depend_on_the_row_of_the_batch(opened: OpenedEngine) -> None:
    maker = BatchMaker(temperature=1.0)
    sequences = [maker.sequence([i + 1, 2, 3]) for i in range(4)]
    drawn = opened.runner.execute(maker.batch([(s, 3) for s in sequences])).token_ids
    for sequence in sequences:
        sequence.num_computed_tokens = 0
    order = [2, 0, 3, 1]
    again = opened.runner.execute(maker.batch([(sequences[i], 3) for i in order])).token_ids
    assert again == [drawn[i] for i in order]


def test_nan_logits_fail_only_their_own_request(opened: OpenedEngine) -> None:
    """A NaN in one request's cache reaches no other request."""
    maker = BatchMaker()
    sick, well = maker.sequence([1, 2, 3]), maker.sequence([4, 5, 6])
    runner = opened.runner
    result = runner.execute(maker.batch([(sick, 3), (well, 3)]))
    for sequence, token in zip((sick, well), result.token_ids, strict=True):
        sequence.token_ids.append(token)
    layer = opened.loaded.model.attention_layers()[0]
    assert layer.v_cache is not None
    layer.v_cache[sick.block_table[0], 0] = float("nan")
    try:
        result = runner.execute(maker.batch([(sick, 1), (well, 1)]))
    finally:
        layer.v_cache.zero_()
    assert list(result.errors) == [0]
    assert "NaN" in result.errors[0]
    assert result.token_ids[1] >= 0


def test_preempted_sequence_starts_over_with_its_new_blocks(opened: OpenedEngine) -> None:
    maker = BatchMaker()
    tokens = [7, 8, 9, 10]
    sequence = maker.sequence(tokens)
    first = opened.runner.execute(maker.batch([(sequence, 4)])).token_ids
    sequence.generation += 1
    sequence.block_table, sequence.num_computed_tokens = [], 0
    assert opened.runner.execute(maker.batch([(sequence, 4)])).token_ids == first
    assert sequence.block_table == [2]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"repetition_penalty": 1.5}, "penalties"),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, "penalties"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_host_side_work_on_logits_is_counted(
    opened: OpenedEngine, params: dict[str, Any], reason: str
) -> None:
    opened.runner.reset_report()
    maker = BatchMaker(**params)
    opened.runner.execute(maker.batch([(maker.sequence([1, 2, 3]), 3)]))
    assert {"phase": "sample", "reason": reason, "count": 1} in opened.runner.report()["eager"]


def test_logprobs_are_of_the_models_own_distribution(opened: OpenedEngine) -> None:
    plain, penalised = BatchMaker(logprobs=2), BatchMaker(logprobs=2, repetition_penalty=5.0)
    results = [opened.runner.execute(m.batch([(m.sequence([1, 2, 3]), 3)])) for m in (plain, penalised)]
    best = [result.logprobs[0][1] for result in results]  # type: ignore[index]
    assert best[0] == best[1]
    drawn = results[0].logprobs[0][0]  # type: ignore[index]
    assert drawn.token_id == results[0].token_ids[0]
    assert drawn.rank == 1
    assert drawn.logprob == best[0].logprob


def test_gaps_in_a_listed_ladder_are_measured(tmp_path: Path) -> None:
    opened = open_tiny(
        tmp_path, cuda_graph_bs_prefill=[4, 128], chunked_prefill_size=128, kv_cache_tokens=1024
    )
    (row,) = [g for g in opened.runner.report()["graphs"] if g["num_tokens"] == 128]
    timing = row["padding_timing"]
    assert timing["eager_tokens"] == 5
    maker = BatchMaker()
    opened.runner.execute(maker.batch([(maker.sequence(list(range(5))), 5)]))
    report = opened.runner.report()
    if timing["graph_s"] <= timing["eager_s"]:
        assert ("prefill", 128) in [(step["phase"], step["bucket"]) for step in report["steps"]]
        assert report["eager"] == []
    else:
        assert {"phase": "prefill", "reason": "padding_too_large", "count": 1} in report["eager"]


def test_steps_larger_than_the_ladder_run_eagerly_and_say_so(tmp_path: Path) -> None:
    runner = open_tiny(tmp_path, cuda_graph_max_bs_prefill=8).runner
    maker = BatchMaker()
    runner.execute(maker.batch([(maker.sequence(list(range(9))), 9)]))
    assert {"phase": "prefill", "reason": "larger_than_largest", "count": 1} in runner.report()["eager"]


def test_enforce_eager_captures_nothing(tmp_path: Path) -> None:
    runner = open_tiny(tmp_path, enforce_eager=True).runner
    maker = BatchMaker()
    runner.execute(maker.batch([(maker.sequence([1, 2]), 2)]))
    report = runner.report()
    assert report["graphs"] == []
    assert report["steps"] == []
    assert {"phase": "prefill", "reason": "mode_none", "count": 1} in report["eager"]


def test_too_little_memory_for_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises((MemoryLimitError, ConfigError), match="kv-cache-tokens"):
        open_tiny(tmp_path, kv_cache_tokens=8)


def test_cuda_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_tiny(tmp_path, device="cuda")


def test_model_length_is_capped_by_the_cache(tmp_path: Path) -> None:
    runner = open_tiny(tmp_path, kv_cache_tokens=64).runner
    assert runner.max_model_len == 64
    assert runner.num_blocks == 5


def test_shutdown_can_be_called_twice_and_gives_everything_back(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path)
    runner = opened.runner
    maker = BatchMaker()
    batch = maker.batch([(maker.sequence([1, 2]), 2)])
    runner.execute(batch)
    held = [weakref.ref(runner.graphs), weakref.ref(opened.loaded.model.attention_layers()[0].caches[0])]
    steps = runner.report()["steps"]
    runner.shutdown()
    runner.shutdown()
    gc.collect()  # frames of earlier failures of this process may still have to go
    assert runner.report()["memory"]["pool_bytes"] == 0
    assert runner.report()["steps"] == steps
    assert [ref() for ref in held] == [None, None]
    with pytest.raises(GaplessError, match="shut down"):
        runner.execute(batch)
