"""Options of a server: where they come from, which wins, what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
from dataclasses import dataclass
from typing import Any

import pytest
import typer

import gapless.cli.serve
from gapless.cli.main import main
from gapless.cli.options import EngineOptions
from gapless.cli.serve import ServerOptions
from gapless.config import ENGINE_FIELDS, GRAPH_FIELDS
from gapless.env import Env, read_env
from gapless.errors import ConfigError
from gapless.launch_server import main as launch_server
from gapless.serve.options import _SERVER_FIELDS, SERVER_ALIASES, resolve_options
from gapless.serve.settings import ServerSettings


@pytest.fixture(scope="module", autouse=True)
def _commands_made_once():
    """Hundreds of command lines are read here, and making the commands takes longer than all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


def resolve(*, engine=None, server=None, file=None, env=None):
    return resolve_options(
        engine_flags={"model": "smollm2", **(engine or {})},
        server_flags=server or {},
        config_file=file,
        env=env,
    )


def test_one_flat_file_holds_both_kinds_of_options():
    file = {"port": 9, "max-running-requests": 3, "served_model_name": "m", "cudagraph_mode": "NONE"}
    options = resolve(file=file)
    assert (options.server.port, options.server.served_model_names) == (9, ("m",))
    assert (options.engine.max_running_requests, options.engine.graphs.mode) == (3, "NONE")


@pytest.mark.parametrize(
    ("flags", "file", "variable", "expected"),
    [({}, {}, "", True), ({}, {}, "no", False), ({}, {"enable-prefix-caching": True}, "no", True)],
)
def test_prefix_caching_is_an_option_of_the_server_too(flags, file, variable, expected):
    env = read_env({"GAPLESS_ENABLE_PREFIX_CACHING": variable})
    options = resolve(engine=flags, file=file, env=env)
    assert options.engine.enable_prefix_caching is expected


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment():
    env = Env(logging_level="DEBUG", api_keys=("from-env",))
    assert resolve(env=env).server.log_level == "debug"
    assert resolve(env=env, file={"log_level": "error"}).server.log_level == "error"
    both = resolve(env=env, file={"api_key": ["from-file"]}, server={"api_key": ["from-flag"]})
    assert both.server.api_keys == ("from-flag",)
    assert resolve(env=env).server.api_keys == ("from-env",)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"prot": 80}, "did you mean port"),
        ({"max_queued_request": 80}, "did you mean max_queued_requests"),
        ({"wholly_other": 1}, "known: "),
        ({"drain_s": 3, "drain_seconds": 4}, "given twice"),
        ({"port": "eighty"}, "must be an integer"),
        ({"api_keys": 7}, "must be a tuple"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(file, words):
    with pytest.raises(ConfigError, match=words):
        resolve(file=file)


def test_a_chat_template_is_a_file_or_its_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert resolve(server={"chat_template": str(path)}).server.chat_template == "{{ messages }}"
    assert resolve(server={"chat_template": "{% if a %}"}).server.chat_template == "{% if a %}"
    with pytest.raises(ConfigError, match="no such template"):
        resolve(server={"chat_template": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 65536}, "between 0 and 65535"),
        ({"port": True}, "integer"),
        ({"host": " "}, "must not be empty"),
        ({"root_path": "api"}, "must begin with /"),
        ({"root_path": "/api/"}, "not end with it"),
        ({"max_queued_requests": 0}, "between 1"),
        ({"max_body_bytes": 10}, "between 1024"),
        ({"max_n": 129}, "between 1 and 128"),
        ({"drain_s": -1}, "--drain-seconds=-1"),
        ({"health_stale_s": 0.5}, "--health-stale-seconds=0.5: must be between 1 and 600"),
        ({"enable_cache_reset": "yes"}, "--enable-cache-reset='yes'"),
        ({"access_log": "xml"}, "json, text, off"),
        ({"log_level": "loud"}, "--log-level"),
        ({"ssl_certfile": "a.pem"}, "go together"),
        ({"ssl_certfile": "/none.pem", "ssl_keyfile": "/none.key"}, "no such file"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"served_model_names": "name"}, "tuple"),
        ({"max_image_pixels": 10**9}, "--max-image-pixels=1000000000: must be between 1 and 89478485"),
        ({"max_media_bytes": 1}, "--max-media-bytes=1: must be between"),
        ({"allowed_local_media_path": "/no/such"}, "--allowed-local-media-path=/no/such"),
        ({"allowed_media_domains": ("https://a.org",)}, "--allowed-media-domains"),
        ({"limit_mm_per_prompt": (("image", -1), ("video", 1))}, "image=-1: must be a number from 0"),
    ],
)
def test_settings_out_of_range_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**values)


