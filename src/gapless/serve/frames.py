"""Messages with arrays inside as frames: the message first, then each array as it lies in memory.

An image's patches are megabytes, a video's tens of them; as part of a message they would be copied into it
on one side and out of it on the other, while streams wait. Instead the message names an array by number, type
and shape, and the socket sends its memory itself. Invariant: an array that was encoded is not written to any
more. Read ``channel.py`` for the sockets.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
Frame = bytes | memoryview


class FrameEncoder:
    """Of one socket; not for several threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._name_array)
        self._arrays: list[memoryview] = []

    def encode(self, message: msgspec.Struct) -> list[Frame]:
        self._arrays = []  # of a message that could not be encoded
        head = self._encoder.encode(message)
        arrays, self._arrays = self._arrays, []
        return [head, *arrays]

    def _name_array(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} cannot be sent")
        flat = np.ascontiguousarray(value)
        self._arrays.append(flat.reshape(-1).view(np.uint8).data)
        return [len(self._arrays) - 1, flat.dtype.str, list(flat.shape)]


class FrameDecoder(Generic[T]):
    """Arrays that come out are views of the frames, and read-only."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._find_array)
        self._arrays: list[Frame] = []

    def decode(self, head: bytes, arrays: list[Frame] | None = None) -> T:
        """Raises ``msgspec.ValidationError`` for fields of wrong types and arrays that are not there."""
        self._arrays = arrays or []
        try:
            return self._decoder.decode(head)
        finally:
            self._arrays = []

    def _find_array(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise NotImplementedError(f"{kind.__name__} cannot be received")
        try:
            index, dtype, shape = value
            return np.frombuffer(self._arrays[index], dtype=np.dtype(dtype)).reshape(shape)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"an array is not there or has another size ({error})") from None
