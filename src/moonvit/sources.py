"""Encoded pictures from where they are: ``data:`` URLs and http(s) addresses, with every limit on untrusted input.

An address is fetched only where a ``FetchPolicy`` names its host. The host is resolved once, every address it resolves
to is checked, and the connection goes to an address that was checked, so a name cannot change its mind in between. Each
redirect goes through the same. One deadline covers names, redirects and content. Environment proxies are not used:
they would resolve names where nobody checks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import ipaddress
import re
import socket
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from moonvit.errors import ConfigError, ImageError, MediaFetchError, MissingDependencyError

if TYPE_CHECKING:
    import ssl

    import httpx

_HEADER = 1024
"""Characters before the comma of a data URL."""
_ADDRESS = 8192
"""Characters of an http(s) address."""
_GRACE = 1.0
"""Seconds past its deadline after which a fetch that does not even answer its cancellation is left behind."""
_WHITESPACE = b" \t\n\r\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_PORTS = {"http": 80, "https": 443}
_DATA = re.compile(r"\s*data:", re.IGNORECASE)
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_INSIDE = tuple(ipaddress.ip_network(text) for text in ("168.63.129.16/32", "192.0.0.0/24", "64:ff9b:1::/48"))
"""Metadata services and special uses that ``ipaddress`` calls global, in all or some versions of Python."""


@dataclass(frozen=True)
class Limits:
    """What an untrusted picture may be. These bound decoding; the model's own picture rule comes after them.

    Attributes:
        max_bytes: Bytes of the encoded picture, however it comes.
        max_pixels: Width times height, from the header. Decoding takes up to 4 bytes for each, a progressive JPEG up to
            8 more while it lasts, dealing with orientation or transparency 4 more.
        max_side: Pixels along one side.
        fetch_seconds: Time for one address: names, redirects and content together.
        max_redirects: Redirects that are followed.
    """

    max_bytes: int = 64 << 20
    max_pixels: int = 120_000_000
    max_side: int = 65_535
    fetch_seconds: float = 10.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_side"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}, must be at least 1", param=name)
        if not self.fetch_seconds > 0:
            raise ConfigError(f"fetch_seconds = {self.fetch_seconds}, must be more than 0", param="fetch_seconds")
        if self.max_redirects < 0:
            raise ConfigError(f"max_redirects = {self.max_redirects}, must not be negative", param="max_redirects")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class FetchPolicy:
    """Which http(s) addresses may be fetched.

    Attributes:
        allowed_hosts: Host names, or IP addresses, matched whole. ``host`` allows ports 80 and 443, ``host:port`` that
            port.
        allow_private: Let these hosts have private, loopback and link-local addresses, and any port: for networks of
            one's own, and for tests.
    """

    allowed_hosts: tuple[str, ...]
    allow_private: bool = False

    def allows(self, host: str, port: int) -> bool:
        """Whether a host and port are named.

        Args:
            host: As it stands in an address; no brackets.
            port: Port of the connection.

        Returns:
            True where an entry matches.
        """
        wanted = _plain_host(host)
        for entry in self.allowed_hosts:
            if _plain_host(entry) == wanted:
                return self.allow_private or port in _PORTS.values()
            name, colon, number = entry.rpartition(":")
            if colon and number.isdecimal() and _plain_host(name) == wanted and int(number) == port:
                return True
        return False


def _plain_host(host: str) -> str:
    plain = host.strip().strip("[]").rstrip(".").lower()
    try:
        return plain if plain.isascii() else plain.encode("idna").decode("ascii")
    except UnicodeError:
        return plain


def failure(kind: type[ImageError], index: int, reason: str) -> ImageError:
    """An error of a kind about the picture of a number, which is also its ``param``."""
    return kind(f"image {index}: {reason}", param=f"images[{index}]")


# ---- data: ----------------------------------------------------------------------------------------------------------


def is_data_url(source: str) -> bool:
    """Whether a string is a ``data:`` URL; case and whitespace before it do not matter."""
    return _DATA.match(source) is not None


def data_url_bytes(url: str, limits: Limits = DEFAULT_LIMITS, index: int = 0) -> bytes:
    """Unwrap a ``data:`` URL (RFC 2397).

    The media type and its parameters are not used: content decides what a picture is. ``;base64`` counts where it
    stands last before the comma, in any case. In base64, whitespace is skipped, the URL-safe alphabet is read like the
    standard one, percent-escapes are undone, and padding may be missing; everything else is refused.

    Args:
        url: The whole URL.
        limits: ``max_bytes`` is checked before anything is decoded.
        index: Place of the picture in the request, for messages.

    Returns:
        The encoded picture.

    Raises:
        ImageError: It is not a data URL, is not well-formed, holds nothing, or too much.
    """
    scheme = _DATA.match(url)
    comma = url.find(",", scheme.end(), scheme.end() + _HEADER) if scheme else -1
    if scheme is None or comma < 0:
        reason = f"a data: URL needs a comma within its first {_HEADER} characters: data:image/png;base64,..."
        raise failure(ImageError, index, reason)
    *parameters, last = url[scheme.end() : comma].split(";")
    is_base64 = bool(parameters) and last.strip().lower() == "base64"
    if any(parameter.strip().lower() == "base64" for parameter in parameters[1:]):
        raise failure(ImageError, index, "';base64' must stand last before the comma of a data: URL")
    length = len(url) - comma - 1
    # An escape takes three characters, four characters of base64 hold three bytes: more than this cannot fit.
    if length > 4 * limits.max_bytes + _HEADER:
        raise failure(ImageError, index, f"a data: URL of {length} characters holds more than {limits.max_bytes} bytes")
    try:
        data = url[comma + 1 :].encode("ascii")
    except UnicodeEncodeError:
        raise failure(ImageError, index, "a data: URL may hold ASCII characters only") from None
    if b"%" in data:
        data = unquote_to_bytes(data)
    if is_base64:
        data = _from_base64(data.translate(None, _WHITESPACE), limits, index)
    elif len(data) > limits.max_bytes:
        raise failure(ImageError, index, f"{len(data)} bytes, at most {limits.max_bytes} are read")
    if not data:
        raise failure(ImageError, index, "the data: URL is empty")
    return data


def _from_base64(text: bytes, limits: Limits, index: int) -> bytes:
    body = text.rstrip(b"=")
    padding = len(text) - len(body)
    size = len(body) * 3 // 4
    if size > limits.max_bytes:
        raise failure(ImageError, index, f"base64 of {size} bytes, at most {limits.max_bytes} are read")
    wrong = re.search(rb"[^A-Za-z0-9+/_-]", body)
    if wrong:
        shown = wrong[0].decode("latin-1")
        raise failure(ImageError, index, f"{shown!r} at character {wrong.start()} is not base64")
    missing = -len(body) % 4
    if missing == 3:
        raise failure(
            ImageError, index, f"base64 of {len(body)} characters: one more than a multiple of 4 is cut short"
        )
    if padding not in (0, missing):
        raise failure(ImageError, index, f"base64 of {len(body)} characters takes {missing} '=', not {padding}")
    try:
        return base64.b64decode(body.translate(_URL_SAFE) + b"=" * missing, validate=True)
    except binascii.Error as error:
        raise failure(ImageError, index, f"not base64: {error}") from None


# ---- http(s): -------------------------------------------------------------------------------------------------------


def is_address(source: str) -> bool:
    """Whether a string is an address with a scheme, such as ``https://...`` or ``file://...``, and no local path."""
    return _SCHEME.match(source) is not None


