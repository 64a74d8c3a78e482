"""``data:`` URLs by their grammar, http(s) addresses by their policy: nothing private is asked, nothing is endless."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import io
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from PIL import Image

from moonvit import sources
from moonvit.errors import ImageError, MediaFetchError, MissingDependencyError
from moonvit.images import open_picture, picture_size
from moonvit.sources import FetchPolicy, Limits, data_url_bytes, fetch_bytes, is_address, is_data_url, is_public

CONTENT = bytes(range(256)) * 3 + b"\xfb\xff\xfe"
TEXT = base64.b64encode(CONTENT).decode()

# ---- data: ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"Data:;Base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:image/jpeg;charset=utf-8;base64,{TEXT}",
        f'data:image/jpeg;name="a photo.jpg";x=1;base64,{TEXT}',
        f"data:image/jpeg; base64 ,{TEXT}",
        f"  \ndata:image/png;base64,{TEXT}",
        f"data:image/png;base64,\r\n  {TEXT}\n",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60)),
        "data:image/png;base64," + " \t\f".join(TEXT),
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{TEXT.replace('/', '_')}",
        f"data:image/png;base64,{quote(TEXT, safe='')}",
        f"data:image/png,{quote(CONTENT)}",
        f"data:,{quote(CONTENT, safe='')}",
    ],
)
def test_data_urls(url: str) -> None:
    assert is_data_url(url) and not is_address(url)
    assert data_url_bytes(url) == CONTENT


@pytest.mark.parametrize("length", range(1, 8))
def test_every_length_with_and_without_padding(length: int) -> None:
    content = b"\xff\x00\xfe\x01\xfd\x02\xfc"[:length]
    text = base64.b64encode(content).decode()
    for shown in (text, text.rstrip("="), text.replace("=", "%3D")):
        assert data_url_bytes(f"data:;base64,{shown}") == content


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png", "needs a comma within its first 1024 characters"),
        ("data:" + "x" * 2000 + ",a", "needs a comma within its first 1024 characters"),
        ("image/png;base64,AAAA", "needs a comma"),
        ("data:,", "the data: URL is empty"),
        ("data:image/png;base64,", "the data: URL is empty"),
        ("data:image/png;base64, \n ", "the data: URL is empty"),
        ("data:image/png;base64,====", "base64 of 0 characters takes 0 '=', not 4"),
        ("data:image/png;base64,AAAAA", "base64 of 5 characters: one more than a multiple of 4 is cut short"),
        ("data:image/png;base64,AAA==", "base64 of 3 characters takes 1 '=', not 2"),
        ("data:image/png;base64,AA=", "base64 of 2 characters takes 2 '=', not 1"),
        ("data:image/png;base64,AA==AA==", "'=' at character 2 is not base64"),
        ("data:image/png;base64,AA!A", "'!' at character 2 is not base64"),
        ("data:image/png;base64,AA.A", "'.' at character 2 is not base64"),
        ("data:image/png;base64,AAAA%00", "'\\x00' at character 4 is not base64"),
        ("data:image/png;base64,AAAÄ", "ASCII characters only"),
        ("data:image/png;base64;charset=utf-8,AAAA", "';base64' must stand last"),
    ],
)
def test_data_urls_that_are_not_well_formed(url: str, said: str) -> None:
    with pytest.raises(ImageError) as caught:
        data_url_bytes(url, index=3)
    assert said in caught.value.message
    assert caught.value.message.startswith("image 3: ")
    assert caught.value.param == "images[3]"
    assert len(caught.value.message) < 200


def test_bytes_are_counted_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("decoded before it was counted")

    monkeypatch.setattr(base64, "b64decode", fail)
    limits = Limits(max_bytes=999)
    text = base64.b64encode(bytes(1000)).decode()
    for url in (f"data:;base64,{text}", f"data:;base64,{text.rstrip('=')}", f"data:;base64,{quote(text, safe='')}"):
        with pytest.raises(ImageError, match="base64 of 1000 bytes, at most 999 are read"):
            data_url_bytes(url, limits)
    monkeypatch.setattr(sources, "unquote_to_bytes", fail)
    with pytest.raises(ImageError, match="a data: URL of 10000 characters holds more than 999 bytes"):
        data_url_bytes("data:," + "%41" * 3333 + "A", limits)
    monkeypatch.undo()
    with pytest.raises(ImageError, match="1000 bytes, at most 999"):
        data_url_bytes("data:," + "A" * 1000, limits)
    assert len(data_url_bytes("data:;base64," + base64.b64encode(bytes(999)).decode(), limits)) == 999
    assert len(data_url_bytes("data:," + "%41" * 999, limits)) == 999


def test_a_hundred_megabytes_are_refused_at_once() -> None:
    url = "data:image/png;base64," + "QUJD" * (100 << 18)
    start = time.process_time()
    with pytest.raises(ImageError, match="base64 of 78643200 bytes, at most 67108864 are read") as caught:
        data_url_bytes(url)
    assert time.process_time() - start < 2.0
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://a/b", True),
        ("HTTPS://a/b", True),
        (" https://a", True),
        ("file:///etc/passwd", True),
        ("s3://bucket/key", True),
        ("a.png", False),
        ("/tmp/a.png", False),
        ("C:\\a.png", False),
        ("C:/a.png", False),
        ("a/http://b", False),
        ("", False),
    ],
)
def test_what_is_an_address(text: str, address: bool) -> None:
    assert is_address(text) == address


# ---- which numbers are public ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_numbers(number: str) -> None:
    assert is_public(number)


@pytest.mark.parametrize(
    "number",
    [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "64:ff9b:1::808:808",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:a9fe:a9fe",
        "::127.0.0.1",
        "64:ff9b::a00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "not a number",
    ],
)
def test_numbers_that_are_not_public(number: str) -> None:
    assert not is_public(number)


# ---- policies -------------------------------------------------------------------------------------------------------


def test_hosts_are_matched_whole() -> None:
    policy = FetchPolicy(("Images.Example.org", "other.example:8443", "bücher.example", "[2606:4700::1111]"))
    for host, port in (
        ("images.example.org", 443),
        ("IMAGES.example.ORG.", 80),
        ("other.example", 8443),
        ("xn--bcher-kva.example", 443),
        ("2606:4700::1111", 443),
    ):
        assert policy.allows(host, port), host
    for host, port in (
        ("images.example.org", 8080),
        ("images.example.org", 22),
        ("other.example", 443),
        ("example.org", 443),
        ("evil-images.example.org", 443),
        ("images.example.org.evil.example", 443),
        ("a.images.example.org", 443),
        ("", 443),
    ):
        assert not policy.allows(host, port), host
    assert not FetchPolicy(()).allows("images.example.org", 443)
    assert FetchPolicy(("127.0.0.1",), allow_private=True).allows("127.0.0.1", 8080)


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail)


def resolving(monkeypatch: pytest.MonkeyPatch, *numbers: str) -> list[str]:
    """Every name resolves to these; returns the names asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        asked.append(host)
        kinds = [socket.AF_INET6 if ":" in number else socket.AF_INET for number in numbers]
        return [(kind, socket.SOCK_STREAM, 6, "", (number, port)) for kind, number in zip(kinds, numbers, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[::1]",
        "169.254.169.254",
        "10.1.2.3",
        "0.0.0.0",
        "2130706433",
        "0x7f000001",
        "127.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:a00:1]",
        "localhost",
        "0177.0.0.1",
    ],
)
def test_private_addresses_are_refused_before_connecting(host: str, no_connection: None) -> None:
    """The host is named in the policy, so that only the number it stands for can be at fault."""
    for scheme in ("http", "https"):
        with pytest.raises(MediaFetchError) as caught:
            fetch_bytes(f"{scheme}://{host}/latest?token=SECRET", FetchPolicy((host,)), index=1)
        assert caught.value.message.startswith("image 1: ")
        assert "SECRET" not in caught.value.message and "latest" not in caught.value.message


