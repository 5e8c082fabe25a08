"""One server of the tiny model for all modules that ask a real engine: its start is what costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_served_model import served, write_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_url(tiny_folder: Path) -> Iterator[str]:
    with served(tiny_folder, "--enable-cache-reset", "--access-log=off") as url:
        yield url
