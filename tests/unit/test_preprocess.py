"""Size rules against the worked examples, pixels against a plain implementation of the official processors."""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from moonvit.errors import GridError, ImageError
from moonvit.families import FAMILIES, ImageRule, family_config
from moonvit.grids import Grid
from moonvit.images import open_picture
from moonvit.preprocess import DECODED_BYTES, NORMALISE, patches_from, resize_plan, tokens_for

EXAMPLES = json.loads((Path(__file__).parent / "data" / "worked_examples.json").read_text())
K25, K3 = family_config("kimi-k2.5").rule, family_config("kimi-k3").rule
VL, VL_2506 = family_config("kimi-vl").rule, family_config("kimi-vl-2506").rule
RULES = {
    "kimi-k2.5": K25,
    "kimi-k3": K3,
    "kimi-k2.5-frame": replace(K25, patch_limit=K25.frame_patch_limit),
    "kimi-vl": VL,
    "kimi-vl-2506": VL_2506,
}


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_the_examples_are_all_there() -> None:
    assert len(EXAMPLES) == 34 * 5
    assert sum(not example["legal"] for example in EXAMPLES) == 8


@pytest.mark.parametrize("setting", RULES)
def test_worked_examples(setting: str) -> None:
    rule = RULES[setting]
    for example in (example for example in EXAMPLES if example["setting"] == setting):
        width, height = example["size"]
        if not example["legal"]:
            longest = max(example["grid"])
            with pytest.raises(ImageError) as caught:
                resize_plan(rule, width, height)
            for number in (width, height, longest, 511):
                assert str(number) in caught.value.message
            continue
        resized = resize_plan(rule, width, height)
        assert [resized.width, resized.height] == example["resized"], example
        assert [resized.padded_width, resized.padded_height] == example["padded"], example
        assert resized.grid == Grid(1, *example["grid"]), example
        assert (resized.grid.patches, resized.grid.tokens) == (example["patches"], example["tokens"]), example


