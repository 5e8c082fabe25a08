"""Arrays that nobody writes to again: inputs that are known by identity, and need not be staged twice.

A flag of numpy says so, which whoever owns the memory could take back; nobody in this package does. Read
``staging.py`` for what is saved by it.
"""

from __future__ import annotations

import numpy as np


def frozen(array: np.ndarray) -> np.ndarray:
    """``array``, with memory of its own, never to be written again: such inputs are known by identity."""
    if array.base is not None:
        array = array.copy()
    array.setflags(write=False)
    return array


def is_frozen(value: object) -> bool:
    """Whether ``value`` is an array that nobody writes to again: neither it nor the array whose memory it
    shows may be written. A view that may not be written says nothing about whoever owns its memory."""
    if not isinstance(value, np.ndarray) or value.flags.writeable:
        return False
    owner = value.base
    return owner is None or (
        isinstance(owner, np.ndarray) and owner.base is None and not owner.flags.writeable
    )
