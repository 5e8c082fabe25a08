"""The engine loop: requests end as they should, bad ones alone, and nothing leaks whatever fails."""

from __future__ import annotations

import itertools

import pytest
from engine_fakes import PagedFakeRunner, expected_tokens
from engine_soak import run_soak
from tokenizer_fakes import TestTokenizer, byte_fallback, byte_level

from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.step import StepResult
from gapless.errors import RequestError
from gapless.sampling.params import SamplingParams

TOKENIZER = byte_level()


def ids_only(**params) -> SamplingParams:
    return SamplingParams(detokenize=False, **params)


def drain(core: EngineCore) -> dict[str, RequestOutput]:
    """Run to the end; the last output of each request."""
    final = {}
    while core.has_unfinished():
        for output in core.step():
            assert output.request_id not in final or not final[output.request_id].finished
            final[output.request_id] = output
    assert core.step() == []
    assert_idle(core)
    return final


def assert_idle(core: EngineCore) -> None:
    allocator = core.scheduler.allocator
    assert (allocator.num_used, allocator.num_held) == (0, 0)
    assert not core.scheduler.has_unfinished
    assert core.scheduler.num_in_flight == 0


def speak(runner: PagedFakeRunner, tokens: list[int]) -> None:
    """Make the runner draw these tokens, whatever it reads."""
    runner.draw = lambda entry, read: tokens[len(read) - entry.sequence.num_prompt_tokens]


def text_core(output: str | list[int], *, tokenizer: TestTokenizer = TOKENIZER, **facts):
    """A core whose model answers with ``output`` to everything."""
    tokens = tokenizer.encode(output, add_special_tokens=False) if isinstance(output, str) else output
    runner = PagedFakeRunner(vocab_size=tokenizer.vocab_size, **facts)
    speak(runner, [*tokens, *[tokens[-1]] * 50])
    return EngineCore(runner, tokenizer=tokenizer, eos_token_ids=[1]), runner, tokens


def test_a_request_is_answered_with_the_models_tokens():
    core = EngineCore(PagedFakeRunner())
    core.add_request("a", [1, 2, 3], ids_only(max_tokens=5))
    output = drain(core)["a"]
    assert output.prompt_token_ids == (1, 2, 3)
    assert list(output.outputs[0].token_ids) == expected_tokens([1, 2, 3], num_tokens=5, vocab_size=1000)
    assert output.outputs[0].finish_reason == "length"


