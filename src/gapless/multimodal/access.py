"""Which places media may be read from, and reading from them: data URLs, files, web servers.

A URL in a request makes this process read for a stranger, so everything but data is closed until the operator
opens it: files below one folder, web servers by name. A name that is allowed may still point anywhere, so it
is resolved here, every address must be a public one, and the connection goes to the address that was judged.
Redirects are followed by hand, each judged like the first URL. An address that the operator listed as such is
his own choice and may be private. Invariant: no byte is sent to, and no file opened at, a place that was not
judged. Read ``loading.py`` for who asks.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import re
import stat
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gapless.errors import ConfigError, RequestError
from gapless.multimodal.web import WebTarget, fetch

MAX_REDIRECTS = 3
FETCH_TIMEOUT_S = 20.0
"""For everything from the name's look-up to the last byte."""
_DATA = re.compile(r"data:([^;,]*)((?:;[^;,]*)*?)(;base64)?,", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SHOWN_CHARS = 80

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaAccess:
    """``local_path``: a folder whose files ``file:`` URLs may name; None: none. ``domains``: hosts that may
    be asked over http and https, as ``example.org`` (on the usual ports) or ``example.org:8080``.

    Raises ``ConfigError`` for a folder that is none and for names that are no host.
    """

    local_path: str | None = None
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.local_path is not None and not Path(self.local_path).is_dir():
            raise ConfigError(f"--allowed-local-media-path={self.local_path}: there is no such folder")
        for domain in self.domains:
            if _split_domain(domain) is None:
                raise ConfigError(
                    f"--allowed-media-domains={domain!r}: must be a host such as example.org or "
                    "example.org:8080, without scheme or path"
                )

    def read(
        self,
        url: str,
        *,
        kind: str,
        max_bytes: int,
        name: str,
        timeout_s: float | None = None,
        resolve: Resolve | None = None,
    ) -> bytes:
        """The bytes behind ``url``. Raises ``RequestError``.

        ``kind``: ``image`` or ``video``, for the type of data URLs. ``name`` begins every error.
        ``timeout_s``: for the web; else ``FETCH_TIMEOUT_S``. ``resolve`` replaces the system's look-up
        of names.
        """
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(url, kind=kind, max_bytes=max_bytes, name=name)
        if scheme == "file":
            return self._read_file(url, kind=kind, max_bytes=max_bytes, name=name)
        if scheme in _DEFAULT_PORTS:
            self._check_web(kind, name)
            return fetch(
                url,
                self._judge,
                max_bytes=max_bytes,
                max_redirects=MAX_REDIRECTS,
                timeout_s=FETCH_TIMEOUT_S if timeout_s is None else timeout_s,
                name=name,
                resolve=resolve,
            )
        raise RequestError(
            f"{name}: {_shown(url)!r} is no URL that can be read; send data:{kind}/...;base64,... (or an "
            "http, https or file URL where the server allows it)"
        )

    def _read_file(self, url: str, *, kind: str, max_bytes: int, name: str) -> bytes:
        if self.local_path is None:
            raise RequestError(
                f"{name}: files of the server are not read; send the {kind} as a data URL, or start the "
                "server with --allowed-local-media-path"
            )
        parts = _parsed(url, name)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise RequestError(f"{name}: {_shown(url)!r} is no file URL; write file:///folder/{kind}")
        text = urllib.parse.unquote(parts.path)
        folder = Path(self.local_path).resolve()
        outside = RequestError(f"{name}: {_shown(text)!r} is not below the folder whose files may be read")
        try:
            path = Path(text).resolve()
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        if not text.startswith("/") or ".." in Path(text).parts or not path.is_relative_to(folder):
            raise outside
        return _read_regular(path, shown=_shown(text), max_bytes=max_bytes, name=name)

    def _check_web(self, kind: str, name: str) -> None:
        if not self.domains:
            raise RequestError(
                f"{name}: nothing is fetched from the web; send the {kind} as a data URL, or start the "
                "server with --allowed-media-domains"
            )

    def _judge(self, url: str, name: str) -> WebTarget:
        """What to connect to for ``url``, and which addresses are fit. Raises ``RequestError``."""
        parts = _parsed(url, name)
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS:
            raise RequestError(f"{name}: it leads to {_shown(url)!r}; only http and https are fetched")
        if "@" in parts.netloc:
            raise RequestError(f"{name}: its URL has a user name or password; send one without")
        if any(character <= " " or character == "\x7f" for character in url):
            raise RequestError(f"{name}: its URL has blanks or control characters")
        try:
            port = parts.port or _DEFAULT_PORTS[scheme]
            host = _host_name(parts.hostname or "")
        except (ValueError, UnicodeError):
            host, port = "", 0
        if not host:
            raise RequestError(f"{name}: {_shown(url)!r} names no host")
        listed = [found for d in self.domains if (found := _split_domain(d)) is not None]
        if not any(host == h and port in ((p,) if p else _DEFAULT_PORTS.values()) for h, p in listed):
            raise RequestError(
                f"{name}: the host {_shown(host)}:{port} is not among those that may be asked; send a data "
                "URL, or start the server with it in --allowed-media-domains"
            )
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        return WebTarget(
            is_tls=scheme == "https",
            host=host,
            port=port,
            path=path + ("?" + query if query else ""),
            may_be_private=_as_address(host) is not None,
            is_public=is_public,
        )


Resolve = Callable[[str, int], list[str]]
"""Host and port to addresses as text."""


def read_data_url(url: str, *, kind: str, max_bytes: int, name: str) -> bytes:
    """Raises ``RequestError`` for anything but base64 of a type that begins with ``kind``."""
    match = _DATA.match(url[:1024])
    if match is None or match[3] is None:
        raise RequestError(f"{name}: a data URL must begin with data:{kind}/...;base64,")
    mime = match[1].strip().lower()
    if not mime.startswith(f"{kind}/") and not (kind == "video" and mime == "image/gif"):
        raise RequestError(f"{name}: its data URL has the type {_shown(mime)!r}; expected {kind}/...")
    if mime == "image/svg+xml":
        raise RequestError(f"{name}: SVG is a drawing, not pixels; send it as PNG")
    num_chars = len(url) - match.end()
    if num_chars // 4 * 3 > max_bytes + 2:
        raise RequestError(
            f"{name}: it has {num_chars // 4 * 3} bytes, the limit is {max_bytes}; send a smaller file, or "
            f"raise the server's --max-{kind}-bytes"
        )
    try:
        data = base64.b64decode(url[match.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(f"{name}: its data URL is not base64 ({error})") from None
    if not data:
        raise RequestError(f"{name}: its data URL holds nothing")
    return data


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet, as are all that it stands for."""
    address = _as_address(text.partition("%")[0])
    if address is None or "%" in text:
        return False
    return all(part.is_global and not part.is_multicast for part in _meant(address))


def _meant(address: Address) -> list[Address]:
    """The address, and the IPv4 address inside it that a gateway would send to."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    meant: list[Address] = [address]
    if address.sixtofour is not None:
        meant.append(address.sixtofour)
    if address.teredo is not None:
        meant += address.teredo
    if address in _NAT64:
        meant.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return meant


def _as_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """In the one form in which names are compared. Raises ``UnicodeError`` for what is no name."""
    host = host.lower().removesuffix(".")
    address = _as_address(host)
    if address is not None:
        return str(address)
    host = host.encode("idna").decode("ascii") if not host.isascii() else host
    return host if re.fullmatch(r"[a-z0-9_]([a-z0-9_.\-]{0,252}[a-z0-9_])?", host) else ""


def _split_domain(domain: object) -> tuple[str, int | None] | None:
    """Host and port of an entry of the list; None for what is neither."""
    if not isinstance(domain, str):
        return None
    address = _as_address(domain.strip("[]"))
    if address is not None:
        return str(address), None
    try:
        parts = urllib.parse.urlsplit("//" + domain)
        host, port = _host_name(parts.hostname or ""), parts.port
    except (ValueError, UnicodeError):
        return None
    plain = parts.netloc == domain and "@" not in domain and not domain.endswith(":")
    return (host, port) if host and plain and port != 0 else None


def _parsed(url: str, name: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError:
        raise RequestError(f"{name}: {_shown(url)!r} is no URL") from None


def _read_regular(path: Path, *, shown: str, max_bytes: int, name: str) -> bytes:
    """``path`` has no links left; one that appears now is not followed, and a pipe is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise RequestError(f"{name}: the file {shown!r} cannot be read") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RequestError(f"{name}: {shown!r} is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RequestError(f"{name}: the file {shown!r} has over {max_bytes} bytes, the limit")
    return data


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
