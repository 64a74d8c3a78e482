"""vLLM's server as people start it, and a client for it."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from moonvit.engines import default_model

FLAGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
)
SHARED = Path("/dev/shm")
KEY = "sesame"


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        base: Its address.
        log: What it writes.
    """

    base: str
    log: Path

    def post(self, content: list[Any], **fields: Any) -> httpx.Response:
        """One chat request of one user message, greedy and without thinking."""
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 24,
            "temperature": 0,
            "chat_template_kwargs": {"thinking": False},
            **fields,
        }
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.base}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)

    def answer(self, *content: Any, **fields: Any) -> dict[str, Any]:
        """The whole answer to a message of pictures (bytes) and text."""
        response = self.post([part(item) for item in content], **fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def text(self, *content: Any, **fields: Any) -> str:
        """What it says about a message of pictures and text."""
        return str(self.answer(*content, **fields)["choices"][0]["message"]["content"])

    def chances(self, *content: Any) -> list[dict[str, float]]:
        """Log-probabilities of the likeliest tokens at each of four places of the answer."""
        options = {"logprobs": True, "top_logprobs": 5, "max_tokens": 4, "ignore_eos": True}
        options["return_tokens_as_token_ids"] = True  # the text of half a character is that of any other
        found = self.answer(*content, **options)["choices"][0]["logprobs"]["content"]
        return [{token["token"]: token["logprob"] for token in place["top_logprobs"]} for place in found]

    def stream(self, *content: Any, **fields: Any) -> list[dict[str, Any]]:
        """The pieces of a streamed answer."""
        response = self.post([part(item) for item in content], stream=True, **fields)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


def sample(name: str) -> bytes:
    """A picture that comes with the demo model."""
    return (default_model() / "samples" / f"{name}.png").read_bytes()


def part(item: Any) -> dict[str, Any]:
    """A picture or text as a part of a message."""
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(item).decode()}"}}


@contextmanager
def serving(
    log: Path, *options: str, flags: tuple[str, ...] = (), ranks: int = 1, **variables: str
) -> Iterator[Server]:
    """Start ``moonvit serve --engine vllm``, and stop it with everything it left.

    Args:
        log: File that it writes to.
        *options: Those of ``moonvit serve``.
        flags: vLLM's own.
        ranks: Tensor-parallel ranks.
        **variables: Of its environment.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "moonvit", "serve", "--engine", "vllm", "--port", str(port), "--api-key", KEY]
    command += [*options, "--", *FLAGS, "--tensor-parallel-size", str(ranks), *flags]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=_environment(ranks, variables), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    left: set[Path] = set()
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, base, log)
        left = _shared_files(process)
        yield Server(base, log)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for file in left:
            file.unlink(missing_ok=True)


def _environment(ranks: int, variables: dict[str, str]) -> dict[str, str]:
    """Of this process, without what would change the engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOONVIT_", "VLLM_"))}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    kept["TORCHDYNAMO_DISABLE"] = "1"  # the first request would compile for seconds
    if ranks > 1:  # by itself the platform wants a NUMA node for each
        cores = sorted(os.sched_getaffinity(0))
        kept["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return kept | variables


def _wait_until_ready(process: subprocess.Popen[Any], base: str, log: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if httpx.get(f"{base}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready after {seconds} s: {log.read_text()[-4000:]}")


def _shared_files(process: subprocess.Popen[Any]) -> set[Path]:
    """Shared memory that workers of this server have mapped; this build of vLLM does not remove it."""
    found = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        found |= {Path(place.path) for place in child.memory_maps() if place.path.startswith(f"{SHARED}/vllm_dist_")}
    return found
