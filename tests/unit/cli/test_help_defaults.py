"""``--help`` says what an option is when it is not given, and says what the config classes say."""

from __future__ import annotations

import dataclasses
import re

import pytest

from gapless.cli.defaults import FOUND_OUT, cluster_defaults, engine_defaults, server_defaults
from gapless.cli.deploy import ClusterOptions
from gapless.cli.main import main
from gapless.cli.options import EngineOptions
from gapless.cli.serve import ServerOptions
from gapless.config import EngineConfig, GraphConfig
from gapless.config_sources import ALIASES
from gapless.deploy.ray_options import RayOptions
from gapless.engine.media_setup import DEFAULT_CACHE_TOKENS
from gapless.serve.options import SERVER_ALIASES
from gapless.serve.settings import ServerSettings

NOTHING_TO_SAY = {"model", "config", "compilation_config"}
"""Nothing is their default: no model, no file."""
NONE_UNLESS_GIVEN = {
    *("api_key", "chat_template", "allowed_local_media_path", "allowed_media_domains"),
    *("ssl_certfile", "ssl_keyfile", "root_path", "cors_origin", "address"),
}


def names_of(group: type) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]


def test_every_option_of_the_engine_has_a_default_in_its_help():
    names = names_of(EngineOptions)
    assert set(engine_defaults(names)) == set(names) - NOTHING_TO_SAY


def test_every_option_of_servers_and_clusters_has_one_or_is_off_without_it():
    names = [*names_of(ServerOptions), *names_of(ClusterOptions)]
    assert set(server_defaults(names)) | set(cluster_defaults(names)) == set(names) - NONE_UNLESS_GIVEN


@pytest.mark.parametrize("name", sorted(set(names_of(EngineOptions)) - NOTHING_TO_SAY))
def test_the_help_of_an_option_agrees_with_the_engines_config(name):
    field = ALIASES.get(name, name)
    owner = EngineConfig(model="m") if hasattr(EngineConfig, field) else GraphConfig()
    default = getattr(owner, field)
    text = engine_defaults([name])[name]
    if default in (None, ()):
        assert field in FOUND_OUT or re.search(r"\d", text), "found out at start-up"
    else:
        assert text == {True: "on", False: "off"}.get(default, str(default)) or default == float(text)


def test_words_stand_only_for_what_no_config_class_says():
    owners = [EngineConfig(model="m"), GraphConfig(), ServerSettings(), RayOptions()]
    for name in FOUND_OUT:
        values = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        assert values, name
        assert all(value in (None, (), "") for value in values), name


def test_limits_depend_on_the_device():
    found = engine_defaults(["max_running_requests", "kv_cache_tokens"])
    gpu, cpu = (EngineConfig(model="m").with_device_defaults(device) for device in ("cuda", "cpu"))
    assert found["max_running_requests"] == (
        f"{gpu.max_running_requests} on a GPU, {cpu.max_running_requests} on a CPU"
    )
    assert found["kv_cache_tokens"] == f"measured on a GPU, {cpu.kv_cache_tokens} on a CPU"


def test_the_size_of_the_cache_of_embeddings_is_the_engines():
    assert engine_defaults(["mm_embedding_cache_tokens"]) == {
        "mm_embedding_cache_tokens": str(DEFAULT_CACHE_TOKENS)
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", str(ServerSettings().port)),
        ("drain_seconds", f"{ServerSettings().drain_s:g}"),
        ("max_body_bytes", "16 MiB"),
        ("max_media_bytes", "4 GiB"),
        ("limit_mm_per_prompt", "image=16,video=1"),
        ("served_model_name", "what --model says"),
        ("enable_cache_reset", "off"),
    ],
)
def test_defaults_of_the_server(name, text):
    assert SERVER_ALIASES.get(name, name) in names_of(ServerSettings)
    assert server_defaults([name]) == {name: text}


def test_a_clusters_counts_are_its_own():
    assert cluster_defaults(["replicas", "host", "max_ongoing_requests"]) == {
        "replicas": RayOptions().replicas,
        "host": ServerSettings().host,
        "max_ongoing_requests": str(RayOptions().max_ongoing_requests),
    }


@pytest.mark.parametrize(
    "command",
    ["generate", "serve", "demo", "inspect", "check", "bench latency", "bench throughput", "deploy ray"],
)
def test_help_prints_them(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for name, default in engine_defaults(names_of(EngineOptions)).items():
        flag = f"--{name.replace('_', '-')}"
        if flag in text:
            assert f"({default})" in text[text.index(flag) :], flag
    assert "(0)" not in text, "a request's seed is not the engine's"