def test_a_streaming_request_shows_every_token_and_a_silent_one_only_the_end():
    core = EngineCore(PagedFakeRunner())
    core.add_request("loud", [1, 2], ids_only(max_tokens=3), streams=True)
    core.add_request("silent", [3, 4], ids_only(max_tokens=3), streams=False)
    seen = []
    while core.has_unfinished():
        seen += [(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in core.step()]
    assert [s for s in seen if s[0] == "loud"] == [("loud", 1, False), ("loud", 2, False), ("loud", 3, True)]
    assert [s for s in seen if s[0] == "silent"] == [("silent", 3, True)]


def test_requests_that_did_not_change_are_not_returned():
    core = EngineCore(PagedFakeRunner(max_num_batched_tokens=4))
    core.add_request("long", list(range(12)), ids_only(max_tokens=1))
    assert [core.step(), core.step()] == [[], []]
    assert [o.request_id for o in core.step()] == ["long"]


def test_each_of_n_choices_is_its_own_sequence_and_the_request_ends_with_the_last():
    runner = PagedFakeRunner()
    core = EngineCore(runner, eos_token_ids=[0])
    runner.draw = lambda entry, read: 0 if len(read) - 2 == entry.sequence.index else 9
    core.add_request("a", [1, 2], ids_only(n=3, max_tokens=10))
    outputs = []
    while core.has_unfinished():
        outputs += core.step()
    assert [o.finished for o in outputs] == [False, False, True]
    choices = outputs[-1].outputs
    assert [c.index for c in choices] == [0, 1, 2]
    assert [c.token_ids for c in choices] == [(0,), (9, 0), (9, 9, 0)]
    assert {c.finish_reason for c in choices} == {"stop"}
    assert_idle(core)


@pytest.mark.parametrize("n", [1, 5, 20])
def test_more_choices_than_running_requests_take_turns(n):
    core = EngineCore(PagedFakeRunner(max_num_reqs=3))
    core.add_request("a", [1, 2], ids_only(n=n, max_tokens=4))
    output = drain(core)["a"]
    expected = expected_tokens([1, 2], num_tokens=4, vocab_size=1000)
    assert [list(c.token_ids) for c in output.outputs] == [expected] * n


def test_seeds_come_from_the_request_or_from_the_engines_own():
    def seeds(engine_seed: int, *params: SamplingParams) -> list[int]:
        runner = PagedFakeRunner()
        core = EngineCore(runner, seed=engine_seed)
        for number, param in enumerate(params):
            core.add_request(str(number), [1], param)
        core.step()
        return [entry.sequence.seed for entry in runner.batches[0].entries]

    assert seeds(0, ids_only(seed=7, n=2)) == seeds(1, ids_only(seed=7, n=2)) == [7, 8]
    assert seeds(0, ids_only(), ids_only()) == seeds(0, ids_only(), ids_only())
    assert seeds(0, ids_only(), ids_only()) != seeds(1, ids_only(), ids_only())
    assert len(set(seeds(0, ids_only(), ids_only()))) == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([5000], "vocabulary"), ([1] * 500, "maximum model length"), ("text", "tokenizer")],
)
def test_a_refused_request_leaves_the_others_alone(prompt, message):
    core = EngineCore(PagedFakeRunner())
    core.add_request("good", [1, 2], ids_only(max_tokens=3))
    with pytest.raises(RequestError, match=message):
        core.add_request("bad", prompt, ids_only())
    assert list(drain(core)) == ["good"]


def test_a_name_in_use_is_refused_and_free_again_afterwards():
    core = EngineCore(PagedFakeRunner())
    core.add_request("a", [1], ids_only(max_tokens=2))
    prepared = core.prepare("b", [1], ids_only(max_tokens=1))
    core.add(prepared)
    with pytest.raises(RequestError, match="request_id='a' is already in use"):
        core.add_request("a", [2], ids_only())
    with pytest.raises(RequestError, match="already in use"):
        core.add(prepared)
    drain(core)
    core.add_request("a", [1], ids_only(max_tokens=1))
    assert drain(core)["a"].finished


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_returns_what_it_has_and_why(num_steps):
    core = EngineCore(PagedFakeRunner())
    core.add_request("a", [1, 2], ids_only(max_tokens=50), streams=False)
    core.add_request("b", [3], ids_only(max_tokens=6))
    for _ in range(num_steps):
        core.step()
    assert core.abort_request("a") is True
    final = drain(core)
    choice = final["a"].outputs[0]
    assert choice.finish_reason == "abort"
    assert list(choice.token_ids) == expected_tokens([1, 2], num_tokens=num_steps, vocab_size=1000)
    assert final["b"].outputs[0].finish_reason == "length"


def test_aborting_the_only_request_still_returns_its_last_output():
    core = EngineCore(PagedFakeRunner())
    core.add_request("a", [1], ids_only())
    core.abort_request("a")
    assert core.has_unfinished()
    assert [o.request_id for o in core.step()] == ["a"]
    assert not core.has_unfinished()


@pytest.mark.parametrize("request_id", ["unknown", "done"])
def test_aborting_what_does_not_run_is_harmless(request_id):
    core = EngineCore(PagedFakeRunner())
    core.add_request("done", [1], ids_only(max_tokens=1))
    drain(core)
    assert core.abort_request(request_id) is False
    assert not core.has_unfinished()


def test_a_request_aborted_while_its_step_runs_drops_the_late_token_and_frees_its_blocks_afterwards():
    runner = PagedFakeRunner()
    core = EngineCore(runner)
    core.add_request("a", [1, 2], ids_only(max_tokens=50))
    core.add_request("b", [3, 4], ids_only(max_tokens=3))
    core.step()
    held = []

    def abort(batch) -> None:
        core.abort_request("a")
        held.append(core.scheduler.allocator.num_held)

    runner.before_execute = abort
    outputs = {o.request_id: o for o in core.step()}
    runner.before_execute = None
    assert held == [1]
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert len(outputs["a"].outputs[0].token_ids) == 1, "the token of the step in flight is not shown"
    assert len(outputs["b"].outputs[0].token_ids) == 2
    drain(core)


