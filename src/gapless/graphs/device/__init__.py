"""Devices that can record and replay work. ``get_device`` maps a torch device to its ``GraphDevice``."""

from __future__ import annotations

import functools

import torch

from gapless.errors import ConfigError
from gapless.graphs.device.base import GraphDevice


def get_device(torch_device: str | torch.device) -> GraphDevice:
    """The one ``GraphDevice`` of a torch device in this process. Raises ``ConfigError`` for types without
    one.
    """
    device = torch.device(torch_device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return _make(device)


@functools.cache
def _make(device: torch.device) -> GraphDevice:
    if device.type == "cpu":
        from gapless.graphs.device.emulated import EmulatedDevice

        return EmulatedDevice(num_warmups=0)
    if device.type == "cuda":
        from gapless.graphs.device.cuda import CudaDevice

        return CudaDevice(device)
    raise ConfigError(f"device {str(device)!r} has no graph support here; use 'cuda' or 'cpu'")
