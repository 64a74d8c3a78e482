"""``Parallel`` and ``Ranks`` in one process: what is said, what is refused, and that one rank is as good as none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moonvit.encoder import VisionEncoder
from moonvit.errors import ConfigError, EngineError, ImageError, InvalidInputError
from moonvit.parallel import Parallel, Ranks, _Process, launched
from tests.unit.test_encoder import PICTURES, small


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mode": "tensors"}, "mode = 'tensors': known are auto, data, tensor"),
        ({"receiver": -1}, "receiver = -1, expected a rank of the group, or None"),
        ({"receiver": "0"}, "receiver = '0', expected a rank of the group, or None"),
    ],
)
def test_what_cannot_be_said(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Parallel(**said)
    assert caught.value.message == message


def test_a_receiver_that_is_no_rank() -> None:
    with pytest.raises(ConfigError, match="receiver = 3, but the ranks of the group are 0 to 0"):
        small("kimi-vl", parallel=Parallel(receiver=3))


def test_launched_processes_without_a_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes were launched, but there is no process group: call torch"):
        small("kimi-vl", parallel=Parallel())
    assert len(small("kimi-vl").encode(PICTURES)) == len(PICTURES), "nothing is asked of who does not ask for ranks"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(small("kimi-vl", parallel=Parallel()).encode(PICTURES)) == len(PICTURES)


@pytest.mark.parametrize("mode", ["auto", "data", "tensor"])
@pytest.mark.parametrize("family", ["kimi-vl", "kimi-k2.5", "kimi-k3"])
def test_one_rank_gives_what_no_ranks_give(mode: Any, family: str, one_rank: dist.ProcessGroup) -> None:
    alone, ranked = small(family), small(family, parallel=Parallel(mode, one_rank, receiver=0))
    for ours, theirs in zip(ranked.encode(PICTURES), alone.encode(PICTURES), strict=True):
        assert type(ours) is type(theirs) and ours.grid == theirs.grid and ours.source_size == theirs.source_size
        assert torch.equal(ours.tensor, theirs.tensor)
    patches, grids = torch.randn(20 + 4, 588), [(1, 10, 2), (1, 2, 2)]
    found = ranked.encode_patches(patches, grids)
    assert type(found) is list
    assert all(torch.equal(a, b) for a, b in zip(found, alone.encode_patches(patches, grids), strict=True))
    assert ranked.plan(PICTURES) == alone.plan(PICTURES)


def test_no_group_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("one rank has nobody to talk to")

    for name in ("all_gather", "all_reduce", "broadcast", "all_to_all_single", "barrier"):
        monkeypatch.setattr(dist, name, fail)
    assert len(small("kimi-k3", parallel=Parallel("tensor")).encode(PICTURES)) == len(PICTURES)
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.gather(b"abc"), ranks.common([True, False])) == (
        0,
        1,
        [b"abc"],
        [True, False],
    )
    ranks.check()
    with pytest.raises(ImageError), ranks.linked():
        ranks.together(lambda: (_ for _ in ()).throw(ImageError("no")))
    with launched() as ranks:
        assert ranks.size == 1


def test_who_is_no_member_is_told() -> None:
    code = (
        "import torch.distributed as dist, datetime\n"
        "from moonvit.errors import EngineError\nfrom moonvit.parallel import Ranks\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try:\n    Ranks(dist.GroupMember.NON_GROUP_MEMBER)\nexcept (EngineError, ValueError) as error:\n"
        "    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "EngineError"


def test_processes_are_told_from_later_ones_of_the_same_number() -> None:
    this = _Process.this()
    assert this.pid == os.getpid() and not this.has_ended()
    assert _Process.from_bytes(this.to_bytes()) == this
    assert _Process(this.machine, this.pid, "1").has_ended(), "another process has that number now"
    assert _Process(this.machine, 2**22 + 1, "1").has_ended()
    assert not _Process("another machine", 2**22 + 1, "1").has_ended(), "who cannot be seen is not given up"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = _Process(this.machine, child.pid, __import__("moonvit.parallel", fromlist=["_started"])._started(child.pid))
    assert not seen.has_ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert seen.has_ended(), "a process that ended is gone before anybody has asked for its exit code"
    child.communicate()


def test_a_group_that_was_lost_stays_lost(one_rank: dist.ProcessGroup) -> None:
    ranks = Ranks(one_rank)
    ranks.size = 2  # as if there were another
    ranks._store.set("lost", "rank 1 of 2 is gone")
    for _ in range(2):
        with pytest.raises(EngineError, match="rank 1 of 2 is gone"), ranks.request():
            raise AssertionError("began in vain")


def test_tensor_parallel_models_keep_their_sums_when_weights_are_packed_anew() -> None:
    model = small("kimi-k2.5").model
    seen = []
    layer = model.vision_tower.encoder.blocks[0].wo
    layer.register_forward_hook(lambda *_: seen.append(1))
    model.pack("vision_tower.encoder.blocks.0.wo", torch.int8)
    replaced = model.vision_tower.encoder.blocks[0].wo
    assert replaced is not layer
    replaced.set_scale(torch.tensor(1.0))
    with torch.no_grad():
        replaced(torch.zeros(1, replaced.in_features))
    assert seen == [1]


def test_a_closed_encoder_says_so_with_ranks_too(one_rank: dist.ProcessGroup) -> None:
    enc: VisionEncoder = small("kimi-vl", parallel=Parallel("data", one_rank))
    enc.close()
    with pytest.raises(InvalidInputError, match="closed"):
        enc.encode(PICTURES)
