"""Jobs as real processes: torchrun, a rank that is killed, a folder that is completed later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonvit.encoder import VisionEncoder
from moonvit.engines import default_model
from moonvit.jobs import run_job
from moonvit.jobs.files import journal_of
from tests.pictures import noise
from tests.ranks import every

ROOT = Path(__file__).parents[2]
RANKS = 3
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


class Command:
    """A command in processes of its own, all of which can be found again."""

    def __init__(self, *words: str) -> None:
        self.mark = f"MOONVIT_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", name: value}
        self.process = subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def alive(self, more: str = "") -> list[int]:
        """Processes of this command, those that only wait to be reaped apart."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if self.mark in environment and (not more or more in environment):
                found.append(int(entry.name))
        return found

    def ended(self, seconds: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once all its processes have ended."""
        out, err = self.process.communicate(timeout=seconds)
        assert self.alive() == []
        return self.process.returncode, out, err

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{number}.png" for number in range(15)]
    for number, path in enumerate(paths):
        noise(500 + 14 * number, 500, seed=number).save(path)
    return [str(path) for path in paths]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What torchrun and OMP_NUM_THREADS give the others: sums over more threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def visible(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for(journal: Path, count: int, command: Command) -> None:
    end = time.monotonic() + 120
    while lines(journal) < count:
        assert command.process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def never_interrupted(pictures: list[str], folder: Path, ranks: int) -> dict[str, bytes]:
    def step(rank: Any) -> Any:
        model = default_model()
        return run_job(VisionEncoder.from_pretrained(model), model, pictures, folder, rank)

    every(ranks, step)
    return visible(folder)


def test_a_killed_rank_ends_the_job_and_the_next_run_completes_it(
    pictures: list[str], tmp_path: Path, one_thread: None
) -> None:
    out = tmp_path / "out"
    words = (*TORCHRUN, "-m", "moonvit", "encode", *pictures, "-o", str(out), "--json")
    with Command(*words) as command:
        wait_for(journal_of(out, 1, RANKS), 1, command)
        [victim] = command.alive("RANK=1")
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        code, said, err = command.ended(30)
        assert time.monotonic() - start < 30
    assert code != 0 and said == ""
    assert "Signal 9 (SIGKILL)" in err and "rank      : 1 (local_rank: 1)" in err
    for survivor in (0, 2):
        assert f"moonvit: ended by SIGTERM on rank {survivor}; what is finished is kept" in err
    kept = sum(lines(journal_of(out, rank, RANKS)) for rank in range(RANKS))
    assert not (out / "index.json").exists() and 1 <= kept < len(pictures)

    with Command(*words) as command:
        code, said, err = command.ended(120)
    assert code == 0, err
    document = json.loads(said)
    assert (document["kept"], document["encoded"]) == (kept, len(pictures) - kept)
    assert visible(out) == never_interrupted(pictures, tmp_path / "whole", RANKS)


def test_a_damaged_picture_is_said_once_and_ends_the_job_with_an_error(pictures: list[str], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(Path(pictures[0]).read_bytes()[:200])
    out = tmp_path / "out"
    with Command(*TORCHRUN, "-m", "moonvit", "encode", str(damaged), pictures[0], "-o", f"{out}/", "--json") as command:
        code, said, err = command.ended(120)
    document = json.loads(said)
    assert code != 0 and [one["index"] for one in document["failed"]] == [0] and document["encoded"] == 1
    assert document["files"].count(None) == 2  # one rank had no picture, one none that could be read
    ours = [line for line in err.splitlines() if line.startswith("moonvit: ")]
    assert ours[0].startswith("moonvit: rank 0: 1 of 2 pictures failed; image 0 (") and "PNG file is damaged" in ours[0]
    assert all("ended by SIGTERM" in line for line in ours[1:])
    assert "exitcode  : 2 " in err


def test_an_interrupt_leaves_at_once_and_the_folder_goes_on(
    pictures: list[str], tmp_path: Path, one_thread: None
) -> None:
    out, pictures = tmp_path / "out", pictures[:6]
    with Command("-m", "moonvit", "encode", *pictures, "-o", f"{out}/") as command:
        wait_for(journal_of(out, 0, 1), 1, command)
        command.process.send_signal(signal.SIGINT)
        code, said, err = command.ended(10)
    assert (code, said) == (130, "")
    assert err == "moonvit: ended by SIGINT; what is finished is kept, and the same command goes on from there\n"
    assert visible(out) == {} and 1 <= lines(journal_of(out, 0, 1)) < 6
    never_interrupted(pictures, out, 1)
    assert visible(out) == never_interrupted(pictures, tmp_path / "whole", 1)
