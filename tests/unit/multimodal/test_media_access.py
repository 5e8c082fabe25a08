"""URLs of media: what is closed stays closed, whatever the URL is made of."""

from __future__ import annotations

import base64
import contextlib
import http.server
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import data_url, png

from gapless.errors import ConfigError, RequestError
from gapless.multimodal import access as access_module
from gapless.multimodal.access import MediaAccess, is_public, read_data_url
from gapless.multimodal.limits import MediaLimits
from gapless.multimodal.loading import MediaLoader

PNG = png()


def read(access: MediaAccess, url: str, *, resolve=None, max_bytes: int = 2**20) -> bytes:
    return access.read(url, kind="image", max_bytes=max_bytes, name="image", resolve=resolve)


class TestDataUrls:
    @pytest.mark.parametrize("mime", ["image/png", "image/jpeg", "IMAGE/PNG", "image/x-unknown"])
    def test_any_type_of_image_is_read(self, mime):
        assert read(MediaAccess(), data_url(PNG, mime)) == PNG

    def test_parameters_of_the_type_are_allowed(self):
        url = "data:image/png;name=a.png;base64," + base64.b64encode(PNG).decode()
        assert read(MediaAccess(), url) == PNG

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("data:", "must begin with data:image"),
            ("data:image/png,abc", "must begin with data:image"),
            ("data:image/png;base64", "must begin with data:image"),
            ("data:;base64,AAAA", "has the type ''"),
            ("data:text/html;base64,AAAA", "has the type 'text/html'; expected image/..."),
            ("data:video/mp4;base64,AAAA", "has the type 'video/mp4'"),
            ("data:image/svg+xml;base64,AAAA", "SVG is a drawing"),
            ("data:image/png;base64,", "holds nothing"),
            ("data:image/png;base64,A", "not base64"),
            ("data:image/png;base64,AA=A", "not base64"),
            ("data:image/png;base64,AAA", "not base64"),
            ("data:image/png;base64,!!!!", "not base64"),
            ("data:image/png;base64,AA AA", "not base64"),
            ("data:image/png;base64,AA\nAA", "not base64"),
            ("data:image/png;base64,AA-_", "not base64"),
            ("data:image/png;base64,AAé=", "not base64"),
        ],
    )
    def test_what_is_not_base64_of_an_image_is_refused(self, url, message):
        with pytest.raises(RequestError, match=message):
            read(MediaAccess(), url)

    def test_the_size_is_judged_before_it_is_decoded(self):
        with pytest.raises(RequestError, match=r"300 bytes, the limit is 100;.*--max-image-bytes"):
            read_data_url(data_url(bytes(300)), kind="image", max_bytes=100, name="image")
        assert len(read_data_url(data_url(bytes(100)), kind="image", max_bytes=100, name="image")) == 100

    def test_a_long_header_costs_nothing(self):
        start = time.perf_counter()
        with pytest.raises(RequestError):
            read(MediaAccess(), "data:" + ";a" * 2_000_000 + ",")
        assert time.perf_counter() - start < 1


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "secret.png").write_bytes(PNG)
        folder = tmp_path / "media"
        (folder / "deep").mkdir(parents=True)
        (folder / "a b.png").write_bytes(PNG)
        (folder / "deep" / "c.png").write_bytes(PNG)
        (folder / "inside.png").symlink_to(folder / "deep" / "c.png")
        (folder / "escape.png").symlink_to(tmp_path / "secret.png")
        (folder / "out").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")
        return folder

    @pytest.mark.parametrize("name", ["a%20b.png", "deep/c.png", "inside.png", "./deep/c.png"])
    def test_files_below_the_folder_are_read(self, folder, name):
        access = MediaAccess(local_path=str(folder))
        assert read(access, f"file://{folder}/{name}") == PNG
        assert read(access, f"file://localhost{folder}/{name}") == PNG

    @pytest.mark.parametrize(
        "name",
        [
            *("../secret.png", "deep/../../secret.png", "%2e%2e/secret.png", "deep/../a b.png", "escape.png"),
            *("out/secret.png", "out/media/../secret.png", "a b.png%00.png", "..%2fsecret.png"),
        ],
    )
    def test_ways_out_of_the_folder_are_refused(self, folder, name):
        with pytest.raises(RequestError, match="not below the folder"):
            read(MediaAccess(local_path=str(folder)), f"file://{folder}/{name}")

    @pytest.mark.parametrize("path", ["/etc/passwd", "/etc/no-such-file", "/proc/self/environ", "relative"])
    def test_outside_all_paths_get_one_answer(self, folder, path):
        with pytest.raises(RequestError, match=r"not below the folder whose files may be read|no file URL"):
            read(MediaAccess(local_path=str(folder)), f"file://{path}")

    def test_a_folder_that_is_a_link_itself_works(self, folder, tmp_path):
        link = tmp_path / "link"
        link.symlink_to(folder)
        assert read(MediaAccess(local_path=str(link)), f"file://{link}/deep/c.png") == PNG

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("file://{0}/pipe", "no regular file"),
            ("file://{0}/deep", "no regular file|cannot be read"),
            ("file://{0}/missing.png", "cannot be read"),
            ("file://example.org{0}/deep/c.png", "no file URL"),
            ("file://{0}/deep/c.png?x=1", "no file URL"),
            ("file://{0}/deep/c.png#x", "no file URL"),
        ],
    )
    def test_what_is_no_plain_file_is_refused(self, folder, url, message):
        with pytest.raises(RequestError, match=message):
            read(MediaAccess(local_path=str(folder)), url.format(folder))

    def test_size_is_bounded(self, folder):
        with pytest.raises(RequestError, match=f"over {len(PNG) - 1} bytes, the limit"):
            read(MediaAccess(local_path=str(folder)), f"file://{folder}/deep/c.png", max_bytes=len(PNG) - 1)

    def test_without_a_folder_nothing_is_read(self, folder):
        with pytest.raises(
            RequestError, match=r"files of the server are not read.*--allowed-local-media-path"
        ):
            read(MediaAccess(), f"file://{folder}/deep/c.png")

    def test_a_folder_that_does_not_exist_is_a_wrong_option(self):
        with pytest.raises(ConfigError, match="--allowed-local-media-path=/no/such: there is no such folder"):
            MediaAccess(local_path="/no/such")


