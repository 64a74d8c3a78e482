"""The server as a process of its own: it starts, says where, and stops in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import user, web

ROOT = Path(__file__).parents[2]
SCRIPT = """
from moonvit.server import run
from moonvit.server.settings import load_settings
from tests.fake_engine import FakeEngine
run(FakeEngine(delay=0.1), load_settings(port=0))
"""


class Process:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.lines: list[str] = []
        self.base = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(60), self.lines

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"served on (http://[\d.:]+)", line)
            if found:
                self.base = found[1]
                self._ready.set()


@pytest.fixture()
def server() -> Iterator[Process]:
    server = Process()
    yield server
    server.process.kill()
    server.process.wait()
    assert server.process.stderr is not None
    server.process.stderr.close()


def test_an_interrupt_lets_short_answers_finish_and_ends_long_ones_with_an_error(server: Process) -> None:
    url = f"{server.base}/v1/chat/completions"
    long = {"messages": user("word " * 500), "stream": True}
    with web.stream("POST", url, json=long) as endless:
        lines = endless.iter_lines()
        next(lines)
        short: list[int] = []
        thread = threading.Thread(
            target=lambda: short.append(web.post(url, json={"messages": user("a b c d e f g h")}).status_code)
        )
        thread.start()
        time.sleep(0.3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    thread.join(10)
    assert short == [200]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["error"]["message"] == "the server is shutting down"
    assert server.process.wait(10) == 0
    assert time.monotonic() - start < 6
    assert not [line for line in server.lines if "Traceback" in line]


def test_no_heavy_package_is_loaded_for_the_server_itself() -> None:
    code = (
        "import sys; from moonvit.server import create_app; from tests.fake_engine import FakeEngine; "
        "create_app(FakeEngine()); print([name for name in ('torch', 'transformers', 'httpx') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
