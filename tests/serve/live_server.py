"""The real application on a real socket, in a thread; only its engine is a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from http_fakes import MODEL, FakeClient, answer, make_app, spell

__all__ = ["MODEL", "FakeClient", "Served", "answer", "spell", "until"]


class Served:
    """An application on a free port, in a thread; ``client`` may be changed while it runs."""

    def __init__(self, client: FakeClient, **settings: Any) -> None:
        self.client = client
        config = uvicorn.Config(make_app(client, **settings), port=0, log_level="error", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
