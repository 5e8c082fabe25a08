"""Where and how a number came about: machine, versions, command, date, commit.

It goes into every result, since a number without it cannot be compared. Paths are cut to their names, so
that a result that is published tells nothing of the machine's folders.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers")


def describe_run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What stands in a result as ``meta``. ``argv``: the command line, if not this process's."""
    import torch

    import gapless

    has_cuda = torch.cuda.is_available()
    return {
        "command": command_text(sys.argv if argv is None else argv),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if has_cuda else platform.processor() or platform.machine(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "gapless": gapless.__version__,
        **{name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if has_cuda else None,
        "python": platform.python_version(),
    }


def command_text(argv: Sequence[str]) -> str:
    """The command line with every path cut to its last part; addresses of servers stay."""
    return " ".join(word if "/" not in word or "://" in word else _cut(word) for word in argv)


def package_version(name: str) -> str | None:
    if util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cut(word: str) -> str:
    option, equals, value = word.partition("=")
    if word.startswith("--") and equals:
        return f"{option}={Path(value).name}"
    return Path(word).name


def _commit() -> str:
    """The commit of the source, marked when it was not what ran; ``unknown`` outside a checkout."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"
