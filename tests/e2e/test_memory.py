"""The plan held against the process itself, as the system counts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RUN = """
import sys
import torch
from moonvit import VisionEncoder

def most():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

side = int(sys.argv[1])
torch.set_num_threads(1)
enc = VisionEncoder.from_config("kimi-k2.5", dtype="float32", num_layers=2)
grids = [(1, side, side)]
enc.encode_patches(torch.zeros(4, 588, dtype=torch.uint8), (1, 2, 2))  # what libraries keep for themselves
patches = torch.randint(0, 256, (side * side, 588), dtype=torch.uint8)
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the most there was begins anew
before = most()
features = enc.encode_patches(patches, grids)
plan = enc.plan(grids)
print(most() - before, plan.peak_bytes - side * side * 588)
"""


def grown(side: int) -> tuple[int, int]:
    """What the process grew by at most, and what was planned beyond the pixels.

    glibc is told to give every block of over 64 KiB back as it is freed. Memory that it keeps of earlier work and uses
    again would hide growth.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    command = [sys.executable, "-c", RUN, str(side)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, env=environment)
    found, planned = map(int, done.stdout.split())
    return found, planned


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_process_grows_by_what_was_planned() -> None:
    small, large = grown(32), grown(80)
    for found, planned in (small, large):
        assert found <= planned * 1.05 + (8 << 20)
    assert (large[0] - small[0]) / (large[1] - small[1]) == pytest.approx(1, rel=0.1)
