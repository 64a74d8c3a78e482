"""``moonvit serve`` as people start it: a process of its own, settings from the environment, the demo model."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from moonvit.engines import default_model
from moonvit.errors import ConfigError
from tests.live import web

SERVE = [sys.executable, "-m", "moonvit", "serve"]


def test_it_answers_about_a_picture_and_stops_when_told() -> None:
    settings = {"MOONVIT_PORT": "0", "MOONVIT_MODEL": str(default_model()), "MOONVIT_DTYPE": "float32"}
    with subprocess.Popen(SERVE, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            base = found[0]
            [model] = web.get(f"{base}/v1/models").json()["data"]
            assert model["id"] == "moonvit-demo"
            assert "float32" in str(model)
            picture = base64.b64encode((default_model() / "samples" / "stop.png").read_bytes()).decode()
            content = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                {"type": "text", "text": "What does it say?"},
            ]
            answer = web.post(f"{base}/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "stop"
        finally:
            process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(30) == -signal.SIGTERM  # uvicorn ends in order, then by the signal it was sent


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*SERVE, "--port", str(port)], capture_output=True, text=True, timeout=60, check=False)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.returncode == ConfigError.exit_code


def test_ctrl_c_stops_it_in_order() -> None:
    with subprocess.Popen([*SERVE, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "http://127.0.0.1" not in (line := process.stderr.readline()):
            assert line, "it ended before it served"
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("variable", "value", "code", "said"),
    [
        ("MOONVIT_MODEL", "/no/such/model", 4, "/no/such/model"),
        ("MOONVIT_DEVICE", "tpu9", 4, "device = 'tpu9' cannot be used"),
        ("MOONVIT_DTYPE", "int8", 4, "dtype = 'int8'"),
        ("MOONVIT_BUDGET", "lots", 4, "budget = 'lots'"),
        ("MOONVIT_ENGINE", "steam", 4, "unknown engine 'steam'"),
        ("MOONVIT_PORT", "70000", 4, "port = '70000'"),
    ],
)
def test_what_the_environment_says_is_heard(variable: str, value: str, code: int, said: str) -> None:
    done = subprocess.run(
        SERVE, env={**os.environ, variable: value}, capture_output=True, text=True, timeout=60, check=False
    )
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.returncode == code