def reference_size(name: str, width: int, height: int) -> tuple[int, int] | None:
    """New size by the published formulas, written out once more; None where Kimi-VL refuses."""
    if name.startswith("kimi-vl"):
        limit = 16384 if name.endswith("2506") else 4096
        if (width // 14) * (height // 14) > limit:
            scale = math.sqrt(limit / ((width // 14) * (height // 14)))
            width, height = int(width * scale), int(height * scale)
        sides = [side + (28 - side % 28) % 28 for side in (width, height)]
        return None if max(sides) // 14 >= 512 else (width, height)
    limit = {"kimi-k2.5": 16384, "kimi-k3": 65536, "kimi-k2.5-frame": 4096}[name]
    s1 = math.sqrt(limit / (max(1.0, width // 14) * max(1.0, height // 14)))
    s2, s3 = 512 * 14 / width, 512 * 14 / height
    scale = min(1.0, s1, s2, s3)
    return min(max(1, int(width * scale)), 7168), min(max(1, int(height * scale)), 7168)


@pytest.mark.parametrize("name", ["kimi-vl", "kimi-vl-2506", "kimi-k2.5", "kimi-k3"])
def test_rule_counter_and_rows_agree_on_20000_random_sizes(name: str) -> None:
    rng = random.Random(name)
    rule = RULES[name]
    refused = 0
    for draw in range(20_000):
        if draw % 4:
            width, height = rng.randint(1, 4000), rng.randint(1, 4000)
        else:  # every order of magnitude, extreme proportions too
            width, height = (int(math.exp(rng.uniform(0, math.log(30_000)))) for _ in "wh")
        expected = reference_size(name, width, height)
        if expected is None:
            refused += 1
            with pytest.raises(ImageError):
                tokens_for(name, width, height)
            continue
        resized = resize_plan(rule, width, height)
        assert (resized.width, resized.height) == expected
        rows = (resized.padded_height // 14) * (resized.padded_width // 14)
        assert 0 <= resized.padded_width - resized.width < 28
        assert 0 <= resized.padded_height - resized.height < 28
        assert rows == resized.grid.patches == 4 * resized.grid.tokens
        tokens = math.ceil(resized.width / 28) * math.ceil(resized.height / 28)
        assert tokens == resized.grid.tokens == tokens_for(name, width, height)
        assert max(resized.grid) <= 512
    assert (refused > 0) == name.startswith("kimi-vl")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_small_sizes_around_every_edge(name: str) -> None:
    edges = (1, 13, 14, 27, 28, 29, 55, 56, 57, 447, 448, 449)
    for width in edges:
        for height in edges:
            grid = patches_from(Image.new("L", (width, height)), RULES[name]).grid
            assert grid.tokens == tokens_for(name, width, height) == math.ceil(width / 28) * math.ceil(height / 28)


def test_the_largest_pictures() -> None:
    assert tokens_for("kimi-k2.5", 489, 7083) == 4464  # over the nominal 4096: the limit counts before padding
    assert tokens_for("kimi-k3", 1861, 7041) == 16817
    assert tokens_for("kimi-k3", 4000, 3000) == 15444
    assert tokens_for(family_config("kimi-k2.5"), 4000, 3000) == 4200


def test_sides_of_exactly_512_patches() -> None:
    assert resize_plan(K25, 7168, 14).grid == Grid(1, 2, 512)
    assert resize_plan(VL, 7140, 14).grid == Grid(1, 2, 510)
    with pytest.raises(ImageError, match="its width becomes 512 patches of 14 pixels, Kimi-VL allows at most 511"):
        resize_plan(VL, 7141, 14)
    with pytest.raises(ImageError, match="picture of 14 x 7141 pixels: its height becomes 512"):
        resize_plan(VL, 14, 7141)


def test_single_precision_would_give_other_sizes() -> None:
    rng = random.Random(0)
    differ = 0
    for _ in range(3000):
        width, height = rng.randint(1500, 6000), rng.randint(1500, 6000)
        scale = np.float32(math.sqrt(16384 / ((width // 14) * (height // 14))))
        resized = resize_plan(K25, width, height)
        differ += (resized.width, resized.height) != (int(np.float32(width) * scale), int(np.float32(height) * scale))
    assert differ > 3


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_no_pixels(name: str, size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="a side must be at least 1"):
        tokens_for(name, *size)


@pytest.mark.parametrize("size", [("4000", 3000), (4000, None), (4000.5, 3000), (True, 3000)])
def test_sizes_that_are_no_whole_numbers(size: Any) -> None:
    with pytest.raises(ImageError, match="is not a whole number"):
        tokens_for("kimi-k3", *size)


def test_a_rule_that_crops() -> None:
    rule = replace(VL, pad=False)
    resized = resize_plan(rule, 69, 40)
    assert (resized.width, resized.height, resized.padded_width, resized.padded_height) == (69, 40, 56, 28)
    assert resized.grid == Grid(1, 2, 4)
    with pytest.raises(GridError, match="w = 0"):
        resize_plan(rule, 13, 40)
    with pytest.raises(GridError, match="w = 3 patches is not a multiple"):
        resize_plan(rule, 42, 40)


# ---- a cap of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_cap_holds_after_padding_and_keeps_proportions(family: str) -> None:
    rng = random.Random(0)
    for size in [(4000, 3000), (20000, 500), (28, 28), (3000, 4000), (1, 1)] + [
        (rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(200)
    ]:
        for cap in (1, 7, 256):
            rule = replace(RULES[family], token_limit=cap)
            resized = resize_plan(rule, *size)
            assert resized.grid.tokens <= cap
            new = resized.width, resized.height
            lowest = max((side / old if side > 1 else 0) for side, old in zip(new, size, strict=True))
            highest = min((side + 1) / old for side, old in zip(new, size, strict=True))
            assert lowest < highest  # one scale for both sides
            try:
                free = resize_plan(RULES[family], *size)
            except ImageError:
                continue
            if free.grid.tokens <= cap:
                assert resized == free


def test_a_cap_is_used_up() -> None:
    assert resize_plan(replace(K3, token_limit=256), 4000, 3000).grid.tokens == 252  # 18 x 14; 19 x 14 is 266
    assert resize_plan(replace(K3, token_limit=256), 2000, 2000).grid.tokens == 256


# ---- pixels ---------------------------------------------------------------------------------------------------------


def noise(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    rng = np.random.default_rng(seed)
    planes = [rng.integers(0, 256, (size[1], size[0]), dtype=np.uint8) for _ in range(bands)]
    return Image.merge(mode, [Image.fromarray(plane) for plane in planes])


def patchify(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) of whole patches to (N, 3, 14, 14), as the official processors reshape it."""
    h, w, _ = pixels.shape
    return pixels.reshape(1, h // 14, 14, w // 14, 14, 3).transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3, 14, 14)


def padded(pixels: np.ndarray) -> np.ndarray:
    h, w, _ = pixels.shape
    return np.pad(pixels, ((0, -h % 28), (0, -w % 28), (0, 0)))


def normalised(pixels: np.ndarray) -> np.ndarray:
    values = (pixels / 255.0).astype(np.float32)
    values -= np.array([0.5, 0.5, 0.5], dtype=np.float32)
    values *= 1 / np.array([0.5, 0.5, 0.5], dtype=np.float32)
    return values


def reference_k25(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB")
    size = reference_size("kimi-k2.5", *image.size)
    assert size is not None
    return patchify(normalised(padded(np.asarray(image.resize(size, Image.Resampling.BICUBIC)))))


def reference_vl(image: Image.Image) -> np.ndarray:
    size = reference_size("kimi-vl", *image.size)
    assert size is not None
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    values = padded(np.asarray(image.convert("RGB"))).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    values = (values - np.float32(0.5)) / np.float32(0.5)
    channels, h, w = values.shape
    return values.reshape(channels, h // 14, 14, w // 14, 14).transpose(1, 3, 0, 2, 4).reshape(-1, 3, 14, 14)


def reference_k3(image: Image.Image) -> np.ndarray:
    size = reference_size("kimi-k3", *image.size)
    assert size is not None
    image = image.resize(size, Image.Resampling.BICUBIC)
    if "A" not in image.getbands():
        return patchify(normalised(padded(np.asarray(image.convert("RGB")))))
    rgba = np.array(image.convert("RGBA"))
    result = np.zeros((*rgba.shape[:2], 3), dtype=np.uint8)
    for y in range(rgba.shape[0]):
        for x in range(rgba.shape[1]):
            ground = np.float32(180 if (y // 8 + x // 8) % 2 == 1 else 255)
            alpha = rgba[y, x, 3].astype(np.float32) / 255
            for channel in range(3):
                value = alpha * np.float32(rgba[y, x, channel]) + (1 - alpha) * ground
                result[y, x, channel] = int(value)
    return patchify(normalised(padded(result)))


REFERENCES = {"kimi-vl": reference_vl, "kimi-k2.5": reference_k25, "kimi-k3": reference_k3}


def floats(image: Image.Image, rule: ImageRule) -> np.ndarray:
    return NORMALISE[patches_from(image, rule).patches_LC].reshape(-1, 3, 14, 14)


def test_the_table_has_the_bits_of_the_reference_formula() -> None:
    every = np.arange(256, dtype=np.uint8)
    grid = np.repeat(every[:, None, None], 3, axis=2)
    assert NORMALISE.dtype == np.float32
    assert NORMALISE.tobytes() == normalised(grid)[:, 0, 0].tobytes()
    torchvision = (every.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    assert NORMALISE.tobytes() == torchvision.tobytes()
    assert (NORMALISE[0], NORMALISE[255]) == (-1.0, 1.0)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
@pytest.mark.parametrize("size", [(1, 1), (13, 40), (56, 28), (120, 75)])
def test_pixels_have_the_bits_of_the_reference(family: str, mode: str, size: tuple[int, int]) -> None:
    image = noise(mode, size, seed=size[0])
    expected = REFERENCES[family](image)
    assert floats(image, RULES[family]).tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_pixels_of_pictures_that_shrink(family: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits lowered, so that small pictures go the way of large ones."""
    image = noise(mode, (400, 260))
    limit = {"kimi-vl": 4096, "kimi-k2.5": 16384, "kimi-k3": 65536}[family]
    real = math.sqrt
    monkeypatch.setattr(math, "sqrt", lambda value: real(value * 60 / limit))
    expected = REFERENCES[family](image) if family != "kimi-vl" else None
    monkeypatch.undo()
    rule = replace(RULES[family], patch_limit=60)
    made = patches_from(image, rule)
    assert made.grid.patches < 120
    if expected is None:
        scale = math.sqrt(60 / (28 * 18))
        shrunk = image.resize((int(400 * scale), int(260 * scale)), Image.Resampling.BICUBIC)
        expected = reference_vl(shrunk)
    assert NORMALISE[made.patches_LC].tobytes() == expected.astype(np.float32).tobytes()


def test_cmyk_shows_in_which_mode_a_picture_is_resized() -> None:
    image = noise("CMYK", (400, 260))
    own, rgb = (patches_from(image, replace(K25, patch_limit=60, rgb_first=first)) for first in (False, True))
    assert not np.array_equal(own.patches_LC, rgb.patches_LC)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_random_sizes_through_real_patches(rule: ImageRule) -> None:
    rng = random.Random(1)
    for _ in range(40):
        size = rng.randint(1, 260), rng.randint(1, 260)
        made = patches_from(Image.new("RGB", size, (9, 8, 7)), rule)
        assert made.patches_LC.shape == (made.grid.patches, 588)
        assert made.patches_LC.dtype == np.uint8
        assert made.patches_LC.flags.c_contiguous
        assert made.grid == resize_plan(rule, *size).grid
        assert made.source_size == size


def test_order_of_patches_and_values() -> None:
    rows, columns = np.indices((56, 84))
    pixels = np.stack([columns, rows, rows // 14 * 6 + columns // 14], axis=-1).astype(np.uint8)
    patches = patches_from(Image.fromarray(pixels), K25).patches_LC.reshape(4, 6, 3, 14, 14)
    for row in range(4):
        for column in range(6):
            red, green, blue = patches[row, column]
            assert (blue == row * 6 + column).all()
            assert (red == column * 14 + np.arange(14)[None, :]).all()
            assert (green == row * 14 + np.arange(14)[:, None]).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P", "LA"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_padding_is_black_to_the_right_and_below(family: str, mode: str) -> None:
    image = Image.new("RGB", (29, 15), "white").convert(mode)
    patches = patches_from(image, RULES[family]).patches_LC.reshape(2, 4, 3, 14, 14)
    pixels = patches.transpose(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert (pixels[:15, :29] == 255).all()
    assert not pixels[15:].any() and not pixels[:, 29:].any()


def test_cropping_keeps_the_middle() -> None:
    pixels = np.zeros((41, 61, 3), dtype=np.uint8)
    pixels[:, :, 0] = np.arange(61)
    pixels[:, :, 1] = np.arange(41)[:, None]
    made = patches_from(Image.fromarray(pixels), replace(VL, pad=False))
    assert made.grid == Grid(1, 2, 4)
    first = made.patches_LC[0].reshape(3, 14, 14)
    assert first[0, 0, 0] == round((61 - 56) / 2) == 2  # half to even, as in the official crop
    assert first[1, 0, 0] == round((41 - 28) / 2) == 6


def test_pictures_stay_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No float copy of a picture, and no second copy of the whole: only bands pass through numpy."""
    seen: list[int] = []
    real = np.asarray

    def watched(value: Any, *args: Any, **kwargs: Any) -> Any:
        array = real(value, *args, **kwargs)
        seen.append(array.nbytes)
        return array

    monkeypatch.setattr(np, "asarray", watched)
    made = patches_from(Image.new("RGB", (700, 1400), "red"), K25)
    assert made.patches_LC.nbytes == 700 * 1400 * 3
    assert max(seen) <= 700 * 8 * 14 * 3
    seen.clear()
    patches_from(Image.new("RGBA", (700, 1400), (1, 2, 3, 4)), K3)
    assert max(seen) <= 700 * 8 * 14 * 4


def test_a_picture_that_was_opened_and_an_image_give_the_same() -> None:
    image = noise("RGB", (50, 40))
    for rule in RULES.values():
        assert np.array_equal(patches_from(open_picture(image), rule).patches_LC, patches_from(image, rule).patches_LC)


def test_a_59_megapixel_photo() -> None:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((6656, 8880)).save(out, "JPEG", quality=60)
    picture = open_picture(out.getvalue())
    for family in FAMILIES:
        made = patches_from(picture, RULES[family])
        assert made.grid.tokens == tokens_for(family, 6656, 8880) == made.patches_LC.shape[0] // 4
        assert made.source_size == (6656, 8880)


# ---- transparency ---------------------------------------------------------------------------------------------------


def logo(hidden: int, size: tuple[int, int] = (75, 61)) -> Image.Image:
    """Black bars on nothing; what stands under the nothing is noise of a seed."""
    image = noise("RGBA", size, hidden)
    image.putalpha(0)
    draw = ImageDraw.Draw(image)
    for x in range(5, size[0] - 8, 20):
        draw.rectangle((x, 8, x + 8, size[1] - 9), fill=(0, 0, 0, 255))
    return image


def on_white(image: Image.Image) -> Image.Image:
    rgba = np.asarray(image.convert("RGBA")).astype(np.int64)
    alpha = rgba[:, :, 3:]
    blended = (rgba[:, :, :3] * alpha + 255 * (255 - alpha)) / 255
    return Image.fromarray(np.floor(blended + 0.5).astype(np.uint8))


@pytest.mark.parametrize("family", ["kimi-vl", "kimi-k2.5"])
def test_colours_under_full_transparency_never_reach_the_model(family: str) -> None:
    rule = RULES[family]
    one, other = (patches_from(logo(hidden), rule).patches_LC for hidden in (1, 2))
    assert np.array_equal(one, other)
    flat = patches_from(on_white(logo(1)), rule).patches_LC
    assert np.array_equal(one, flat)
    assert set(np.unique(one)) == {0, 255}
    shrunk = replace(rule, patch_limit=8)
    assert np.array_equal(patches_from(logo(1), shrunk).patches_LC, patches_from(on_white(logo(1)), shrunk).patches_LC)


@pytest.mark.parametrize("family", ["kimi-vl", "kimi-k2.5"])
def test_half_transparent_pixels_are_mixed_with_white(family: str) -> None:
    image = noise("RGBA", (28, 28))
    mine = patches_from(image, RULES[family]).patches_LC
    assert np.array_equal(mine, patches_from(on_white(image), RULES[family]).patches_LC)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_logo_in_every_mode_gives_the_same_pixels(family: str, tmp_path: Path) -> None:
    rgba = logo(0)
    palette = Image.new("P", rgba.size, 1)
    palette.putpalette([0, 0, 0, 200, 10, 10] + [0] * 762)
    palette.paste(0, mask=rgba.getchannel("A"))
    palette.info["transparency"] = 1
    by_bytes = palette.copy()
    by_bytes.info["transparency"] = bytes([255, 0])
    grey = Image.merge("LA", (Image.new("L", rgba.size, 0), rgba.getchannel("A")))
    keyed = Image.new("RGB", rgba.size, (9, 9, 9))
    keyed.paste((0, 0, 0), mask=rgba.getchannel("A"))
    keyed.info["transparency"] = (9, 9, 9)
    pictures: list[Any] = [rgba, palette, by_bytes, grey, keyed]
    for number, (image, kind) in enumerate(
        [(rgba, "png"), (palette, "png"), (by_bytes, "png"), (grey, "png"), (keyed, "png"), (palette, "gif")]
    ):
        image.save(tmp_path / f"{number}.{kind}")
        pictures.append(tmp_path / f"{number}.{kind}")
    rgba.save(tmp_path / "lossless.webp", lossless=True)
    pictures.append(tmp_path / "lossless.webp")
    for rule in (RULES[family], replace(RULES[family], patch_limit=8)):
        wanted = patches_from(open_picture(rgba), rule).patches_LC
        for picture in pictures:
            assert np.array_equal(patches_from(open_picture(picture), rule).patches_LC, wanted), picture


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("size", [(28, 28), (61, 43)])
def test_the_chessboard_of_k3_has_the_bits_of_the_reference(mode: str, size: tuple[int, int]) -> None:
    image = noise(mode, size)
    assert floats(image, K3).tobytes() == reference_k3(image).tobytes()


def test_the_chessboard_comes_after_the_resize_and_before_the_padding() -> None:
    image = noise("RGBA", (151, 100))
    rule = replace(K3, patch_limit=21)
    resized = resize_plan(rule, *image.size)
    size = resized.width, resized.height
    assert size != image.size and not any(side % 8 == 0 or side % 28 == 0 for side in size)
    small = image.resize(size, Image.Resampling.BICUBIC)
    made = NORMALISE[patches_from(image, rule).patches_LC].reshape(-1, 3, 14, 14)
    assert made.tobytes() == reference_k3(small).tobytes()
    clear = patches_from(Image.new("RGBA", (30, 20)), K3).patches_LC.reshape(2, 4, 3, 14, 14)
    pixels = clear.transpose(0, 3, 1, 4, 2).reshape(28, 56, 3)[:, :, 0]
    assert (pixels[0, 0], pixels[0, 8], pixels[8, 0], pixels[8, 8]) == (255, 180, 180, 255)
    assert not pixels[20:].any() and not pixels[:, 30:].any()


def test_k3_truncates_where_it_mixes() -> None:
    pixel = Image.new("RGBA", (28, 28), (100, 0, 255, 128))
    first = patches_from(pixel, K3).patches_LC[0].reshape(3, 14, 14)[:, 0, 0]
    alpha = np.float32(128) / np.float32(255)
    mixed = [alpha * np.float32(value) + (1 - alpha) * np.float32(255) for value in (100, 0, 255)]
    assert 126.9999 < mixed[1] < 127  # the nearest value would be 127
    assert list(first) == [int(value) for value in mixed] == [177, 126, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_drop_is_what_the_official_processors_do(mode: str) -> None:
    image = noise(mode, (120, 75))
    for family, reference in (("kimi-vl", reference_vl), ("kimi-k2.5", reference_k25)):
        rule = replace(RULES[family], alpha="drop")
        assert floats(image, rule).tobytes() == reference(image).astype(np.float32).tobytes()
    scale = math.sqrt(8 / (8 * 5))
    shrunk = image.resize((int(120 * scale), int(75 * scale)), Image.Resampling.BICUBIC)
    rule = replace(VL, alpha="drop", patch_limit=8)  # Pillow resizes transparent modes premultiplied: order shows
    assert floats(image, rule).tobytes() == reference_vl(shrunk).astype(np.float32).tobytes()


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["P", "1"])
def test_palettes_and_bits_become_colours_before_the_resize(family: str, mode: str) -> None:
    image = noise("RGB", (300, 200)).convert(mode)
    rule = replace(RULES[family], patch_limit=40)
    assert np.array_equal(patches_from(image, rule).patches_LC, patches_from(image.convert("RGB"), rule).patches_LC)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_opaque_alpha_changes_nothing(family: str) -> None:
    image = noise("RGB", (90, 70))
    opaque = image.copy()
    opaque.putalpha(255)
    assert np.array_equal(patches_from(image, RULES[family]).patches_LC, patches_from(opaque, RULES[family]).patches_LC)


def test_the_ground_is_a_setting() -> None:
    image = logo(0)
    made = {
        alpha: patches_from(image, replace(K25, alpha=alpha)).patches_LC.tobytes()  # type: ignore[arg-type]
        for alpha in ("white", "chessboard", "drop")
    }
    assert len(set(made.values())) == 3


# ---- memory ---------------------------------------------------------------------------------------------------------

GROWTH = """
import sys
from pathlib import Path
import numpy as np
from moonvit import family_config
from moonvit.images import open_picture
from moonvit.preprocess import patches_from, resize_plan


def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


rule = family_config("kimi-k3").rule
patches_from(open_picture(Path(sys.argv[1]).with_name("small.png").read_bytes()), rule)
content = Path(sys.argv[1]).read_bytes()
out = np.ones((resize_plan(rule, 2000, 1500).grid.patches, 588), np.uint8)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
patches_from(open_picture(content), rule, out)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no peak")
@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
        ("RGBA", "PNG", {"compress_level": 1}),
        ("LA", "PNG", {"compress_level": 1}),
        ("RGBA", "WEBP", {"quality": 50, "method": 0}),
        ("P", "GIF", {}),
    ],
)
def test_decoding_stays_within_what_a_plan_counts(
    mode: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    width, height = 2000, 1500
    values = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 4), dtype=np.uint8)
    picture = Image.fromarray(np.kron(values, np.ones((8, 8, 1), np.uint8)))
    file = tmp_path / "picture"
    Image.new("RGB", (30, 30)).save(tmp_path / "small.png")
    (picture.convert("RGB") if mode in ("RGB", "P") else picture).convert(mode).save(file, kind, **options)
    done = subprocess.run([sys.executable, "-c", GROWTH, str(file)], capture_output=True, text=True, check=True)
    grown = int(done.stdout)
    assert 2 * width * height < grown <= DECODED_BYTES * width * height
