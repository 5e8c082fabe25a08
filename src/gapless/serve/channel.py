"""The wire between the two processes: zmq over a socket file that only this user can reach, msgpack inside,
arrays beside it (``frames.py``).

Each direction is a PUSH that connects and a PULL that binds, so a message sent early waits in the sender and
no send ever blocks or fails. There is no limit on queued messages here: what goes in is bounded by admission
(``process_client.py``), what comes out by the reader, which never waits for anybody. Invariant: the folder of
the socket files is private (0700) and goes away with the HTTP process, or with the engine when the former
was killed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import zmq

from gapless.serve.frames import Frame, FrameDecoder, FrameEncoder
from gapless.serve.messages import FromEngine, Refused, ToEngine

_MAX_PATH = 90
"""Bytes in the path of a socket file, with room for the name; the system's own limit is 107."""
_LINGER_MS = 1000
"""How long a closing socket tries to deliver its last messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where each direction is bound."""

    folder: str
    to_engine: str
    from_engine: str

    @classmethod
    def make(cls) -> Addresses:
        """Fresh ones, in a new private folder."""
        folder = tempfile.mkdtemp(prefix="gapless-")
        if len(folder.encode()) > _MAX_PATH:
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="gapless-", dir="/tmp")
        return cls(
            folder=folder, to_engine=f"ipc://{folder}/to-engine", from_engine=f"ipc://{folder}/from-engine"
        )

    def remove(self) -> None:
        """Safe to call twice, from either process."""
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineChannel:
    """The engine's end. Implements ``Channel`` of ``engine_loop.py``."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context()
        self._inbox = _bound(self._context, addresses.to_engine)
        self._outbox = _connected(self._context, addresses.from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        if timeout_s > 0 and not self._inbox.poll(max(1, int(timeout_s * 1000))):
            return []
        messages: list[ToEngine] = []
        # Asked first: nearly every step has nothing, and the exception for that costs twice as much.
        while cast(int, self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            data = self._inbox.recv(zmq.NOBLOCK)
            arrays: list[Frame] = []
            while self._inbox.getsockopt(zmq.RCVMORE):  # all parts of a message arrive together
                arrays.append(self._inbox.recv(copy=False).buffer)
            try:
                messages.append(self._decoder.decode(data, arrays))
            except msgspec.ValidationError as error:
                self._refuse(data, error)
        return messages

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def _refuse(self, data: bytes, error: msgspec.ValidationError) -> None:
        """A request whose fields have wrong types gets its answer, and the loop never sees it."""
        raw = msgspec.msgpack.decode(data)
        if not isinstance(raw, dict) or not isinstance(raw.get("request_id"), str):
            raise error
        self.send(Refused(raw["request_id"], str(error)))

    def close(self) -> None:
        """Delivers what was sent, within a second."""
        self._inbox.close()
        self._outbox.close()
        self._context.term()


class ClientChannel:
    """The HTTP process's end. ``fd`` becomes readable when messages may have arrived; it signals *changes*,
    so ``receive`` until there is nothing."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context()
        self._inbox = _bound(self._context, addresses.from_engine)
        self._outbox = _connected(self._context, addresses.to_engine)
        self._encoder = FrameEncoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self.fd = cast(int, self._inbox.getsockopt(zmq.FD))

    def receive(self) -> FromEngine | None:
        """The next message, or None when there is none now."""
        try:
            return self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: ToEngine) -> None:
        head, *arrays = self._encoder.encode(message)
        self._outbox.send(head, zmq.SNDMORE if arrays else 0)
        for index, array in enumerate(arrays, start=1):
            self._outbox.send(array, zmq.SNDMORE if index < len(arrays) else 0, copy=False)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()


def _bound(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def _connected(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # ms; the other end may not be bound yet
    socket.connect(address)
    return socket
