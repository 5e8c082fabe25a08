"""Which GPUs, or which share of the cores, each replica on this machine gets.

Decided before any process starts and told by environment variables, because CUDA and OpenMP read them once,
before a program can say anything. A replica sees its own GPUs only, as devices 0, 1, …. GPUs are counted by
their device files: asking CUDA would leave a context of some hundred megabytes in the HTTP process. Read
``replicas.py`` for who starts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from gapless.env import inherited
from gapless.errors import ConfigError

_GPUS, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def place_replicas(num_replicas: int, *, gpus_each: int = 1, device: str = "auto") -> list[dict[str, str]]:
    """The environment of each. Raises ``ConfigError`` where GPUs do not suffice.

    On a CPU the cores are divided, unless ``OMP_NUM_THREADS`` says how many threads each may have.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus and device != "cuda":
        return _share_cores(num_replicas)
    needed = num_replicas * gpus_each
    if len(gpus) < needed:
        each = f" with {gpus_each} GPUs each" if gpus_each > 1 else ""
        raise ConfigError(
            f"--replicas={num_replicas}{each} needs {needed} GPUs and {len(gpus)} can be seen; lower "
            f"--replicas, or let {_GPUS} name more of them"
        )
    return [{_GPUS: ",".join(gpus[i * gpus_each : (i + 1) * gpus_each])} for i in range(num_replicas)]


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """As ``CUDA_VISIBLE_DEVICES`` names them: that list itself, else 0, 1, … for each GPU of the machine."""
    listed = inherited(_GPUS)
    if listed is not None:
        return _until_invalid([name.strip() for name in listed.split(",")])
    found = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(index) for index in range(len(found))]


def _until_invalid(names: Sequence[str]) -> list[str]:
    """CUDA ends the list at the first entry that names nothing, such as -1."""
    valid: list[str] = []
    for name in names:
        if not name or name.startswith("-"):
            break
        valid.append(name)
    return valid


def _share_cores(num_replicas: int) -> list[dict[str, str]]:
    if num_replicas == 1 or inherited(_THREADS):
        return [{} for _ in range(num_replicas)]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [{_THREADS: str(max(1, num_cores // num_replicas))} for _ in range(num_replicas)]
