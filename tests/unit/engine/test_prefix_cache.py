"""Prefix caching in the scheduler and the loop: what is found, from when on, and that it is never wrong.

The fake runner draws each token from what it reads back through the block table, so a block with other
contents than its hash says changes a token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_fakes import PagedFakeRunner, expected_tokens
from engine_soak import Soak
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import OverlappedEngine, make_scheduler, make_sequence
from test_core_ahead import LateRunner
from test_interrupted_bookkeeping import interrupted_at

from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.request import Request, Sequence, make_sequences
from gapless.engine.scheduler import Scheduler
from gapless.engine.step import ScheduledBatch
from gapless.sampling.params import SamplingParams

STEM = list(range(100, 120))  # five blocks of four


def scheduler_of(**options: Any) -> Scheduler:
    return make_scheduler(PagedFakeRunner(**options), enable_prefix_caching=True)


def core_of(runner: PagedFakeRunner | None = None, **options: Any) -> EngineCore:
    return EngineCore(runner or PagedFakeRunner(**options), enable_prefix_caching=True)


def launch(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.launched(batch)
    return batch


def accept(scheduler: Scheduler, batch: ScheduledBatch, token: int = 7) -> None:
    for entry in batch.sampled_entries:
        if not entry.is_stale:
            entry.sequence.append_token(token)
    scheduler.complete(batch)


def starts(batch: ScheduledBatch) -> list[int]:
    return [entry.start for entry in batch.entries]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "detokenize": False, **values})


def run(core: EngineCore, *prompts: list[int], **values: Any) -> list[RequestOutput]:
    """All at once; every token is checked."""
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, params(**values), streams=False)
    outputs = drain(core)
    for index, prompt in enumerate(prompts):
        for choice in outputs[str(index)].outputs:
            count = len(choice.token_ids)
            assert list(choice.token_ids) == expected_tokens(prompt, num_tokens=count, vocab_size=1000)
            assert choice.finish_reason == "length", choice.error
    return [outputs[str(index)] for index in range(len(prompts))]


def drain(core: EngineCore) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(2000):
        if not core.has_unfinished():
            assert_idle(core.scheduler)
            return outputs
        outputs.update({output.request_id: output for output in core.step()})
    raise AssertionError("the engine does not come to an end")


def assert_idle(scheduler: Scheduler) -> None:
    allocator = scheduler.allocator
    assert (allocator.num_used, allocator.num_held) == (0, 0)
    assert allocator.num_free == allocator.num_usable


class TestWhatIsFound:
    @pytest.mark.parametrize(
        ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (21, 20)]
    )
    def test_full_blocks_but_never_the_last_token(self, num_tokens: int, num_cached: int) -> None:
        core, prompt = core_of(), list(range(num_tokens))
        assert run(core, prompt)[0].num_cached_tokens == 0
        assert run(core, prompt)[0].num_cached_tokens == num_cached
        assert core.runner.batches[3].entries[0].start == num_cached  # type: ignore[attr-defined]

    @pytest.mark.parametrize("num_same", range(0, 20))
    def test_as_far_as_prompts_are_the_same(self, num_same: int) -> None:
        core = core_of()
        run(core, STEM)
        other = STEM[:num_same] + [5] * (20 - num_same)
        assert run(core, other)[0].num_cached_tokens == num_same // 4 * 4

    def test_nothing_when_only_the_end_is_the_same(self) -> None:
        core = core_of()
        run(core, [1, *STEM])
        assert run(core, STEM)[0].num_cached_tokens == 0

    def test_an_answer_when_the_conversation_goes_on(self) -> None:
        core = core_of()
        (first,) = run(core, STEM, max_tokens=7)
        prompt = [*STEM, *first.outputs[0].token_ids, 3]
        # The seventh token was drawn, but nothing was computed of it.
        assert run(core, prompt)[0].num_cached_tokens == 24

    @pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.3, "seed": 3}])
    def test_whatever_the_sampling_is(self, values: dict[str, Any]) -> None:
        core = core_of()
        run(core, STEM, repetition_penalty=1.5, max_tokens=1)
        assert run(core, STEM, **values)[0].num_cached_tokens == 16

    @pytest.mark.parametrize(
        ("first", "second", "num_cached"),
        [(b"", b"", 16), (b"", b"adapter", 0), (b"a", b"b", 0), (b"a", b"a", 16)],
    )
    def test_only_by_requests_whose_other_inputs_are_the_same(
        self, first: bytes, second: bytes, num_cached: int
    ) -> None:
        scheduler = scheduler_of()
        for name, extra in (("x", first), ("y", second)):
            request = Request(
                request_id=name,
                prompt=None,
                prompt_token_ids=tuple(STEM),
                params=params(),
                max_total_tokens=23,
                cache_extra=extra,
            )
            (sequence,) = make_sequences(request, base_seed=0)
            scheduler.add(sequence)
            accept(scheduler, launch(scheduler))
        assert sequence.num_cached_tokens == num_cached

    @pytest.mark.parametrize("values", [{"prompt_logprobs": 0}, {"pooling": "last"}])
    def test_nothing_by_requests_that_read_hidden_states_but_others_find_theirs(
        self, values: dict[str, Any]
    ) -> None:
        core = core_of()
        run(core, STEM, **values)
        assert run(core, STEM, **values)[0].num_cached_tokens == 0
        assert core.report()["prefix_cache"]["queries"] == 0
        assert run(core, STEM)[0].num_cached_tokens == 16

    def test_nothing_without_a_cache(self) -> None:
        core = EngineCore(PagedFakeRunner())
        run(core, STEM)
        assert run(core, STEM)[0].num_cached_tokens == 0
        assert core.report()["prefix_cache"] is None
        core.reset_prefix_cache()


class TestFromWhenOn:
    def test_a_block_of_the_prompt_from_the_launch_of_the_step_that_computes_its_last_token(self) -> None:
        scheduler = scheduler_of(max_num_batched_tokens=6)
        scheduler.add(make_sequence(STEM))
        for step, num_found in enumerate((0, 1, 3, 4)):
            batch = scheduler.schedule()
            assert batch is not None
            probe = make_sequence(STEM)
            assert scheduler.prefix_cache is not None
            assert len(scheduler.prefix_cache.match(probe)) == num_found, f"step {step} is not launched yet"
            scheduler.launched(batch)

    def test_in_the_next_step_while_that_one_is_in_flight(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(make_sequence(STEM))
        launch(scheduler)
        scheduler.add(make_sequence(STEM))
        batch = launch(scheduler)
        assert starts(batch) == [20, 16]
        assert batch.entries[1].block_table[:4] == batch.entries[0].block_table[:4]
        assert batch.entries[1].block_table[4] != batch.entries[0].block_table[4]

    def test_not_within_one_step(self) -> None:
        scheduler = scheduler_of(max_num_batched_tokens=64)
        scheduler.add(make_sequence(STEM))
        scheduler.add(make_sequence(STEM))
        assert starts(launch(scheduler)) == [0, 0]

    @pytest.mark.parametrize("end", ["stop", "abort", "preempted"])
    def test_a_block_with_drawn_tokens_once_its_sequence_has_given_it_back(self, end: Any) -> None:
        scheduler = scheduler_of()
        sequence = make_sequence([1, 2, 3], max_tokens=30)
        scheduler.add(sequence)
        for _ in range(7):
            accept(scheduler, launch(scheduler))
        probe = make_sequence(list(sequence.token_ids))
        assert scheduler.prefix_cache is not None
        assert scheduler.prefix_cache.match(probe) == []
        if end == "preempted":
            scheduler._preempt(scheduler.running.pop())
        else:
            scheduler.finish(sequence, reason=end)
        # 3 + 7 tokens are known, 9 computed: two full blocks.
        assert len(scheduler.prefix_cache.match(probe)) == 2

    def test_not_what_a_step_in_flight_computes_of_tokens_that_the_host_does_not_know(self) -> None:
        scheduler = scheduler_of()
        sequence = make_sequence([1, 2, 3], max_tokens=30)
        scheduler.add(sequence)
        launch(scheduler)
        launch(scheduler)  # computes the fourth token, which nobody knows here
        scheduler.finish(sequence, reason="abort")
        assert scheduler.allocator.num_published == 0

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_nothing_of_a_step_that_was_never_launched(self, reason: Any) -> None:
        scheduler = scheduler_of(max_num_batched_tokens=8)
        sequence = make_sequence(STEM)
        scheduler.add(sequence)
        accept(scheduler, launch(scheduler))
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.finish(sequence, reason=reason)
        assert scheduler.allocator.num_published == (2 if reason == "abort" else 0)
        scheduler.complete(batch)
        assert_idle(scheduler)

    def test_nothing_of_a_sequence_that_was_aborted_inside_the_launch(self) -> None:
        runner = PagedFakeRunner()
        core = core_of(runner)
        runner.before_execute = lambda batch: core.abort_request("0")
        core.add_request("0", STEM, params())
        drain(core)
        assert core.scheduler.allocator.num_published == 0


class TestEviction:
    def test_the_longest_unused_prompt_goes_first_from_its_end(self) -> None:
        core = core_of(num_blocks=14, max_model_len=60)
        prompts = {name: [n * 50 + i for i in range(18)] for n, name in enumerate("abc")}
        run(core, prompts["a"], max_tokens=1)  # four blocks, and one that is not full
        run(core, prompts["b"], max_tokens=1)
        assert run(core, prompts["a"], max_tokens=1)[0].num_cached_tokens == 16
        run(core, prompts["c"] + [1] * 4, max_tokens=1)  # six blocks, and five are blank
        assert run(core, prompts["a"], max_tokens=1)[0].num_cached_tokens == 16
        cached_b = run(core, prompts["b"], max_tokens=1)[0].num_cached_tokens
        assert 0 < cached_b < 16, "its first blocks have outlived its last ones"

    def test_blocks_in_use_are_never_evicted(self) -> None:
        core = core_of(num_blocks=12, max_model_len=60, max_num_batched_tokens=64)
        core.add_request("long", STEM, params(max_tokens=20), streams=False)
        core.step()
        for number in range(12):
            core.add_request(f"n{number}", [number * 9 + i for i in range(9)], params(max_tokens=2))
        outputs = drain(core)
        tokens = outputs["long"].outputs[0].token_ids
        assert list(tokens) == expected_tokens(STEM, num_tokens=20, vocab_size=1000)

    def test_a_preempted_sequence_finds_what_is_left_of_its_own(self) -> None:
        scheduler = scheduler_of(num_blocks=20)
        sequence = make_sequence(STEM, max_tokens=20)
        scheduler.add(sequence)
        for _ in range(5):
            accept(scheduler, launch(scheduler))
        scheduler._preempt(scheduler.running.pop())
        batch = launch(scheduler)
        assert starts(batch) == [24]
        assert batch.entries[0].num_new_tokens == 1
        assert sequence.num_cached_tokens == 0, "of the prompt, when it first ran"
        assert scheduler.prefix_cache is not None
        assert (scheduler.prefix_cache.num_queries, scheduler.prefix_cache.num_hits) == (20, 0)


class TestChoices:
    @pytest.mark.parametrize("ahead", [0, 1])
    @pytest.mark.parametrize("budget", [6, 32])
    def test_all_share_the_blocks_of_their_prompt(self, ahead: int, budget: int) -> None:
        runner = LateRunner(max_steps_ahead=ahead, max_num_batched_tokens=budget)
        core = core_of(runner)
        prompt = [*STEM, 1, 2]
        run(core, prompt, n=4)
        computed = sum(e.num_new_tokens for b in runner.batches for e in b.entries if e.start < len(prompt))
        assert computed == 22 + 3 * 2, "the prompt once, and its last two tokens for each other choice"
        report = core.report()["prefix_cache"]
        assert (report["queries"], report["hits"]) == (4 * 22, 3 * 20)

    def test_nobody_waits_for_a_prompt_that_cannot_be_shared(self) -> None:
        core = core_of()
        run(core, [1, 2, 3, 4], n=3)
        assert core.runner.batches[0].num_reqs == 3  # type: ignore[attr-defined]

    def test_the_others_go_on_when_the_first_one_ends_early(self) -> None:
        runner = PagedFakeRunner(max_num_batched_tokens=8)
        core = core_of(runner)
        core.add_request("0", STEM, params(n=3))
        core.step()
        core.scheduler.finish(core.scheduler.running[0], reason="error", error="x")
        outputs = drain(core)
        for choice in outputs["0"].outputs[1:]:
            assert list(choice.token_ids) == expected_tokens(STEM, num_tokens=3, vocab_size=1000)

    def test_the_others_do_not_wait_for_blocks_that_will_never_be_published(self) -> None:
        core = core_of(max_num_batched_tokens=8)
        core.add_request("0", STEM, params(n=2, max_tokens=40), streams=False)
        core.step()
        core.reset_prefix_cache()
        for _ in range(5):
            core.step()
        assert len(core.scheduler.running) == 2
        drain(core)


class TestFailures:
    def test_a_failed_launch_leaves_nothing_to_find(self) -> None:
        runner = PagedFakeRunner()
        core = core_of(runner)
        run(core, STEM)

        def fail(batch: ScheduledBatch) -> None:
            raise RuntimeError("lost")

        runner.before_execute = fail
        core.add_request("0", [*STEM, *STEM], params())
        assert drain(core)["0"].outputs[0].finish_reason == "error"
        runner.before_execute = None
        run(core, [*STEM, *STEM, 1])

    def test_who_found_what_a_failing_step_computed_is_computed_anew(self) -> None:
        runner = LateRunner(max_steps_ahead=1)
        runner.fails_at = 0
        core = core_of(runner)
        core.add_request("bad", STEM, params(max_tokens=5), streams=False)
        core.step()  # step 0 in flight
        core.add_request("good", [*STEM, 1], params(max_tokens=5), streams=False)
        # What the failing step wrote is not to be trusted; steps that read it draw tokens nobody may see.
        runner.slots = dict.fromkeys(runner.slots, -1)
        draw, runner._draw = runner._draw, lambda entry: 5  # type: ignore[method-assign]
        outputs = {output.request_id: output for output in core.step()}
        runner._draw = draw  # type: ignore[method-assign]
        assert runner.batches[1].entries[-1].start == 20, "it had found the blocks"
        outputs.update(drain(core))
        assert outputs["bad"].outputs[0].finish_reason == "error"
        good = outputs["good"].outputs[0]
        assert list(good.token_ids) == expected_tokens([*STEM, 1], num_tokens=5, vocab_size=1000)

    def test_a_step_that_fails_late_empties_the_cache(self) -> None:
        runner = LateRunner(max_steps_ahead=1)
        core = core_of(runner)
        run(core, STEM)
        runner.fails_at = runner.batches[-1].step_id + 1
        core.add_request("0", [9, 9, 9], params())
        drain(core)
        assert core.scheduler.allocator.num_published == 0
        assert run(core, STEM)[0].num_cached_tokens == 0
        assert run(core, STEM)[0].num_cached_tokens == 16

    def test_a_request_that_fails_alone_leaves_nothing_of_its_own(self) -> None:
        runner = PagedFakeRunner()
        core = core_of(runner)
        run(core, [8] * 9)
        runner.errors = lambda batch: {0: "NaN logits"}
        core.add_request("0", STEM, params())
        assert drain(core)["0"].outputs[0].finish_reason == "error"
        runner.errors = None
        assert run(core, STEM)[0].num_cached_tokens == 0
        assert run(core, [8] * 9)[0].num_cached_tokens == 8, "others keep what they have"


class TestReset:
    def test_nothing_is_found_afterwards(self) -> None:
        core = core_of()
        run(core, STEM)
        core.reset_prefix_cache()
        assert core.scheduler.allocator.num_published == 0
        assert run(core, STEM)[0].num_cached_tokens == 0
        assert run(core, STEM)[0].num_cached_tokens == 16

    def test_not_even_what_a_running_request_computes_later(self) -> None:
        core = core_of(max_num_batched_tokens=8)
        core.add_request("0", STEM, params(max_tokens=10), streams=False)
        core.step()
        core.reset_prefix_cache()
        drain(core)
        assert core.scheduler.allocator.num_published == 0


class TestCounts:
    def test_queries_and_hits_are_exact_and_never_fall(self) -> None:
        core = core_of()
        run(core, STEM)
        run(core, STEM, [1, 2, 3])
        run(core, [*STEM, *STEM])
        cache = core.scheduler.prefix_cache
        assert cache is not None
        assert (cache.num_queries, cache.num_hits) == (20 + 23 + 40, 0 + 16 + 20)
        report = core.report()["prefix_cache"]
        assert (report["queries"], report["hits"], report["hit_rate"]) == (83, 36, round(36 / 83, 4))
        cache.reset_counts()
        assert core.report()["prefix_cache"]["queries"] == 0
        assert core.report()["prefix_cache"]["hit_rate"] == 0.0
        run(core, STEM)
        assert core.report()["prefix_cache"]["hits"] == 16
        assert (cache.num_queries, cache.num_hits) == (103, 52)

    def test_the_last_delta_of_each_choice_has_its_own_count(self) -> None:
        core = core_of()
        run(core, STEM)
        core.add_request("0", [*STEM, 5], params(n=2))
        deltas = []
        while core.has_unfinished():
            deltas += core.step_deltas()
        assert [d.num_cached_tokens for d in deltas if d.finish_reason is None] == [0] * (len(deltas) - 2)
        assert [d.num_cached_tokens for d in deltas if d.finish_reason is not None] == [20, 20]

    def test_a_server_counts_what_the_engine_found(self) -> None:
        from gapless.serve.stats import EngineCounters, collect_stats

        core = core_of()
        run(core, STEM)
        run(core, STEM)
        stats = collect_stats(core, EngineCounters(), log=None, capture={}, uptime_s=1.0)
        assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (40, 16)
        assert stats["kv_usage"] == 0.0, "what is only kept counts as free"


PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 24), st.integers(0, 6), st.integers(1, 16)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(
    work=PROMPTS,
    later=PROMPTS,
    aborts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 15)), max_size=3),
    num_blocks=st.integers(13, 60),
    budget=st.sampled_from([2, 5, 40]),
    max_num_reqs=st.integers(1, 8),
    num_ahead=st.integers(0, 2),
)
def test_tokens_are_those_of_computing_everything(
    work, later, aborts, num_blocks, budget, max_num_reqs, num_ahead
) -> None:
    """Over shared stems, chunks, preemption, aborts and steps in flight; nothing leaks."""
    runner = PagedFakeRunner(num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_reqs=max_num_reqs)
    engine = OverlappedEngine(runner, num_ahead=num_ahead, enable_prefix_caching=True)
    sequences: list[Sequence] = []
    for part in (work, later):
        for stem, num_stem, num_own, max_tokens in part:
            prompt = [stem * 100 + i for i in range(num_stem)] + [900 + i for i in range(num_own)]
            sequences.append(make_sequence(prompt or [stem], max_tokens=max_tokens))
            engine.add(sequences[-1])
        for step in range(13):
            for _, which in [a for a in aborts if a[0] == step]:
                engine.scheduler.finish(sequences[which % len(sequences)], reason="abort")
            engine.step()
    engine.run()
    for sequence in sequences:
        prompt = list(sequence.request.prompt_token_ids)
        made = sequence.output_token_ids
        assert made == expected_tokens(prompt, num_tokens=len(made), vocab_size=1000)
        assert sequence.finish_reason == "abort" or len(made) == sequence.params.max_tokens
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_with_faults_gives_no_wrong_token_and_loses_no_block(seed: int) -> None:
    soak = Soak(num_requests=120, seed=seed, enable_prefix_caching=True)
    summary = soak.run()
    cache = soak.core.scheduler.prefix_cache
    assert cache is not None
    assert cache.num_hits > 200
    assert summary.num_preemptions > 0
    assert min(summary.num_aborted, summary.num_errors) > 0


@pytest.mark.parametrize("seed", range(6))
def test_a_life_with_steps_ahead_that_fail_late_gives_no_wrong_token(seed: int) -> None:
    rng = random.Random(seed)
    runner = LateRunner(max_steps_ahead=1, num_blocks=40, max_model_len=100)
    core = core_of(runner)
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, RequestOutput] = {}
    for _ in range(150):
        if rng.random() < 0.3:
            name, stem = str(len(prompts)), rng.randrange(3)
            prompts[name] = [stem * 50 + i for i in range(rng.randint(1, 40))] + [rng.randrange(9)]
            core.add_request(name, prompts[name], params(max_tokens=rng.randint(1, 20), n=rng.choice((1, 2))))
        if rng.random() < 0.05:
            runner.fails_at = runner.batches[-1].step_id + 1 if runner.batches else None
        if prompts and rng.random() < 0.05:
            core.abort_request(rng.choice(list(prompts)))
        outputs.update({output.request_id: output for output in core.step()})
    outputs.update(drain(core))
    assert outputs.keys() == prompts.keys()
    for name, output in outputs.items():
        for choice in output.outputs:
            count = len(choice.token_ids)
            assert list(choice.token_ids) == expected_tokens(prompts[name], num_tokens=count, vocab_size=1000)
    assert core.scheduler.prefix_cache is not None
    assert core.scheduler.prefix_cache.num_hits > 0


@pytest.mark.parametrize("part", range(3))
def test_an_interrupt_at_any_line_leaves_nothing_wrong_to_find(
    part: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts go on, and prompts that ran before are computed anew or found as they are."""
    caplog.set_level("CRITICAL")
    files = ("engine/scheduler.py", "engine/prefix_cache.py", "cache/blocks.py", "cache/prefix.py")
    monkeypatch.setattr("test_interrupted_bookkeeping.FILES", files)
    at_line = 1 + part * 9
    while True:
        core = core_of(
            LateRunner(max_steps_ahead=1, num_blocks=14, max_model_len=60, max_num_batched_tokens=12)
        )
        run(core, STEM)
        for name, own in (("a", [1, 2]), ("b", [3]), ("c", list(range(9)))):
            core.add_request(name, [*STEM, *own], params(max_tokens=6), streams=False)
        outputs: dict[str, Any] = {}
        if not interrupted_at(at_line, core, outputs).where:
            return
        drain(core)
        cache = core.scheduler.prefix_cache
        assert cache is not None
        before = cache.num_queries
        assert before >= 20
        run(core, STEM, [*STEM, 1, 2])
        run(core, [*STEM, 3], [*STEM, *range(9)])
        assert cache.num_queries == before + 42 + 50
        at_line += 27
