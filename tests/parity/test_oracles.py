"""Our features against implementations that other people wrote, on the same random weights, in float32.

Each is skipped where its package is not installed; ``test_goldens.py`` holds what they answered, and always runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonvit.families import VisionConfig
from moonvit.model import VisionModel
from moonvit.reference import max_relative_error
from tests.parity import oracles
from tests.parity.cases import CLIPS, GATE, IMAGES, random_model, random_patches, tiny, wide

ALL_CLIPS = [grid for grids in CLIPS.values() for grid in grids]
FEW = [(1, 4, 6), (1, 10, 8), (4, 2, 4), (2, 4, 6)]


def ours(model: VisionModel, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    return model(patches, model.prepare(grids, rows=96))


def check_size(config: VisionConfig, size: str) -> None:
    """A wide case is of released width, so that head dimensions 72 and 128 are what is compared."""
    if size == "wide":
        assert (config.head_dim, config.hidden_size) == ((128, 1024) if config.family == "kimi-k3" else (72, 1152))


@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_kimi_k25_is_that_of_transformers(size: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tiny("kimi-k2.5") if size == "tiny" else wide("kimi-k2.5")
    check_size(config, size)
    model, grids = random_model(config), [*IMAGES, *ALL_CLIPS]
    patches = random_patches(grids)
    oracles.write_k25_checkpoint(model.state_dict(), config, tmp_path)
    theirs = oracles.transformers_features(oracles.load_transformers(tmp_path), patches, grids)
    assert max_relative_error(ours(model, patches, grids), theirs) <= GATE


@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_kimi_vl_is_that_of_kornia(size: str) -> None:
    pytest.importorskip("kornia.models.kimi_vl")
    config = tiny("kimi-vl") if size == "tiny" else wide("kimi-vl")
    check_size(config, size)
    model = random_model(config)
    patches = random_patches(IMAGES)
    theirs = oracles.kornia_features(model.state_dict(), config, patches, IMAGES)
    assert max_relative_error(ours(model, patches, IMAGES), theirs) <= GATE


@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_kimi_k3_is_that_of_mlx_vlm(size: str) -> None:
    pytest.importorskip("mlx.core")
    if not oracles.mlx_vlm_is_installed():
        pytest.skip("mlx-vlm is not installed")
    # mlx-vlm has the half-precision epsilon of old torch written into its tower; ours follows for the comparison.
    config = (tiny if size == "tiny" else wide)("kimi-k3", norm_eps=2**-7)
    check_size(config, size)
    model, grids = random_model(config), [*IMAGES, *ALL_CLIPS] if size == "tiny" else FEW
    patches = random_patches(grids)
    theirs = oracles.mlx_features(model.state_dict(), config, patches, grids)
    assert max_relative_error(ours(model, patches, grids), theirs) <= GATE
