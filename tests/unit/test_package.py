"""The package as a whole: what importing it costs, what it exports, which version it is."""

import importlib
import statistics
import subprocess
import sys
import time

import pytest

import gapless
from gapless.serve.version import version as served_version


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_import_loads_neither_torch_nor_transformers():
    answer = run_python(
        "import gapless, sys; print([n for n in ('torch', 'transformers', 'rich') if n in sys.modules])"
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_import_takes_less_than_300_milliseconds():
    def seconds(code):
        start = time.perf_counter()
        assert run_python(code).returncode == 0
        return time.perf_counter() - start

    bare = statistics.median(seconds("pass") for _ in range(5))
    with_import = statistics.median(seconds("import gapless") for _ in range(5))
    assert with_import - bare < 0.3


@pytest.mark.parametrize("name", gapless.__all__)
def test_every_public_name_exists(name):
    assert getattr(gapless, name).__name__ == name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        gapless.no_such_name  # noqa: B018


def test_dir_lists_the_public_names():
    assert set(gapless.__all__) <= set(dir(gapless))


def test_version_is_the_distribution_s():
    assert gapless.__version__ == importlib.metadata.version("gapless") == "0.1.0"


def test_a_source_folder_on_the_path_has_no_version_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert gapless.__version__ == served_version() == "unknown"
