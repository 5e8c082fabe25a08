"""Options: what each field accepts, defaults by device, precedence of sources, contradictions, and the
environment.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.config import CUDAGraphMode, EngineConfig, GraphConfig
from gapless.config_sources import parse_compilation_config, parse_sizes, read_config_file
from gapless.env import LOGGING_LEVELS, Env, read_env
from gapless.errors import ConfigError
from gapless.graphs.modes import GraphMode, Strategy
from gapless.graphs.plan import GraphRequest

NONE, FULL = GraphMode.NONE, GraphMode.FULL
BOTH = GraphMode.FULL_AND_PIECEWISE


def engine(**fields) -> EngineConfig:
    return EngineConfig(model="smollm2", **fields)


# --- graph options ---


def test_the_default_says_nothing():
    assert GraphConfig().to_request() == GraphRequest()
    assert GraphConfig().to_request(force=True) == GraphRequest(force=True)


@pytest.mark.parametrize("mode", list(GraphMode), ids=str)
def test_a_mode_is_given_as_text_or_enum(mode):
    assert CUDAGraphMode is GraphMode
    assert GraphConfig(mode=mode.value).mode is mode  # type: ignore[arg-type]
    assert GraphConfig(mode=mode).to_request().mode is mode


@pytest.mark.parametrize("strategy", list(Strategy), ids=str)
def test_a_backend_is_given_as_text_or_enum(strategy):
    for value in (strategy, strategy.value):
        request = GraphConfig(prefill_backend=value, decode_backend=value).to_request()  # type: ignore[arg-type]
        assert (request.prefill, request.decode) == (strategy, strategy)


def test_every_graph_option_reaches_the_request():
    config = GraphConfig(
        mode=GraphMode.PIECEWISE,
        prefill_backend=Strategy.TC_PIECEWISE,
        decode_backend=Strategy.TC_PIECEWISE,
        prefill_max=8,
        decode_max=2,
        prefill_sizes=(4, 8),
        decode_sizes=(1, 2),
        capture_sizes=(16,),
        compile_mode=3,
        tc_compiler="inductor",
        use_inductor_graph_partition=True,
        splitting_ops=("moe::dispatch",),
    )
    default = GraphRequest(force=True)
    request = config.to_request()
    for field in dataclasses.fields(GraphRequest):
        assert getattr(request, field.name) != getattr(default, field.name), field.name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"mode": "full"},
            r"cudagraph_mode='full': must be one of auto, NONE, PIECEWISE, FULL, .*FULL_AND_PIECEWISE",
        ),
        ({"mode": None}, "cudagraph_mode=None"),
        (
            {"prefill_backend": "FULL"},
            r"--cuda-graph-backend-prefill='FULL': .*disabled, tc_piecewise, breakable, full",
        ),
        ({"decode_backend": "eager"}, "--cuda-graph-backend-decode='eager'"),
        ({"prefill_max": 0}, "--cuda-graph-max-bs-prefill=0: must be between 1"),
        ({"prefill_max": -4}, "--cuda-graph-max-bs-prefill=-4"),
        ({"decode_max": 2**40}, "--cuda-graph-max-bs-decode=1099511627776"),
        ({"decode_max": True}, "--cuda-graph-max-bs-decode=True: must be an integer"),
        ({"decode_max": "8"}, "--cuda-graph-max-bs-decode='8': must be an integer"),
        ({"prefill_sizes": []}, "--cuda-graph-bs-prefill is an empty list"),
        ({"prefill_sizes": [4, 0]}, "--cuda-graph-bs-prefill: 0 is not a capture size"),
        ({"decode_sizes": "1,two"}, "--cuda-graph-bs-decode: 'two' is not a capture size"),
        ({"decode_sizes": 8}, "--cuda-graph-bs-decode=8: must be a list"),
        ({"capture_sizes": [1.5]}, "cudagraph_capture_sizes: 1.5"),
        ({"compile_mode": 1}, "compilation mode 1 is not supported: 0 is no compilation, 3 is piecewise"),
        ({"compile_mode": 2}, "compilation mode 2"),
        ({"compile_mode": "3"}, "compilation mode '3'"),
        ({"tc_compiler": "nvcc"}, "--cuda-graph-tc-compiler='nvcc': must be one of eager, inductor"),
        ({"use_inductor_graph_partition": 1}, "use_inductor_graph_partition=1: must be true or false"),
        ({"splitting_ops": "moe"}, "splitting_ops='moe': must be a list"),
        ({"splitting_ops": [""]}, "splitting_ops"),
        (
            {"mode": "FULL", "prefill_backend": "disabled"},
            "backend-prefill=disabled contradicts cudagraph_mode=FULL",
        ),
        ({"mode": "NONE", "decode_backend": "full"}, "backend-decode=full contradicts cudagraph_mode=NONE"),
        (
            {"prefill_sizes": [4, 8], "prefill_max": 9},
            "max-bs-prefill=9 disagrees with --cuda-graph-bs-prefill",
        ),
        ({"compile_mode": 0, "prefill_backend": "tc_piecewise"}, "contradicts compilation mode 0"),
        ({"splitting_ops": [], "prefill_backend": "breakable"}, "splitting_ops is empty"),
    ],
)
def test_a_bad_graph_option_is_named_with_its_value(fields, words):
    with pytest.raises(ConfigError, match=words):
        GraphConfig(**fields)


@pytest.mark.parametrize(
    "value", ["1,2,4", "1 2 4", "1, 2, 4", "[1, 2, 4]", [1, 2, 4], (1, 2, 4), ["1", "2", "4"], ["1,2", "4"]]
)
def test_size_lists_are_read_in_every_spelling(value):
    assert parse_sizes("sizes", value) == (1, 2, 4)
    assert GraphConfig(decode_sizes=value).decode_sizes == (1, 2, 4)


@pytest.mark.parametrize("value", ["", " ", [], ["-1"], "1;2", "1.5", [True], None, {"1": 2}])
def test_what_is_no_size_list_is_refused_under_its_name(value):
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes("--sizes", value)


# --- compilation config ---


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "dict"])
@pytest.mark.parametrize(
    ("value", "fields"),
    [
        ({}, {}),
        (
            {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
            {"compile_mode": 3, "mode": "FULL_AND_PIECEWISE"},
        ),
        ({"mode": 0}, {"compile_mode": 0}),
        ({"mode": None}, {}),
        ({"cudagraph_capture_sizes": [4, 1, 2]}, {"capture_sizes": (4, 1, 2)}),
        ({"use_inductor_graph_partition": True}, {"use_inductor_graph_partition": True}),
        ({"splitting_ops": []}, {"splitting_ops": ()}),
        ({"split_ops": ["moe"]}, {"splitting_ops": ("moe",)}),
        ({"split_ops": ["moe"], "splitting_ops": ["moe"]}, {"splitting_ops": ("moe",)}),
    ],
)
def test_a_compilation_config_becomes_graph_options(value, fields, as_json):
    assert parse_compilation_config(json.dumps(value) if as_json else value) == fields


def test_a_compilation_config_takes_the_enum():
    assert parse_compilation_config({"cudagraph_mode": CUDAGraphMode.FULL}) == {"mode": FULL}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        (3, "must be an object"),
        ({"level": 3}, r"no key 'level'; its keys are cudagraph_mode, mode, .*splitting_ops"),
        ({"split_ops": ["a"], "splitting_ops": ["b"]}, "splitting_ops twice"),
    ],
)
def test_a_bad_compilation_config_is_refused_and_the_keys_are_listed(value, words):
    with pytest.raises(ConfigError, match=words):
        parse_compilation_config(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"mode": 2}, "compilation mode 2 is not supported"),
        ({"cudagraph_mode": "FULLEST"}, "cudagraph_mode='FULLEST': must be one of"),
        ({"cudagraph_capture_sizes": [0]}, "0 is not a capture size"),
    ],
)
def test_values_inside_a_compilation_config_are_checked(value, words):
    with pytest.raises(ConfigError, match=words):
        GraphConfig.from_sources(python={"compilation_config": value})


# --- sources ---

SOURCES = ("flags", "python", "config_file", "env")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"mode": "NONE"}, "mode", NONE),
        ({"cudagraph_mode": "NONE"}, "mode", NONE),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "mode", NONE),
        ({"compilation_config": '{"mode": 3}'}, "compile_mode", 3),
        ({"cuda_graph_backend_prefill": "full"}, "prefill_backend", Strategy.FULL),
        ({"--cuda-graph-backend-decode": "disabled"}, "decode_backend", Strategy.DISABLED),
        ({"cuda-graph-max-bs-prefill": 64}, "prefill_max", 64),
        ({"cuda_graph_max_bs_decode": 8}, "decode_max", 8),
        ({"cuda_graph_bs_prefill": "4 8"}, "prefill_sizes", (4, 8)),
        ({"cuda_graph_bs_decode": [1, 2]}, "decode_sizes", (1, 2)),
        ({"cuda_graph_tc_compiler": "inductor"}, "tc_compiler", "inductor"),
        ({"mode": None}, "mode", "auto"),
    ],
)
def test_every_source_takes_field_names_and_flag_names(source, given, field, value):
    assert getattr(GraphConfig.from_sources(**{source: given}), field) == value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"env": "NONE"}, NONE),
        ({"config_file": "FULL", "env": "NONE"}, FULL),
        ({"python": "PIECEWISE", "config_file": "FULL", "env": "NONE"}, GraphMode.PIECEWISE),
        ({"flags": "PIECEWISE", "config_file": "FULL"}, GraphMode.PIECEWISE),
        ({"flags": "PIECEWISE", "python": "PIECEWISE", "env": "FULL"}, GraphMode.PIECEWISE),
        ({"flags": None, "config_file": "FULL"}, FULL),
        ({}, "auto"),
    ],
)
def test_command_line_and_python_beat_the_file_which_beats_the_environment(given, expected):
    sources = {name: {"mode": mode} for name, mode in given.items()}
    assert GraphConfig.from_sources(**sources).mode == expected


def test_fields_from_different_sources_come_together():
    config = GraphConfig.from_sources(
        flags={"prefill_max": 64},
        config_file={"decode_max": 8, "prefill_max": 32},
        env={"tc_compiler": "eager"},
    )
    assert (config.prefill_max, config.decode_max, config.tc_compiler) == (64, 8, "eager")


def test_command_line_and_python_may_not_disagree():
    with pytest.raises(
        ConfigError, match=r"mode=FULL from the command line disagrees with mode=NONE from the Python"
    ):
        GraphConfig.from_sources(flags={"mode": "FULL"}, python={"mode": "NONE"})


def test_command_line_and_python_may_say_the_same_in_two_spellings():
    config = GraphConfig.from_sources(flags={"decode_sizes": "1,2"}, python={"decode_sizes": [1, 2]})
    assert config.decode_sizes == (1, 2)


@pytest.mark.parametrize("source", SOURCES)
def test_one_source_may_not_disagree_with_itself(source):
    given = {"mode": "FULL", "compilation_config": {"cudagraph_mode": "NONE"}}
    with pytest.raises(ConfigError, match=r"mode=FULL disagrees with compilation_config's mode=NONE"):
        GraphConfig.from_sources(**{source: given})


def test_a_mode_against_a_flag_of_another_source_names_both_and_where_they_came_from():
    with pytest.raises(ConfigError) as caught:
        GraphConfig.from_sources(flags={"prefill_backend": "disabled"}, config_file={"mode": "FULL"})
    message = str(caught.value)
    assert "--cuda-graph-backend-prefill=disabled contradicts cudagraph_mode=FULL" in message
    assert "prefill_backend from the command line" in message
    assert "mode from the config file" in message


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("prefil_backend", "did you mean prefill_backend"),
        ("zzz", "known: .*prefill_backend"),
        ("model", "known:|did you mean"),
    ],
)
def test_an_unknown_option_is_named_with_its_source_and_a_hint(source, key, hint):
    with pytest.raises(ConfigError, match=rf"unknown option '{key}' from the .*({hint})"):
        GraphConfig.from_sources(**{source: {key: 1}})


def test_engine_options_and_graph_options_come_from_the_same_sources():
    config = EngineConfig.from_sources(
        flags={"model_path": "m", "cuda_graph_bs_decode": "1 2", "mem_fraction_static": 0.5},
        python={"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
        config_file={"block-size": 32, "model": "other"},
    )
    assert (config.model, config.gpu_memory_utilization, config.block_size) == ("m", 0.5, 32)
    assert config.graphs == GraphConfig(mode=BOTH, compile_mode=3, decode_sizes=(1, 2))


def test_python_may_pass_a_graph_config():
    graphs = GraphConfig(mode=FULL, prefill_max=64)
    assert EngineConfig.from_sources(python={"model": "m", "graphs": graphs}).graphs == graphs
    with pytest.raises(ConfigError, match=r"prefill_max=8 disagrees with graphs\.prefill_max=64"):
        EngineConfig.from_sources(python={"model": "m", "graphs": graphs, "prefill_max": 8})
    with pytest.raises(ConfigError, match="must be a GraphConfig"):
        EngineConfig.from_sources(python={"model": "m", "graphs": {"mode": "FULL"}})


@pytest.mark.parametrize(
    ("flags", "config_file", "variable", "expected"),
    [
        ({}, {}, None, True),
        ({}, {}, "off", False),
        ({}, {}, "1", True),
        ({}, {"enable-prefix-caching": False}, "1", False),
        ({"enable_prefix_caching": True}, {"enable_prefix_caching": False}, "0", True),
        ({"enable_prefix_caching": False}, {}, None, False),
    ],
)
def test_prefix_caching_is_on_unless_flag_file_or_environment_say_otherwise(
    flags, config_file, variable, expected
):
    env = read_env({} if variable is None else {"GAPLESS_ENABLE_PREFIX_CACHING": variable}).engine_options()
    config = EngineConfig.from_sources(flags={"model": "m", **flags}, config_file=config_file, env=env)
    assert config.enable_prefix_caching is expected


def test_a_missing_model_is_an_error():
    with pytest.raises(ConfigError, match="no model was named"):
        EngineConfig.from_sources(flags={"block_size": 16})


def test_a_config_file_is_toml_with_the_same_names(tmp_path):
    path = tmp_path / "gapless.toml"
    path.write_text(
        'model = "m"\nblock-size = 32\ncuda-graph-bs-decode = [1, 2]\n'
        '[compilation-config]\ncudagraph_mode = "FULL_AND_PIECEWISE"\n'
    )
    config = EngineConfig.from_sources(config_file=read_config_file(path))
    assert (config.model, config.block_size) == ("m", 32)
    assert config.graphs == GraphConfig(mode=BOTH, decode_sizes=(1, 2))


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        read_config_file(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        read_config_file(tmp_path / "bad.toml")


# --- engine options ---


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": ""}, "--model=''"),
        ({"model": None}, "--model=None"),
        ({"dtype": "int8"}, "--dtype='int8': must be one of auto, float32, bfloat16, float16"),
        ({"device": "tpu"}, "--device='tpu': must be one of auto, cpu, cuda"),
        ({"load_format": "pickle"}, "--load-format='pickle': must be one of auto, dummy, safetensors, gguf"),
        ({"seed": -1}, "--seed=-1"),
        ({"seed": 1.0}, "--seed=1.0: must be an integer"),
        ({"max_model_len": 0}, "--max-model-len=0"),
        ({"max_model_len": 2**31}, "--max-model-len=2147483648: must be between 1 and 2147483647"),
        ({"max_running_requests": -5}, "--max-running-requests=-5"),
        ({"max_running_requests": 10**9}, "--max-running-requests=1000000000"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size=0"),
        ({"chunked_prefill_size": 10**9}, "--chunked-prefill-size=1000000000"),
        ({"block_size": 8}, "--block-size=8: must be between 16 and 128"),
        ({"block_size": 256}, "--block-size=256"),
        ({"block_size": 24}, "--block-size=24: must be a power of two"),
        ({"kv_cache_tokens": 15}, "--kv-cache-tokens=15: must be between 16"),
        ({"kv_cache_tokens": 2**31}, "--kv-cache-tokens"),
        ({"max_total_tokens": -1}, "--max-total-tokens=-1"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization=0.0: must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.01}, "--gpu-memory-utilization=1.01"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization=nan"),
        ({"gpu_memory_utilization": "0.9"}, "--gpu-memory-utilization='0.9'"),
        ({"attention_backend": ""}, "--attention-backend=''"),
        ({"enforce_eager": "yes"}, "--enforce-eager='yes'"),
        ({"graphs": {}}, "must be a GraphConfig"),
        (
            {"kv_cache_tokens": 64, "max_total_tokens": 32},
            "kv-cache-tokens=64 contradicts --max-total-tokens=32",
        ),
        (
            {"enforce_eager": True, "graphs": GraphConfig(mode=FULL)},
            "--enforce-eager contradicts cudagraph_mode=FULL",
        ),
        (
            {"enforce_eager": True, "graphs": GraphConfig(decode_backend=Strategy.FULL)},
            "--enforce-eager contradicts --cuda-graph-backend-decode=full",
        ),
    ],
)
def test_a_bad_engine_option_is_named_with_its_value(fields, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**{"model": "smollm2", **fields})


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_are_powers_of_two(block_size):
    assert engine(block_size=block_size).block_size == block_size


@pytest.mark.parametrize(("device", "limits"), [("cuda", (256, 4096, None)), ("cpu", (16, 256, 16384))])
def test_limits_that_were_not_given_come_from_the_device(device, limits):
    config = engine()
    filled = config.with_device_defaults(device)
    assert (filled.max_running_requests, filled.chunked_prefill_size, filled.kv_cache_tokens) == limits
    assert filled.device == device
    assert config.max_running_requests is None  # the user's object is untouched


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_limits_that_were_given_stay(device):
    given = {"max_running_requests": 3, "chunked_prefill_size": 77, "kv_cache_tokens": 160}
    filled = engine(**given).with_device_defaults(device)
    assert {name: getattr(filled, name) for name in given} == given


def test_the_default_cache_respects_the_total():
    assert engine(max_total_tokens=1000).with_device_defaults("cpu").kv_cache_tokens == 1000


@pytest.mark.parametrize(("config", "device"), [(engine(), "tpu"), (engine(device="cpu"), "cuda")])
def test_defaults_of_a_device_that_was_not_asked_for_are_refused(config, device):
    with pytest.raises(ConfigError, match=device):
        config.with_device_defaults(device)


def test_enforce_eager_is_mode_none_and_keeps_what_agrees():
    assert engine(enforce_eager=True).graph_request().mode is NONE
    graphs = GraphConfig(prefill_backend=Strategy.DISABLED)
    assert engine(enforce_eager=True, graphs=graphs).graph_request().prefill is Strategy.DISABLED
    assert engine(graphs=GraphConfig(mode=FULL)).graph_request(force=True) == GraphRequest(
        mode=FULL, force=True
    )


@pytest.mark.parametrize(("config", "field"), [(GraphConfig(), "mode"), (engine(), "seed"), (Env(), "soak")])
def test_options_are_frozen(config, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 1)


def test_configuration_needs_no_torch():
    code = "import sys, gapless.config, gapless.env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- environment ---


def test_an_empty_environment_gives_the_defaults():
    assert read_env({}) == Env()
    assert read_env({"GAPLESS_SOAK": "", "GAPLESS_LOGGING_LEVEL": " "}) == Env()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("GAPLESS_FORCE_GRAPHS", "force_graphs"),
        ("GAPLESS_VIT_ENABLE_CUDA_GRAPH", "vit_enable_cuda_graph"),
        ("GAPLESS_SOAK", "soak"),
        ("GAPLESS_TUNE_LINEAR", "tune_linear"),
        ("GAPLESS_FAST_LAUNCH", "fast_launch"),
        ("TRITON_INTERPRET", "triton_interpret"),
    ],
)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("On", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_switches_are_read_from_the_environment(name, field, text, value):
    assert getattr(read_env({name: text}), field) is value


@pytest.mark.parametrize("level", LOGGING_LEVELS)
def test_logging_levels_are_read_in_any_case(level):
    assert read_env({"GAPLESS_LOGGING_LEVEL": level.lower()}).logging_level == level


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GAPLESS_FORCE_GRAPHS", "2"),
        ("GAPLESS_VIT_ENABLE_CUDA_GRAPH", "maybe"),
        ("GAPLESS_SOAK", "-"),
        ("GAPLESS_LOGGING_LEVEL", "LOUD"),
    ],
)
def test_a_value_that_cannot_be_read_is_an_error_naming_the_variable(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text}: must be"):
        read_env({name: text})


def test_the_cache_folder_is_read_from_the_environment(tmp_path):
    assert read_env({"GAPLESS_CACHE_DIR": str(tmp_path)}).cache_dir == tmp_path
    assert read_env({"GAPLESS_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"
    assert read_env({"GAPLESS_CACHE_DIR": " "}).cache_dir is None


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("GAPLESS_FORCE_GRAPHS", "1")
    assert read_env().force_graphs
