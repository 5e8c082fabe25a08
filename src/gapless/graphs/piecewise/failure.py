"""What a start that fails in tracing tells its user: one message, with everything that helps.

What failed (op, file, line), that the strategy is experimental, how to go on without it, and what a report
should contain. Errors of our own, wrapped by PyTorch on their way out of the backend, are unwrapped instead.
"""

from __future__ import annotations

import re
import sysconfig
import traceback

from gapless.errors import GaplessError
from gapless.graphs.device.recorder import is_internal_file


def own_error(error: Exception) -> GaplessError | None:
    """One of ours, raised by the backend and wrapped on its way out."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, GaplessError):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    return inner


def explain(error: Exception, off_switch: str) -> str:
    """The one message of a failed start."""
    error = getattr(error, "inner_exception", None) or error
    text = str(error).strip()
    first_line = next((line for line in text.splitlines() if line.strip()), "no message")
    frame = _user_frame(error, text)
    op = re.search(r"call_(?:function|method) (.+?)\(\*?\(|target: ([^\s)]+)", text)
    return (
        f"tc_piecewise could not trace the model: {type(error).__name__}: {first_line}\n"
        f"  op: {(op.group(1) or op.group(2)) if op else frame.line}\n"
        f"  at: {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n"
        "  tc_piecewise is experimental. Kernels that compile or load themselves when they are called, and "
        "control flow that\n  depends on data, cannot be traced: register such a kernel with "
        "register_custom_op.\n"
        f"  To go on without it, start with {off_switch}\n"
        "  A report should contain: this message with its traceback, the model and its quantisation, the "
        "launch command\n  with all options, the GPU and its driver (`gapless env` prints them)."
    )


def _user_frame(error: Exception, text: str) -> traceback.FrameSummary:
    """The innermost line of the user's code that was being traced, from what the error knows of it."""
    frames = list(getattr(error, "real_stack", None) or ())
    if not frames:
        found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.+)', text)
        frames = [traceback.FrameSummary(f, int(n), name, line=code.strip()) for f, n, name, code in found]
    frames = frames or list(traceback.extract_tb(error.__traceback__))
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    for frame in reversed(frames):
        if not is_internal_file(frame.filename) and not frame.filename.startswith(library):
            return frame
    return frames[-1] if frames else traceback.FrameSummary("unknown file", 0, "unknown", line="unknown")
