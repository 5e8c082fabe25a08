"""``gapless generate`` around a fake engine: output, JSON schema, exit codes, what reaches the engine."""

import json

import pytest
from cli_fakes import FakeLLM

from gapless.cli.main import main
from gapless.errors import CaptureError, ConfigError, MemoryLimitError, ModelError


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    monkeypatch.setattr("gapless.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


@pytest.fixture
def run(capsys):
    def run_command(*args):
        code = main(["generate", "--model", "m", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def test_single_prompt_prints_the_text_alone(run):
    code, out, err = run("--prompt", "hello")
    assert (code, out) == (0, "HELLO\n")
    assert "graph replays" in err
    assert "FULL_AND_PIECEWISE" in err


def test_several_prompts_are_printed_in_order_under_their_prompts(run):
    code, out, _ = run("--prompt", "one", "--prompt", "two")
    assert code == 0
    assert out == "[1/2] one\nONE\n\n[2/2] two\nTWO\n\n"


def test_json_lines_in_prompt_order_then_the_report(run):
    code, out, err = run("--prompt", "one", "--prompt", "two", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [r["type"] for r in records] == ["request", "request", "report"]
    assert [r.get("text") for r in records] == ["ONE", "TWO", None]
    assert list(records[0]) == [
        "type", "index", "choice", "prompt", "text", "token_ids", "finish_reason", "logprobs", "error"
    ]  # fmt: skip
    assert {"plan", "graphs", "steps", "eager"} <= records[2].keys()
    assert "graph replays" not in err


def test_json_report_rows_have_the_schema_keys(run):
    report = json.loads(run("--prompt", "one", "--json")[1].splitlines()[-1])
    assert {"phase", "strategy", "bucket", "count", "padding"} <= report["steps"][0].keys()
    assert {"phase", "reason", "count"} <= report["eager"][0].keys()


def test_one_failed_request_gives_exit_code_1_and_the_others_their_text(run):
    code, out, _ = run("--prompt", "bad", "--prompt", "two", "--json")
    failed, fine, _ = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert (failed["finish_reason"], failed["error"], failed["text"]) == ("error", "a bad prompt", "")
    assert (fine["finish_reason"], fine["error"], fine["text"]) == ("length", None, "TWO")


@pytest.mark.parametrize("prompt", ["", "unrenderable"])
def test_prompt_that_cannot_be_rendered_fails_alone(run, prompt):
    code, out, _ = run("--prompt", "one", "--prompt", prompt, "--prompt", "three", "--json")
    records = [json.loads(line) for line in out.splitlines()[:-1]]
    assert code == 1
    assert [r["text"] for r in records] == ["ONE", "", "THREE"]
    assert [r["finish_reason"] for r in records] == ["length", "error", "length"]
    assert records[1]["error"]


def test_choices_are_lines_of_their_own(run):
    _, out, _ = run("--prompt", "one", "--prompt", "two", "--n", "2", "--temperature", "1", "--json")
    records = [json.loads(line) for line in out.splitlines()[:-1]]
    assert [(r["index"], r["choice"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_logprobs_reach_the_json(run):
    _, out, _ = run("--prompt", "a", "--logprobs", "1", "--json")
    record = json.loads(out.splitlines()[0])
    assert record["logprobs"] == [[{"token_id": 65, "logprob": -0.5, "rank": 1, "token": None}]]


def test_token_id_prompts_have_no_prompt_text(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"token_ids": [1, 2, 3]}\n{"prompt": "x"}\n')
    _, out, _ = run("--prompts-file", str(path), "--json")
    first, second, _ = [json.loads(line) for line in out.splitlines()]
    assert first["prompt"] is None
    assert second["prompt"] == "x"
    assert FakeLLM.made[0].prompts[0] == [1, 2, 3]


def test_chat_template_is_used_by_default_and_said_so(run):
    _, _, err = run("--prompt", "hello")
    assert FakeLLM.made[0].prompts == [{"prompt": "<user>hello", "prompt_token_ids": [1]}]
    assert "chat template" in err


def test_raw_passes_the_prompt_as_it_is(run):
    _, _, err = run("--prompt", "hello", "--raw")
    assert FakeLLM.made[0].prompts == ["hello"]
    assert "chat template" not in err


def test_model_without_template_gets_raw_prompts_and_refuses_chat(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "has_template", False)
    assert run("--prompt", "hello")[0] == 0
    assert FakeLLM.made[0].prompts == ["hello"]
    code, out, err = run("--prompt", "hello", "--chat")
    assert (code, out) == (2, "")
    assert "--raw" in err
    assert FakeLLM.made[1].is_shut_down


def test_stop_strings_need_a_tokenizer_and_the_error_says_so(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "has_tokenizer", False)
    code, out, err = run("--prompt", "hello", "--stop", "END")
    assert (code, out) == (2, "")
    assert "--stop 'END'" in err
    assert "no tokenizer" in err
    assert "detokenize" not in err  # what the command line has no flag for
    assert FakeLLM.made[0].is_shut_down


def test_defaults_are_greedy_and_128_tokens(run):
    run("--prompt", "x")
    params = FakeLLM.made[0].params
    assert (params.temperature, params.max_tokens, params.n, params.ignore_eos) == (0.0, 128, 1, False)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--max-tokens", "5"], "max_tokens", 5),
        (["--temperature", "0.7"], "temperature", 0.7),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--top-k", "40"], "top_k", 40),
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--seed", "7"], "seed", 7),
        (["--stop", "a", "--stop", "b"], "stop", ("a", "b")),
        (["--ignore-eos"], "ignore_eos", True),
        (["--logprobs", "3"], "logprobs", 3),
        (["--max_tokens=6"], "max_tokens", 6),
    ],
)
def test_sampling_flags_reach_the_engine(run, flags, field, value):
    assert run("--prompt", "x", *flags)[0] == 0
    assert getattr(FakeLLM.made[0].params, field) == value


@pytest.mark.parametrize(
    ("flags", "option", "value"),
    [
        (["--device", "cpu"], "device", "cpu"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--max-model-len", "512"], "max_model_len", 512),
        (["--max-running-requests", "8"], "max_running_requests", 8),
        (["--chunked-prefill-size", "64"], "chunked_prefill_size", 64),
        (["--max-total-tokens", "4096"], "max_total_tokens", 4096),
        (["--block-size", "32"], "block_size", 32),
        (["--kv-cache-tokens", "2048"], "kv_cache_tokens", 2048),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", 0.5),
        (["--attention-backend", "torch_reference"], "attention_backend", "torch_reference"),
        (["--tp", "2"], "tensor_parallel_size", 2),
        (["--tp-size=4"], "tensor_parallel_size", 4),
        (["--tensor_parallel_size", "2"], "tensor_parallel_size", 2),
        (["--break-at-all-reduce"], "break_at_all_reduce", True),
        (["--enforce-eager"], "enforce_eager", True),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--cuda-graph-backend-prefill", "full"], "cuda_graph_backend_prefill", "full"),
        (["--cuda-graph-backend-prefill=disabled"], "cuda_graph_backend_prefill", "disabled"),
        (["--cuda-graph-backend-decode", "breakable"], "cuda_graph_backend_decode", "breakable"),
        (["--cuda-graph-max-bs-prefill", "2048"], "cuda_graph_max_bs_prefill", 2048),
        (["--cuda-graph-max-bs-decode", "4"], "cuda_graph_max_bs_decode", 4),
        (["--cuda-graph-bs-prefill", "4,8,16"], "cuda_graph_bs_prefill", "4,8,16"),
        (["--cuda-graph-bs-decode", "1", "2", "4"], "cuda_graph_bs_decode", "1,2,4"),
        (["--cuda-graph-bs-decode", "1 2 4"], "cuda_graph_bs_decode", "1 2 4"),
        (["--cuda_graph_bs_decode=1", "2"], "cuda_graph_bs_decode", "1,2"),
        (["--cuda-graph-tc-compiler", "inductor"], "cuda_graph_tc_compiler", "inductor"),
        (["--compilation-config", '{"mode": 3}'], "compilation_config", '{"mode": 3}'),
        (["--config", "f.toml"], "config", "f.toml"),
    ],
)
def test_engine_flags_reach_the_engine(run, flags, option, value):
    assert run("--prompt", "x", *flags)[0] == 0
    assert FakeLLM.made[0].options[option] == value


def test_options_that_were_not_given_are_not_passed(run):
    run("--prompt", "x")
    assert FakeLLM.made[0].options == {"model": "m", "config": None}


def test_model_path_is_another_name_of_model(capsys):
    assert main(["generate", "--model-path", "folder", "--prompt", "x"]) == 0
    assert FakeLLM.made[0].options["model"] == "folder"


def test_engine_is_shut_down_after_the_run(run):
    run("--prompt", "x")
    assert FakeLLM.made[0].is_shut_down


@pytest.mark.parametrize("flags", [[], ["--prompts-file", "no-such-file"], ["--prompts-file", "/"]])
def test_mistakes_in_prompts_are_found_before_the_model_loads(run, flags):
    code, out, err = run(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("gapless: ")
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--top-p", "1.5"],
        ["--top-k", "-2"],
        ["--max-tokens", "0"],
        ["--max-tokens", "-5"],
        ["--n", "0"],
        ["--n", "100000"],
        ["--min-p", "2"],
        ["--logprobs", "1000"],
        ["--stop", ""],
        ["--temperature", "nan"],
        ["--seed", "99999999999999999999999"],
    ],
)
def test_bad_sampling_values_are_one_sentence_and_exit_code_2(run, flags):
    code, out, err = run("--prompt", "x", *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert flags[0].removeprefix("--").replace("-", "_") in err
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--max-tokens", "many"], "--max-tokens"),
        (["--promt", "x"], "--prompt"),
        (["--cuda-graph-bs-decode", "1", "two"], "two"),
        (["--max-model-len"], "--max-model-len"),
        (["stray"], "stray"),
    ],
)
def test_bad_command_lines_are_one_sentence_and_exit_code_2(run, flags, word):
    code, out, err = run("--prompt", "x", *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert word in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--dtype=x: choose y"), 2),
        (ModelError("no such folder"), 2),
        (MemoryLimitError("no room for one block"), 2),
        (CaptureError("the capture failed"), 1),
    ],
)
def test_errors_of_the_engine_are_one_sentence(run, monkeypatch, error, code):
    monkeypatch.setattr(FakeLLM, "error", error)
    assert run("--prompt", "x") == (code, "", f"gapless: {error}\n")


def test_missing_model_is_an_error(capsys):
    assert main(["generate", "--prompt", "x"]) == 2
    assert "--model" in capsys.readouterr().err


def test_bug_of_ours_is_not_hidden(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "error", ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        run("--prompt", "x")


def test_interrupt_ends_quietly_and_shuts_the_engine_down(run, monkeypatch):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "stream", interrupted)
    code, _, err = run("--prompt", "x")
    assert code == 130
    assert "Traceback" not in err
    assert FakeLLM.made[0].is_shut_down
