"""Picture size -> patch grid, and picture -> uint8 patches, by the exact rule of each family.

The arithmetic is that of the official processors: float64 scale, truncation, Pillow's antialiased bicubic, black
padding to the right and below. Patches stay uint8; the tower normalises them with ``NORMALISE``, chunk by chunk.

Two corner cases differ from the official order on purpose. Palette and 1-bit pictures become RGB(A) before the resize,
where the official Kimi-VL and K3 processors let Pillow resize palette indices with nearest neighbour; pictures in which
one colour stands for transparency become RGBA before K3's. Transparency of Kimi-VL and K2.5 pictures is composited on
white unless the rule says ``"drop"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moonvit.errors import ImageError
from moonvit.families import PATCH, PATCH_VALUES, ImageRule, VisionConfig, family_config
from moonvit.grids import MAX_SIDE, MERGE, Grid, as_grid
from moonvit.images import Picture, open_picture

CELL = PATCH * MERGE
"""Pixels along one language token."""
LONGEST = 2**31 - 1
"""Pixels of a side at most: no format has more."""
_BAND = 8
"""Patch rows that are cut at a time: the picture is never copied whole."""
_INDEXED = ("P", "PA", "1")
"""Modes whose values are no amounts, so that means of them say nothing."""


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

    The order of the terms and float64 matter: float32 changes the outcome for about one size in 150.

    Args:
        rule: The rule.
        width: Pixels of the upright picture.
        height: Pixels of the upright picture.

    Returns:
        Sizes after resize and padding, and the grid.

    Raises:
        ImageError: A side is under one pixel or over ``LONGEST``, or, for Kimi-VL, the padded picture has 512 patches
            or more on a side.
        GridError: A rule that crops leaves no patches, or an odd number of them.
    """
    for side in (width, height):
        if isinstance(side, bool) or not hasattr(side, "__index__"):
            raise ImageError(f"picture of {width!r} x {height!r} pixels: {side!r} is not a whole number")
    if width < 1 or height < 1:
        raise ImageError(f"picture of {width} x {height} pixels: a side must be at least 1")
    if width > LONGEST or height > LONGEST:
        raise ImageError(f"a side of the picture has more than {LONGEST} pixels")
    new = _kimi_vl_size(rule, width, height) if rule.kind == "kimi-vl" else _navit_size(rule, width, height)
    if not rule.pad:
        h, w = new[1] // PATCH, new[0] // PATCH
        resized = Resized(*new, w * PATCH, h * PATCH, Grid(1, h, w))
    else:
        resized = _padded(*new)
        if rule.token_limit is not None and resized.grid.tokens > rule.token_limit:
            resized = _capped(width, height, rule.token_limit)
    if rule.kind == "kimi-vl":
        _refuse_long_sides(width, height, resized.grid)
    return resized if rule.pad else replace(resized, grid=as_grid(resized.grid))


