"""The parts of HTTP the frameworks leave open: bounded bodies, hanging up, event streams, errors in one shape."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from types import TracebackType
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonvit.engines import Delta
from moonvit.errors import (
    AuthenticationError,
    EngineError,
    MoonvitError,
    RequestError,
    SlowRequestError,
    TooLargeError,
)
from moonvit.server.queue import PendingBytes
from moonvit.server.schema import clip

log = logging.getLogger("moonvit.server")

GONE = 499
"""Status under which a request whose client hung up is logged; nobody receives it."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PARSE_INLINE = 64 << 10
_DRAIN_SECONDS = 2.0
_MESSAGE = 600


# ---- errors ---------------------------------------------------------------------------------------------------------


def as_error(error: BaseException, request_id: str) -> MoonvitError:
    """Turn whatever a request failed with into an error that may be shown.

    Args:
        error: What was raised.
        request_id: Name of the request, by which the log is searched.

    Returns:
        The error itself if it is one of ours; otherwise one that tells nothing of the inside.
    """
    if isinstance(error, MoonvitError):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        log.error("%s ran out of memory", request_id)
        return EngineError("the server ran out of memory on this request; others go on")
    log.error("%s failed: %s: %s", request_id, type(error).__name__, clip(str(error), 300), exc_info=_trace(error))
    return MoonvitError(f"the server failed on this request; its log has the reason under {request_id}")


