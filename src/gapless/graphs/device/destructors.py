"""Waiting for what the driver does behind the end of a graph.

A graph holds what its work needs through *user objects*; NCCL hangs the plans of captured collectives on
them. Their destructors are called by a thread of the driver some time after the graph is gone. A communicator
that ends in the meantime frees memory which that thread is about to touch. So whoever ends one waits here
first: a graph without work, destroyed last, has a destructor of our own, and the driver's thread takes them
in order.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from gapless.graphs.device.driver import load_driver

_NO_DESTRUCTOR_SYNC = 1
_MOVE = 1
_FUNCTIONS = ("cuUserObjectCreate", "cuGraphCreate", "cuGraphRetainUserObject", "cuGraphDestroy")
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_waiting: list[Any] = []
"""Destructors that the driver has not called yet: they must outlive a wait that was given up."""


def wait_for_destructors(timeout_s: float) -> bool:
    """Wait until the destructors of all graphs that were destroyed before have run; call it when the device
    is idle. False where the driver cannot be asked, or has not come to it after ``timeout_s`` seconds."""
    driver = load_driver(_FUNCTIONS)
    if driver is None:
        return False
    has_run = threading.Event()
    destructor = _Destructor(lambda _: has_run.set())
    held, graph = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuUserObjectCreate(ctypes.byref(held), None, destructor, 1, _NO_DESTRUCTOR_SYNC):
        return False
    _waiting.append(destructor)
    if driver.cuGraphCreate(ctypes.byref(graph), 0):
        return False
    has_moved = not driver.cuGraphRetainUserObject(graph, held, 1, _MOVE)
    if driver.cuGraphDestroy(graph) or not has_moved or not has_run.wait(timeout_s):
        return False
    _waiting.remove(destructor)
    return True