@pytest.mark.parametrize(
    "value",
    [
        "image=4",
        '{"image": 4}',
        {"image": 4},
        "image=4,video=1",
        " image = 4 , video = 1 ",
        '{"video":1,"image":4}',
    ],
)
def test_limits_of_media_may_be_written_in_many_ways(value):
    limits = (("image", 4), ("video", 1))
    assert resolve(server={"limit_mm_per_prompt": value}).server.limit_mm_per_prompt == limits
    assert resolve(file={"limit-mm-per-prompt": value}).server.limit_mm_per_prompt == limits


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("audio=1", "unknown kind 'audio'; kinds are image, video"),
        ("image", "image=: must be a number"),
        ("image=1.5", "image=1.5: must be a number from 0 to 1024"),
        ("image=2000", "image=2000: must be a number from 0 to 1024"),
        ("{image: 1}", "is not JSON"),
        (4, "must be a JSON object"),
    ],
)
def test_limits_of_media_that_make_no_sense_are_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        resolve(server={"limit_mm_per_prompt": value})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"max_pixel": 1}', "max_pixel is not known; known: min_pixels, max_pixels, fps"),
        ('{"max_pixels": "1"}', "max_pixels='1': must be a number above 0"),
        ('{"images_kwargs": {"fps": 1}}', "images_kwargs.fps is not known; known: min_pixels, max_pixels"),
        ('{"images_kwargs": 3}', "images_kwargs=3: must be a JSON object"),
        ('{"fps": 1, "num_frames": 4}', "exclude each other"),
        ("max_pixels=1", "is not JSON"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_settings_of_the_processor_that_make_no_sense_are_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        resolve(engine={"mm_processor_kwargs": value})


def test_settings_of_media_are_shown_as_objects():
    kwargs = {"videos_kwargs": {"fps": 1}, "max_pixels": 9000}
    options = resolve(engine={"mm_processor_kwargs": json.dumps(kwargs)})
    assert options == resolve(file={"mm_processor_kwargs": kwargs})
    assert options.engine.mm_processor_kwargs == (("max_pixels", 9000), ("videos_kwargs", (("fps", 1),)))
    assert options.server.to_dict()["limit_mm_per_prompt"] == {"image": 16, "video": 1}


def test_what_is_shown_of_settings_holds_no_key():
    shown = ServerSettings(api_keys=("secret", "other")).to_dict()
    assert "secret" not in str(shown)
    assert shown["num_api_keys"] == 2


def test_keys_from_the_environment_are_separated_by_commas():
    assert read_env({"GAPLESS_API_KEY": " a, b ,"}).api_keys == ("a", "b")
    assert read_env({}).api_keys == ()


@pytest.mark.parametrize("start", [lambda args: main(["serve", *args]), launch_server])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no model"),
        (["--model-path", "smollm2", "--colour", "red"], "--colour"),
        (["--model-path", "smollm2", "--port", "eighty"], "--port"),
        (["--model-path", "smollm2", "--port", "70000"], "--port=70000"),
        (["--model", "/no/such/model"], "no such folder or file"),
        (["--model", "smollm2", "--enforce-eager", "--cuda-graph-backend-decode", "full"], "contradicts"),
        (
            ["--model", "smollm2", "--cuda-graph-backend-prefill", "full", "--compilation-config",
             '{"cudagraph_mode": "NONE"}'],
            "cudagraph_mode",
        ),
        (["--model", "smollm2", "--kv-cache-tokens", "64", "--max-total-tokens", "32"], "contradicts"),
        (["--model", "smollm2", "--drain-seconds", "nan"], "--drain-seconds=nan: must be"),
        (["--model", "smollm2", "--ssl-keyfile", "key.pem"], "go together"),
        (["--model", "smollm2", "--max-image-bytes", "5"], "--max-image-bytes is about images"),
        (["--model", "smollm2", "--limit-mm-per-prompt", "image=1"], "takes text only; leave it out"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(start, args, words, capsys):
    assert start(args) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert words in out.err
    assert len(out.err.strip().splitlines()) == 1
    assert "Traceback" not in out.err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "zmq" else find_spec(name, *rest)
    )
    assert main(["serve", "--model", "smollm2"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'gapless[serve]'" in error
    assert "zmq" in error


@dataclass(frozen=True)
class Case:
    """One way of saying one option: ``words`` on the command line, ``expected`` in the resolved config."""

    field: str
    words: tuple[str, ...]
    expected: Any


def _case(flag: str, field: str, *forms: tuple[str, Any]) -> list[Case]:
    return [Case(field, (flag, *text.split()), expected) for text, expected in forms]


ENGINE_CASES = [
    *_case("--model", "model", ("m", "m")),
    *_case("--model-path", "model", ("m", "m")),
    *_case("--load-format", "load_format", ("dummy", "dummy")),
    *_case("--dtype", "dtype", ("bfloat16", "bfloat16")),
    *_case("--device", "device", ("cpu", "cpu")),
    *_case("--max-model-len", "max_model_len", ("99", 99)),
    *_case("--max-running-requests", "max_running_requests", ("7", 7)),
    *_case("--chunked-prefill-size", "chunked_prefill_size", ("123", 123)),
    *_case("--max-total-tokens", "max_total_tokens", ("4321", 4321)),
    *_case("--block-size", "block_size", ("32", 32)),
    *_case("--kv-cache-tokens", "kv_cache_tokens", ("640", 640)),
    *_case("--gpu-memory-utilization", "gpu_memory_utilization", ("0.5", 0.5)),
    *_case("--mem-fraction-static", "gpu_memory_utilization", ("0.25", 0.25)),
    *_case("--tensor-parallel-size", "tensor_parallel_size", ("2", 2)),
    *_case("--tp", "tensor_parallel_size", ("2", 2)),
    *_case("--attention-backend", "attention_backend", ("reference", "reference")),
    *_case("--enable-prefix-caching", "enable_prefix_caching", ("", True)),
    *_case("--no-enable-prefix-caching", "enable_prefix_caching", ("", False)),
    *_case("--enforce-eager", "enforce_eager", ("", True)),
    *_case("--tensor-parallel-size", "tensor_parallel_size", ("2", 2)),
    Case("break_at_all_reduce", ("--break-at-all-reduce", "--tensor-parallel-size", "2"), True),
    *_case("--count-expert-tokens", "count_expert_tokens", ("", True)),
    *_case("--enable-vit-cuda-graph", "enable_vit_cuda_graph", ("", True)),
    Case("vit_cuda_graph_mode", ("--vit-cuda-graph-mode", "exact", "--enable-vit-cuda-graph"), "exact"),
    Case("vit_cuda_graph_budgets", ("--vit-cuda-graph-budgets", "8,16", "--enable-vit-cuda-graph"), (8, 16)),
    Case("vit_cuda_graph_max_tokens", ("--vit-cuda-graph-max-tokens", "64", "--enable-vit-cuda-graph"), 64),
    *_case("--mm-embedding-cache-tokens", "mm_embedding_cache_tokens", ("5", 5)),
    *_case("--mm-processor-kwargs", "mm_processor_kwargs", ('{"max_pixels":9000}', (("max_pixels", 9000),))),
]
GRAPH_CASES = [
    *(
        case
        for phase in ("prefill", "decode")
        for backend in ("full", "breakable", "tc_piecewise", "disabled")
        for case in _case(f"--cuda-graph-backend-{phase}", f"{phase}_backend", (backend, backend))
    ),
    *_case("--cuda-graph-max-bs-prefill", "prefill_max", ("512", 512)),
    *_case("--cuda-graph-max-bs-decode", "decode_max", ("8", 8)),
    *(
        case
        for phase in ("prefill", "decode")
        for case in _case(
            f"--cuda-graph-bs-{phase}",
            f"{phase}_sizes",
            ("1,2,4", (1, 2, 4)),
            ("1 2 4", (1, 2, 4)),
            ("8", (8,)),
        )
    ),
    *(
        Case(
            "tc_compiler",
            ("--cuda-graph-tc-compiler", name, "--cuda-graph-backend-prefill", "tc_piecewise"),
            name,
        )
        for name in ("eager", "inductor")
    ),
]
COMPILATION_CASES = [
    ("mode", {"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY"),
    ("compile_mode", {"mode": 0}, 0),
    ("compile_mode", {"mode": 3}, 3),
    ("capture_sizes", {"cudagraph_capture_sizes": [1, 8]}, (1, 8)),
    ("use_inductor_graph_partition", {"use_inductor_graph_partition": True, "mode": 3}, True),
    ("splitting_ops", {"splitting_ops": ["my::op"], "mode": 3}, ("my::op",)),
    ("splitting_ops", {"split_ops": []}, ()),
]
ONLY_IN_FILES = {"seed"}
"""On a command line ``--seed`` is a request's, so for dummy weights it stands in the config file."""


def resolved(monkeypatch, start, words) -> Any:
    """What ``gapless serve WORDS`` would start with."""
    seen = []
    monkeypatch.setattr(gapless.cli.serve, "_run", lambda options: seen.append(options) or 0)
    assert start(words) == 0
    (options,) = seen
    return options


def value_of(options: Any, field: str) -> Any:
    return getattr(options.engine if field in ENGINE_FIELDS else options.engine.graphs, field)


STARTS = {"gapless serve": lambda args: main(["serve", *args]), "launch_server": launch_server}


@pytest.mark.parametrize("case", ENGINE_CASES + GRAPH_CASES, ids=lambda case: " ".join(case.words[:4]))
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_every_flag_reaches_the_configuration_in_every_spelling(monkeypatch, start, case):
    flag, *rest = case.words
    model = [] if case.field == "model" else ["--model", "m"]
    spellings = [[flag, *rest], ["--" + flag[2:].replace("-", "_"), *rest]]
    if start is launch_server:
        spellings = spellings[:1]  # the same command under another name
    elif rest and not rest[0].startswith("--"):
        spellings += [[f"{spelled}={first}", *more] for spelled, first, *more in spellings]
    for words in spellings:
        options = resolved(monkeypatch, start, [*model, *words])
        assert value_of(options, case.field) == case.expected, words


@pytest.mark.parametrize(("field", "value", "expected"), COMPILATION_CASES, ids=str)
@pytest.mark.parametrize("flag", ["--compilation-config", "--compilation_config"])
def test_every_key_of_the_compilation_config_reaches_the_configuration(
    monkeypatch, flag, field, value, expected
):
    options = resolved(monkeypatch, launch_server, ["--model", "m", flag, json.dumps(value)])
    assert value_of(options, field) == expected


def test_no_option_of_the_engine_is_out_of_a_servers_reach(monkeypatch, tmp_path):
    """A field or a flag that is added later must be added to the cases above."""
    covered = {case.field for case in ENGINE_CASES + GRAPH_CASES} | {field for field, *_ in COMPILATION_CASES}
    assert covered | ONLY_IN_FILES == {*ENGINE_FIELDS, *GRAPH_FIELDS}
    flags = {field.name for field in dataclasses.fields(EngineOptions)} - {"config", "compilation_config"}
    said = {case.words[0][2:].removeprefix("no-").replace("-", "_") for case in ENGINE_CASES + GRAPH_CASES}
    assert said >= flags
    file = tmp_path / "options.toml"
    file.write_text("seed = 5")
    options = resolved(monkeypatch, launch_server, ["--model", "m", "--config", str(file)])
    assert options.engine.seed == 5


SERVER_CASES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("81", 81),
    "served_model_name": ("n", ("n",)),
    "api_key": ("k", ("k",)),
    "chat_template": ("{{ x }}", "{{ x }}"),
    "max_queued_requests": ("5", 5),
    "max_body_bytes": ("2048", 2048),
    "tool_call_parser": ("hermes", "hermes"),
    "generation_config": ("none", "none"),
    "max_n": ("3", 3),
    "drain_seconds": ("1.5", 1.5),
    "health_stale_seconds": ("45", 45.0),
    "root_path": ("/llm", "/llm"),
    "replicas": ("2", 2),
    "routing": ("load", "load"),
    "max_replica_restarts": ("0", 0),
    "limit_mm_per_prompt": ("image=4,video=0", (("image", 4), ("video", 0))),
    "allowed_local_media_path": ("/", "/"),
    "allowed_media_domains": ("example.org", ("example.org",)),
    "max_image_bytes": ("7", 7),
    "max_image_pixels": ("8", 8),
    "max_video_bytes": ("9", 9),
    "max_video_seconds": ("10", 10),
    "max_video_frames": ("11", 11),
    "max_decoded_pixels": ("12", 12),
    "max_media_bytes": ("2000000", 2_000_000),
    "cors_origin": ("*", ("*",)),
    "access_log": ("text", "text"),
    "log_level": ("error", "error"),
}


@pytest.mark.parametrize(("name", "text", "expected"), [(n, *v) for n, v in SERVER_CASES.items()], ids=str)
def test_every_flag_of_the_http_side_reaches_its_settings(monkeypatch, name, text, expected):
    field = SERVER_ALIASES.get(name, name)
    for flag in ("--" + name, "--" + name.replace("_", "-")):
        options = resolved(monkeypatch, launch_server, ["--model", "m", flag, text])
        assert getattr(options.server, field) == expected


def test_the_flags_of_the_http_side_are_all_tried(monkeypatch, tmp_path):
    certificate = {"ssl_certfile": tmp_path / "c", "ssl_keyfile": tmp_path / "k"}
    words = ["--enable-cache-reset"]
    for name, path in certificate.items():
        path.touch()
        words += ["--" + name, str(path)]
    options = resolved(monkeypatch, launch_server, ["--model", "m", *words])
    assert options.server.enable_cache_reset
    assert (options.server.ssl_certfile, options.server.ssl_keyfile) == tuple(map(str, certificate.values()))
    tried = {*SERVER_CASES, *certificate, "enable_cache_reset"}
    assert tried == {field.name for field in dataclasses.fields(ServerOptions)}
    assert {SERVER_ALIASES.get(name, name) for name in tried} == set(_SERVER_FIELDS)


def test_a_certificate_that_is_none_is_found_out_before_the_engine_starts(tmp_path, capsys):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("not a certificate")
    files = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    assert main(["serve", "--model", "smollm2", *files]) == 2
    assert "are no certificate and its key" in capsys.readouterr().err


def test_a_port_in_use_is_found_out_before_the_engine_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "smollm2", "--port", str(port)]) == 2
    assert f"--port={port} on 127.0.0.1" in capsys.readouterr().err
