"""A file that holds one JSON object, or a ``ModelError`` that says why it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapless.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Raises ``ModelError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value
