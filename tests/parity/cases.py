"""Models and pictures that all parity checks share."""

from __future__ import annotations

import torch

from moonvit.compare import GATE as GATE
from moonvit.families import VisionConfig, family_config
from moonvit.model import VisionModel

IMAGES = [(1, 4, 6), (1, 16, 16), (1, 12, 2), (1, 2, 2), (1, 18, 10)]
CLIPS = {2: [(2, 10, 6), (2, 16, 16)], 3: [(3, 4, 6)], 4: [(4, 4, 6), (4, 2, 18)]}

_TINY = {
    "kimi-vl": {"hidden_size": 72, "num_heads": 2, "intermediate_size": 100, "text_hidden_size": 48},
    "kimi-k2.5": {"hidden_size": 72, "num_heads": 2, "intermediate_size": 100, "text_hidden_size": 48},
    "kimi-k3": {"hidden_size": 64, "num_heads": 3, "qkv_size": 96, "intermediate_size": 100, "text_hidden_size": 48},
}


def tiny(family: str, **overrides: object) -> VisionConfig:
    """A small model of a family: 3 layers, a position table of 16 x 16, odd widths."""
    return family_config(
        family, **{"num_layers": 3, "pos_emb_height": 16, "pos_emb_width": 16, **_TINY[family], **overrides}
    )


def wide(family: str, **overrides: object) -> VisionConfig:
    """A model of released width with 2 layers."""
    return family_config(family, **{"num_layers": 2, **overrides})


def random_model(config: VisionConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> VisionModel:
    """Random weights."""
    return VisionModel.empty(config, dtype).init_weights_(seed)


def random_patches(grids: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
    """Normalised pixels of the range pictures have, (L, 588)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sum(t * h * w for t, h, w in grids), 588, generator=generator) * 2 - 1
