"""``Grid``: arithmetic, every spelling, every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moonvit.errors import EmptyInputError, GridError
from moonvit.grids import Grid, as_grid, as_grids


def test_patches_and_tokens() -> None:
    assert (Grid(1, 36, 36).patches, Grid(1, 36, 36).tokens) == (1296, 324)
    assert (Grid(4, 50, 86).patches, Grid(4, 50, 86).tokens) == (17200, 1075)  # frames are pooled away
    assert tuple(Grid(1, 2, 512)) == (1, 2, 512)


@pytest.mark.parametrize(
    "value",
    [
        (4, 6),
        [4, 6],
        (1, 4, 6),
        Grid(1, 4, 6),
        np.array([4, 6]),
        np.array([1, 4, 6], dtype=np.int32),
        torch.tensor([4, 6], dtype=torch.int32),
        torch.tensor([1, 4, 6]),
        (np.int64(4), torch.tensor(6)),
    ],
)
def test_every_spelling_of_one_grid(value: Any) -> None:
    grid = as_grid(value)
    assert grid == Grid(1, 4, 6)
    assert all(type(side) is int for side in grid)


def test_rows_of_a_tensor_are_grids() -> None:
    assert as_grids(torch.tensor([[1, 4, 6], [2, 2, 8]])) == (Grid(1, 4, 6), Grid(2, 2, 8))
    assert as_grids(np.array([[4, 6], [2, 8]])) == (Grid(1, 4, 6), Grid(1, 2, 8))


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 512, 512), (4, 2, 512), (2, 512, 2)])
def test_the_limits_themselves_are_legal(grid: tuple[int, int, int]) -> None:
    assert tuple(as_grid(grid)) == grid


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((3, 4), "grid 7: h = 3 patches is not a multiple of the merge size 2"),
        ((4, 5), "grid 7: w = 5 patches is not a multiple of the merge size 2"),
        ((514, 4), "grid 7: h = 514 patches, allowed 2 to 512"),
        ((4, 513), "grid 7: w = 513 patches, allowed 2 to 512"),
        ((0, 4), "grid 7: h = 0 patches, allowed 2 to 512"),
        ((4, -2), "grid 7: w = -2 patches, allowed 2 to 512"),
        ((0, 4, 4), "grid 7: t = 0, allowed 1 to 4"),
        ((5, 4, 4), "grid 7: t = 5, allowed 1 to 4"),
        ((4.0, 4), "grid 7: 4.0 is not a whole number"),
        ((True, 4), "grid 7: True is not a whole number"),
        (("4", 4), "grid 7: '4' is not a whole number"),
        ((4,), "grid 7: expected (h, w) or (t, h, w), got (4,)"),
        ((1, 1, 4, 4), "grid 7: expected (h, w) or (t, h, w), got (1, 1, 4, 4)"),
        ("46", "grid 7: expected (h, w) or (t, h, w), got '46'"),
        (None, "grid 7: expected (h, w) or (t, h, w), got None"),
        (np.array(4), "grid 7: expected (h, w) or (t, h, w), got array(4)"),
    ],
)
def test_bad_grids_name_index_value_and_limit(bad: Any, said: str) -> None:
    with pytest.raises(GridError) as caught:
        as_grid(bad, 7)
    assert caught.value.message == said
    assert caught.value.param == "grids[7]"


def test_the_index_is_that_of_the_bad_one() -> None:
    with pytest.raises(GridError, match="grid 2: h = 3"):
        as_grids([(2, 2), (4, 4), (3, 4), (5, 5)])


@pytest.mark.parametrize("empty", [[], (), np.zeros((0, 3), dtype=np.int64), torch.zeros(0, 2, dtype=torch.int64)])
def test_nothing_is_an_error(empty: Any) -> None:
    with pytest.raises(EmptyInputError):
        as_grids(empty)