@pytest.mark.parametrize(
    "url", ["", "ftp://example.org/a.png", "gopher://x", "javascript:1", "/etc/passwd", "a.png", "blob:x"]
)
def test_other_schemes_are_refused(url):
    with pytest.raises(RequestError, match="no URL that can be read"):
        read(MediaAccess(local_path="/", domains=("example.org",)), url)


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            *(
                "127.0.0.1",
                "127.8.9.10",
                "0.0.0.0",
                "10.0.0.1",
                "172.16.0.1",
                "192.168.1.1",
                "169.254.169.254",
            ),
            *("100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "240.0.0.1"),
            *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
            *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
            *("2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::", "", "localhost", "2130706433"),
        ],
    )
    def test_addresses_of_no_public_machine(self, address):
        assert not is_public(address)

    @pytest.mark.parametrize(
        "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
    )
    def test_public_addresses(self, address):
        assert is_public(address)


class TestJudging:
    ACCESS = MediaAccess(domains=("example.org", "Images.Example.com:8080", "bücher.example"))

    @pytest.mark.parametrize(
        "url",
        [
            *("http://evil.org/a.png", "http://example.org.evil.org/", "http://evil-example.org/"),
            *("http://sub.example.org/", "https://example.org:8443/", "http://images.example.com/"),
            *("http://127.0.0.1/", "http://[::1]/", "http://2130706433/", "http://0x7f000001/"),
            *("http://0177.0.0.1/", "http://127.1/", "http://localhost/", "http://[::ffff:127.0.0.1]/"),
        ],
    )
    def test_hosts_that_are_not_listed_are_refused(self, url):
        with pytest.raises(RequestError, match="not among those that may be asked"):
            read(self.ACCESS, url, resolve=_never)

    @pytest.mark.parametrize(
        "url",
        [
            *(
                "http://",
                "http:///a.png",
                "http://example.org:99999/",
                "http://example.org:x/",
                "http://[::1",
            ),
            *("http://user@example.org/", "http://user:pw@example.org/", "http://example.org@127.0.0.1/"),
            *(
                "http://example.org /",
                "http://exa\nmple.org/",
                "http://example.org/a\r\nHost: x",
                "http://?x",
            ),
            *("http://example.org\\@127.0.0.1/", "http://ex%61mple.org/"),
        ],
    )
    def test_urls_that_can_be_read_in_two_ways_are_refused(self, url):
        with pytest.raises(RequestError):
            read(self.ACCESS, url, resolve=_never)

    @pytest.mark.parametrize(
        "addresses",
        [["127.0.0.1"], ["169.254.169.254"], ["::1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:192.168.0.1"]],
    )
    def test_a_listed_name_that_points_inside_is_refused(self, addresses):
        with pytest.raises(RequestError, match=r"example.org is not on the public internet"):
            read(self.ACCESS, "https://example.org/a.png", resolve=lambda host, port: addresses)

    @pytest.mark.parametrize(
        "url", ["HTTP://EXAMPLE.ORG/", "http://example.org./", "http://images.example.com:8080/"]
    )
    def test_listed_hosts_are_looked_up_in_whatever_spelling(self, url):
        with pytest.raises(RequestError, match="not on the public internet"):
            read(self.ACCESS, url, resolve=lambda host, port: ["127.0.0.1"])

    def test_a_name_without_an_address_says_so(self):
        with pytest.raises(RequestError, match=r"example.org cannot be found"):
            read(self.ACCESS, "http://example.org/", resolve=lambda host, port: [])

    def test_names_in_other_alphabets_are_compared_as_sent(self):
        with pytest.raises(RequestError, match=r"xn--bcher-kva.example is not on the public internet"):
            read(self.ACCESS, "http://bücher.example/", resolve=lambda host, port: ["10.0.0.1"])

    def test_without_a_list_nothing_is_fetched(self):
        with pytest.raises(RequestError, match=r"nothing is fetched from the web.*--allowed-media-domains"):
            read(MediaAccess(), "https://example.org/a.png", resolve=_never)

    @pytest.mark.parametrize(
        "domain",
        ["", "http://example.org", "example.org/", "a b", "*", "host:", "host:0", "u@h", 7],
    )
    def test_entries_that_are_no_hosts_are_wrong_options(self, domain):
        with pytest.raises(ConfigError, match="--allowed-media-domains"):
            MediaAccess(domains=(domain,))