def test_a_request_added_while_a_step_runs_joins_the_next_one():
    runner = PagedFakeRunner()
    core = EngineCore(runner)
    core.add_request("a", [1], ids_only(max_tokens=2))

    def add(batch) -> None:
        runner.before_execute = None
        core.add_request("b", [2], ids_only(max_tokens=1))

    runner.before_execute = add
    final = drain(core)
    assert set(final) == {"a", "b"}


class TestFailures:
    def test_a_step_that_raises_fails_its_sequences_and_the_engine_goes_on(self, caplog):
        runner = PagedFakeRunner(max_num_reqs=2)
        core = EngineCore(runner)
        for name in "abc":
            core.add_request(name, [1, 2, 3], ids_only(max_tokens=3), streams=False)

        def fail(batch) -> None:
            runner.before_execute = None
            raise RuntimeError("device lost")

        runner.before_execute = fail
        final = drain(core)
        for name in "ab":
            (choice,) = final[name].outputs
            assert choice.finish_reason == "error"
            assert choice.error == "step 0 failed: RuntimeError: device lost"
        assert final["c"].outputs[0].finish_reason == "length"
        assert "device lost" in caplog.text

    def test_only_the_choices_in_the_failed_step_fail(self):
        runner = PagedFakeRunner(max_num_reqs=1)
        core = EngineCore(runner)
        core.add_request("a", [1, 2, 3], ids_only(n=2, max_tokens=2))

        def fail(batch) -> None:
            runner.before_execute = None
            raise ValueError("bad")

        runner.before_execute = fail
        assert [c.finish_reason for c in drain(core)["a"].outputs] == ["error", "length"]

    @pytest.mark.parametrize("at_step", [0, 1, 2])
    def test_an_entry_reported_as_bad_fails_alone(self, at_step):
        runner = PagedFakeRunner(max_num_batched_tokens=5)
        core = EngineCore(runner)
        for number, name in enumerate("abc"):
            core.add_request(name, [number] * 3, ids_only(max_tokens=4))

        def errors(batch) -> dict[int, str]:
            if len(runner.batches) != at_step + 1:
                return {}
            victims = [i for i, e in enumerate(batch.entries) if e.sequence.request.request_id == "b"]
            return dict.fromkeys(victims, "NaN logits")

        runner.errors = errors
        final = drain(core)
        assert (final["b"].outputs[0].finish_reason, final["b"].outputs[0].error) == ("error", "NaN logits")
        for number, name in ((0, "a"), (2, "c")):
            expected = expected_tokens([number] * 3, num_tokens=4, vocab_size=1000)
            assert list(final[name].outputs[0].token_ids) == expected

    @pytest.mark.parametrize("token", [-1, 1000, 10**9])
    def test_a_token_outside_the_vocabulary_fails_only_its_request(self, token):
        runner = PagedFakeRunner()
        core = EngineCore(runner)
        runner.draw = lambda entry, read: token if entry.sequence.request.request_id == "bad" else 5
        core.add_request("bad", [1], ids_only(max_tokens=2))
        core.add_request("good", [2], ids_only(max_tokens=2))
        final = drain(core)
        assert final["bad"].outputs[0].finish_reason == "error"
        assert f"token {token}" in final["bad"].outputs[0].error
        assert final["good"].outputs[0].token_ids == (5, 5)

    @pytest.mark.parametrize("result", [StepResult(token_ids=[]), StepResult(token_ids=[1, 2, 3])])
    def test_a_result_of_the_wrong_size_is_a_failed_step(self, result):
        runner = PagedFakeRunner()
        runner.execute = lambda batch: result
        core = EngineCore(runner)
        core.add_request("a", [1], ids_only())
        (choice,) = drain(core)["a"].outputs
        assert choice.finish_reason == "error"
        assert "tokens for 1 sequences" in choice.error

    def test_an_interrupt_is_passed_on_and_leaves_the_engine_usable(self):
        runner = PagedFakeRunner()
        core = EngineCore(runner)
        core.add_request("a", [1], ids_only(max_tokens=3))

        def interrupt(batch) -> None:
            runner.before_execute = None
            raise KeyboardInterrupt

        runner.before_execute = interrupt
        with pytest.raises(KeyboardInterrupt):
            core.step()
        core.add_request("b", [2], ids_only(max_tokens=2))
        final = drain(core)
        assert final["a"].outputs[0].finish_reason == "error"
        assert final["b"].outputs[0].finish_reason == "length"


