"""What crosses between the HTTP side and an engine on another machine: msgpack, and errors as data.

An exception that crosses a cluster comes out as something else (wrapped, or not at all when its constructor
takes more than a message), so the far side sends what went wrong as a value and the near side raises it
again. Read ``ray_client.py`` for the near side, ``ray_serve.py`` for the far one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gapless.errors import RequestError
from gapless.serve.client import EngineBusyError, EngineDeadError, EngineDrainingError
from gapless.serve.messages import Delta

Kind = Literal["request", "busy", "draining", "dead"]


class Fault(msgspec.Struct, frozen=True):
    """An error of ``serve/client.py``, or a refused request."""

    kind: Kind
    message: str
    retry_after_s: float = 1.0

    def raise_again(self) -> None:
        if self.kind == "request":
            raise RequestError(self.message)
        if self.kind == "busy":
            raise EngineBusyError(self.message, retry_after_s=self.retry_after_s)
        if self.kind == "draining":
            raise EngineDrainingError(self.message)
        raise EngineDeadError(self.message)


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One piece of an answer: deltas, or a vector, or why there will be no more."""

    deltas: list[Delta] = []
    values: list[float] | None = None
    fault: Fault | None = None


FAULTS = (RequestError, EngineBusyError, EngineDrainingError, EngineDeadError)
_decoder = msgspec.msgpack.Decoder(Part)
_encoder = msgspec.msgpack.Encoder()


def encode(part: Part) -> bytes:
    return _encoder.encode(part)


def decode(data: bytes) -> Part:
    """Raises the fault that a part carries."""
    part = _decoder.decode(data)
    if part.fault is not None:
        part.fault.raise_again()
    return part


def fault_of(error: Exception) -> Fault:
    """Of one of ``FAULTS``."""
    if isinstance(error, EngineBusyError):
        return Fault("busy", str(error), error.retry_after_s)
    if isinstance(error, EngineDrainingError):
        return Fault("draining", str(error))
    return Fault("request" if isinstance(error, RequestError) else "dead", str(error))
