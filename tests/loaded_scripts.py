"""Scripts and examples as modules: they are in no package, so they are loaded by path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_script(path: Path) -> Any:
    """The module that ``path`` makes when it is not run but imported, new each time. It is in ``sys.modules``
    as ``script_NAME``, which its dataclasses want."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
