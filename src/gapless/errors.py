"""Every exception Gapless raises on purpose, in one tree.

``GaplessError`` is the root, so a caller can catch all of ours and nothing else. Each class also derives from
the built-in a Python user would expect (``ValueError`` for a bad option, ``RuntimeError`` for a failed
capture), because code that knows nothing of Gapless catches those. Messages name the value, the limit and
what to do.
"""

from __future__ import annotations


class GaplessError(Exception):
    """Root of all errors raised by Gapless itself."""


class ConfigError(GaplessError, ValueError):
    """An option has a value that does not exist, is out of range, or contradicts another option."""


class RequestError(GaplessError, ValueError):
    """One request is unusable (empty, too long, token ids out of range, bad sampling parameters); others go
    on."""


class ModelError(GaplessError, ValueError):
    """A model folder or file cannot be used: missing, truncated, or asks for something that is not
    implemented."""


class MemoryLimitError(GaplessError, RuntimeError):
    """There is too little memory for what was asked (for example not one block of KV cache)."""


class RankError(GaplessError, RuntimeError):
    """One of several ranks that hold a model together has failed or is gone, so the others cannot go on."""


class GraphError(GaplessError, RuntimeError):
    """Something about capturing or replaying a graph went wrong."""


class CaptureError(GraphError):
    """A capture failed; everything was restored and this size runs eagerly. The message names op and source
    line."""

    def __init__(self, message: str, *, cause: str | None = None) -> None:
        """``cause`` is one line that is the same for every size that fails for the same reason."""
        super().__init__(message)
        self.cause = cause or message.partition("\n")[0]


class StaleAddressError(GraphError):
    """A captured graph would read memory whose owner has died or moved since the capture."""


class CaptureClosedError(GraphError):
    """A capture was asked for after the store had been sealed."""


class CompileError(GraphError):
    """A forward could not be traced, split or compiled; the message says what to do."""