class TestText:
    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize(
        "tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"]
    )
    def test_the_text_is_the_same_streamed_and_at_the_end(self, streams, tokenizer):
        core, _, tokens = text_core("hello world 🙂é", tokenizer=tokenizer)
        core.add_request("a", "hello", SamplingParams(max_tokens=len(tokens)), streams=streams)
        final = drain(core)["a"]
        prompt = tokenizer.encode("hello")
        assert final.prompt == "hello"
        assert tokenizer.decode(prompt) + final.outputs[0].text == tokenizer.decode(prompt + tokens)

    @pytest.mark.parametrize("streams", [True, False])
    def test_a_text_cut_within_a_character_ends_with_a_replacement(self, streams):
        core, _, tokens = text_core("ok🚀")
        core.add_request("a", "hello", SamplingParams(max_tokens=len(tokens) - 1), streams=streams)
        assert drain(core)["a"].outputs[0].text == "ok\ufffd"

    def test_streamed_text_only_grows_and_shows_no_broken_character(self):
        core, _, tokens = text_core("naïve 🙂🙃 한국어 text")
        core.add_request("a", "hello", SamplingParams(max_tokens=len(tokens)))
        texts = []
        while core.has_unfinished():
            texts += [o.outputs[0].text for o in core.step()]
        for earlier, later in itertools.pairwise(texts):
            assert later.startswith(earlier)
        assert all("\ufffd" not in text for text in texts)
        assert texts[-1] == "naïve 🙂🙃 한국어 text"

    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize(
        ("stop", "include", "text"),
        [("world", False, "hello "), ("world", True, "hello world"), (["xyz", "lo w"], False, "hel")],
    )
    def test_a_stop_string_ends_the_choice(self, streams, stop, include, text):
        core, _, _ = text_core("hello world, hello again")
        params = SamplingParams(max_tokens=50, stop=stop, include_stop_str_in_output=include)
        core.add_request("a", "hi", params, streams=streams)
        (choice,) = drain(core)["a"].outputs
        assert (choice.text, choice.finish_reason) == (text, "stop")
        assert choice.stop_reason == (stop if isinstance(stop, str) else "lo w")

    def test_text_that_might_be_a_stop_string_is_not_shown_early(self):
        core, _, _ = text_core("abcabd")
        core.add_request("a", "x", SamplingParams(max_tokens=50, stop="abd"))
        texts = []
        while core.has_unfinished():
            texts += [o.outputs[0].text for o in core.step()]
        assert texts[-1] == "abc"
        assert all("abc".startswith(text) for text in texts)

    def test_withheld_text_is_shown_when_the_length_ends_the_choice(self):
        core, _, tokens = text_core("xST")
        core.add_request("a", "x", SamplingParams(max_tokens=len(tokens), stop="STOP"))
        assert drain(core)["a"].outputs[0].text == "xST"

    def test_withheld_text_is_shown_when_the_request_is_aborted(self):
        core, _, tokens = text_core("xSTOP")
        core.add_request("a", "x", SamplingParams(max_tokens=50, stop="STOPPED"))
        for _ in range(len(tokens)):
            core.step()
        core.abort_request("a")
        assert drain(core)["a"].outputs[0].text == "xSTOP"

    def test_a_stop_string_on_the_last_allowed_token_is_a_stop(self):
        core, _, tokens = text_core("abc")
        core.add_request("a", "x", SamplingParams(max_tokens=len(tokens), stop="c"))
        (choice,) = drain(core)["a"].outputs
        assert (choice.finish_reason, choice.text) == ("stop", "ab")

    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize(
        ("params", "text", "reason"),
        [
            ({}, "hi", None),
            ({"skip_special_tokens": False}, "hi", None),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hi</s>", None),
            ({"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 3}, "hi</s>", "length"),
        ],
    )
    def test_eos_is_in_the_tokens_and_not_in_the_text(self, streams, params, text, reason):
        tokens = [*TOKENIZER.encode("hi", add_special_tokens=False), 1]
        core, _, _ = text_core(tokens)
        params = {**params, "max_tokens": len(tokens)} if "max_tokens" in params else params
        core.add_request("a", "x", SamplingParams(**params), streams=streams)
        (choice,) = drain(core)["a"].outputs
        assert (choice.text, list(choice.token_ids)) == (text, tokens)
        assert choice.finish_reason == (reason or "stop")
        assert choice.stop_reason is None

    def test_a_stop_token_is_named_as_the_reason_and_left_out_of_the_text(self):
        core, _, tokens = text_core("ab")
        core.add_request("a", "x", SamplingParams(stop_token_ids=[tokens[-1]], max_tokens=50))
        (choice,) = drain(core)["a"].outputs
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == tokens[-1]
        assert choice.text == TOKENIZER.decode(tokens[:-1])

    def test_nothing_follows_a_stop_string_that_ends_in_the_middle_of_a_token(self):
        class Pieces:
            """Tokens that hold whole characters and the beginning of the next one."""

            pieces = (b"a", b".\xf0\x9f")

            def decode(self, token_ids, *, skip_special_tokens=True):
                return b"".join(self.pieces[t] for t in token_ids).decode(errors="replace")

        runner = PagedFakeRunner(vocab_size=2)
        speak(runner, [0, 1, 0, 0])
        core = EngineCore(runner, tokenizer=Pieces())
        core.add_request("a", [0], SamplingParams(stop="."))
        (choice,) = drain(core)["a"].outputs
        assert (choice.text, choice.token_ids, choice.stop_reason) == ("a", (0, 1), ".")

    def test_min_tokens_passes_over_early_stop_strings(self):
        core, _, tokens = text_core("a.b.c")
        core.add_request("a", "x", SamplingParams(stop=".", min_tokens=3, max_tokens=50))
        assert len(tokens) == 5
        (choice,) = drain(core)["a"].outputs
        assert choice.text == "a.b"

    def test_logprobs_come_one_per_token_with_their_text(self):
        core, _, tokens = text_core("hello")
        core.add_request("a", "x", SamplingParams(logprobs=2, max_tokens=2))
        core.add_request("b", "x", SamplingParams(max_tokens=2))
        final = drain(core)
        assert final["b"].outputs[0].logprobs is None
        logprobs = final["a"].outputs[0].logprobs
        assert len(logprobs) == 2
        first = logprobs[0][tokens[0]]
        assert (first.logprob, first.rank) == (-0.5, 1)
        assert first.decoded_token == TOKENIZER.decode([tokens[0]])

    def test_without_detokenize_there_is_no_text(self):
        core, _, tokens = text_core("hello")
        core.add_request("a", "x", ids_only(max_tokens=len(tokens)))
        (choice,) = drain(core)["a"].outputs
        assert (choice.text, list(choice.token_ids)) == ("", tokens)


@pytest.mark.parametrize("num_prompt", [1, 30, 59])
def test_the_maximum_model_length_ends_a_choice(num_prompt):
    core = EngineCore(PagedFakeRunner(max_model_len=60, max_num_batched_tokens=64))
    core.add_request("a", [1] * num_prompt, ids_only(max_tokens=None))
    (choice,) = drain(core)["a"].outputs
    assert choice.finish_reason == "length"
    assert num_prompt + len(choice.token_ids) == 60


def test_a_cache_smaller_than_the_model_length_ends_a_choice_when_it_is_full():
    core = EngineCore(PagedFakeRunner(num_blocks=6, block_size=4, max_model_len=1000))
    core.add_request("a", [1] * 5, ids_only(max_tokens=None))
    core.add_request("b", [2] * 5, ids_only(max_tokens=None))
    final = drain(core)
    assert [5 + len(final[name].outputs[0].token_ids) for name in "ab"] == [20, 20]
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_two_hundred_random_requests_with_aborts_and_failures_leak_nothing(seed):
    summary = run_soak(num_requests=200, seed=seed)
    assert summary.num_finished == 200
    assert min(summary.num_aborted, summary.num_preemptions, summary.num_errors) > 0


class _Tokenizer:
    """Text of one letter per token; ``on_decode`` sees what is decoded and may do anything."""

    def __init__(self, on_decode) -> None:
        self.on_decode = on_decode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        self.on_decode(list(token_ids))
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("max_steps_ahead", [0, 1])
def test_a_text_that_cannot_be_decoded_fails_its_own_request_only(streams, max_steps_ahead):
    def refuse_z(token_ids: list[int]) -> None:
        if token_ids.count(ord("z")) > 2:
            raise ValueError("no such text")

    runner = PagedFakeRunner(vocab_size=128, max_steps_ahead=max_steps_ahead)
    runner.draw = lambda entry, read: read[0]
    core = EngineCore(runner, tokenizer=_Tokenizer(refuse_z))
    for request_id, prompt in [("a", "a"), ("bad", "z"), ("b", "b")]:
        params = SamplingParams(max_tokens=6, temperature=0.0)
        core.add_request(request_id, prompt, params, streams=streams)
    final = {name: output.outputs[0] for name, output in drain(core).items()}
    assert (final["a"].text, final["a"].finish_reason) == ("aaaaaa", "length")
    assert (final["b"].text, final["b"].finish_reason) == ("bbbbbb", "length")
    assert final["bad"].finish_reason == "error"
    assert "no such text" in final["bad"].error


@pytest.mark.parametrize("other_streams", [True, False])
def test_an_abort_while_outputs_are_collected_is_seen_once(other_streams):
    """The collector may run anywhere and end a stream that was forgotten."""

    def abort_other(token_ids: list[int]) -> None:
        if token_ids[-3:] == [ord("a")] * 3:
            core.abort_request("other")

    runner = PagedFakeRunner(vocab_size=128)
    runner.draw = lambda entry, read: read[0]
    core = EngineCore(runner, tokenizer=_Tokenizer(abort_other))
    core.add_request("a", "a", SamplingParams(max_tokens=3, temperature=0.0), streams=False)
    other = SamplingParams(max_tokens=50, temperature=0.0)
    core.add_request("other", "o", other, streams=other_streams)
    final = {name: output.outputs[0] for name, output in drain(core).items()}
    assert (final["a"].text, final["a"].finish_reason) == ("aaa", "length")
    assert final["other"].finish_reason == "abort"


@pytest.mark.parametrize("max_steps_ahead", [0, 1])
@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_a_step_is_scheduled_ends_what_runs_and_loses_no_block(
    max_steps_ahead, num_blocks, at, monkeypatch
):
    """What the half-made step has counted as computed never is: nobody may go on from there."""
    runner = PagedFakeRunner(num_blocks=num_blocks, max_steps_ahead=max_steps_ahead)
    core = EngineCore(runner)
    for name in "abc":
        core.add_request(name, [1, 2, 3, 4, 5], ids_only(max_tokens=3, temperature=0.0))
    core.step()
    commit, calls = core.scheduler._commit, itertools.count(1)

    def interrupted(sequence, num_new):
        entry = commit(sequence, num_new)
        if next(calls) == at:
            raise KeyboardInterrupt
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    core.add_request("later", [6, 7, 8], ids_only(max_tokens=4, temperature=0.0))
    final = {name: output.outputs[0] for name, output in drain(core).items()}
    assert {final[name].finish_reason for name in "abc"} == {"error"}
    assert "interrupted" in final["a"].error
    later = expected_tokens([6, 7, 8], num_tokens=4, vocab_size=runner.vocab_size)
    assert list(final["later"].token_ids) == later
