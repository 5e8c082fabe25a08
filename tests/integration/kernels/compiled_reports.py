"""Kernels compiled for a Hopper GPU, in a process of their own: Triton's interpreter is off there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def reports_of(script: str) -> list[dict[str, Any]]:
    """What a script of this folder says of each kernel, a JSON object a line."""
    folder = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(folder.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, str(folder / script)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
