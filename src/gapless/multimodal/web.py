"""One GET request over a connection to an address that was judged first.

``access.py`` says which hosts and addresses are fit; this file sees to it that no other is ever connected to.
Names are resolved once and the socket goes to the address itself, so a name whose answer changes between the
look and the leap gains nothing. Proxies of the environment are not used: they would do the resolving. Bounds:
bytes while they arrive, redirects, and one deadline over everything, kept by a timer that closes the socket,
because a server that sends a byte now and then never runs into a socket's own time limit.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gapless.errors import RequestError

_CHUNK = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, kw_only=True, slots=True)
class WebTarget:
    """Where a URL leads. ``path`` has the query. ``may_be_private``: the operator named this very address."""

    is_tls: bool
    host: str
    port: int
    path: str
    may_be_private: bool
    is_public: Callable[[str], bool]


Judge = Callable[[str, str], WebTarget]
"""URL and the name for errors to a target; raises ``RequestError`` for one that may not be asked."""


def fetch(
    url: str,
    judge: Judge,
    *,
    max_bytes: int,
    max_redirects: int,
    timeout_s: float,
    name: str,
    resolve: Callable[[str, int], list[str]] | None = None,
) -> bytes:
    """The body of an answer with status 200. Raises ``RequestError``."""
    deadline_s = time.monotonic() + timeout_s
    was_tls = False
    for _ in range(max_redirects + 1):
        target = judge(url, name)
        if was_tls and not target.is_tls:
            raise RequestError(f"{name}: it leads from https to http, which is not followed")
        was_tls = target.is_tls
        address = _address_of(target, name, resolve or _resolve)
        try:
            result = _get(target, address, max_bytes=max_bytes, deadline_s=deadline_s, name=name)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline_s:
                raise RequestError(
                    f"{name}: {target.host} did not send it within the {timeout_s:.1f} seconds there were"
                ) from None
            raise RequestError(f"{name}: {target.host} could not be asked ({type(error).__name__})") from None
        if isinstance(result, bytes):
            return result
        url = urllib.parse.urljoin(url, result)
    raise RequestError(f"{name}: it leads on more than {max_redirects} times")


def _address_of(target: WebTarget, name: str, resolve: Callable[[str, int], list[str]]) -> str:
    """Refused as soon as one address is not public: which of them would be used is the server's choice."""
    try:
        addresses = resolve(target.host, target.port)
    except (OSError, UnicodeError):
        addresses = []
    if not addresses:
        raise RequestError(f"{name}: the host {target.host} cannot be found")
    if not target.may_be_private and not all(target.is_public(address) for address in addresses):
        raise RequestError(f"{name}: the host {target.host} is not on the public internet; it is not asked")
    return addresses[0]


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _get(target: WebTarget, address: str, *, max_bytes: int, deadline_s: float, name: str) -> bytes | str:
    """The body, or where it leads instead."""
    connection = _Connection(target, address, timeout_s=_left(deadline_s))
    try:
        connection.connect()
        with _closed_at(connection.sock, deadline_s):
            headers = {"Accept-Encoding": "identity", "User-Agent": "gapless", "Accept": "image/*, video/*"}
            connection.request("GET", target.path, headers=headers)
            answer = connection.getresponse()
            if answer.status in _REDIRECTS:
                return answer.getheader("Location") or "about:blank"
            if answer.status != 200:
                raise RequestError(f"{name}: {target.host} answers with status {answer.status}")
            if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
                raise RequestError(f"{name}: {target.host} sends it compressed, which was not asked for")
            return _body(answer, max_bytes=max_bytes, deadline_s=deadline_s, name=name)
    finally:
        connection.close()


def _body(answer: http.client.HTTPResponse, *, max_bytes: int, deadline_s: float, name: str) -> bytes:
    too_large = RequestError(f"{name}: it has over {max_bytes} bytes, the limit")
    if answer.length is not None and answer.length > max_bytes:
        raise too_large
    body = bytearray()
    announced = answer.length
    while part := answer.read(_CHUNK):
        body += part
        if len(body) > max_bytes:
            raise too_large
    if time.monotonic() >= deadline_s or (announced is not None and len(body) < announced):
        raise TimeoutError  # the timer closed the socket, which reads as an end
    return bytes(body)


class _Connection(http.client.HTTPConnection):
    """To ``address``, while name and certificate are those of the host."""

    def __init__(self, target: WebTarget, address: str, *, timeout_s: float) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self._target, self._address = target, address
        self.default_port = 443 if target.is_tls else 80  # so that Host names the port when it is another

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._target.is_tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._target.host)


@contextlib.contextmanager
def _closed_at(sock: socket.socket, deadline_s: float) -> Iterator[None]:
    def close() -> None:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline_s), close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _left(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