def _trace(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The traceback with a message that is cut short: it may quote the request."""
    shown = Exception(f"{type(error).__name__}: {clip(str(error), 300)}")
    return (type(shown), shown, error.__traceback__)


def error_body(error: MoonvitError) -> dict[str, Any]:
    """The error in the OpenAI shape, no longer than a client needs.

    Args:
        error: Any of ours.

    Returns:
        ``{"error": {"message", "type", "param", "code"}}``.
    """
    body = error.to_dict()
    body["error"]["message"] = clip(error.message, _MESSAGE)
    return body


def error_response(error: MoonvitError, retry_after: int = 1) -> JSONResponse:
    """The answer an error deserves.

    Args:
        error: Any of ours.
        retry_after: Seconds, for errors that pass.

    Returns:
        A JSON response with the status of the error's class.
    """
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)


# ---- bodies ---------------------------------------------------------------------------------------------------------


async def read_json(request: Request, pending: PendingBytes, limit: int, seconds: float) -> tuple[Any, int]:
    """Read and decode a JSON body without ever holding more than it may have.

    Args:
        request: The request.
        pending: Account of all bodies; the caller gives the returned bytes back when the request is over.
        limit: Bytes of one body.
        seconds: Time in which it must arrive.

    Returns:
        The document, and the bytes taken from ``pending``.

    Raises:
        TooLargeError: The body is over the limit.
        SlowRequestError: It did not arrive in time.
        RequestError: It is not JSON, or is marked as something else.
        OverloadedError: The bodies of all requests together are over their limit.
        ClientDisconnect: The client hung up.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(f"Content-Type = {clip(kind)!r}; send application/json", param="Content-Type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(f"Content-Encoding = {clip(encoding)!r}; send the body as it is", param="Content-Encoding")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        await _drain(request)
        raise TooLargeError(f"the body has {declared} bytes, allowed {limit}")
    body = bytearray()

    async def collect() -> None:
        async for piece in request.stream():
            if len(body) + len(piece) > limit:
                raise TooLargeError(f"the body has more than the {limit} bytes allowed")
            pending.take(len(piece))
            body.extend(piece)

    held = 0
    try:
        try:
            await asyncio.wait_for(collect(), seconds)
        except asyncio.TimeoutError:
            raise SlowRequestError(f"{len(body)} bytes of the body arrived in the {seconds:g} s allowed") from None
        except TooLargeError:
            await _drain(request)
            raise
        document = _decode(body) if len(body) < _PARSE_INLINE else await asyncio.to_thread(_decode, body)
        held = len(body)
    finally:
        if not held:
            pending.give_back(len(body))
    return document, held


def _decode(body: bytearray) -> Any:
    try:
        return from_json(bytes(body), allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {clip(str(error), 120)}") from None


async def _drain(request: Request) -> None:
    """Let a client that is still sending finish, so that it reads the refusal and not a broken pipe."""
    if "expect" in request.headers:
        return

    async def discard() -> None:
        while (await request.receive()).get("more_body"):
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(discard(), _DRAIN_SECONDS)


# ---- answers that can be cancelled ----------------------------------------------------------------------------------


class Job:
    """One answer at work in a task of its own, cancelled the moment its client hangs up.

    Args:
        deltas: The answer; it is closed in the task that runs it.
        receive: The ASGI channel, on which a disconnect arrives.
        running: Where the job is listed while it runs.
    """

    _AHEAD = 16

    def __init__(self, deltas: AsyncGenerator[Delta], receive: Receive, running: set[Job]) -> None:
        self._deltas = deltas
        self._receive = receive
        self._running = running
        self._items: deque[Delta] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Job:
        self._running.add(self)
        self._pump = asyncio.create_task(self._run())
        self._pump.add_done_callback(lambda _: self._more.set())
        self._watch = asyncio.create_task(self._until_gone())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.discard(self)
        self._watch.cancel()
        self._pump.cancel()
        await asyncio.wait({self._watch, self._pump})
        for task in (self._watch, self._pump):
            if not task.cancelled():
                task.exception()

    def __aiter__(self) -> Job:
        return self

    async def __anext__(self) -> Delta:
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self._pump.done():
                self._pump.result()
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        self._room.set()
        return self._items.popleft()

    async def _run(self) -> None:
        async with aclosing(self._deltas) as deltas:
            async for delta in deltas:
                self._items.append(delta)
                self._more.set()
                while len(self._items) >= self._AHEAD:
                    self._room.clear()
                    await self._room.wait()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientDisconnect())

    def fail(self, failure: Exception) -> None:
        """End the answer now.

        Args:
            failure: What its reader is told.
        """
        self._failure = failure
        self._items.clear()
        self._pump.cancel()
        self._more.set()


class EventStream(Response):
    """Server-sent events, written one by one; a client that stops reading is dropped.

    Args:
        events: JSON documents, in order.
        resources: What to close when the stream is over.
        write_timeout: Seconds one write may take.
        on_error: Turns an error in mid-stream into the document that is sent instead.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        resources: AsyncExitStack,
        write_timeout: float,
        on_error: Callable[[BaseException], dict[str, Any]],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources
        self._write_timeout = write_timeout
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream.

        Args:
            scope: The request.
            receive: Not used: the job listens on it.
            send: The ASGI channel.

        Raises:
            ClientDisconnect: The client hung up or stopped reading.
        """

        async def write(text: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            try:
                await asyncio.wait_for(send(message), self._write_timeout)
            except asyncio.TimeoutError:
                raise ClientDisconnect from None

        async with self._resources:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await write(f"data: {dump(event)}\n\n")
            except (ClientDisconnect, asyncio.CancelledError):
                raise
            except BaseException as error:
                await write(f"data: {dump(self._on_error(error))}\n\n")
            await write("data: [DONE]\n\n", more=False)


def dump(document: Any) -> str:
    """One line of JSON.

    Args:
        document: What to write.

    Returns:
        JSON without spaces or line breaks; text stays as it is.
    """
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


# ---- the gate -------------------------------------------------------------------------------------------------------


class Gate:
    """Middleware: names each request, asks for the key, catches what nobody caught, logs one line and counts.

    Args:
        app: What comes after.
        api_key: The key asked for on ``/v1`` and ``/metrics``; None asks for none.
        count: Called with route, status, error code and seconds of each request.
        retry_after: Seconds to tell a client that comes at a bad time.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        count: Callable[[str, int, str | None, float], None],
        retry_after: Callable[[], int],
    ) -> None:
        self._app = app
        self._retry_after = retry_after
        self._key = api_key.encode() if api_key is not None else None
        self._count = count

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if self._key is None or not (path.startswith("/v1/") or path == "/metrics"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._key):
            raise AuthenticationError("this server asks for a key: send 'Authorization: Bearer KEY'")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on.

        Args:
            scope: The request.
            receive: The ASGI channel.
            send: The ASGI channel.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        notes: dict[str, Any] = {"request_id": request_id}
        scope.setdefault("state", {}).update(notes=notes)
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, named)
        except ClientDisconnect:
            notes["code"] = "client_disconnected"
            status = GONE
        except Exception as error:
            shown = as_error(error, request_id)
            notes["code"] = shown.code
            if not status:
                await error_response(shown, self._retry_after())(scope, receive, named)
        finally:
            self._report(scope, notes, status, time.monotonic() - start)

    def _report(self, scope: Scope, notes: dict[str, Any], status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._count(route, status, notes.get("code"), seconds)
        level = logging.DEBUG if route in ("/health", "/metrics") and status == 200 else logging.INFO
        path = clip(scope["path"], 64).encode("unicode_escape").decode()
        words = " ".join(f"{key}={clip(str(value), 64)!r}" for key, value in notes.items())
        log.log(level, "%s %s %d in %.0f ms %s", scope["method"], path, status, seconds * 1e3, words)
