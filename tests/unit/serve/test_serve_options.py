"""Options of a server: where they come from, which wins, what is refused before anything starts."""

from __future__ import annotations

import socket

import pytest

from gapless.cli.main import main
from gapless.env import Env, read_env
from gapless.errors import ConfigError
from gapless.launch_server import main as launch_server
from gapless.serve.options import resolve_options
from gapless.serve.settings import ServerSettings


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
        ({"access_log": "xml"}, "json, text, off"),
        ({"log_level": "loud"}, "--log-level"),
        ({"ssl_certfile": "a.pem"}, "go together"),
        ({"ssl_certfile": "/none.pem", "ssl_keyfile": "/none.key"}, "no such file"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"served_model_names": "name"}, "tuple"),
    ],
)
def test_settings_out_of_range_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**values)


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
        (["--model", "smollm2", "--ssl-keyfile", "key.pem"], "go together"),
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


def test_every_flag_of_the_engine_is_a_flag_of_the_server(capsys):
    assert main(["generate", "--help"]) == 0
    generate = capsys.readouterr().out
    assert main(["serve", "--help"]) == 0
    serve = capsys.readouterr().out
    for flag in (
        "--cuda-graph-backend-prefill",
        "--cuda-graph-bs-decode",
        "--max-total-tokens",
        "--model-path",
    ):
        assert flag in generate
        assert flag in serve


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
