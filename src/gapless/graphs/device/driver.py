"""Access to the CUDA driver's library for calls that PyTorch has no functions for."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def load_driver(functions: tuple[str, ...]) -> Any:
    """The driver's library; None where it is missing, or lacks one of ``functions``. Argument types that a
    caller sets are its own: other lists of functions get another object."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if all(hasattr(driver, name) for name in functions) else None
