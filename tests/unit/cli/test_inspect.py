"""``gapless inspect``: plans without weights."""

import json

import pytest

from gapless.cli.main import main
from gapless.engine.rules import Feature
from vl_checkpoints import write_vl_folder


@pytest.fixture
def inspect(capsys):
    def run(*args):
        code = main(["inspect", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def plan(inspect):
    def run(*args):
        code, out, err = inspect(*args, "--json")
        assert code == 0, err
        return json.loads(out)["plan"]

    return run


def test_text_names_model_device_sizes_and_reasons(inspect):
    code, out, _ = inspect("--device", "cpu", "--cuda-graph-backend-prefill", "breakable")
    assert code == 0
    for word in ("cpu", "breakable", "prefill sizes, in tokens:", "1, 2, 4, 8, 16", "the default mode"):
        assert word in out


def test_defaults_of_the_two_devices(plan):
    assert plan("--device", "cpu")["prefill"]["sizes"][-1] == 256
    assert plan("--device", "cuda")["prefill"]["sizes"][-1] == 4096
    assert plan("--device", "cpu")["decode"]["sizes"][-1] == 16
    assert plan("--device", "cuda")["decode"]["sizes"][-1] == 256


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_mode_is_a_plan_of_that_mode(plan, mode):
    assert plan("--compilation-config", json.dumps({"cudagraph_mode": mode}))["mode"] == mode


@pytest.mark.parametrize("feature", list(Feature))
def test_every_feature_can_be_planned_with(inspect, feature):
    code, out, err = inspect("--feature", feature, "--device", "cuda")
    assert code == 0, err
    assert feature in out


@pytest.mark.parametrize("feature", ["lora", "speculative_decoding", "multimodal", "disaggregation"])
def test_soft_rule_yields_to_a_named_backend(plan, feature):
    asked = ("--device", "cuda", "--feature", feature)
    assert plan(*asked)["prefill"]["strategy"] == "disabled"
    named = plan(*asked, "--cuda-graph-backend-prefill", "breakable")
    assert named["prefill"]["strategy"] == "breakable"


@pytest.mark.parametrize(
    ("feature", "phase", "strategy"),
    [("no_layer_split", "prefill", "tc_piecewise"), ("no_layer_split", "decode", "full")],
)
def test_model_that_cannot_be_split_is_traced_and_keeps_full_decode(plan, feature, phase, strategy):
    found = plan("--device", "cuda", "--feature", feature, "--attention-backend", "flash_attention_2")
    assert found[phase]["strategy"] == strategy


def test_mla_models_stop_at_2048_tokens(plan):
    assert plan("--device", "cuda", "--feature", "mla")["prefill"]["sizes"][-1] == 2048


def test_cascade_attention_is_mentioned(plan):
    rules = [d["rule"] for d in plan("--device", "cuda", "--feature", "cascade_attention")["decisions"]]
    assert "cascade" in rules


@pytest.mark.parametrize(
    ("backend", "draft_tokens", "decode"),
    [
        ("flashinfer", 0, "full"),
        ("flashinfer", 2, "breakable"),
        ("flash_attention_2", 2, "full"),
        ("nobody_knows_it", 0, "breakable"),
    ],
)
def test_support_of_the_attention_backend_limits_decode(plan, backend, draft_tokens, decode):
    flags = ("--device", "cuda", "--attention-backend", backend, "--draft-tokens", str(draft_tokens))
    found = plan(*flags)
    assert found["decode"]["strategy"] == decode
    assert found["uniform_query_len"] == 1 + draft_tokens


def test_model_folder_is_read_without_weights(plan, inspect, tmp_path):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model", str(tmp_path), "--device", "cuda", "--chunked-prefill-size", "8192")
    assert plan(*flags)["prefill"]["sizes"][-1] == 4096  # the cap of Llama 2
    assert "LlamaForCausalLM, 32 layers, 4096 positions" in inspect(*flags)[1]
    assert inspect(*flags, "--tp", "8")[0] == 0
    code, _, error = inspect(*flags, "--tp", "3")
    assert code == 2
    assert "--tensor-parallel-size=3 does not divide num_attention_heads=32" in error


@pytest.mark.parametrize(
    ("flags", "text", "sizes"),
    [
        ((), "encoder   off", []),
        (
            ("--enable-vit-cuda-graph", "--vit-cuda-graph-max-tokens", "200"),
            "encoder   budget: 64, 128, 200 patches",
            [64, 128, 200],
        ),
        (
            ("--enable-vit-cuda-graph", "--vit-cuda-graph-budgets", "66,9"),
            "encoder   budget: 12, 68 patches",
            [12, 68],  # four patches are a token
        ),
        (
            ("--enable-vit-cuda-graph", "--vit-cuda-graph-mode", "exact"),
            "encoder   exact: any size up to 8192 patches",
            [],
        ),
    ],
)
def test_graphs_of_a_vision_encoder_are_shown(inspect, tmp_path, flags, text, sizes):
    folder = write_vl_folder(tmp_path, "qwen3_vl", has_weights=False)
    _, out, _ = inspect("--model", str(folder), "--device", "cpu", *flags)
    assert text in out.splitlines()
    facts = json.loads(inspect("--model", str(folder), "--device", "cpu", *flags, "--json")[1])
    assert facts["encoder"]["sizes"] == sizes


def test_several_ranks_of_a_model_with_vision_are_refused_as_by_generate(inspect, tmp_path):
    folder = str(write_vl_folder(tmp_path, "qwen3_vl", has_weights=False))
    flags = ("--model", folder, "--device", "cpu")
    code, out, error = inspect(*flags, "--tp", "2")
    assert (code, out) == (2, "")
    assert "--tensor-parallel-size=2: models that take images run on one GPU only" in error
    assert inspect(*flags, "--tp", "1")[0] == 0


def test_a_model_of_text_has_no_line_about_an_encoder(inspect):
    assert "encoder" not in inspect("--device", "cpu")[1]


def test_config_file_counts_and_flags_win(plan, tmp_path):
    path = tmp_path / "gapless.toml"
    path.write_text('cuda_graph_bs_decode = [1, 2]\nmax_running_requests = 8\ndevice = "cpu"\n')
    assert plan("--config", str(path))["decode"]["sizes"] == [1, 2]
    assert plan("--config", str(path), "--cuda-graph-bs-decode", "4", "8")["decode"]["sizes"] == [4, 8]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--feature", "warp_drive"], "choose from"),
        (["--model", "no/such/folder"], "no such folder"),
        (["--cuda-graph-backend-decode", "fast"], "fast"),
        (["--cuda-graph-bs-decode", "0"], "0"),
        (["--cuda-graph-bs-decode", ""], "cuda_graph_bs_decode"),
        (["--cuda-graph-bs-decode", "64", "--device", "cpu"], "64"),
        (["--cuda-graph-bs-decode", "1,2", "--cuda-graph-max-bs-decode", "4"], "4"),
        (["--compilation-config", "{"], "JSON"),
        (["--compilation-config", '{"mode": 1}'], "mode"),
        (["--compilation-config", '{"modus": 3}'], "modus"),
        (["--compilation-config", '{"cudagraph_mode": "FASTEST"}'], "FASTEST"),
        (
            ["--compilation-config", '{"cudagraph_mode": "NONE"}', "--cuda-graph-backend-decode", "full"],
            "contradicts",
        ),
        (["--enforce-eager", "--cuda-graph-backend-decode", "full"], "contradicts"),
        (["--device", "tpu"], "tpu"),
        (["--block-size", "7"], "7"),
        (["--max-running-requests", "0"], "0"),
        (["--gpu-memory-utilization", "1.5"], "1.5"),
        (["--config", "no-such.toml"], "no-such.toml"),
        (["--draft-tokens", "-1"], "draft-tokens"),
    ],
)
def test_bad_options_are_one_sentence_that_names_them(inspect, args, word):
    code, out, err = inspect(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert word in err
    assert "Traceback" not in err


def test_config_file_that_is_not_toml_or_has_unknown_keys_is_an_error(inspect, tmp_path):
    path = tmp_path / "gapless.toml"
    path.write_text("this is no toml")
    assert inspect("--config", str(path))[0] == 2
    path.write_text("max_runing_requests = 8\n")
    code, _, err = inspect("--config", str(path))
    assert code == 2
    assert "max_running_requests" in err
