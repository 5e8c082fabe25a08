"""Capturing a program as a transaction, and the pass that many captures share.

``capture_program`` runs a callable once under recording and returns a replayable ``Program``, or raises one
``CaptureError`` that says where and why, with everything as it was before. ``capture_pass`` holds what
captures share: one process-wide lock, the device's long-lived stream, and the garbage collector kept from
running finalizers (which may free device memory) in the middle of a capture. ``warm_up`` comes first, always:
lazy compiles and library handles do not work under capture. Read ``breakable.py`` for how the program is put
together.
"""

from __future__ import annotations

import gc
import linecache
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from gapless.errors import CaptureError, ConfigError, RankError
from gapless.graphs.breakable import ProgramRecorder, activate
from gapless.graphs.device.base import GraphDevice, Pool
from gapless.graphs.device.recorder import is_internal_file, user_source_line
from gapless.graphs.modes import RuntimeMode, Strategy
from gapless.graphs.peers import PeerCaptureError, Peers, check_peers
from gapless.graphs.program import Program

T = TypeVar("T")


def capture_program(
    fn: Callable[[], T],
    *,
    device: GraphDevice,
    pool: Pool,
    strategy: Strategy,
    peers: Peers | None = None,
    what: str = "a forward",
) -> tuple[Program, T]:
    """Record ``fn()`` into ``pool``; returns the program and what ``fn`` returned (static tensors of the
    pool).

    ``fn`` must read its inputs from static tensors and have been warmed up. Outputs hold undefined values
    until the first replay. Breakable and piecewise captures break where a break is reached: in the first
    those are calls of the model, in the second split parts of its compiled forward. Raises ``ConfigError``
    for strategy ``disabled``, ``CaptureError`` when anything fails; then nothing of the attempt is left and
    later captures work. With ``peers`` it fails everywhere where it fails anywhere. ``what``: phase and
    size, for the error.
    """
    if strategy is Strategy.DISABLED:
        raise ConfigError("strategy disabled runs eagerly: there is nothing to capture")
    check_peers(peers)
    recorder = ProgramRecorder(device, pool, peers)
    breaks_go_to = recorder if strategy.runtime_mode is RuntimeMode.PIECEWISE else None
    with capture_pass(device), torch.no_grad(), nullcontext() if peers is None else peers.capturing():
        put_back_random_state = device.keep_random_state()  # segments of a breakable capture replay: may draw
        try:
            recorder.begin()
            with activate(breaks_go_to):
                outputs = fn()
            program = recorder.finish()
            check_peers(peers)
            return program, outputs
        except BaseException as error:
            recorder.abandon()
            put_back_random_state()
            # KeyboardInterrupt and the like pass through, and so does the end of a peer.
            if not isinstance(error, Exception) or isinstance(error, RankError):
                raise
            failure = _failure(error, recorder, device, what)
            if peers is not None and not isinstance(error, PeerCaptureError):
                peers.first_problem(failure.cause)
            # The traceback's frames own the forward's tensors: pool memory would live as long as the error.
            _clear_frames(error)
            raise failure from None if failure is error else error


@contextmanager
def capture_pass(device: GraphDevice, *, collects: bool = True) -> Iterator[None]:
    """Hold the process-wide capture lock, run on the capture stream, keep the collector off. Re-entrant per
    thread.

    The collector runs once before and once after, not per capture (that costs ten times the start-up), and
    after it at what is new alone; whether it was enabled before is restored in any case. ``collects=False``
    leaves both out, for a capture that requests wait for.
    """
    with _lock:
        if _depth.value:
            with _nested():
                yield
            return
        was_enabled = gc.isenabled()
        with garbage_set_aside() if collects else nullcontext():
            gc.disable()
            try:
                with _nested(), device.stream_scope():
                    yield
            finally:
                if was_enabled:
                    gc.enable()
                    if collects:
                        gc.collect()


@contextmanager
def garbage_set_aside() -> Iterator[None]:
    """Collect garbage, and leave what is alive now out of every collection within the block: with a model and
    Transformers imported each takes 0.3 s, and a start makes half a dozen. Blocks in it collect only what is
    new. Nothing is set aside where somebody has done so himself (``gc.freeze``): only all of it can be taken
    back."""
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def capture_turn() -> Iterator[None]:
    """Hold the capture lock alone. For who may capture while he holds a lock of his own: with this one taken
    first, a capture that calls him in the end cannot wait for him while he waits for it. Re-entrant."""
    with _lock:
        yield


def warm_up(fn: Callable[[], object], device: GraphDevice, times: int) -> None:
    """Run ``fn`` on the capture stream so that everything lazy has happened, and wait for it to finish."""
    with torch.no_grad(), device.stream_scope():
        for _ in range(times):
            fn()
    device.synchronize()


class _Depth(threading.local):
    value = 0


_lock = threading.RLock()
_depth = _Depth()

_HINTS = (
    "a host read or synchronisation (.item(), .tolist(), .cpu(), boolean indexing, printing a tensor)",
    "something done for the first time here (kernel compile, library handle): warm up the same code first",
    "another thread using the device",
    "tensors of another device, or host tensors copied to this one",
)


@contextmanager
def _nested() -> Iterator[None]:
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def _failure(error: Exception, recorder: ProgramRecorder, device: GraphDevice, what: str) -> CaptureError:
    if isinstance(error, PeerCaptureError):
        return error
    reason = str(error) or type(error).__name__
    if not isinstance(error, CaptureError):
        reason = f"{type(error).__name__}: {reason}"
    hints = "; ".join(f"({i}) {hint}" for i, hint in enumerate(_HINTS, 1))
    line, call = _user_line(error)
    return CaptureError(
        f"capture of {what} failed in segment {recorder.segment_index}: {reason}\n"
        f"  failing op: {call}\n  last recorded op: {device.last_op or 'unknown'}\n"
        f"  source line: {line}\n  usual causes: {hints}",
        cause=f"{' '.join(reason.split())} ({line})",
    )


def _user_line(error: BaseException) -> tuple[str, str]:
    """The innermost line of the error's traceback that belongs to the user's code, and what of it raised, as
    it stands there: CUDA records ops that nobody names, but Python knows which call was under way.

    Ending a capture can fail after the forward has returned: then the line that asked for the capture.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_internal_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}", _expression(frame)
    return f"{user_source_line()} (asked for this capture)", "none: the forward had returned"


def _expression(frame: traceback.FrameSummary) -> str:
    """The part of its source that ``frame`` was running, without line breaks; ``unknown`` without source."""
    first, last = frame.lineno, frame.end_lineno
    if first is None or last is None or frame.colno is None or frame.end_colno is None:
        return "unknown"
    lines = [linecache.getline(frame.filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][: frame.end_colno]  # columns count bytes
    lines[0] = lines[0][frame.colno :]
    return " ".join(b"".join(lines).decode(errors="replace").split()) or "unknown"


def _clear_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
