"""Several ranks give what one process gives: its bits, its errors, its memory; and none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moonvit.attention import this_machine
from moonvit.checkpoint import save_vision
from moonvit.deploy import deploy, split_tensors
from moonvit.families import FAMILIES
from moonvit.grids import Grid
from moonvit.plan import Kept, make_plan
from moonvit.reference import max_relative_error
from tests.distributed import work
from tests.distributed.team import Team, good
from tests.parity.cases import GATE

Teams = Callable[[int], Team]
FAMILY_NAMES = list(FAMILIES)
MODES = ["data", "tensor"]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def distance(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Root mean square difference of all images, relative to the features themselves."""
    a, b = torch.cat(ours).double(), torch.cat(exact).double()
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_data_parallel_has_the_bits_of_one_process(team: Teams, family: str, size: int) -> None:
    for found, by_share, whole in good(team(size).run(work.encoded, family, "data", None)):
        assert equal(found, by_share), "the same passes give the same bits"
        assert max_relative_error(found, whole) <= GATE


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensor_parallel_is_within_the_gate(team: Teams, family: str, size: int) -> None:
    results = good(team(size).run(work.encoded, family, "tensor", None))
    for found, _, whole in results:
        assert max_relative_error(found, whole) <= GATE
        assert equal(found, results[0][0]), "all ranks have the same"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("receiver", [0, 2])
def test_only_the_receiver_has_features(team: Teams, mode: str, receiver: int) -> None:
    for rank, (found, by_share, whole) in enumerate(good(team(3).run(work.encoded, "kimi-k2.5", mode, receiver))):
        assert len(found) == (len(whole) if rank == receiver else 0)
        if found and mode == "data":
            assert equal(found, by_share)
        elif found:
            assert max_relative_error(found, whole) <= GATE


def test_half_precision_moves_as_it_is(team: Teams) -> None:
    for found, by_share, _ in good(team(2).run(work.encoded, "kimi-k3", "data", None, "bfloat16")):
        assert all(one.dtype == torch.bfloat16 for one in found)
        assert equal(found, by_share)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_half_precision_are_no_further_off_than_plain_pytorch(team: Teams, family: str, dtype: str) -> None:
    for found, plain, exact in good(team(4).run(work.halves, family, dtype)):
        assert distance(found, exact) <= 1.1 * distance(plain, exact)


def test_chunks_of_video_have_their_rows(team: Teams) -> None:
    for found, alone in good(team(2).run(work.patched, "kimi-k2.5", "data", [(2, 4, 4), (1, 2, 2)])):
        assert [len(one) for one in found] == [4, 1]
        assert max_relative_error(found, alone) <= GATE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("receiver", [None, 1])
@pytest.mark.parametrize(
    "grids",
    [work.CLIPS, [(1, 2, 2)], [(1, 4, 6)] * 3, [(4, 2, 2)]],
    ids=["clips and images", "one image", "fewer images than ranks", "one clip"],
)
def test_any_number_of_images(team: Teams, mode: str, receiver: int | None, grids: list[Any]) -> None:
    for rank, (found, alone) in enumerate(good(team(4).run(work.patched, "kimi-k2.5", mode, grids, receiver))):
        if receiver in (None, rank):
            assert max_relative_error(found, alone) <= GATE
        else:
            assert found == []


def test_five_hundred_images(team: Teams) -> None:
    grids = [(1, 2 + 2 * (index % 3), 2) for index in range(500)]
    for found, alone in good(team(3).run(work.patched, "kimi-k3", "data", grids)):
        assert len(found) == 500 and max_relative_error(found, alone) <= GATE


@pytest.mark.parametrize("receiver", [None, 1])
def test_no_byte_is_received_that_is_not_a_feature(team: Teams, receiver: int | None) -> None:
    """And padded, the same request would move more."""
    grids = [(1, 12, 12), (1, 4, 4), (2, 6, 6), (1, 2, 2), (1, 8, 6)]
    config = work.make("kimi-k2.5").config
    spread = deploy(config, grids, dp=3, dtype="float32")
    size = 40 * 4
    whole = sum(Grid(*grid).tokens for grid in grids) * size
    for rank, found in enumerate(good(team(3).run(work.received, "kimi-k2.5", grids, receiver))):
        own = sum(Grid(*grids[index]).tokens for index in spread.shares[rank].images) * size
        assert found["plan"] == whole
        assert found["received"] == (whole - own if receiver in (None, rank) else 0)


@pytest.mark.parametrize("grids", [[(1, 36, 36), (1, 10, 10), (1, 16, 12)], [(1, 24, 24)]], ids=["three", "one"])
def test_no_rank_takes_more_than_its_plan(team: Teams, grids: list[Any]) -> None:
    config = work.make("kimi-k2.5").config
    machine = replace(this_machine(), threads=1)
    spread = deploy(config, grids, dp=4, dtype="float32", machine=machine)
    for share, found in zip(spread.shares, good(team(4).run(work.peaks, "kimi-k2.5", grids, "data")), strict=True):
        assert found <= share.peak_bytes, "a rank without images takes what it receives"
        own = [grids[index] for index in share.images]
        if own:
            alone = make_plan(config, own, dtype="float32", machine=machine, kept=Kept(0))
            assert found >= (alone.peak_bytes - alone.stages["patches"]) * 0.99, "and the plan is not loose"