class TestFetching:
    """Against a web server on this machine, which the operator has listed by its address."""

    @pytest.mark.parametrize("path", ["/ok", "/chunked", "/to/ok", "/to/to/to/ok"])
    def test_what_is_allowed_is_read(self, web, path):
        assert read(web.access, web.url(path)) == PNG

    def test_a_loader_decodes_it(self, web):
        assert MediaLoader(access=web.access).image(web.url("/ok")).size == (8, 6)

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/missing", "answers with status 404"),
            ("/large", "over 1000 bytes"),
            ("/endless", "over 1000 bytes"),
            ("/compressed", "sends it compressed"),
            ("/short", "could not be asked"),
            ("/nonsense", "could not be asked"),
            ("/to/to/to/to/ok", "leads on more than 3 times"),
            ("/away", "evil.example:80 is not among those"),
            ("/home", r"localhost:\d+ is not among those"),
            ("/file", "only http and https are fetched"),
            ("/nowhere", "only http and https are fetched|names no host"),
        ],
    )
    def test_what_goes_wrong_is_said(self, web, path, message):
        with pytest.raises(RequestError, match=message):
            read(web.access, web.url(path), max_bytes=1000)

    def test_a_slow_server_meets_the_deadline(self, web, monkeypatch):
        monkeypatch.setattr(access_module, "FETCH_TIMEOUT_S", 0.3)
        start = time.perf_counter()
        with pytest.raises(RequestError, match="within"):
            read(web.access, web.url("/drip"))
        assert time.perf_counter() - start < 3

    def test_another_port_of_a_listed_address_is_refused(self, web):
        with pytest.raises(RequestError, match="not among those"):
            read(MediaAccess(domains=("127.0.0.1:1",)), web.url("/ok"))

    def test_the_name_is_not_looked_up_again_when_it_is_connected_to(self, web):
        """The one look-up gives a public address first; a second one would give this machine."""
        answers = iter([["203.0.113.9"], ["127.0.0.1"]])
        access = MediaAccess(domains=(f"rebind.example:{web.port}",))
        with pytest.raises(RequestError, match="not on the public internet"):
            read(access, f"http://rebind.example:{web.port}/ok", resolve=lambda host, port: next(answers))
        assert next(answers) == ["127.0.0.1"]


