"""One open segment per process, whichever device records it.

Recording redirects process-wide machinery (allocator routing, dispatch modes), so a second one would corrupt
the first. ``capture_pass`` serialises whole captures by a lock; this is the check underneath it, which fails
instead of waiting.
"""

from __future__ import annotations

import threading

from gapless.errors import GraphError

_guard = threading.Lock()
_owner: object | None = None
_thread: int | None = None


def claim_recording(device: object) -> None:
    """Raises ``GraphError`` when a segment is open already."""
    global _owner, _thread
    with _guard:
        if _owner is not None:
            raise GraphError("a segment is already being recorded in this process; end or abandon it first")
        _owner, _thread = device, threading.get_ident()


def is_recording_here() -> bool:
    """True on the thread whose segment is open."""
    return _owner is not None and _thread == threading.get_ident()


def release_recording(device: object) -> None:
    global _owner
    with _guard:
        if _owner is device:
            _owner = None