def test_tensor_parallel_ranks_take_what_their_plan_says(team: Teams) -> None:
    grids = [(1, 36, 36), (1, 10, 10)]
    part = split_tensors(work.make("kimi-k2.5").config, 3)
    machine = replace(this_machine(), threads=1)
    plan = make_plan(part, grids, dtype="float32", machine=machine, kept=Kept(0))
    for found in good(team(3).run(work.peaks, "kimi-k2.5", grids, "tensor")):
        pixels = plan.stages["patches"]  # there already
        assert (plan.peak_bytes - pixels) * 0.99 <= found <= plan.peak_bytes - pixels + 4096


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_one_rank_is_that_of_all_and_harms_nothing(team: Teams, mode: str, tmp_path: Path) -> None:
    results = good(team(3).run(work.errors_then_work, mode, str(tmp_path)))
    assert results[0] == results[1] == results[2]
    *broken, no_pictures, no_patches, differing = results[0]
    assert broken == ["UnsupportedMediaError images[2]", "ImageError images[2]"] * 3
    assert no_pictures == no_patches == "EmptyInputError"
    assert differing.startswith(
        "the ranks do not agree on grids: rank 0 has [[1, 16, 22]], rank 1 has [[1, 16, 22], [1"
    )


def test_no_room_on_one_rank_is_told_to_all(team: Teams) -> None:
    said = good(team(2).run(work.no_room_on_one_rank))
    assert said == [
        "EngineError: rank 1 of 2 failed: MemoryError: no room for features",
        "MemoryError: no room for features",
    ]


@pytest.mark.parametrize("mode", MODES)
def test_nan_on_one_rank(team: Teams, mode: str) -> None:
    said = good(team(2).run(work.nan_on_the_last_rank, mode))
    assert said[0] == said[1] and said[0].startswith("NonFiniteError images[")


def test_groups_do_not_wait_for_each_other(team: Teams) -> None:
    assert good(team(4).run(work.in_two_groups)) == [[5, 5]] * 4


def test_every_rank_enters_the_same_calls_whatever_its_caches_hold(team: Teams) -> None:
    assert good(team(2).run(work.caches_that_differ)) == [True, True]


@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
def test_a_checkpoint_is_read_by_each_rank_for_itself(team: Teams, spelling: Any, tmp_path: Path) -> None:
    enc = work.make("kimi-k2.5")
    save_vision(enc.model, tmp_path, spelling)
    whole = [one.tensor for one in enc.encode(work.pictures())]
    for mode in MODES:
        for found in good(team(3).run(work.loaded, str(tmp_path), mode)):
            assert max_relative_error(found, whole) <= GATE


def test_what_does_not_divide_is_refused_on_all_ranks_or_data_parallel(team: Teams) -> None:
    said = good(team(4).run(work.refused, "tensor", "kimi-k3"))
    assert said == ["nothing"] * 4
    told = good(team(4).run(refused_with_six_heads))
    assert told == ["ConfigError: tp = 4: 6 heads and an MLP of 96 divide over 1, 2, 3, 6 ranks"] * 4
    told = good(team(4).run(auto_with_six_heads))
    assert told == ["nothing"] * 4


def refused_with_six_heads() -> str:
    return work.refused("tensor", "kimi-k3", num_heads=6)


def auto_with_six_heads() -> str:
    return work.refused("auto", "kimi-k3", num_heads=6)


def test_different_models_are_refused(team: Teams) -> None:
    told = good(team(2).run(work.made_differently))
    assert told == ["InvalidInputError: the ranks do not agree on num_layers: rank 0 has 1, rank 1 has 2"] * 2


def test_what_ranks_were_asked_for_differently_is_told(team: Teams) -> None:
    for work_of, key in ((work.different_batches, "batch"), (work.different_weights, "weights")):
        told = good(team(2).run(work_of))
        assert told[0] == told[1] and told[0].startswith(
            f"InvalidInputError: the ranks do not agree on {key}: rank 0 has"
        )
    told = good(team(2).run(work.receiver_out_of_range))
    assert told == ["ConfigError: receiver = 7, but the ranks of the group are 0 to 1"] * 2


def test_floats_that_do_not_lie_together_take_no_more_than_the_plan(team: Teams) -> None:
    grids = [(1, 36, 36), (1, 36, 36), *[(1, 12, 12)] * 18]
    machine = replace(this_machine(), threads=1)
    spread = deploy(work.make("kimi-k2.5").config, grids, dp=2, dtype="float32", machine=machine)
    assert any(max(share.images) - min(share.images) >= len(share.images) for share in spread.shares)
    for share, found in zip(spread.shares, good(team(2).run(work.float_peak, grids)), strict=True):
        assert found <= share.peak_bytes


def test_messages_of_any_length(team: Teams) -> None:
    assert good(team(3).run(work.gathered)) == [[b"", b"x" * 1000, b"x" * 2000]] * 3


@pytest.mark.parametrize(
    ("mode", "receiver", "doomed"),
    [("data", None, 2), ("tensor", None, 2), ("data", 0, 1), ("data", 3, 0)],
)
def test_a_killed_rank_is_named_by_all_others(mode: str, receiver: int | None, doomed: int) -> None:
    team = Team(4)
    try:
        team.tell(work.die_in_the_middle, mode, receiver, doomed)
        said = team.collect(30, gone=frozenset({doomed}))
    finally:
        team.stop()
    pid = team.processes[doomed].pid
    others = [one for rank, one in enumerate(said) if rank != doomed]
    assert good(others) == [f"EngineError: rank {doomed} of 4 is gone: its process {pid} has ended"] * 3


def test_a_rank_that_leaves_between_layers_takes_the_others_along() -> None:
    team = Team(3)
    try:
        said = team.run(work.leave_in_the_middle, seconds=30)
    finally:
        team.stop()
    assert said[1] == "MemoryError: no room"
    assert said[0] == said[2] == "EngineError: rank 1 of 3 left in the middle of a request: no room"
