"""The installed package's version."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    return metadata.version("gapless")
