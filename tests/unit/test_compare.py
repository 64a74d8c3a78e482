"""``compare``: it names the stage at which a tower leaves the reference, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moonvit.compare import GRIDS, MOST, compare
from moonvit.errors import DivergenceError, GridError
from moonvit.families import FAMILIES
from moonvit.grids import Grid
from moonvit.model import Block, Metadata, PositionTable, VisionModel
from tests.parity.cases import random_model, tiny

STAGES = ["embed", "block 0", "block 1", "block 2", "merge", "projector"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_tower_does_not_diverge(family: str, dtype: torch.dtype) -> None:
    found = compare(random_model(tiny(family), dtype))
    assert [stage.name for stage in found.stages] == STAGES
    assert found.first is None, found
    assert all(stage.error > 0 for stage in found.stages)
    found.check()


def _breakages(model: VisionModel) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """For each stage a module that belongs to it, and something that goes wrong there."""
    tower = model.vision_tower
    return {
        "embed": (tower.patch_embed, lambda part, inputs, output: output.mul_(1.001)),
        "block 0": (tower.encoder.blocks[0].mlp, lambda part, inputs, output: output * 1.01),
        "block 1": (tower.encoder.blocks[1].wo, lambda part, inputs, output: output + 0.001),
        "block 2": (tower.encoder.blocks[2].norm0, lambda part, inputs, output: output.flip(1)),
        "merge": (tower.encoder.final_layernorm, lambda part, inputs, output: output.roll(1, 0)),
        "projector": (model.projector.linears[0], lambda part, inputs, output: output * 1.001),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_at_fault_is_named(stage: str) -> None:
    model = random_model(tiny("kimi-k2.5"))
    part, breakage = _breakages(model)[stage]
    hook = part.register_forward_hook(breakage)
    found = compare(model)
    hook.remove()
    assert found.first is not None and found.first.name == stage
    assert found.to_dict()["first"] == stage
    with pytest.raises(DivergenceError, match=f"^{stage} is the first stage that diverges") as caught:
        found.check()
    assert caught.value.param == stage
    assert compare(model).first is None


def test_nan_diverges() -> None:
    model = random_model(tiny("kimi-k2.5"))
    hook = model.vision_tower.encoder.blocks[1].register_forward_hook(
        lambda part, inputs, output: inputs[0].fill_(torch.nan)
    )
    found = compare(model)
    hook.remove()
    assert found.first is not None and found.first.name == "block 1"
    assert found.to_dict()["stages"][2]["error"] is None


def test_images_of_ones_own_are_compared_up_to_a_size() -> None:
    model = random_model(tiny("kimi-k2.5"))
    patches = torch.randint(0, 256, (24, 588), dtype=torch.uint8)
    found = compare(model, patches, [Grid(1, 4, 6)])
    assert found.grids == (Grid(1, 4, 6),) != GRIDS
    with pytest.raises(GridError, match=f"at most {MOST}"):
        compare(model, None, [Grid(1, 4, 6), Grid(1, 66, 64)])


def test_a_fault_in_later_chunks_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Block.forward

    def broken(self: Block, hidden: torch.Tensor, kv: torch.Tensor, meta: Metadata) -> None:
        forward(self, hidden, kv, meta)
        assert len(meta.chunks) > 1
        for chunk in meta.chunks[1:]:
            hidden[chunk.start : chunk.stop].mul_(1.001)

    monkeypatch.setattr(Block, "forward", broken)
    first = compare(random_model(tiny("kimi-vl"))).first
    assert first is not None and first.name == "block 0"


def test_a_fault_in_clips_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = PositionTable.add_to_
    monkeypatch.setattr(
        PositionTable, "add_to_", lambda self, hidden, meta: add(self, hidden, replace(meta, frame_TD=None))
    )
    assert compare(random_model(tiny("kimi-vl"))).first is None  # takes none
    first = compare(random_model(tiny("kimi-k2.5"))).first
    assert first is not None and first.name == "embed"


def test_an_overflow_is_named_where_it_happens() -> None:
    model = random_model(tiny("kimi-k2.5"), torch.float16)
    with torch.no_grad():  # finite weights whose product is not: plain PyTorch overflows as well
        model.vision_tower.encoder.blocks[1].mlp.fc0.weight.mul_(1e3)
        model.vision_tower.encoder.blocks[1].mlp.fc1.weight.mul_(3e4)
    assert all(weight.isfinite().all() for weight in model.parameters())
    found = compare(model)
    assert found.first is not None and found.first.name == "block 1"
    assert json.dumps(found.to_dict(), allow_nan=False)
