"""The package's version, as the server tells it."""

from __future__ import annotations

import gapless


def version() -> str:
    """``unknown`` where the package is run from a source folder on the path."""
    return gapless.__version__
