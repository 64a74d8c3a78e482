"""A real server on a free port, in a thread of the test process."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from PIL import Image

from moonvit.engines import Engine
from moonvit.server.app import create_app
from moonvit.server.settings import load_settings

web = httpx.Client(
    # Loading certificates for every call would be most of its time; a kept connection would outlive its server.
    verify=False,
    trust_env=False,
    timeout=30,
    limits=httpx.Limits(max_keepalive_connections=0),
)
"""The client of the tests."""


@contextmanager
def live(engine: Engine, **settings: Any) -> Iterator[str]:
    """Serve an engine; yields the base address."""
    config = uvicorn.Config(
        create_app(engine, load_settings(**settings)), port=0, log_level="warning", access_log=False, lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for a condition; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited too long"
        time.sleep(0.005)
    return time.monotonic() - start


def solid(
    colour: str | tuple[int, ...], size: tuple[int, int] = (56, 56), format: str = "PNG", mode: str = "RGB"
) -> bytes:
    """An encoded picture of one colour."""
    out = io.BytesIO()
    Image.new(mode, size, colour).save(out, format)
    return out.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    """A picture as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes) -> dict[str, Any]:
    """A picture as a message part."""
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def user(*content: Any) -> list[dict[str, Any]]:
    """A conversation of one user message; strings become text parts."""
    parts = [{"type": "text", "text": item} if isinstance(item, str) else item for item in content]
    return [{"role": "user", "content": parts}]


def ask(base: str, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    """One chat request."""
    return web.post(f"{base}/v1/chat/completions", json={"messages": messages, **fields})


def text_of(response: httpx.Response) -> str:
    """The answer of a chat request that must have worked."""
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a request that must have failed, checked for the OpenAI shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])