@pytest.mark.parametrize("numbers", [("10.0.0.1",), ("93.184.216.34", "10.0.0.1"), ("2606:4700::1111", "::1"), ()])
def test_one_private_number_is_enough(
    numbers: tuple[str, ...], no_connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, *numbers)
    with pytest.raises(MediaFetchError, match="has an address that is not public" if numbers else "has no address"):
        fetch_bytes("https://images.example.org/a.png", FetchPolicy(("images.example.org",)))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://other.example/a.png", "https://other.example is not one of the hosts"),
        ("https://images.example.org:22/a.png", "is not one of the hosts"),
        ("https://images.example.org:0/a.png", "is not one of the hosts"),
        ("https://images.example.org.evil.example/", "is not one of the hosts"),
        ("https://images.example.org@evil.example/a", "user name or password"),
        ("https://user:SECRET@images.example.org/a", "user name or password"),
        ("https://evil.example\\@images.example.org/a", "user name or password"),
        ("https://evil.example#@images.example.org/a", "https://evil.example is not one of the hosts"),
        ("ftp://images.example.org/a.png", "scheme 'ftp': only http and https"),
        ("file:///etc/passwd", "scheme 'file': only http and https"),
        ("gopher://images.example.org/", "scheme 'gopher'"),
        ("https:///a.png", "is not one of the hosts"),
        ("images.example.org/a.png", "scheme ''"),
        ("https://[::1/", "could not be read: InvalidURL"),
        ("https://images.example.org/" + "a" * 9000, "characters, at most 8192 are read"),
    ],
)
def test_addresses_outside_the_policy(
    url: str, said: str, no_connection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolving(monkeypatch, "93.184.216.34")
    with pytest.raises(MediaFetchError) as caught:
        fetch_bytes(url, FetchPolicy(("images.example.org",)))
    assert said in caught.value.message
    assert "SECRET" not in caught.value.message
    assert not asked


def test_no_policy_asks_nobody(no_connection: None) -> None:
    with pytest.raises(MediaFetchError, match="addresses are not fetched here"):
        fetch_bytes("https://images.example.org/a.png?token=SECRET", None)


def test_a_missing_httpx_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'moonvit\[serve\]'"):
        fetch_bytes("https://images.example.org/a.png", FetchPolicy(("images.example.org",)))


class Answer:
    """What a transport got and gave, without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *results: Any) -> None:
        self.requests: list[httpx.Request] = []
        left = list(results)

        async def handle(transport: Any, request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            result = left.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)


def test_the_connection_goes_to_the_number_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving(monkeypatch, "93.184.216.34")
    answer = Answer(monkeypatch, httpx.Response(200, stream=httpx.ByteStream(b"picture")))
    policy = FetchPolicy(("images.example.org",))
    assert fetch_bytes("https://images.example.org/a%20b.png?size=2", policy) == b"picture"
    assert asked == ["images.example.org"]  # once: the name has no second chance
    (request,) = answer.requests
    assert str(request.url) == "https://93.184.216.34/a%20b.png?size=2"
    assert request.headers["host"] == "images.example.org"
    assert request.extensions["sni_hostname"] == "images.example.org"  # whose certificate is asked for and checked
    assert request.headers["accept-encoding"] == "identity"
    assert "cookie" not in request.headers and "authorization" not in request.headers


def test_the_next_number_is_tried_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "2606:4700::1111", "93.184.216.34")
    answer = Answer(
        monkeypatch, httpx.ConnectError("no route"), httpx.Response(200, stream=httpx.ByteStream(b"picture"))
    )
    assert fetch_bytes("http://images.example.org:80/", FetchPolicy(("images.example.org",))) == b"picture"
    assert [str(request.url) for request in answer.requests] == ["http://[2606:4700::1111]/", "http://93.184.216.34/"]
    Answer(monkeypatch, httpx.ConnectError("a"), httpx.ConnectTimeout("b"))
    with pytest.raises(MediaFetchError, match="within 10 seconds"):
        fetch_bytes("http://images.example.org/", FetchPolicy(("images.example.org",)))


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("https://127.0.0.1/", "is not one of the hosts"),
        ("https://inside.example/", "not public"),
        ("//evil.example/", "https://evil.example is not one of the hosts"),
        ("https://user@images.example.org/", "user name or password"),
        ("https://images.example.org:22/", "is not one of the hosts"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("ftp://images.example.org/", "scheme 'ftp'"),
        ("https://[::1/", "InvalidURL"),
    ],
)
def test_every_hop_is_checked(location: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        number = "10.0.0.1" if host == "inside.example" else "93.184.216.34"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    answer = Answer(monkeypatch, httpx.Response(302, headers={"location": location}))
    with pytest.raises(MediaFetchError, match=said):
        fetch_bytes("https://images.example.org/", FetchPolicy(("images.example.org", "inside.example")))
    assert len(answer.requests) == 1


# ---- a real server --------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Well and badly behaved answers, by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, _, rest = self.path.strip("/").partition("?")[0].partition("/")
        with contextlib.suppress(OSError):
            getattr(self, f"on_{kind}")(rest)

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def on_good(self, rest: str) -> None:
        self.answer(CONTENT, Content_Type="text/plain")

    def on_hops(self, rest: str) -> None:
        left = int(rest)
        self.answer(b"", 302, Location=f"/hops/{left - 1}?token=SECRET" if left else "/good")

    def on_relative(self, rest: str) -> None:
        self.answer(b"moved", 307, Location="../good")

    def on_nowhere(self, rest: str) -> None:
        self.answer(b"", 302)

    def on_status(self, rest: str) -> None:
        self.answer(b"no picture", int(rest))

    def on_empty(self, rest: str) -> None:
        self.answer(b"")

    def on_zipped(self, rest: str) -> None:
        self.answer(CONTENT, Content_Encoding="gzip")

    def on_announced(self, rest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "99999999999")
        self.end_headers()

    def on_endless(self, rest: str) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(100_000):
            self.wfile.write(bytes(10_000))

    def on_short(self, rest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(bytes(10))
        self.close_connection = True

    def on_stall(self, rest: str) -> None:
        self.server.over.wait(3)  # type: ignore[attr-defined]

    def on_headers(self, rest: str) -> None:
        """A byte of a header every now and then: no single read takes long."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        self.drip()

    def on_drip(self, rest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.drip()

    def drip(self) -> None:
        while not self.server.over.wait(0.05):  # type: ignore[attr-defined]
            self.wfile.write(b"a")
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.over = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


POLICY = FetchPolicy(("127.0.0.1",), allow_private=True)


def test_a_picture_is_fetched(base: str) -> None:
    assert fetch_bytes(f"{base}/good", POLICY) == CONTENT
    assert fetch_bytes(f"  {base}/good?a=b#c\n", POLICY) == CONTENT


def test_opening_an_address(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("L", (1, 1)).save(out, "PNG")
    png = out.getvalue()
    monkeypatch.setattr(Handler, "on_good", lambda self, rest: self.answer(png))
    assert open_picture(f"{base}/good", fetch=POLICY).size == (1, 1)
    assert picture_size(f"{base}/good", fetch=POLICY) == (1, 1)
    assert open_picture(f"{base}/good", fetch=POLICY, allow_paths=False).size == (1, 1)


def test_a_few_redirects_are_followed(base: str) -> None:
    assert fetch_bytes(f"{base}/relative/", POLICY) == CONTENT
    for hops in range(3):
        assert fetch_bytes(f"{base}/hops/{hops}", POLICY) == CONTENT
    with pytest.raises(MediaFetchError, match="more than 3 redirects") as caught:
        fetch_bytes(f"{base}/hops/11?token=SECRET", POLICY)
    assert "SECRET" not in caught.value.message
    with pytest.raises(MediaFetchError, match="more than 0 redirects"):
        fetch_bytes(f"{base}/hops/0", POLICY, Limits(max_redirects=0))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("status/404", "answered with status 404"),
        ("status/500", "answered with status 500"),
        ("status/206", "answered with status 206"),
        ("nowhere", "answered with status 302"),
        ("empty", "answered with nothing"),
        ("zipped", "answered with content-encoding 'gzip'"),
        ("announced", "announces 99999999999 bytes, at most 50000 are read"),
        ("endless", "sends more than 50000 bytes"),
        ("short", "could not be read: RemoteProtocolError"),
    ],
)
def test_bad_answers(base: str, path: str, said: str) -> None:
    with pytest.raises(MediaFetchError) as caught:
        fetch_bytes(f"{base}/{path}?token=SECRET", POLICY, Limits(max_bytes=50_000), index=5)
    assert said in caught.value.message
    assert caught.value.param == "images[5]"
    for hidden in ("SECRET", "token", path):
        assert hidden not in caught.value.message.removeprefix("image 5: ").replace(base, "").replace(said, "")


@pytest.mark.parametrize("path", ["stall", "headers", "drip"])
def test_one_deadline_covers_everything(base: str, path: str) -> None:
    start = time.monotonic()
    with pytest.raises(MediaFetchError, match=r"gave no picture within 0\.3 seconds"):
        fetch_bytes(f"{base}/{path}?token=SECRET", POLICY, Limits(fetch_seconds=0.3))
    assert 0.25 < time.monotonic() - start < 1.2


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(5) and [])
    start = time.monotonic()
    with pytest.raises(MediaFetchError, match=r"within 0\.3 seconds"):
        fetch_bytes("http://images.example.org/", FetchPolicy(("images.example.org",)), Limits(fetch_seconds=0.3))
    assert time.monotonic() - start < 1.2
    over.set()


