"""Picture size -> patch grid, and picture -> uint8 patches, by the exact rule of each family.

The arithmetic is that of the official processors: float64 scale, truncation, Pillow's antialiased bicubic, black
padding to the right and below. Patches stay uint8; the tower normalises them with ``NORMALISE``, chunk by chunk.

Two corner cases differ from the official order on purpose. Palette and 1-bit pictures become RGB(A) before the resize,
where the official processors let Pillow resize palette indices with nearest neighbour. Transparency of Kimi-VL and K2.5
pictures is composited on white unless the rule says ``"drop"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from moonvit.images import Picture
from numpy.typing import NDArray
from PIL import Image

from moonvit.errors import ImageError
from moonvit.families import PATCH, PATCH_VALUES, ImageRule, VisionConfig, family_config
from moonvit.grids import MAX_SIDE, MERGE, Grid, as_grid

CELL = PATCH * MERGE
"""Pixels along one language token."""
_BAND = 8
"""Patch rows that are cut at a time: the picture is never copied whole."""


def _normalise_table() -> NDArray[np.float32]:
    table = (np.arange(256) / 255.0).astype(np.float32)
    table -= np.float32(0.5)
    table *= np.float32(2.0)
    return table


NORMALISE: NDArray[np.float32] = _normalise_table()
"""float32 value of each uint8: (v / 255 - 0.5) / 0.5, bit-identical to the official processors."""


@dataclass(frozen=True)
class Resized:
    """What becomes of a picture size.

    Attributes:
        width: Pixels after the resize.
        height: Pixels after the resize.
        padded_width: Pixels after padding or cropping.
        padded_height: Pixels after padding or cropping.
        grid: The patches of that.
    """

    width: int
    height: int
    padded_width: int
    padded_height: int
    grid: Grid


@dataclass(frozen=True, eq=False)
class Patches:
    """One picture as the tower takes it.

    Attributes:
        patches_LC: uint8 (L, 588): patches row by row, inside a patch channel, then row, then column.
        grid: Their arrangement.
        source_size: Width and height of the upright picture before the resize, in pixels.
    """

    patches_LC: NDArray[np.uint8]
    grid: Grid
    source_size: tuple[int, int]


def resize_plan(rule: ImageRule, width: int, height: int) -> Resized:
    """Apply a family's rule to a picture size.

    Args:
        rule: The rule.
        width: Pixels of the upright picture.
        height: Pixels of the upright picture.

    Returns:
        Sizes after resize and padding, and the grid.

    Raises:
        ImageError: A side is under one pixel, or, for Kimi-VL, the padded picture has 512 patches or more on a side.
    """
    if width < 1 or height < 1:
        raise ImageError(f"picture of {width} x {height} pixels: a side must be at least 1")
    if rule.kind == "kimi-vl":
        return _kimi_vl_plan(rule, width, height)
    # The order of the terms and float64 matter: float32 changes the outcome for about one size in 150.
    by_patches = math.sqrt(rule.patch_limit / (max(1.0, width // PATCH) * max(1.0, height // PATCH)))
    side = rule.side_limit * PATCH
    scale = min(1.0, by_patches, side / width, side / height)
    new_width = min(max(1, int(width * scale)), side)
    new_height = min(max(1, int(height * scale)), side)
    return _padded(new_width, new_height)


def _padded(width: int, height: int) -> Resized:
    padded_width, padded_height = -(-width // CELL) * CELL, -(-height // CELL) * CELL
    grid = Grid(1, padded_height // PATCH, padded_width // PATCH)
    return Resized(width, height, padded_width, padded_height, grid)


def _kimi_vl_plan(rule: ImageRule, width: int, height: int) -> Resized:
    patches = (width // PATCH) * (height // PATCH)
    new_width, new_height = width, height
    if patches > rule.patch_limit:
        scale = math.sqrt(rule.patch_limit / patches)
        new_width, new_height = max(1, int(width * scale)), max(1, int(height * scale))
    if rule.pad:
        resized = _padded(new_width, new_height)
        _, h, w = resized.grid
    else:
        h, w = new_height // PATCH, new_width // PATCH
        resized = Resized(new_width, new_height, w * PATCH, h * PATCH, Grid(1, h, w))
    for name, side in (("width", w), ("height", h)):
        if side >= MAX_SIDE:
            raise ImageError(
                f"picture of {width} x {height} pixels: its {name} becomes {side} patches of {PATCH} pixels, Kimi-VL "
                f"allows at most {MAX_SIDE - 1}"
            )
    if not rule.pad:
        as_grid(resized.grid)
    return resized


def tokens_for(model: str | VisionConfig, width: int, height: int) -> int:
    """Language tokens one picture takes.

    Args:
        model: Family name as ``family_config`` reads it, or a configuration.
        width: Pixels of the upright picture.
        height: Pixels of the upright picture.

    Returns:
        The number of rows the encoder gives and of placeholders in the prompt.

    Raises:
        ConfigError: The family is unknown.
        ImageError: The picture is not legal for the family.
    """
    config = family_config(model) if isinstance(model, str) else model
    return resize_plan(config.rule, width, height).grid.tokens


def patches_from(picture: Picture | Image.Image, rule: ImageRule) -> Patches:
    """Resize, pad and cut a picture.

    Args:
        picture: An opened picture, or an upright PIL image.
        rule: The family's rule.

    Returns:
        uint8 patches and their grid.

    Raises:
        ImageError: The picture is not legal for the family.
    """
    image = picture.image if isinstance(picture, Picture) else picture
    source_size = picture.size if isinstance(picture, Picture) else image.size
    resized = resize_plan(rule, *image.size)
    image = _flat(image, rule, (resized.width, resized.height))
    if not rule.pad:
        left = round((image.width - resized.padded_width) / 2)
        top = round((image.height - resized.padded_height) / 2)
        image = image.crop((left, top, left + resized.padded_width, top + resized.padded_height))
    return Patches(_cut(image, resized.grid), resized.grid, source_size)


def _flat(image: Image.Image, rule: ImageRule, size: tuple[int, int]) -> Image.Image:
    """The picture as RGB at its new size, transparency dealt with."""
    transparent = "A" in image.getbands() or "transparency" in image.info
    if transparent and rule.alpha != "drop":
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        if rule.alpha == "chessboard":
            image = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
            return _on_chessboard(image)
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(ground, image).convert("RGB")
    elif transparent and rule.kind == "kimi-vl":
        # The official Kimi-VL processor forgets alpha after the resize, which Pillow does premultiplied.
        image = image if image.mode == "RGBA" else image.convert("RGBA")
    elif image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_chessboard(image: Image.Image) -> Image.Image:
    """Composite RGBA on K3's chessboard of 8-pixel squares, white at the top left, truncating."""
    width, height = image.size
    result = Image.new("RGB", image.size)
    columns = np.arange(width) // 8
    for top in range(0, height, 64):
        bottom = min(top + 64, height)
        rgba = np.asarray(image.crop((0, top, width, bottom)))
        grey = (np.arange(top, bottom)[:, None] // 8 + columns[None, :]) % 2 == 1
        ground = np.where(grey, np.float32(180), np.float32(255))[:, :, None]
        alpha = rgba[:, :, 3:].astype(np.float32) / np.float32(255)
        blended = (alpha * rgba[:, :, :3] + (np.float32(1) - alpha) * ground).astype(np.uint8)
        result.paste(Image.fromarray(blended), (0, top))
    return result


def _cut(image: Image.Image, grid: Grid) -> NDArray[np.uint8]:
    _, h, w = grid
    patches: NDArray[Any] = np.zeros((h, w, 3, PATCH, PATCH), dtype=np.uint8)
    for row in range(0, h, _BAND):
        top, bottom = row * PATCH, min((row + _BAND) * PATCH, h * PATCH)
        held = min(bottom, image.height)
        if held <= top:
            break
        band = np.zeros((bottom - top, w * PATCH, 3), dtype=np.uint8)
        band[: held - top, : image.width] = np.asarray(image.crop((0, top, image.width, held)))
        shaped = band.reshape((bottom - top) // PATCH, PATCH, w, PATCH, 3)
        patches[row : row + _BAND] = shaped.transpose(0, 2, 4, 1, 3)
    return patches.reshape(h * w, PATCH_VALUES)
