"""Files of ``deploy/``: what they name exists, and the options that documents show are accepted."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from gapless.cli.main import app
from gapless.config_sources import read_config_file
from gapless.env import Env
from gapless.serve.auth import OPEN_PATHS
from gapless.serve.options import resolve_options

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
NGINX = (ROOT / "deploy/nginx.conf").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
NOT_SENT = shutil.ignore_patterns("__pycache__", "*.egg-info")
"""To the builder, by ``.dockerignore``."""


def serve_flags() -> set[str]:
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    return {name for parameter in parameters for name in parameter.opts}


def test_what_the_image_copies_is_there_and_is_sent_to_the_builder():
    copied = [
        word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    ]
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert copied
    assert set(copied) <= set(sent)
    assert all((ROOT / word).exists() for word in copied)


def test_the_image_installs_every_file_as_it_is(tmp_path):
    """Its steps, with a ``pip`` that only builds: the second build finds what the first one left."""
    pytest.importorskip("setuptools", reason="what pip builds with")
    pip, app_folder = tmp_path / "bin" / "pip", tmp_path / "app"
    pip.parent.mkdir()
    app_folder.mkdir()
    build = f'"{sys.executable}" -W ignore -c "import setuptools; setuptools.setup()" -q build'
    pip.write_text(f'#!/bin/sh\n[ "$1" = uninstall ] || exec {build}\n')
    pip.chmod(0o755)
    environment = {**os.environ, "PATH": f"{pip.parent}:{os.environ['PATH']}"}
    steps = DOCKERFILE.replace("\\\n", " ").partition("\nWORKDIR /app\n")[2]
    for name, rest in re.findall(r"^(COPY|RUN) (.+)$", steps, re.MULTILINE):
        if name == "RUN":
            subprocess.run(rest, shell=True, check=True, cwd=app_folder, env=environment, capture_output=True)
            continue
        *sources, target = rest.split()
        for source in sources:  # with its times, as a builder does
            place = app_folder / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=NOT_SENT, dirs_exist_ok=True)
            else:
                shutil.copy2(ROOT / source, place)
    expected, built = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
        for folder in (app_folder / "src/gapless", app_folder / "build/lib/gapless")
    )
    assert built == expected


def test_the_image_ends_by_signal_and_not_as_root():
    assert re.search(r'^ENTRYPOINT \["gapless", "serve"', DOCKERFILE, re.MULTILINE), (
        "a shell would keep SIGTERM"
    )
    assert "\nUSER gapless\n" in DOCKERFILE


def test_the_unit_stops_the_right_process_and_waits_longer_than_the_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy/gapless.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > 30
    assert service["RestartPreventExitStatus"] == "2"
    words = service["ExecStart"].split()
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= serve_flags()


def test_options_of_the_guide_are_accepted(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "options.toml").write_text(text.replace("/srv/models/qwen3-0.6b", "smollm2"))
    options = resolve_options(
        engine_flags={},
        server_flags={},
        config_file=read_config_file(str(tmp_path / "options.toml")),
        env=Env(api_keys=("K1", "K2")),
    )
    assert options.server.max_queued_requests == 512
    assert options.server.api_keys == ("K1", "K2")
    assert options.engine.model == "smollm2"


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z-]+)", GUIDE))))
def test_flags_of_the_guide_exist(flag):
    assert flag in serve_flags()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(/[a-z_.]+)`", GUIDE)) - {"/server_info"}))
def test_paths_that_the_guide_calls_open_are(path):
    assert path in OPEN_PATHS


def test_metrics_of_the_guide_exist():
    from test_http_status import SAMPLES

    known = {re.split(r"[{ ]", sample)[0] for sample in SAMPLES} | {"gapless:engine_steps_total"}
    for name in re.findall(r"((?:vllm|gapless):\w+)", GUIDE):
        assert name.removesuffix("_bucket") in known or f"{name.removesuffix('_bucket')}_count" in known, name


def test_streams_pass_the_proxy_unbuffered():
    assert "proxy_buffering off;" in NGINX
    assert "proxy_ignore_client_abort off;" in NGINX


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx_accepts_its_configuration(tmp_path):
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    key += ["-keyout", str(tmp_path / "k.pem"), "-out", str(tmp_path / "c.pem")]
    subprocess.run(key, check=True, capture_output=True)
    site = re.sub(r"(ssl_certificate +)\S+;", rf"\g<1>{tmp_path}/c.pem;", NGINX)
    site = re.sub(r"(ssl_certificate_key +)\S+;", rf"\g<1>{tmp_path}/k.pem;", site)
    (tmp_path / "site.conf").write_text(site.replace("listen 443", "listen 127.0.0.1:48443"))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\nevents {{}}\n"
        f"http {{ include {tmp_path}/site.conf; }}\n"
    )
    done = subprocess.run(
        ["nginx", "-t", "-c", str(tmp_path / "nginx.conf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
