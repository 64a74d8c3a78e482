"""Plans held against torch's allocator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from moonvit.attention import has_bfloat16
from moonvit.bench.measure import peak, room_for, run_plan
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.plan import Plan

TINY: dict[str, dict[str, Any]] = {
    "kimi-vl": {"hidden_size": 128, "num_heads": 4, "intermediate_size": 900, "text_hidden_size": 128},
    "kimi-k2.5": {"hidden_size": 128, "num_heads": 4, "intermediate_size": 900, "text_hidden_size": 512},
    "kimi-k3": {"hidden_size": 128, "num_heads": 6, "qkv_size": 192, "intermediate_size": 900, "text_hidden_size": 256},
}
"""Widths at which what attention kernels take for themselves, some 150 KB a thread, is not the most there is."""
REQUESTS = {
    "one": [Grid(1, 36, 36)],
    "several": [Grid(1, 18, 30), Grid(1, 10, 10), Grid(1, 6, 12)],
    "as large as the table": [Grid(1, 16, 16)],
    "frames": [Grid(4, 12, 12)],
    "frames and a larger image": [Grid(2, 8, 10), Grid(1, 16, 14)],
    "smallest": [Grid(1, 2, 2)],
}
NARROW = {"pos_emb_height": 16, "pos_emb_width": 16, "num_layers": 2}


def held(model: VisionModel, plan: Plan) -> int:
    """Most bytes at once beyond weights, pixels and features."""
    patches = torch.randint(0, 256, (plan.patches, 588), dtype=torch.uint8)
    return peak(partial(run_plan, model, patches, plan, out=room_for(model, plan))).peak


def assert_held(model: VisionModel, plan: Plan) -> None:
    """The allocator gives no more than was planned, and within 1 % as much; the parts of a pass likewise."""
    found = held(model, plan)
    assert found <= plan.workspace_bytes
    if len(plan.batches) == 1 and plan.dtype == "float32":
        meta = model.prepare(plan.grids, plan.rows, plan.groups)
        pixels = torch.zeros(meta.patches, 588, dtype=torch.uint8)
        embedding = peak(lambda: model.vision_tower.patch_embed(pixels, meta)).peak
        hidden = model.vision_tower.patch_embed(pixels, meta)
        blocks = peak(lambda: model.vision_tower.encoder(hidden, meta)).peak
        stages = plan.stages
        assert embedding == pytest.approx(stages["hidden"] + max(stages["embed"], stages["positions"]), rel=0.01)
        held_rows = stages["kv"] + stages["attended"]
        assert blocks == pytest.approx(held_rows + max(stages["attention"], stages["chunk"]), rel=0.01)
    # What oneDNN takes in half precision is an envelope of measurements; everything else is a sum of buffers.
    envelope = plan.dtype != "float32" and has_bfloat16()
    assert plan.workspace_bytes <= found * (1.10 if envelope else 1.01)