def fetch_bytes(url: str, policy: FetchPolicy | None, limits: Limits = DEFAULT_LIMITS, index: int = 0) -> bytes:
    """Bring an encoded picture from an http(s) address. Blocks; runs no longer than ``limits.fetch_seconds``.

    Args:
        url: The address.
        policy: Which hosts may be asked; None refuses every address.
        limits: Bytes, seconds and redirects.
        index: Place of the picture in the request, for messages.

    Returns:
        The body of the answer.

    Raises:
        MediaFetchError: The address is not allowed, or did not give a picture in time. Messages hold scheme, host and
            port of an address, nothing else of it.
        MissingDependencyError: ``httpx`` is not installed.
    """
    if policy is None:
        why = "http(s) addresses are not fetched here, as no host is allowed; send the picture as a data: URL"
        raise failure(MediaFetchError, index, why)
    try:
        import httpx
    except ImportError:
        raise MissingDependencyError("fetching pictures needs httpx: pip install 'moonvit[serve]'") from None

    async def bring() -> bytes:
        try:
            return await asyncio.wait_for(_follow(url, policy, limits, index), limits.fetch_seconds)
        except (TimeoutError, asyncio.TimeoutError, httpx.TimeoutException):
            reason = f"the address gave no picture within {limits.fetch_seconds:g} seconds"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            reason = f"the address could not be read: {type(error).__name__}"
        raise failure(MediaFetchError, index, reason)

    result = _run_beside(bring(), limits.fetch_seconds + _GRACE)
    if result is None:
        raise failure(MediaFetchError, index, f"the address gave no picture within {limits.fetch_seconds:g} seconds")
    return result