def _navit_size(rule: ImageRule, width: int, height: int) -> tuple[int, int]:
    """K2.5 and K3: fit the patches of the whole and of each side, never enlarge."""
    by_patches = math.sqrt(rule.patch_limit / (max(1.0, width // PATCH) * max(1.0, height // PATCH)))
    side = rule.side_limit * PATCH
    scale = min(1.0, by_patches, side / width, side / height)
    return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)


def _kimi_vl_size(rule: ImageRule, width: int, height: int) -> tuple[int, int]:
    """Kimi-VL: fit the patches of the whole; a side is not looked at here."""
    patches = (width // PATCH) * (height // PATCH)
    if patches <= rule.patch_limit:
        return width, height
    scale = math.sqrt(rule.patch_limit / patches)
    return max(1, int(width * scale)), max(1, int(height * scale))


def _padded(width: int, height: int) -> Resized:
    padded_width, padded_height = -(-width // CELL) * CELL, -(-height // CELL) * CELL
    grid = Grid(1, padded_height // PATCH, padded_width // PATCH)
    return Resized(width, height, padded_width, padded_height, grid)


def _capped(width: int, height: int, tokens: int) -> Resized:
    """The largest size of the same proportions that has no more tokens, padding included."""
    low, high = 0.0, 1.0
    best = _padded(1, 1)
    for _ in range(64):  # until neighbouring floats
        scale = (low + high) / 2
        tried = _padded(max(1, int(width * scale)), max(1, int(height * scale)))
        if tried.grid.tokens <= tokens:
            low, best = scale, tried
        else:
            high = scale
    return best


def _refuse_long_sides(width: int, height: int, grid: Grid) -> None:
    for name, side in (("width", grid.w), ("height", grid.h)):
        if side >= MAX_SIDE:
            raise ImageError(
                f"picture of {width} x {height} pixels: its {name} becomes {side} patches of {PATCH} pixels, Kimi-VL "
                f"allows at most {MAX_SIDE - 1}"
            )


DECODED_BYTES = 20
"""Bytes that a pixel of the source takes at most until it is patches, whatever the format and mode.

Measured per pixel: JPEG 7 to 13, PNG 7 to 17 (with transparency), GIF 9, BMP 8, WebP 19, whose decoder holds four
copies.
"""


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


def patches_from(picture: Picture | Image.Image, rule: ImageRule, out_LC: NDArray[np.uint8] | None = None) -> Patches:
    """Resize, pad and cut a picture.

    Args:
        picture: An opened picture, or a PIL image, which is opened as ``open_picture`` does.
        rule: The family's rule.
        out_LC: Where the patches go, uint8 (L, 588) of the grid that ``resize_plan`` gives, rows one behind the
            other; None makes room for them.

    Returns:
        uint8 patches and their grid.

    Raises:
        ImageError: The picture is not legal for the family.
    """
    opened = open_picture(picture) if isinstance(picture, Image.Image) else picture
    resized = resize_plan(rule, *opened.size)
    image = _flat(opened.image, rule, (resized.width, resized.height))
    if not rule.pad:
        left = round((image.width - resized.padded_width) / 2)
        top = round((image.height - resized.padded_height) / 2)
        image = image.crop((left, top, left + resized.padded_width, top + resized.padded_height))
    if out_LC is None:
        out_LC = np.empty((resized.grid.patches, PATCH_VALUES), dtype=np.uint8)
    _cut(image, resized.grid, out_LC)
    return Patches(out_LC, resized.grid, opened.size)


def _flat(image: Image.Image, rule: ImageRule, size: tuple[int, int]) -> Image.Image:
    """The picture as RGB at its new size, transparency dealt with."""
    transparent = image.has_transparency_data
    if image.mode in _INDEXED:
        image = image.convert("RGBA" if transparent else "RGB")
    if transparent and rule.alpha == "white":
        image = _on_white(image if image.mode == "RGBA" else image.convert("RGBA"))
    elif transparent and rule.alpha == "chessboard":
        return _on_chessboard(_resized(image if image.mode == "RGBA" else image.convert("RGBA"), size))
    elif rule.rgb_first and image.mode != "L":  # grey gives the same either way, at a third of the work
        image = _rgb(image)
    return _rgb(_resized(image, size))


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Composite RGBA on white."""
    result = Image.new("RGB", image.size, "white")
    result.paste(image, mask=image.getchannel("A"))
    return result


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


def _cut(image: Image.Image, grid: Grid, out_LC: NDArray[np.uint8]) -> None:
    _, h, w = grid
    patches = out_LC.reshape(h, w, 3, PATCH, PATCH)
    patches[-(-image.height // PATCH) :] = 0
    for row in range(0, h, _BAND):
        top, bottom = row * PATCH, min((row + _BAND) * PATCH, h * PATCH)
        held = min(bottom, image.height)
        if held <= top:
            break
        band = np.zeros((bottom - top, w * PATCH, 3), dtype=np.uint8)
        band[: held - top, : image.width] = np.asarray(image.crop((0, top, image.width, held)))
        shaped = band.reshape((bottom - top) // PATCH, PATCH, w, PATCH, 3)
        patches[row : row + _BAND] = shaped.transpose(0, 2, 4, 1, 3)
