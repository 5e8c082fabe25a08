"""The loop with a channel made of lists: what goes in, what comes out, step by step."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from engine_process_fakes import CRASHING_TOKEN, expected_answer, make_core

from gapless.errors import GaplessError
from gapless.serve.engine_loop import MAX_FAILED_STEPS, EngineLoop
from gapless.serve.messages import (
    AbortRequest,
    Answer,
    Embedding,
    EmbedRequest,
    GenerateRequest,
    Grammar,
    Heartbeat,
    Query,
    Refused,
    Shutdown,
    StepOutput,
)


class ListChannel:
    """``script``: what arrives at each look; ``waits`` records how long the loop was willing to wait."""

    def __init__(self, *script) -> None:
        self.script = deque(script)
        self.sent = []
        self.waits = []

    def receive(self, timeout_s):
        self.waits.append(timeout_s)
        return self.script.popleft() if self.script else [Shutdown(drain_s=60)]

    def send(self, message):
        self.sent.append(message)

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def deltas(self, name):
        return [d for output in self.of(StepOutput) for d in output.deltas if d.request_id == name]


def run(core, *script, **options):
    channel = ListChannel(*script)
    loop = EngineLoop(core, channel, report=core.runner.report, **options)
    loop.run()
    return channel, loop


def generate(name, prompt, num_tokens=4, **values):
    params = {"max_tokens": num_tokens, "temperature": 0.0, **values.pop("params", {})}
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params, **values)


def test_one_message_per_step_holds_every_stream():
    channel, _ = run(make_core(), [generate("a", [1]), generate("b", [2])])
    outputs = channel.of(StepOutput)
    assert len(outputs) == 4
    assert all([d.request_id for d in output.deltas] == ["a", "b"] for output in outputs)
    for name, first in (("a", 1), ("b", 2)):
        assert [t for d in channel.deltas(name) for t in d.token_ids] == expected_answer([first], 4)


def test_a_request_that_does_not_stream_has_one_delta():
    channel, _ = run(make_core(), [generate("a", [1], stream=False)])
    (delta,) = channel.deltas("a")
    assert (delta.token_ids, delta.finish_reason) == (expected_answer([1], 4), "length")


def test_it_waits_only_when_there_is_nothing_to_do():
    channel, _ = run(make_core(), [], [generate("a", [1])], heartbeat_s=1.0)
    assert channel.waits[0] > 0.9
    assert set(channel.waits[2:]) == {0.0}


def test_an_abort_frees_the_blocks_before_the_next_step():
    core = make_core()
    seen = []
    launch = core.runner.launch
    core.runner.launch = lambda batch: (seen.append(core.scheduler.allocator.num_used), launch(batch))[1]
    script = ([generate("a", list(range(1, 40)), 500), generate("b", [2], 3)], [AbortRequest(request_id="a")])
    channel, _ = run(core, *script)
    assert seen == [4, 1, 1]
    assert channel.deltas("a")[-1].finish_reason == "abort"
    assert core.scheduler.allocator.num_used == 0


def test_aborting_what_is_unknown_does_nothing():
    channel, _ = run(make_core(), [AbortRequest(request_id="never")], [generate("a", [1])])
    assert len(channel.deltas("a")) == 4


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (generate("a", []), "empty prompt"),
        (generate("a", [1], params={"top_p": 7.0}), "top_p"),
        (generate("a", [1], params={"colour": 1}), "colour"),
        (generate("a", [1], prompt_logprobs=99), "prompt_logprobs"),
        (EmbedRequest(request_id="a", prompt_token_ids=[]), "empty prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_once(message, words):
    channel, loop = run(make_core(), [message])
    (refused,) = channel.of(Refused)
    assert refused.request_id == "a"
    assert words in refused.message
    assert channel.of(StepOutput) == []
    assert loop.stats()["requests_refused"] == 1


def test_a_name_in_use_is_refused_and_the_first_goes_on():
    channel, _ = run(make_core(), [generate("a", [1]), generate("a", [2])])
    assert len(channel.of(Refused)) == 1
    assert [t for d in channel.deltas("a") for t in d.token_ids] == expected_answer([1], 4)


def test_an_embedding_is_no_text():
    channel, loop = run(
        make_core(), [EmbedRequest(request_id="e", prompt_token_ids=[3, 4]), generate("a", [1])]
    )
    assert channel.of(Embedding) == [Embedding("e", [2.0, 7.0])]
    assert channel.deltas("e") == []
    assert len(channel.deltas("a")) == 4
    assert loop.stats()["prompt_tokens"] == 3


def test_a_failed_embedding_says_why():
    channel, _ = run(make_core(), [EmbedRequest(request_id="e", prompt_token_ids=[CRASHING_TOKEN])])
    (embedding,) = channel.of(Embedding)
    assert embedding.values == []
    assert "this prompt breaks its step" in embedding.error


def test_a_failed_step_is_told_to_its_requests_and_the_next_is_run():
    channel, loop = run(make_core(), [generate("a", [CRASHING_TOKEN])], [generate("b", [1])])
    (delta,) = channel.deltas("a")
    assert delta.finish_reason == "error"
    assert len(channel.deltas("b")) == 4
    assert loop.stats()["requests_finished"] == {"error": 1, "length": 1}


def test_only_failing_steps_end_the_loop():
    script = [[generate(f"r{i}", [CRASHING_TOKEN])] for i in range(MAX_FAILED_STEPS)]
    with pytest.raises(GaplessError, match=f"{MAX_FAILED_STEPS} steps in a row have failed"):
        run(make_core(), *script)


def test_shutdown_finishes_what_runs_within_the_limit():
    channel, _ = run(make_core(), [generate("a", [1], 30), Shutdown(drain_s=60)])
    assert channel.deltas("a")[-1].finish_reason == "length"


def test_shutdown_aborts_what_does_not_finish():
    ticks = iter(range(10**6))
    channel, _ = run(make_core(), [generate("a", [1], 3000), Shutdown(drain_s=50)], clock=lambda: next(ticks))
    last = channel.deltas("a")[-1]
    assert last.finish_reason == "abort"
    assert 1 < len(channel.deltas("a")) < 60


def test_queries_are_answered():
    core = make_core()
    channel, _ = run(core, [Query(query_id=7, what="report"), Query(query_id=8, what="stats")])
    first, second = channel.of(Answer)
    assert first == Answer(7, core.runner.report())
    assert (second.query_id, second.value["num_running"]) == (8, 0)


def test_heartbeats_come_once_per_interval_also_under_load():
    ticks = iter(range(10**6))
    channel, _ = run(make_core(), [generate("a", [1], 100)], clock=lambda: next(ticks) / 10, heartbeat_s=5.0)
    beats = channel.of(Heartbeat)
    assert len(beats) > 3
    between = [b.stats["uptime_s"] - a.stats["uptime_s"] for a, b in pairwise(beats)]
    assert all(5.0 <= gap < 7.0 for gap in between)


def test_statistics_count_what_happened():
    _, loop = run(make_core(max_num_reqs=1), [generate("a", [1, 2, 3], 5), generate("b", [4], 6)])
    stats = loop.stats()
    assert stats["prompt_tokens"] == 4
    assert stats["generation_tokens"] == 11
    assert stats["num_steps"] == 11
    assert stats["requests_finished"] == {"length": 2}
    assert sum(stats["queue_time_s"]["counts"]) == 2
    assert sum(stats["step_time_s"]["counts"]) == 11
    assert (stats["num_graphs"], stats["pool_bytes"], stats["capture_s"]) == (2, 7, 0.5)
    assert (stats["num_running"], stats["num_waiting"], stats["kv_usage"]) == (0, 0, 0.0)


def test_the_time_in_the_queue_ends_with_the_first_step():
    ticks = iter(range(10**6))
    script = [generate("a", [1], 50), generate("b", [2], 2)]
    _, loop = run(make_core(max_num_reqs=1), script, clock=lambda: next(ticks) / 10)
    record = loop.stats()["queue_time_s"]
    assert sum(record["counts"]) == 2
    assert record["sum"] > 5, "the second has waited for all of the first one's steps"


def test_a_grammar_is_refused_where_there_is_none():
    channel, _ = run(make_core(), [generate("a", [1], grammar=Grammar(kind="json_object"))])
    assert len(channel.of(Refused)) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_bug_in_a_tokenizer_fails_the_request_that_meets_it(n):
    core = make_core()
    decode = core.tokenizer.decode

    def breaks(token_ids, **options):
        if 13 in token_ids:
            raise ZeroDivisionError("unlucky")
        return decode(token_ids, **options)

    core.tokenizer.decode = breaks
    channel, _ = run(core, [generate("a", [13], params={"n": n}), generate("b", [1])])
    deltas = channel.deltas("a")
    assert sorted(d.index for d in deltas) == list(range(n))
    assert all(d.finish_reason == "error" and "unlucky" in d.error for d in deltas)
    assert [t for d in channel.deltas("b") for t in d.token_ids] == expected_answer([1], 4)