def _never(host: str, port: int) -> list[str]:
    raise AssertionError(f"{host} was looked up")


class _Web:
    def __init__(self, port: int) -> None:
        self.port = port
        self.access = MediaAccess(domains=(f"127.0.0.1:{port}",))

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture(scope="module")
def web() -> Iterator[_Web]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield _Web(server.server_address[1])
    server.shutdown()
    server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        away = {
            "/away": "http://evil.example/a.png",
            "/home": f"http://localhost:{self.server.server_address[1]}/ok",
            "/file": "file:///etc/passwd",
        }
        if self.path.startswith("/to/"):
            return self._answer(302, b"", Location=self.path.removeprefix("/to"))
        if self.path in away:
            return self._answer(302, b"", Location=away[self.path])
        if self.path == "/nowhere":
            return self._answer(302, b"")
        if self.path == "/ok":
            return self._answer(200, PNG)
        if self.path == "/large":
            return self._answer(200, bytes(2000))
        if self.path == "/compressed":
            return self._answer(200, PNG, **{"Content-Encoding": "gzip"})
        if self.path == "/short":
            return self._answer(200, PNG, **{"Content-Length": "900"})
        if self.path == "/nonsense":
            self.wfile.write(b"what is this\r\n\r\n")
            return None
        if self.path in ("/chunked", "/endless"):
            return self._chunks(PNG if self.path == "/chunked" else None)
        if self.path == "/drip":
            return self._drip()
        return self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _chunks(self, body: bytes | None) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for part in [body] if body is not None else [bytes(500)] * 10_000:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    def _drip(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)


def test_limits_reach_the_data_url():
    loader = MediaLoader(limits=MediaLimits(max_image_bytes=10))
    with pytest.raises(RequestError, match=r"^messages\[0\]: .*the limit is 10"):
        loader.image(data_url(PNG), name="messages[0]")


_TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("htps:/.@#?%\\[]0123456789abcefgxlmor-_ \t\r\n", max_size=60),
)
_STARTS = st.sampled_from(
    [
        *(
            "",
            "http://",
            "https://",
            "HTTP:",
            "http:example.org",
            "http://example.org",
            "https://example.org:443/",
        ),
        *(
            "http://example.org@",
            "http://user@example.org",
            "http://[",
            "file://",
            "file:///",
            "data:image/png;",
        ),
    ]
)


@settings(max_examples=50, deadline=None)
@given(_STARTS, _TEXTS)
def test_whatever_the_url_no_other_host_is_looked_up_and_no_file_is_read(start, rest):
    looked_up: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[str]:
        looked_up.append((host, port))
        return []

    access = MediaAccess(domains=("example.org",), local_path=os.path.dirname(__file__))
    with pytest.raises(RequestError, match=r"^image: "):
        read(access, start + rest, resolve=resolve)
    assert set(looked_up) <= {("example.org", 80), ("example.org", 443)}


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 80), st.text(max_size=3))
def test_a_damaged_data_url_is_never_read_as_something_else(data, position, damage):
    url = data_url(data)
    found = url[:position] + damage + url[position:]
    try:
        assert read(MediaAccess(), found) == base64.b64decode(found.partition(",")[2], validate=True)
    except RequestError:
        return