def _run_beside(work: Coroutine[Any, Any, bytes], seconds: float) -> bytes | None:
    """Run a coroutine in a loop and a thread of its own; None where it takes longer.

    The caller's thread may have a running loop already, and a name server that does not answer holds up the end of a
    loop but must not hold up the caller.
    """
    results: list[bytes] = []
    errors: list[BaseException] = []
    done = threading.Event()

    async def report() -> None:
        try:
            results.append(await work)
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=lambda: asyncio.run(report()), name="moonvit-fetch-one", daemon=True).start()
    if not done.wait(seconds):
        return None
    if errors:
        raise errors[0]
    return results[0]


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Who is trusted, read once: it takes longer than many a picture."""
    import httpx

    return httpx.create_ssl_context()


async def _follow(url: str, policy: FetchPolicy, limits: Limits, index: int) -> bytes:
    import httpx

    if len(url) > _ADDRESS:
        raise failure(MediaFetchError, index, f"an address of {len(url)} characters, at most {_ADDRESS} are read")
    address = httpx.URL(url.strip())
    # Not a Client: that would follow the environment's proxies, keep cookies, and write whole addresses to the log.
    async with httpx.AsyncHTTPTransport(verify=_certificates()) as transport:
        for _ in range(limits.max_redirects + 1):
            response = await _ask(transport, address, policy, limits, index)
            try:
                if not response.has_redirect_location:
                    return await _body(response, address, limits, index)
                address = address.join(response.headers["location"])
            finally:
                await response.aclose()
    raise failure(MediaFetchError, index, f"more than {limits.max_redirects} redirects")


async def _ask(
    transport: httpx.AsyncHTTPTransport, address: httpx.URL, policy: FetchPolicy, limits: Limits, index: int
) -> httpx.Response:
    """One request, to an address that was checked."""
    import httpx

    host = address.raw_host.decode("ascii")
    if address.scheme not in _PORTS:
        raise failure(MediaFetchError, index, f"scheme {address.scheme[:20]!r}: only http and https are fetched")
    if address.userinfo:
        raise failure(MediaFetchError, index, "an address with a user name or password is not fetched")
    port = _PORTS[address.scheme] if address.port is None else address.port
    if not host or not 1 <= port <= 65535 or not policy.allows(host, port):
        raise failure(MediaFetchError, index, f"{_shown(address)} is not one of the hosts that may be fetched from")
    numbers = await _resolve(address, host, port, policy, index)
    headers = {
        "host": address.netloc.decode("ascii"),
        "accept": "image/png,image/jpeg,image/webp,image/gif,image/bmp",
        "accept-encoding": "identity",
        "user-agent": "moonvit",
    }
    wait = dict.fromkeys(("read", "write", "pool"), limits.fetch_seconds)
    wait["connect"] = limits.fetch_seconds / len(numbers)
    extensions = {"timeout": wait, "sni_hostname": host.rstrip(".")}
    for place, number in enumerate(numbers):
        request = httpx.Request("GET", address.copy_with(host=number), headers=headers, extensions=extensions)
        try:
            return await transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if place == len(numbers) - 1:
                raise
    raise AssertionError("a name always resolves to at least one number here")


async def _resolve(address: httpx.URL, host: str, port: int, policy: FetchPolicy, index: int) -> list[str]:
    """IP addresses of a host, in the order of the resolver, all of them allowed."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise failure(MediaFetchError, index, f"the host of {_shown(address)} has no address") from None
    numbers = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for number in numbers:
        if not policy.allow_private and not is_public(number):
            raise failure(MediaFetchError, index, f"the host of {_shown(address)} has an address that is not public")
    if not numbers:
        raise failure(MediaFetchError, index, f"the host of {_shown(address)} has no address")
    return numbers


def is_public(number: str) -> bool:
    """Whether an IP address is one of the public internet, seen through the ways IPv6 wraps IPv4.

    Args:
        number: IPv4 or IPv6 address, maybe with a zone.

    Returns:
        False for loopback, private, link-local, shared, reserved, multicast and metadata addresses.
    """
    try:
        ip = ipaddress.ip_address(number.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.teredo is not None or ip.is_site_local:
            return False
    if any(ip in network for network in _INSIDE):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def _body(response: httpx.Response, address: httpx.URL, limits: Limits, index: int) -> bytes:
    if response.status_code != 200:
        raise failure(MediaFetchError, index, f"{_shown(address)} answered with status {response.status_code}")
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise failure(MediaFetchError, index, f"{_shown(address)} answered with content-encoding {encoding[:40]!r}")
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.max_bytes:
        reason = f"{_shown(address)} announces {announced[:20]} bytes, at most {limits.max_bytes} are read"
        raise failure(MediaFetchError, index, reason)
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > limits.max_bytes:
            raise failure(MediaFetchError, index, f"{_shown(address)} sends more than {limits.max_bytes} bytes")
    if not content:
        raise failure(MediaFetchError, index, f"{_shown(address)} answered with nothing")
    return bytes(content)


def _shown(address: httpx.URL) -> str:
    """Scheme, host and port: paths and queries may hold secrets."""
    return f"{address.scheme}://{address.netloc.decode('ascii')}"[:200]
