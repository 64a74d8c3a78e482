"""Every snippet of the README runs, and prints what the README says it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonvit.engines import default_model, open_engine
from tests.live import live

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [
    line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.startswith("moonvit ")
]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    engine = open_engine("embedded", str(default_model()))
    with live(engine) as base:
        yield base


def run(command: list[str], cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_screen_has_what_a_stranger_needs() -> None:
    first = README[: README.index("## What is here")]
    assert "make serve" in first and "make test" in first
    kinds = [kind for kind, _ in re.findall(r"^```(\w*)\n(.*?)^```$", first, re.M | re.S)]
    assert kinds == ["bash", "python", "", "bash"]
    code = next(text for kind, text in BLOCKS if kind == "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 8
    assert (ROOT / re.findall(r"!\[[^]]*\]\(([^)]+)\)", first)[0]).stat().st_size > 10_000


@pytest.mark.parametrize(("target", "last"), [("serve", "moonvit serve"), ("test", "-m pytest")])
def test_make_installs_once(target: str, last: str, tmp_path: Path) -> None:
    stamp = tmp_path / "installed"
    stamp.touch()
    steps = run(["make", "--no-print-directory", "-n", target, f"STAMP={stamp}", "VENV=elsewhere"]).splitlines()
    assert steps[-1].endswith(last)
    assert not any("install" in step and "pip" in step for step in steps)
    fresh = run(["make", "--no-print-directory", "-n", target, "VENV=elsewhere"])
    assert fresh.index("venv elsewhere") < fresh.index("-c constraints.txt") < fresh.rindex(last)


@pytest.mark.parametrize("number", [n for n, text in enumerate(PYTHON) if "openai" not in text])
def test_python_prints_what_stands_below_it(number: int) -> None:
    text = PYTHON[number]
    place = next(n for n, (_, block) in enumerate(BLOCKS) if block == text)
    kind, expected = BLOCKS[place + 1]
    assert kind == ""
    assert run([sys.executable, "-c", text]) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if word.startswith("src/") else word for word in shlex.split(command)]
    out = run([sys.executable, "-m", "moonvit", *words[1:]], cwd=tmp_path)
    assert out.strip()
    if " ask " in command:
        assert out == "stop\n"


def test_torchrun_writes_a_folder(tmp_path: Path) -> None:
    [line] = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if "torchrun" in line]
    words = [str(ROOT / word) if word.startswith("src/") else word for word in shlex.split(line)]
    assert words[0] == "torchrun"
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]], cwd=tmp_path)
    index = json.loads((tmp_path / "features" / "index.json").read_text())
    assert len(index["tensors"]) == 2 and len([name for name in index["files"] if name]) == 2


def test_the_plan_prints_what_stands_below_it() -> None:
    [shown] = [text for kind, text in BLOCKS if kind == "" and "stock towers" in text]
    command = next(shlex.split(command) for command in COMMANDS if "--compare" in command)
    out = run([sys.executable, "-m", "moonvit", *command[1:]], COLUMNS="80")
    printed = [line.rstrip() for line in out.splitlines()]
    assert all(line in printed for line in shown.splitlines())


def test_curl_gets_an_answer(address: str) -> None:
    snippet = next(text for kind, text in BLOCKS if kind == "bash" and text.startswith("curl"))
    out = run(["bash", "-c", snippet.replace("http://127.0.0.1:8000", address)])
    assert '"content":"stop"' in out.replace(": ", ":")


def test_the_openai_client_streams_an_answer(address: str) -> None:
    snippet = next(text for text in PYTHON if "openai" in text)
    assert run([sys.executable, "-c", snippet.replace("http://127.0.0.1:8000", address)]) == "stop"


def test_the_demo_model_is_described_by_its_own_measurement() -> None:
    facts = json.loads((default_model() / "demo.json").read_text())
    section = README[README.index("<!-- demo:begin -->") : README.index("<!-- demo:end -->")]
    assert f"{facts['questions']:,} held-out questions" in section
    assert f"**{facts['accuracy']:.1%}**" in section
    for kind, share in facts["kinds"].items():
        assert f"| {kind} | {share:.1%} |" in section
    two, three = (facts["multi_of"][number] for number in ("2", "3"))
    assert f"Of two pictures it answers **{two:.1%}**, of three **{three:.1%}**" in " ".join(README.split())


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
