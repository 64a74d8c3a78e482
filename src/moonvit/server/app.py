"""The HTTP application: OpenAI chat completions with pictures, what they cost, and a page to try them on.

It stands on the ``Engine`` protocol alone. A request goes through ``Gate`` (name, key, log), ``read_json`` (bounded
body), ``schema`` (every field honoured or refused), ``Admission`` (a place, then a turn), ``Media`` (pictures brought
and checked off the event loop) and the engine; each answer runs in a ``Job`` that ends when its client hangs up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

from moonvit.engines import Delta, Engine, GenerateRequest
from moonvit.errors import ConfigError, EngineError, MoonvitError, NotFoundError, RequestError
from moonvit.families import PATCH
from moonvit.grids import MERGE, as_grid
from moonvit.preprocess import resize_plan
from moonvit.prompts.messages import TextPart
from moonvit.server.answer import Answer
from moonvit.server.http import EventStream, Gate, Job, as_error, error_body, read_json
from moonvit.server.media import Media
from moonvit.server.metrics import CONTENT_TYPE, Metrics
from moonvit.server.queue import Admission, PendingBytes
from moonvit.server.schema import clip, parse_chat, parse_plan
from moonvit.server.settings import Settings, load_settings

log = logging.getLogger("moonvit.server")

_STATIC = Path(__file__).parent / "static"
_SAMPLES = Path(__file__).parent.parent / "demo" / "samples"
_PLANS_RUNNING, _PLANS_WAITING = 2, 64
_HEALTH_SECONDS = 2.0
_GRACE_SECONDS = 2
"""For answers in progress when the server is told to stop."""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Service:
    """What the routes share.

    Args:
        engine: Whatever runs the model.
        settings: What the operator decided.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.pending = PendingBytes(settings.max_pending)
        self.media = Media(settings, self.pending)
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self.plans = Admission(_PLANS_RUNNING, _PLANS_WAITING)
        self.metrics = Metrics(self.admission, self.pending)
        self._created = int(time.time())
        self._jobs: set[Job] = set()

    def stop(self) -> None:
        """End every answer in progress with an error its client can read."""
        for job in tuple(self._jobs):
            job.fail(EngineError("the server is shutting down"))

    # -- helpers --

    async def _body(self, request: Request, stack: AsyncExitStack) -> Any:
        settings = self.settings
        document, held = await read_json(request, self.pending, settings.max_body, settings.body_timeout)
        stack.callback(self.pending.give_back, held)
        return document

    def _check_model(self, document: Any) -> None:
        asked = document.get("model") if isinstance(document, dict) else None
        if isinstance(asked, str) and asked != self.engine.info.model:
            raise NotFoundError(
                f"model = {clip(asked)!r} is not served here; served: {self.engine.info.model!r}", param="model"
            )

    def _check_pictures(self, request: GenerateRequest) -> int:
        pictures = [part for message in request.messages for part in message.images]
        if pictures and self.engine.info.vision is None:
            raise RequestError(
                f"{pictures[0].param} is a picture, but {self.engine.info.model!r} takes text only",
                param=pictures[0].param,
            )
        return len(pictures)

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Bring the pictures, wait for a turn, run the engine."""
        finished = False
        async with self.media.gathered(request) as brought:
            try:
                async with self.admission.turn(), aclosing(_generator(self.engine.generate(brought))) as deltas:
                    async for delta in deltas:
                        finished = finished or delta.finish_reason is not None
                        yield delta
            except MoonvitError as error:
                error.param = _part_at_fault(error.param, brought)
                raise
        if not finished:
            raise EngineError("the engine ended the answer without a reason")

    # -- routes --

    async def chat(self, request: Request) -> Response:
        """Answer ``POST /v1/chat/completions``.

        Args:
            request: The request.

        Returns:
            The completion, or a stream of its chunks.

        Raises:
            MoonvitError: The request is refused or fails before its first piece.
        """
        notes = request.state.notes
        start = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.enter_context(self.admission.place())
            document = await self._body(request, stack)
            self._check_model(document)
            call = parse_chat(document, max_images=self.settings.max_images, id=notes["request_id"])
            del document
            images = self._check_pictures(call.request)
            if call.user:
                notes["user"] = call.user
            if _holds_data_url(call.request):
                notes["warning"] = "a data URL was sent as text, not as an image_url part"
                log.warning("%s sent a data URL as text, not as an image_url part", notes["request_id"])
            answer = Answer(f"chatcmpl-{uuid.uuid4().hex}", self.engine.info.model, include_usage=call.include_usage)
            streamed = call.stream
            job = await stack.enter_async_context(Job(self._deltas(call.request), request.receive, self._jobs))
            del call  # with it go the addresses, which hold whole pictures
            try:
                first = await anext(job)
            except StopAsyncIteration:
                raise EngineError("the engine ended the answer without a word") from None
            self.metrics.first_token.observe(time.monotonic() - start)

            def over() -> None:
                notes.update(images=images, prompt=answer.usage.prompt_tokens, answer=answer.usage.completion_tokens)
                self.metrics.count(answer.usage, images)

            if not streamed:
                answer.add(first)
                async for delta in job:
                    answer.add(delta)
                over()
                return JSONResponse(answer.completion())

            async def events() -> AsyncIterator[dict[str, Any]]:
                yield answer.opening()
                for chunk in answer.chunks(first):
                    yield chunk
                async for delta in job:
                    for chunk in answer.chunks(delta):
                        yield chunk
                over()

            def failed(error: BaseException) -> dict[str, Any]:
                shown = as_error(error, notes["request_id"])
                notes["code"] = shown.code
                return error_body(shown)

            return EventStream(events(), stack.pop_all(), self.settings.write_timeout, failed)

    async def plan(self, request: Request) -> Response:
        """Answer ``POST /v1/vision/plan``.

        Args:
            request: The request.

        Returns:
            Tokens and bytes of the request, and size, grid and tokens of each picture.

        Raises:
            MoonvitError: The request is refused.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self.plans.place())
            document = await self._body(request, stack)
            self._check_model(document)
            asked = parse_plan(document, max_images=self.settings.max_images, id=request.state.notes["request_id"])
            self._check_pictures(asked)
            asked, sizes = await self.media.measure(asked)
            images = [self._picture(asked, index, size) for index, size in enumerate(sizes)]
            try:
                async with self.plans.turn():
                    cost = await self.engine.count_tokens(asked)
            except MoonvitError as error:
                error.param = _part_at_fault(error.param, asked)
                raise
        plan = cost.plan or {}
        return JSONResponse(
            {
                "object": "vision.plan",
                "model": self.engine.info.model,
                "prompt_tokens": cost.prompt_tokens,
                "image_tokens": cost.image_tokens,
                "max_context": self.engine.info.max_context,
                "peak_bytes": plan.get("peak_bytes", 0),
                "images": images,
                "plan": cost.plan,
            }
        )

    def _picture(self, request: GenerateRequest, index: int, size: tuple[int, int]) -> dict[str, Any]:
        vision = self.engine.info.vision
        assert vision is not None  # _check_pictures refused the request otherwise
        param = [part.param for message in request.messages for part in message.images][index]
        try:
            resized = resize_plan(vision.rule, *size)
            grid = as_grid(resized.grid, index)
        except MoonvitError as error:
            error.param = param
            raise
        return {
            "param": param,
            "size": list(size),
            "resized": [resized.width, resized.height],
            "padded": [resized.padded_width, resized.padded_height],
            "grid": list(grid),
            "patches": grid.patches,
            "tokens": grid.tokens,
        }

    def model(self) -> dict[str, Any]:
        """The entry of ``/v1/models``.

        Returns:
            The OpenAI fields, and what the page and people want to know beside them.
        """
        info = self.engine.info
        return {
            "id": info.model,
            "object": "model",
            "created": self._created,
            "owned_by": "moonvit",
            "max_model_len": info.max_context,
            "family": info.family,
            "vision": info.vision is not None,
            "patch_size": PATCH,
            "merge_size": MERGE,
            "max_images": self.settings.max_images,
            "max_body_bytes": int(self.settings.max_body),
            "details": info.details,
        }

    async def health(self) -> Response:
        """Answer ``GET /health``.

        Returns:
            200 while the engine can answer.

        Raises:
            EngineError: It cannot, or does not say so in time.
        """
        try:
            alive = await asyncio.wait_for(self.engine.health(), _HEALTH_SECONDS)
        except asyncio.TimeoutError:
            raise EngineError(f"the engine did not report its health within {_HEALTH_SECONDS:g} s") from None
        if not alive:
            raise EngineError("the engine has stopped")
        return JSONResponse(
            {
                "status": "ok",
                "model": self.engine.info.model,
                "running": self.admission.running,
                "in_flight": self.admission.inside,
            }
        )


