"""Our features against a slow float64 tower written from the formulas, and low precision against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from moonvit import reference
from moonvit.families import FAMILIES
from moonvit.model import VisionModel
from tests.parity.cases import CLIPS, GATE, IMAGES, random_model, random_patches, tiny, wide

FAMILY_NAMES = list(FAMILIES)
SIZES = {"tiny": tiny, "wide": wide}


def _grids(family: str, size: str = "tiny") -> list[tuple[int, int, int]]:
    images, clips = (IMAGES, [grid for grids in CLIPS.values() for grid in grids])
    if size == "wide":
        images, clips = [(1, 4, 6), (1, 16, 12), (1, 2, 2)], [(2, 10, 6), (4, 4, 2)]
    return [*images, *(clips if FAMILIES[family].pos_emb_time > 1 else [])]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_float32_is_within_the_gate_of_float64(family: str, size: str) -> None:
    model, grids = random_model(SIZES[size](family)), _grids(family, size)
    patches = random_patches(grids)
    expected = reference.features(model.state_dict(), model.config, patches, grids)
    for rows in (64, 256):
        assert reference.max_relative_error(model(patches, model.prepare(grids, rows)), expected) <= GATE


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_full_depth_is_within_the_gate_of_float64(family: str) -> None:
    model, grids = random_model(tiny(family, num_layers=27)), _grids(family)
    patches = random_patches(grids)
    expected = reference.features(model.state_dict(), model.config, patches, grids)
    assert reference.max_relative_error(model(patches, model.prepare(grids)), expected) <= GATE


def _distance(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Root mean square difference of all images, relative to the features themselves."""
    a, b = torch.cat(ours).double(), torch.cat(exact).double()
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("size", "layers"), [("tiny", 27), ("wide", 2)])
def test_low_precision_is_no_further_off_than_plain_pytorch(
    family: str, dtype: torch.dtype, size: str, layers: int
) -> None:
    model: VisionModel = random_model(SIZES[size](family, num_layers=layers), dtype)
    grids = _grids(family, size)
    patches = random_patches(grids)
    state = model.state_dict()
    exact = reference.features(state, model.config, patches, grids, torch.float32)
    plain = reference.features(state, model.config, patches, grids, dtype)
    ours = model(patches, model.prepare(grids))
    assert all(features.dtype == dtype for features in ours)
    assert _distance(ours, exact) <= 1.1 * _distance(plain, exact)


def test_a_nan_is_no_agreement() -> None:
    fine, broken = torch.ones(3, 4), torch.full((3, 4), torch.nan)
    for ours in ([fine, broken], [broken, fine]):
        assert not reference.max_relative_error(ours, [fine, fine]) <= GATE
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(2, 4\)"):
        reference.max_relative_error([fine], [fine[:2]])