def test_a_fetch_that_does_not_even_end_is_left_behind(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_GRACE", -0.4)
    with pytest.raises(MediaFetchError, match=r"within 0\.5 seconds"):
        fetch_bytes(f"{base}/stall", POLICY, Limits(fetch_seconds=0.5))


def test_a_connection_that_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(MediaFetchError, match="could not be read: ConnectError"):
        fetch_bytes(f"http://127.0.0.1:{port}/", POLICY)


def test_https_to_a_server_that_has_none(base: str) -> None:
    with pytest.raises(MediaFetchError, match="could not be read: ConnectError"):
        fetch_bytes(base.replace("http:", "https:") + "/good", POLICY)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Port and certificate of a server that can prove to be pictures.test, and nobody else."""
    folder = tmp_path_factory.mktemp("secure")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test"]
    subprocess.run(
        [*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=30
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server.server_address[1], certificate
    server.shutdown()
    server.server_close()


def test_a_certificate_is_that_of_the_name_in_the_address(
    secure: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to a number, what is proved is the name."""
    port, certificate = secure
    resolving(monkeypatch, "127.0.0.1")
    policy = FetchPolicy(("pictures.test", "other.test", "127.0.0.1"), allow_private=True)
    with pytest.raises(MediaFetchError, match="could not be read: ConnectError"):
        fetch_bytes(f"https://pictures.test:{port}/good", policy)  # nobody vouches for it
    trusted = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(sources, "_certificates", lambda: trusted)
    assert fetch_bytes(f"https://pictures.test:{port}/good", policy) == CONTENT
    assert fetch_bytes(f"https://pictures.test.:{port}/good", policy) == CONTENT
    for host in ("other.test", "127.0.0.1"):
        with pytest.raises(MediaFetchError, match="could not be read: ConnectError"):
            fetch_bytes(f"https://{host}:{port}/good", policy)


def test_certificates_are_checked_and_read_once() -> None:
    context = sources._certificates()
    assert context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname
    assert sources._certificates() is context


def test_it_works_where_a_loop_is_running(base: str) -> None:
    async def inside() -> bytes:
        return fetch_bytes(f"{base}/good", POLICY)

    assert asyncio.run(inside()) == CONTENT


def test_proxies_of_the_environment_are_not_asked(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert fetch_bytes(f"{base}/good", POLICY) == CONTENT


def test_addresses_are_not_logged(base: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fetch_bytes(f"{base}/good?token=SECRET", POLICY)
    assert not [record for record in caplog.records if "SECRET" in record.getMessage()]
