"""The offline engine: forms of prompts, order of results, streams that share an engine, and how calls end."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from engine_fakes import PagedFakeRunner, expected_tokens
from tokenizer_fakes import byte_level

import gapless
from gapless.errors import ConfigError, GaplessError, RequestError
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

TOKENIZER = byte_level()
VOCAB = TOKENIZER.vocab_size
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def make_llm(**facts) -> LLM:
    return LLM._from_parts(PagedFakeRunner(vocab_size=VOCAB, **facts), TOKENIZER, eos_token_ids=())


def expected(prompt: list[int], num_tokens: int = 4) -> list[int]:
    return expected_tokens(list(prompt), num_tokens=num_tokens, vocab_size=VOCAB)


def assert_idle(llm: LLM) -> None:
    """No request of a call that has ended is left; a last step only delivers what was aborted."""
    llm.core.step()
    assert not llm.core.has_unfinished()
    assert llm.core.scheduler.allocator.num_used == 0


HELLO = TOKENIZER.encode("hello")
WORLD = TOKENIZER.encode("world again")


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("hello", [HELLO]),
        (["hello"], [HELLO]),
        (["hello", "world again"], [HELLO, WORLD]),
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6, 7), [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (np.array([5, 6, 7]), [[5, 6, 7]]),
        ([np.array([5, 6]), np.array([7])], [[5, 6], [7]]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "hello"}, [HELLO]),
        ([{"prompt": "hello"}, {"prompt_token_ids": [5]}], [HELLO, [5]]),
        (["hello", [5, 6], {"prompt_token_ids": (7,)}], [HELLO, [5, 6], [7]]),
        ([], []),
    ],
)
def test_every_form_of_prompts_is_understood(prompts, ids):
    outputs = make_llm().generate(prompts, GREEDY)
    assert [list(o.prompt_token_ids) for o in outputs] == ids
    assert [list(o.outputs[0].token_ids) for o in outputs] == [expected(p) for p in ids]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts=None: must be a list"),
        (7, "prompts=7"),
        ([5, "hello"], "prompt token 1 is 'hello'"),
        (["hello", 5], "prompt 1: prompt=5: must be a string or a list"),
        (["hello", ""], "prompt 1: empty prompt"),
        ("", "^empty prompt"),
        ([[]], "^empty prompt"),
        ({}, "prompt has the keys"),
        ({"text": "hello"}, "give 'prompt' .text. or 'prompt_token_ids'"),
        ({"prompt": 5}, "'prompt' is 5: must be a string"),
        ([[5], [10**6]], "prompt 1: prompt token 0 is 1000000"),
    ],
)
def test_an_unusable_prompt_stops_the_call_before_anything_runs(prompts, message):
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.runner.batches == []
    assert_idle(llm)


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first():
    llm = make_llm()
    params = [SamplingParams(max_tokens=n, detokenize=False) for n in (9, 1, 5)]
    outputs = llm.generate([[1], [2], [3]], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]
    assert [o.prompt_token_ids for o in outputs] == [(1,), (2,), (3,)]


def test_text_and_prompt_are_in_the_output():
    (output,) = make_llm().generate("hello", SamplingParams(max_tokens=8))
    assert output.prompt == "hello"
    whole = TOKENIZER.decode([*HELLO, *output.outputs[0].token_ids])
    assert output.prompt + output.outputs[0].text == whole


def test_without_sampling_params_the_defaults_apply():
    (output,) = make_llm().generate([1, 2])
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 sampling_params for 2 prompts"),
        ([GREEDY] * 3, "3 sampling_params for 2 prompts"),
        ([GREEDY, 5], "prompt 1: sampling_params=5: must be SamplingParams"),
        (5, "sampling_params=5: must be a list"),
    ],
)
def test_sampling_params_must_be_one_or_one_for_each(params, message):
    with pytest.raises(RequestError, match=message):
        make_llm().generate(["hello", "world"], params)


def test_with_errors_return_the_bad_prompts_fail_alone_and_in_place():
    llm = make_llm()
    outputs = llm.generate(["hello", "", [10**6], [5, 6]], SamplingParams(max_tokens=4, n=2), errors="return")
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error", "length"]
    assert [len(o.outputs) for o in outputs] == [2, 2, 2, 2]
    assert "empty prompt" in outputs[1].outputs[0].error
    assert outputs[1].prompt == ""
    assert "vocabulary" in outputs[2].outputs[1].error
    assert list(outputs[3].outputs[0].token_ids) == expected([5, 6])
    assert_idle(llm)


def test_an_unknown_error_policy_is_refused():
    with pytest.raises(ConfigError, match="errors='ignore'"):
        make_llm().generate("hello", errors="ignore")


def test_a_failed_step_ends_up_in_the_result_not_in_an_exception():
    llm = make_llm()

    def fail(batch) -> None:
        llm.runner.before_execute = None
        raise RuntimeError("boom")

    llm.runner.before_execute = fail
    (output,) = llm.generate("hello", GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert "boom" in output.outputs[0].error
    (output,) = llm.generate("hello", GREEDY)
    assert output.outputs[0].finish_reason == "length"


def test_an_interrupted_call_leaves_nothing_running():
    llm = make_llm()

    def interrupt(batch) -> None:
        llm.runner.before_execute = None
        raise KeyboardInterrupt

    llm.generate("hello", GREEDY)
    llm.runner.before_execute = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 20, GREEDY)
    assert not llm.core.scheduler.has_unfinished
    assert_idle(llm)
    assert llm.generate("hello", GREEDY)[0].finished


class TestStream:
    def test_a_stream_yields_growing_outputs_that_end_like_generate(self):
        llm = make_llm()
        final = llm.generate(["hello", "world"], GREEDY)
        updates: dict[int, list[str]] = {0: [], 1: []}
        for output in llm.stream(["hello", "world"], GREEDY):
            index = int(output.request_id.rpartition("-")[2])
            updates[index].append(output.outputs[0].text)
        for index, texts in updates.items():
            assert len(texts) == 4
            assert texts[-1] == final[index].outputs[0].text
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))

    def test_a_bad_prompt_raises_at_the_call_not_at_the_first_item(self):
        with pytest.raises(RequestError):
            make_llm().stream("", GREEDY)

    def test_a_stream_that_is_never_read_runs_nothing(self):
        llm = make_llm()
        llm.stream("hello", GREEDY)
        assert not llm.core.has_unfinished()

    def test_with_errors_return_the_failed_prompt_is_the_first_update(self):
        updates = list(make_llm().stream(["", "hello"], GREEDY, errors="return"))
        assert updates[0].outputs[0].finish_reason == "error"
        assert updates[-1].outputs[0].finish_reason == "length"

    def test_closing_a_stream_aborts_what_still_runs(self):
        llm = make_llm()
        stream = llm.stream(["hello", "world"], SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
        assert not llm.core.scheduler.has_unfinished
        assert_idle(llm)

    def test_streams_open_at_once_share_the_steps_and_see_only_their_own(self):
        llm = make_llm()
        first, second = llm.stream([1, 2], GREEDY), llm.stream([3, 4], GREEDY)
        next(first), next(second)
        (between,) = llm.generate([5, 6], GREEDY)
        assert list(between.outputs[0].token_ids) == expected([5, 6])
        rest = [*first], [*second]
        assert [list(r[-1].outputs[0].token_ids) for r in rest] == [expected([1, 2]), expected([3, 4])]
        assert {o.prompt_token_ids for o in rest[0]} == {(1, 2)}
        assert any(batch.num_reqs > 1 for batch in llm.runner.batches)


class TestChat:
    MESSAGES = [{"role": "user", "content": "hi"}]

    def test_a_conversation_goes_through_the_template_without_a_second_bos(self):
        (output,) = make_llm().chat(self.MESSAGES, GREEDY)
        assert output.prompt == "<s>user: hi</s><s>assistant:"
        assert list(output.prompt_token_ids) == TOKENIZER.encode(output.prompt, add_special_tokens=False)
        assert output.prompt_token_ids.count(TOKENIZER.bos_token_id) == 2
        assert list(output.outputs[0].token_ids) == expected(output.prompt_token_ids)

    def test_several_conversations_give_several_results(self):
        outputs = make_llm().chat([self.MESSAGES, self.MESSAGES * 2], GREEDY)
        assert [o.prompt.count("user") for o in outputs] == [1, 2]

    def test_template_arguments_and_the_generation_prompt_can_be_chosen(self):
        (output,) = make_llm().chat(
            self.MESSAGES, GREEDY, add_generation_prompt=False, chat_template_kwargs={"thinking": False}
        )
        assert output.prompt == "<s>user: hi</s>thinking=False"

    @pytest.mark.parametrize(
        "messages", [["hello"], [{"content": "no role"}], [[]], [["hi"]], 5, [None], [{"role": "user"}, "x"]]
    )
    def test_malformed_messages_are_refused(self, messages):
        with pytest.raises(RequestError):
            make_llm().chat(messages, GREEDY)

    def test_with_errors_return_a_malformed_conversation_fails_alone(self):
        outputs = make_llm().chat([self.MESSAGES, ["bad"]], GREEDY, errors="return")
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error"]

    def test_a_lone_surrogate_is_refused_not_a_crash(self):
        with pytest.raises(RequestError, match="not valid Unicode"):
            make_llm().chat([{"role": "user", "content": "\ud800"}], GREEDY)

    def test_chat_needs_a_tokenizer(self):
        with pytest.raises(RequestError, match="no tokenizer"):
            LLM._from_parts(PagedFakeRunner(), None).chat(self.MESSAGES)


class TestLife:
    def test_the_report_is_the_runners_and_the_prefix_caches(self):
        llm = make_llm()
        llm.generate("hello", GREEDY)
        assert llm.report() == {"steps": len(llm.runner.batches), "prefix_cache": None}

    def test_the_context_manager_shuts_down_and_again_is_harmless(self):
        with make_llm() as llm:
            llm.generate("hello", GREEDY)
        assert llm.runner.is_shut_down
        llm.shutdown()

    def test_after_shutdown_a_call_says_so(self):
        llm = make_llm()
        stream = llm.stream("hello", GREEDY)
        open_stream = llm.stream("hello", GREEDY)
        next(open_stream)
        llm.shutdown()
        for call in (lambda: llm.generate("hello"), lambda: next(stream), lambda: next(open_stream)):
            with pytest.raises(GaplessError, match="shut down"):
                call()


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "hint"),
        [
            ("max_model_length", "did you mean max_model_len"),
            ("cudagraph_backend_decode", "cuda_graph_backend_decode"),
            ("pipeline_parallel_size", "no option pipeline_parallel_size=2"),
        ],
    )
    def test_an_unknown_option_is_an_error_with_its_neighbours(self, option, hint):
        with pytest.raises(ConfigError, match=hint):
            LLM("nowhere", **{option: 2})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "no model"),
            ({"model": "m", "dtype": "float8"}, "float8"),
            ({"model": "m", "max_model_len": 0}, "max-model-len=0"),
            ({"model": "m", "cuda_graph_backend_decode": "fast"}, "fast"),
            ({"model": "m", "compilation_config": {"cudagraph_mode": "SOMETIMES"}}, "SOMETIMES"),
            ({"model": "m", "config": "does-not-exist.toml"}, "does-not-exist.toml"),
        ],
    )
    def test_a_wrong_option_is_refused_before_the_model_is_opened(self, options, message):
        with pytest.raises(ConfigError, match=message):
            LLM(**options)

    @pytest.mark.parametrize("content", [b"model = ", b"\xff\xfe"])
    def test_a_config_file_that_is_not_toml_is_named(self, tmp_path, content):
        path = tmp_path / "gapless.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"gapless\.toml: not TOML"):
            LLM(config=path)

    def test_the_config_file_ranks_below_arguments(self, tmp_path, monkeypatch):
        import gapless.engine.build as build

        seen = []

        def open_engine(config, progress):
            seen.append(config)
            raise ConfigError("stop here")

        monkeypatch.setattr(build, "open_engine", open_engine)
        path = tmp_path / "gapless.toml"
        path.write_text('model = "from-file"\nmax_model_len = 64\nblock_size = 32\n')
        with pytest.raises(ConfigError, match="stop here"):
            LLM(config=path, max_model_len=128, cuda_graph_bs_decode=[1, 2])
        (config,) = seen
        assert (config.model, config.max_model_len, config.block_size) == ("from-file", 128, 32)
        assert config.graphs.decode_sizes == (1, 2)

    @pytest.mark.parametrize(
        ("option", "default", "in_file"),
        [
            ("dtype", "auto", "float32"),
            ("device", "auto", "cpu"),
            ("load_format", "auto", "dummy"),
            ("seed", 0, 5),
            ("block_size", 16, 32),
            ("gpu_memory_utilization", 0.9, 0.5),
            ("attention_backend", "auto", "torch_reference"),
            ("enable_prefix_caching", True, False),
            ("enforce_eager", False, True),
        ],
    )
    def test_a_value_that_was_passed_wins_over_the_file_though_it_is_the_default(
        self, tmp_path, monkeypatch, option, default, in_file
    ):
        import gapless.engine.build as build

        seen = []

        def open_engine(config, progress):
            seen.append(getattr(config, option))
            raise ConfigError("stop here")

        monkeypatch.setattr(build, "open_engine", open_engine)
        path = tmp_path / "gapless.toml"
        path.write_text(f"{option} = {json.dumps(in_file)}\n")
        for given in ({option: default}, {}, {option: None}):
            with pytest.raises(ConfigError, match="stop here"):
                LLM("m", config=path, **given)
        assert seen == [default, in_file, in_file]


class TestPackage:
    def test_importing_the_package_imports_no_torch(self):
        code = "import gapless, sys; from gapless import LLM, SamplingParams; print('torch' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "False"

    @pytest.mark.parametrize("name", gapless.__all__)
    def test_every_public_name_is_there(self, name):
        assert getattr(gapless, name).__name__ == name
        assert name in dir(gapless)

    def test_a_name_that_does_not_exist_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = gapless.nonsense

    def test_the_version_is_the_distributions(self):
        from importlib.metadata import version

        assert gapless.__version__ == version("gapless")


@pytest.mark.parametrize("max_steps_ahead", [0, 1])
def test_threads_may_share_an_engine(max_steps_ahead):
    """Each gets its own answers; without a lock steps end out of order and blocks leak."""
    llm = make_llm(max_steps_ahead=max_steps_ahead)
    prompts = [[5, 6, 7], [8] * 40, [9, 4]]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    wanted = [expected(prompt, 12) for prompt in prompts]
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
                if found != wanted:
                    failures.append(found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert_idle(llm)