async def _generator(deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
    """An iterator as a generator, so that closing it reaches the engine whichever of the two the engine returns."""
    try:
        async for delta in deltas:
            yield delta
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()


def _part_at_fault(param: str | None, request: GenerateRequest) -> str | None:
    """An engine counts pictures; a client knows messages and parts."""
    counted = re.fullmatch(r"(?:images|grids)\[(\d+)\]", param or "")
    pictures = [part.param for message in request.messages for part in message.images]
    if counted and int(counted[1]) < len(pictures):
        return pictures[int(counted[1])]
    return param


def _holds_data_url(request: GenerateRequest) -> bool:
    texts = (part.text for message in request.messages for part in message.parts if isinstance(part, TextPart))
    return any("data:image/" in text and ";base64," in text for text in texts)


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """Build the application.

    Args:
        engine: Whatever runs the model; it is closed when the application shuts down.
        settings: What the operator decided; by default the environment and the defaults.

    Returns:
        The application, to be run by any ASGI server.
    """
    settings = settings or load_settings()
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.media.close()
        await engine.close()

    app = FastAPI(title="moonvit", openapi_url=None, lifespan=lifespan)
    app.state.service = service

    def count(route: str, status: int, code: str | None, seconds: float) -> None:
        service.metrics.requests.labels(route, str(status)).inc()
        service.metrics.seconds.labels(route).observe(seconds)
        if code is not None:
            service.metrics.errors.labels(code).inc()

    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    app.add_middleware(Gate, api_key=key, count=count, retry_after=lambda: service.admission.retry_after)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send headers of their own, such as x-stainless-lang
            expose_headers=["X-Request-Id", "Retry-After"],
        )

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {clip(request.url.path)}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        request.state.notes["code"] = code
        message = {404: f"there is nothing at {where}", 405: f"{where}: this address does not take that method"}.get(
            error.status_code, str(error.detail)
        )
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return JSONResponse(body, error.status_code, error.headers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.chat(request)

    @app.post("/v1/vision/plan")
    async def plan(request: Request) -> Response:
        return await service.plan(request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service._check_model({"model": name})
        return JSONResponse(service.model())

    @app.get("/health")
    async def health() -> Response:
        return await service.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """The page and its pictures: a fixed list of files, read when the application is built."""
    pages = {"/": "index.html", "/static/style.css": "style.css", **{f"/static/{n}": n for n in ("app.js",)}}
    samples = {path.name: path for path in sorted(_SAMPLES.glob("*.png"))} if _SAMPLES.is_dir() else {}

    def file(path: Path) -> Any:
        async def send() -> Response:
            return FileResponse(path, headers=_PAGE_HEADERS)

        return send

    for address, name in pages.items():
        app.add_api_route(address, file(_STATIC / name), methods=["GET"])
    for name, path in samples.items():
        app.add_api_route(f"/samples/{name}", file(path), methods=["GET"])

    @app.get("/samples")
    async def list_samples() -> Response:
        data = [{"name": path.stem, "url": f"/samples/{name}"} for name, path in samples.items()]
        return JSONResponse({"object": "list", "data": data})


def run(engine: Engine, settings: Settings) -> None:
    """Serve until interrupted.

    Args:
        engine: Whatever runs the model.
        settings: What the operator decided.
    """
    import uvicorn

    # Only our own loggers are turned up: those of the libraries write headers and addresses of requests.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("moonvit").setLevel(settings.log_level.upper())
    app = create_app(engine, settings)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
                port = listener.getsockname()[1]
                if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
                    log.warning("listening on %s without a key: whoever reaches it can use the model", settings.host)
                log.info("%s is served on http://%s:%d (Ctrl-C stops it)", engine.info.model, host, port)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:  # told twice: at once, without the traces of everything that is cut off
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, app.state.service.stop)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        # Its greetings name a socket where people want an address.
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS + 2,
    )
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=config.backlog)
    except (OSError, OverflowError) as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}", param="port"
        ) from None
    with listener, suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listener])
