"""Pictures from every source and of every kind: the right pixels, or a clear refusal before any work."""

from __future__ import annotations

import base64
import functools
import io
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import GifImagePlugin, Image, ImageCms, ImageDraw, ImageFile, ImageOps, PngImagePlugin, WebPImagePlugin

from moonvit import images
from moonvit.errors import ConfigError, ImageError, MediaFetchError, UnsupportedMediaError
from moonvit.headers import READABLE, detect
from moonvit.images import MODES, Limits, Picture, open_picture, picture_size
from moonvit.preprocess import tokens_for

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP"]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    if kind == "JPEG" and "exif" in options:
        options["exif"] = b"Exif\0\0" + options["exif"]
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def quad(width: int, height: int) -> Image.Image:
    """Quarters of red, green, blue and white, clockwise from the top left."""
    image = Image.new("RGB", (width, height), "red")
    draw = ImageDraw.Draw(image)
    draw.rectangle((width // 2, 0, width, height // 2 - 1), fill=(0, 255, 0))
    draw.rectangle((width // 2, height // 2, width, height), fill=(0, 0, 255))
    draw.rectangle((0, height // 2, width // 2 - 1, height), fill="white")
    return image


def pixels(picture: Picture | Image.Image) -> np.ndarray:
    image = picture.image if isinstance(picture, Picture) else picture
    return np.asarray(image.convert("RGBA"))


def chunk(kind: bytes, data: bytes = b"", flaw: int = 0) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ flaw)


def raw_png(
    width: int, height: int, bits: int, colour: int, rows: bytes, *, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG put together by hand; ``rows`` hold the filter byte of each row."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + before + data + after + chunk(b"IEND")


def exif(orientation: int, *, order: str = "<", kind: int = 3) -> bytes:
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0) if kind == 3 else (orientation,)))
    entries = struct.pack(order + "HHI", 0x0100, 4, 1) + struct.pack(order + "I", 9)
    entries += struct.pack(order + "HHI", 0x0112, kind, 1) + value
    mark = b"II*\x00" if order == "<" else b"MM\x00*"
    return mark + struct.pack(order + "IH", 8, 2) + entries + struct.pack(order + "I", 0)


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where a decoder is so much as made."""

    def fail(*args: Any) -> Any:
        raise AssertionError("a decoder saw the file")

    monkeypatch.setattr(images, "_PLUGINS", dict.fromkeys(READABLE, fail))
    monkeypatch.setattr(Image, "open", fail)


# ---- sources --------------------------------------------------------------------------------------------------------


def routes(image: Image.Image, folder: Path, kind: str = "PNG", **options: Any) -> Iterator[Any]:
    """One picture as everything it can come as."""
    content = encoded(image, kind, **options)
    path = folder / "picture"
    path.write_bytes(content)
    yield from (content, bytearray(content), memoryview(content), path, str(path))
    yield f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
    yield Image.open(io.BytesIO(content))


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    image = noise(37, 23)
    digests = set()
    for source in [*routes(image, tmp_path), image, np.asarray(image)]:
        picture = open_picture(source)
        assert picture.size == picture_size(source) == (37, 23)
        assert picture.image.mode == "RGB"
        assert np.array_equal(pixels(picture), pixels(image))
        digests.add(picture.digest)
    assert len(digests) == 2  # of the encoded bytes, and of the pixels where there are none


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind: str, tmp_path: Path) -> None:
    image = quad(64, 32)
    for source in routes(image, tmp_path, kind):
        picture = open_picture(source)
        assert picture.size == picture_size(source) == (64, 32)
        wanted = pixels(Image.open(io.BytesIO(encoded(image, kind))))
        assert np.array_equal(pixels(picture), wanted)
        assert abs(wanted.astype(int) - pixels(image).astype(int)).mean() < 4


def test_what_is_opened_holds_neither_file_nor_decoder() -> None:
    for kind in FORMATS:
        picture = open_picture(encoded(quad(64, 32), kind, comment=b"hello" if kind == "GIF" else None))
        assert type(picture.image) is Image.Image
        assert set(picture.image.info) <= {"transparency"}


def test_the_callers_image_is_not_changed() -> None:
    image = Image.open(io.BytesIO(encoded(quad(64, 32), "JPEG", exif=exif(6))))
    before = dict(image.info)
    picture = open_picture(image)
    assert picture.size == (32, 64)
    assert image.size == (64, 32) and image.info == before


@pytest.mark.parametrize(
    "source", [None, 5, 3.5, ["a.png"], ("a", "b"), object(), torch.zeros(2, 2, 3, dtype=torch.uint8), {"url": "x"}]
)
def test_what_is_no_picture(source: Any) -> None:
    for call in (open_picture, picture_size):
        with pytest.raises(ImageError, match=f"image 0: a picture cannot be read from {type(source).__name__}"):
            call(source)


def test_errors_name_the_picture() -> None:
    with pytest.raises(ImageError, match="image 4: there are no bytes") as caught:
        open_picture(b"", index=4)
    assert caught.value.param == "images[4]"


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pipe, empty = tmp_path / "pipe", tmp_path / "empty"
    os.mkfifo(pipe)
    empty.write_bytes(b"")
    for source, said in (
        (tmp_path / "missing.png", "No such file"),
        (str(tmp_path / "missing.png"), "No such file"),
        (tmp_path, "is not a file"),
        (pipe, "is not a file"),
        ("a\0b", "null"),
        ("x" * 5000, "name too long"),
    ):
        for call in (open_picture, picture_size):
            with pytest.raises(ImageError, match=said):
                call(source)
    with pytest.raises(ImageError, match="no bytes"):
        open_picture(empty)
    with pytest.raises(UnsupportedMediaError):
        picture_size(empty)


def test_paths_only_where_they_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(noise(4, 4)))
    for source in (path, str(path), "/etc/passwd", "a.png"):
        for call in (open_picture, picture_size):
            with pytest.raises(ImageError, match="local files are not read here") as caught:
                call(source, allow_paths=False)
            assert "passwd" not in caught.value.message
    assert open_picture(path.read_bytes(), allow_paths=False).size == (4, 4)


def test_addresses_are_not_fetched_without_a_policy() -> None:
    for address in ("http://127.0.0.1/a.png", "HTTPS://example.org/a.png", "file:///etc/passwd", "ftp://example.org/a"):
        for call in (open_picture, picture_size):
            with pytest.raises(MediaFetchError):
                call(address)


def test_size_needs_the_header_alone(tmp_path: Path, no_decoder: None) -> None:
    for kind in FORMATS:
        content = encoded(noise(300, 200), kind)
        path = tmp_path / kind
        path.write_bytes(content)
        assert picture_size(content) == picture_size(path) == (300, 200)
        if kind != "WEBP":
            assert picture_size(content[:1000]) == (300, 200)


# ---- orientation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_on_every_route(orientation: int, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    image = quad(64, 32)
    content = encoded(image, kind, exif=exif(orientation), **options)
    control = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert control.size == ((32, 64) if orientation >= 5 else (64, 32))
    for source in routes(image, tmp_path, kind, exif=exif(orientation), **options):
        picture = open_picture(source)
        assert picture.size == picture_size(source) == control.size
        assert np.array_equal(pixels(picture), pixels(control))
        again = open_picture(picture.image)  # no tag stayed behind to turn it again
        assert np.array_equal(pixels(again), pixels(control))


CORNERS = {  # colours clockwise from the top left of quad() turned upright
    1: "RGBW",
    2: "GRWB",
    3: "BWRG",
    4: "WBGR",
    5: "RWBG",
    6: "WRGB",
    7: "BGRW",
    8: "GBWR",
}


@pytest.mark.parametrize("orientation", CORNERS)
def test_orientation_in_words(orientation: int) -> None:
    names = {(255, 0, 0): "R", (0, 255, 0): "G", (0, 0, 255): "B", (255, 255, 255): "W"}
    image = open_picture(encoded(quad(64, 32), exif=exif(orientation))).image
    right, bottom = image.width - 1, image.height - 1
    found = [names[image.getpixel(place)] for place in ((0, 0), (right, 0), (right, bottom), (0, bottom))]  # type: ignore[index]
    assert "".join(found) == CORNERS[orientation]


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "RGBA", "I;16"])
def test_orientation_in_other_modes(mode: str) -> None:
    base = Image.new("I;16", (5, 3), 900) if mode == "I;16" else noise(5, 3).convert(mode)
    content = encoded(base, exif=exif(6))
    turned = open_picture(content)
    assert turned.size == (3, 5)
    assert np.array_equal(
        pixels(turned), pixels(open_picture(encoded(base)).image.transpose(Image.Transpose.ROTATE_270))
    )


def test_the_grid_is_that_of_the_upright_picture() -> None:
    content = encoded(noise(1000, 100), "JPEG", exif=exif(6))
    assert picture_size(content) == (100, 1000)
    assert tokens_for("kimi-k2.5", *picture_size(content)) == tokens_for("kimi-k2.5", 100, 1000)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [3, 4])
def test_both_byte_orders_and_integer_types(order: str, kind: int) -> None:
    assert picture_size(encoded(noise(9, 5), "JPEG", exif=exif(8, order=order, kind=kind))) == (5, 9)


@pytest.mark.parametrize(
    "block",
    [
        exif(0),
        exif(9),
        exif(65535),
        exif(6)[:20],
        exif(6)[:6],
        exif(6, kind=4).replace(struct.pack("<HH", 0x0112, 4), struct.pack("<HH", 0x0112, 2)),
        b"II*\x00\xff\xff\xff\xff",
        b"XX*\x00" + exif(6)[4:],
        b"\x00" * 40,
        b"II*\x00" + struct.pack("<IH", 8, 65535),
    ],
)
def test_damaged_exif_is_ignored(block: bytes) -> None:
    plain = encoded(noise(9, 5), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(block) + 8) + b"Exif\0\0" + block
    content = plain[:2] + segment + plain[2:]
    assert picture_size(content) == (9, 5)
    assert np.array_equal(pixels(open_picture(content)), pixels(open_picture(plain)))
    png = raw_png(2, 1, 8, 0, b"\0\x01\x02", before=chunk(b"eXIf", block))
    assert open_picture(png).size == picture_size(png) == (2, 1)


def test_exif_behind_the_data_counts() -> None:
    png = raw_png(2, 1, 8, 0, b"\0\x01\x02", after=chunk(b"eXIf", exif(6)))
    assert open_picture(png).size == picture_size(png) == (1, 2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("tagged", [0, 3, 6])
def test_exif_alone_turns_a_picture(kind: str, tagged: int, tmp_path: Path) -> None:
    """Pillow would also take an orientation from XMP, or from the text of a PNG; viewers do not."""
    text = '<rdf:Description tiff:Orientation="8"/>'
    options: dict[str, Any] = {"exif": exif(tagged)} if tagged else {}
    if kind == "PNG":
        options["pnginfo"] = PngImagePlugin.PngInfo()
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", text)
        options["pnginfo"].add_text("Raw profile type exif", f"\nexif\n40\n{exif(8).hex()}")
    else:
        options["xmp"] = text.encode()
    image = quad(64, 32)
    content = encoded(image, kind, **options)
    if not tagged:
        assert ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size == (32, 64)
    size = (32, 64) if tagged == 6 else (64, 32)
    for source in routes(image, tmp_path, kind, **options):
        assert picture_size(source) == open_picture(source).size == size


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_of_an_image_that_pillow_turns_itself(orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    content = encoded(quad(64, 32), "TIFF", exif=tags)
    control = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert control.size == ((32, 64) if orientation >= 5 else (64, 32))
    for _ in range(2):
        image = Image.open(io.BytesIO(content))
        assert picture_size(image) == picture_size(image) == control.size
        assert np.array_equal(pixels(open_picture(image)), pixels(control))


def test_the_first_exif_of_a_jpeg_counts() -> None:
    plain = encoded(noise(9, 5), "JPEG", exif=exif(6))
    second = b"\xff\xe1" + struct.pack(">H", len(exif(3)) + 8) + b"Exif\0\0" + exif(3)
    place = plain.index(b"\xff\xdb")
    content = plain[:place] + second + plain[place:]
    assert open_picture(content).size == picture_size(content) == (5, 9)


# ---- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*sorted(MODES), "La", "RGBa", "I;16", "I;16B", "I", "F", "LAB"])
def test_every_mode_is_read_or_refused(mode: str) -> None:
    image = Image.new(mode, (6, 4))
    if mode in ("I", "F", "LAB"):
        with pytest.raises(ImageError, match=f"pictures of mode {mode} are not read; convert it to RGB, L or I;16"):
            open_picture(image)
        return
    picture = open_picture(image)
    assert picture.image.mode in MODES
    assert picture.image.convert("RGB").size == (6, 4)


def ramp16(*, colour: bool = False) -> bytes:
    values = np.linspace(0, 65535, 256).astype(">u2")
    rows = np.repeat(values, 3) if colour else values
    return raw_png(256, 1, 16, 2 if colour else 0, b"\0" + rows.tobytes())


def test_16_bits_are_scaled_not_clipped() -> None:
    grey, colour = open_picture(ramp16()), open_picture(ramp16(colour=True))
    assert (grey.image.mode, colour.image.mode) == ("L", "RGB")
    values = pixels(grey)[0, :, 0]
    assert list(values) == list(range(256))
    assert np.array_equal(pixels(grey), pixels(colour))
    native = Image.frombytes("I;16", (2, 1), struct.pack("<HH", 256, 65535))
    assert list(pixels(open_picture(native))[0, :, 0]) == [1, 255]


def test_16_bits_of_a_large_picture_in_bands() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (200, 7), dtype=np.uint16)
    content = raw_png(7, 200, 16, 0, b"".join(b"\0" + row.astype(">u2").tobytes() for row in values))
    assert np.array_equal(pixels(open_picture(content))[:, :, 0], values >> 8)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_the_grey_that_is_transparent(bits: int) -> None:
    """Pillow scales greys of fewer bits to 8, and leaves the transparent one as it was."""
    top = (1 << bits) - 1
    key = top // 3 if bits > 1 else 1
    greys = [0, key, top]
    if bits == 16:
        row = struct.pack(">3H", *greys)
    else:
        packed = sum(grey << (24 - bits * (number + 1)) for number, grey in enumerate(greys))
        row = packed.to_bytes(3, "big")[: -(-3 * bits // 8)]
    content = raw_png(3, 1, bits, 0, b"\0" + row, before=chunk(b"tRNS", struct.pack(">H", key)))
    found = pixels(open_picture(content))[0]
    assert [list(pixel[:3]) for pixel in found] == [[grey * 255 // top] * 3 for grey in greys]
    assert [pixel[3] for pixel in found] == [0 if grey == key else 255 for grey in greys]


@pytest.mark.parametrize("bits", [8, 16])
def test_the_colour_that_is_transparent(bits: int) -> None:
    form = ">6H" if bits == 16 else ">6B"
    shift = bits - 8
    colours = [0x12 << shift, 0x56 << shift, 0x9A << shift, 1, 2, 3]
    key = chunk(b"tRNS", struct.pack(">3H", *colours[:3]))
    content = raw_png(2, 1, bits, 2, b"\0" + struct.pack(form, *colours), before=key)
    assert [list(pixel) for pixel in pixels(open_picture(content))[0]] == [
        [0x12, 0x56, 0x9A, 0],
        [0, 0, 0, 255] if bits == 16 else [1, 2, 3, 255],
    ]


def test_cmyk_and_ycck() -> None:
    image = noise(32, 16).convert("CMYK")
    content = encoded(image, "JPEG", quality=95)
    picture = open_picture(content)
    assert picture.image.mode == "CMYK"
    assert np.array_equal(pixels(picture), pixels(Image.open(io.BytesIO(content))))
    white = open_picture(encoded(Image.new("CMYK", (8, 8)), "JPEG"))
    assert (pixels(white) == 255).all()


def test_grey_in_every_format() -> None:
    grey = Image.linear_gradient("L").resize((32, 32))
    for kind in FORMATS:
        found = pixels(open_picture(encoded(grey, kind)))[:, :, :3]
        assert (found[:, :, 0] == found[:, :, 1]).all() and (found[:, :, 1] == found[:, :, 2]).all()
        assert found[0, 0, 0] < 20 < 230 < found[31, 31, 0]


def test_colour_profiles_change_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image = noise(20, 10)
    for kind in ("PNG", "JPEG", "WEBP"):
        plain, tagged = encoded(image, kind), encoded(image, kind, icc_profile=profile)
        assert len(tagged) > len(plain)
        assert np.array_equal(pixels(open_picture(tagged)), pixels(open_picture(plain)))


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (2, 2), (3, 3), (4, 4), (3, 4)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_axes_are_never_guessed(size: tuple[int, int], mode: str) -> None:
    image = noise(*size).convert(mode)
    for source in (image, np.asarray(image), encoded(image)):
        picture = open_picture(source)
        assert picture.size == picture_size(source) == size
        assert picture.image.mode == mode
        assert np.array_equal(pixels(picture), pixels(image))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 224, 224), np.uint8),
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((4,), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.int64),
        np.zeros((4, 4), bool),
    ],
)
def test_arrays_of_another_layout(array: np.ndarray) -> None:
    for call in (open_picture, picture_size):
        with pytest.raises(ImageError, match=r"expected uint8 \(H, W\), \(H, W, 3\) or \(H, W, 4\)") as caught:
            call(array)
        assert str(array.shape) in caught.value.message and str(array.dtype) in caught.value.message


def test_arrays_of_other_strides_and_one_channel() -> None:
    base = np.random.default_rng(0).integers(0, 256, (10, 8, 4), dtype=np.uint8)
    for array in (base[::2, ::-1, :3], base[:, :, 1], base.transpose(1, 0, 2), base[:, :, 2:3]):
        found = np.asarray(open_picture(array).image)
        assert np.array_equal(found, array[:, :, 0] if array.shape[-1] == 1 else array)
    with pytest.raises(ImageError, match="holds no pixels"):
        open_picture(base[:0])


# ---- animations -----------------------------------------------------------------------------------------------------


def frames(*colours: str, size: tuple[int, int] = (20, 10)) -> list[Image.Image]:
    return [Image.new("RGB", size, colour) for colour in colours]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_animation_is_its_first_frame(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = frames("red", "green", "blue")[:count]
    options: dict[str, Any] = {"save_all": True, "append_images": rest} if rest else {}
    content = encoded(first, kind, **({"lossless": True} if kind == "WEBP" else {}), **options)
    decoded: list[str] = []
    for plugin, method in ((WebPImagePlugin.WebPImageFile, "_get_next"), (PngImagePlugin.PngImageFile, "_seek")):
        real = getattr(plugin, method)

        def watched(self: Any, *args: Any, real: Callable[..., Any] = real, name: str = method) -> Any:
            decoded.append(name)
            return real(self, *args)

        monkeypatch.setattr(plugin, method, watched)
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "seek", lambda *args: decoded.append("another frame"))
    picture = open_picture(content)
    assert picture.size == picture_size(content) == (20, 10)
    assert (pixels(picture) == [255, 0, 0, 255]).all()
    assert decoded == (["_get_next"] if kind == "WEBP" else [])


def test_thousands_of_frames_cost_nothing() -> None:
    one = encoded(Image.new("P", (1, 1)), "GIF")
    start = one.index(b",")
    content = one[:-1] + one[start:-1] * 5000 + b";"
    assert Image.open(io.BytesIO(content)).n_frames > 1000  # type: ignore[attr-defined]
    assert open_picture(content).size == picture_size(content) == (1, 1)


def test_a_first_frame_that_is_larger_than_its_screen() -> None:
    content = bytearray(encoded(Image.new("P", (20, 10)), "GIF"))
    content[6:10] = struct.pack("<HH", 4, 4)
    assert open_picture(bytes(content)).size == picture_size(bytes(content)) == (20, 10)


# ---- damaged --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_every_cut_is_refused(kind: str) -> None:
    content = encoded(quad(64, 32), kind)
    least = len(content) - (2 if kind == "GIF" else 0)  # a GIF may lack its end: every pixel is there
    for length in {*range(1, min(200, least)), *range(1, least, 7), *range(max(1, least - 20), least)}:
        with pytest.raises(ImageError):
            open_picture(content[:length])


def test_a_cut_progressive_jpeg_is_refused() -> None:
    content = encoded(noise(200, 200), "JPEG", progressive=True)
    assert open_picture(content).size == (200, 200)
    for cut in (128, len(content) // 2):
        with pytest.raises(ImageError, match="the JPEG file is damaged"):
            open_picture(content[:-cut])


@pytest.mark.parametrize("kind", FORMATS)
def test_what_follows_the_picture_does_no_harm(kind: str) -> None:
    content = encoded(quad(64, 32), kind)
    assert np.array_equal(pixels(open_picture(content + b"garbage" * 99)), pixels(open_picture(content)))


def test_one_wrong_byte_in_the_data_of_a_png() -> None:
    content = encoded(noise(40, 40))
    start = content.index(b"IDAT") + 4
    for place in range(start, len(content) - 16, 97):
        flipped = bytearray(content)
        flipped[place] ^= 1
        with pytest.raises(
            ImageError, match="image 0: the PNG file is damaged: the checksum of its IDAT chunk is wrong"
        ):
            open_picture(bytes(flipped))


@pytest.mark.parametrize("kind", FORMATS)
def test_random_damage_is_an_image_error_or_a_picture(kind: str) -> None:
    rng = random.Random(kind)
    content = encoded(noise(24, 16), kind)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 255, rng.randrange(256)])
        for call in (open_picture, picture_size):
            try:
                call(bytes(damaged), Limits(max_pixels=100_000))
            except ImageError as error:
                assert len(error.message) < 300 and "0x" not in error.message


def test_junk_and_endless_pieces_are_bounded() -> None:
    jpeg = encoded(noise(4, 4), "JPEG")
    end = jpeg.index(b"\xff\xdb")
    for junk in (b"\x01", b"\xff", b"\xff\x00"):
        assert open_picture(jpeg[:end] + junk * 1000 + jpeg[end:]).size == (4, 4)
        with pytest.raises(ImageError, match="more than 65536 bytes between its segments"):
            open_picture(jpeg[:end] + junk * 70_000 + jpeg[end:])
    with pytest.raises(ImageError, match="more than 100000 segments"):
        open_picture(jpeg[:2] + b"\xff\xfe\x00\x02" * 100_001 + jpeg[2:])
    with pytest.raises(ImageError, match="more than 100000 chunks"):
        open_picture(raw_png(1, 1, 8, 0, b"\0\0", before=chunk(b"teXt") * 100_001))
    gif = encoded(Image.new("P", (1, 1)), "GIF")
    start = gif.index(b",")
    for extension in (b"!\xfe\x01a" + b"\x00", b"!\xfe" + b"\x01a" * 9):
        with pytest.raises(ImageError, match="more than 100000 blocks"):
            open_picture(gif[:start] + extension * 60_000 + b"\0" + gif[start:])


def test_scans_are_counted() -> None:
    """A few bytes each make a decoder go over the whole picture again."""
    content = encoded(noise(64, 64), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    scan = content[last:-2]
    assert open_picture(content[:-2] + scan * 3 + content[-2:]).size == (64, 64)
    with pytest.raises(ImageError, match="the JPEG file is damaged: 2010 scans, at most 64 are decoded"):
        open_picture(content[:-2] + scan * 2000 + content[-2:])


def test_scans_are_those_of_the_picture() -> None:
    """Phones append a video, in which every pair of bytes comes up; a length may lead over an end that is none."""
    content = encoded(noise(64, 64), "JPEG", progressive=True)
    plain = pixels(open_picture(content))
    assert np.array_equal(pixels(open_picture(content + b"\xff\xda" * 500)), plain)
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xda"
    first, last = content.index(b"\xff\xda"), content.rindex(b"\xff\xda")
    scan = content[last:-2]
    assert np.array_equal(pixels(open_picture(content[:last] + comment * 500 + content[last:])), plain)
    assert np.array_equal(pixels(open_picture(content[:first] + comment + content[first:])), plain)
    with pytest.raises(ImageError, match="2010 scans"):
        open_picture(content[:last] + comment + scan * 2000 + content[last:])
    with pytest.raises(ImageError, match="more than 100000 segments in its picture"):
        open_picture(content[:last] + b"\xff\xfe\x00\x02" * 100_001 + content[last:])


def test_no_scan_hides_from_the_count() -> None:
    """The decoder steps over such a marker alone where restarts are on: it reads no length behind it."""
    content = encoded(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    assert content.count(b"\xff\xda") == 10
    hidden = content[content.rindex(b"\xff\xda") : -2] * 100
    marker = b"\xff\x02" + (2 + len(hidden)).to_bytes(2, "big")
    with pytest.raises(ImageError, match="110 scans, at most 64"):
        open_picture(content[:-2] + marker + hidden + content[-2:])


def test_scans_of_four_colours_in_many_steps() -> None:
    image = noise(64, 64).convert("CMYK")
    content = encoded(image, "JPEG", progressive=True)
    assert 10 < content.count(b"\xff\xda") <= 32
    assert open_picture(content).size == (64, 64)


def test_metadata_never_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that unpacks to more than Pillow allows is stripped, like profiles and thumbnails."""
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(70 << 20)))
    profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(9 << 20)))
    assert open_picture(raw_png(2, 1, 8, 0, b"\0\1\2", before=bomb + profile, after=bomb)).size == (2, 1)
    seen: list[bytes] = []
    real = images._PLUGINS["JPEG"]
    monkeypatch.setitem(images._PLUGINS, "JPEG", lambda stream: seen.append(stream.getvalue()) or real(stream))  # type: ignore[attr-defined, func-returns-value]
    content = encoded(noise(16, 16), "JPEG", exif=exif(1), icc_profile=b"p" * 200_000, comment=b"c" * 50_000)
    open_picture(content)
    assert len(content) > 250_000 and len(seen[0]) < 5_000
    for word in (b"Exif", b"ICC_PROFILE", b"ccccc"):
        assert word in content and word not in seen[0]


def test_pillows_multi_picture_jpeg_is_a_jpeg() -> None:
    content = encoded(quad(64, 32), "MPO", save_all=True, append_images=[noise(64, 32)])
    assert Image.open(io.BytesIO(content)).format == "MPO"
    assert np.array_equal(pixels(open_picture(content)), pixels(open_picture(encoded(quad(64, 32), "JPEG"))))


# ---- bombs ----------------------------------------------------------------------------------------------------------


def flat_png(width: int, height: int, bits: int = 1, colour: int = 0) -> bytes:
    """A legal PNG of zeros, packed row by row."""
    packer = zlib.compressobj(9)
    row = bytes(1 + -(-width * bits // 8))
    data = b"".join([packer.compress(row * 64) for _ in range(height // 64)])
    data += packer.compress(row * (height % 64)) + packer.flush()
    palette = chunk(b"PLTE", bytes(3)) if colour == 3 else b""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + palette + chunk(b"IDAT", data) + chunk(b"IEND")


def with_size(content: bytes, place: int, form: str, width: int, height: int) -> bytes:
    return content[:place] + struct.pack(form, width, height) + content[place + struct.calcsize(form) :]


@functools.cache
def huge() -> dict[str, tuple[bytes, int, int]]:
    small = quad(64, 32)
    png, gif, bmp, jpeg, webp = (encoded(small, kind) for kind in ("PNG", "GIF", "BMP", "JPEG", "WEBP"))
    frame = jpeg.index(b"\xff\xc0") + 5
    extended = b"VP8X" + struct.pack("<IB3x", 10, 0) + (16383).to_bytes(3, "little") * 2
    return {
        "png": (with_size(png, 16, ">II", 2**31 - 1, 2**31 - 1), 2**31 - 1, 2**31 - 1),
        "png of one bit": (flat_png(30_000, 30_000), 30_000, 30_000),
        "png of a palette": (with_size(flat_png(64, 64, 8, 3), 16, ">II", 16384, 16384), 16384, 16384),
        "gif": (with_size(gif, 6, "<HH", 65535, 65535), 65535, 65535),
        "bmp": (with_size(bmp, 18, "<ii", 60000, -60000), 60000, 60000),
        "jpeg": (with_size(jpeg, frame, ">HH", 60000, 50000), 50000, 60000),
        "webp": (webp[:12] + extended + webp[12:], 16384, 16384),
        "just over": (with_size(png, 16, ">II", 12_000, 10_001), 12_000, 10_001),
    }


@pytest.mark.parametrize(
    "name", ["png", "png of one bit", "png of a palette", "gif", "bmp", "jpeg", "webp", "just over"]
)
def test_bombs_are_refused_from_the_header(name: str, no_decoder: None, tmp_path: Path) -> None:
    content, width, height = huge()[name]
    path = tmp_path / "bomb"
    path.write_bytes(content)
    for source in (content, path):
        for call in (open_picture, picture_size):
            with pytest.raises(ImageError) as caught:
                call(source)
            assert f"{width} x {height}" in caught.value.message
            assert "120000000" in caught.value.message or "65535" in caught.value.message


def test_pixels_within_ones_own_limit_are_decoded_whatever_pillow_thinks() -> None:
    """108 megapixels are over the size at which ``Image.open`` warns, and warnings are errors here."""
    content = flat_png(12_000, 9_000)
    assert len(content) < 100_000
    assert open_picture(content).size == (12_000, 9_000)
    with pytest.raises(ImageError, match=r"12000 x 9000 = 108000000 pixels, at most 1000000 are decoded"):
        open_picture(content, Limits(max_pixels=1_000_000))


def test_a_header_that_says_two_sizes() -> None:
    jpeg = encoded(quad(64, 32), "JPEG")
    start = jpeg.index(b"\xff\xc0")
    frame = jpeg[start : start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big")]
    large = with_size(frame, 5, ">HH", 60000, 60000)
    with pytest.raises(ImageError, match="the JPEG file is damaged: it has two frames"):
        open_picture(jpeg[:start] + frame + large + jpeg[start + len(frame) :])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0))
    with pytest.raises(ImageError, match="the PNG file is damaged: it has two headers"):
        open_picture(raw_png(1, 1, 8, 0, b"\0\0", before=header))


@pytest.mark.parametrize(("width", "height"), [(20_000, 1), (1, 20_000), (65_535, 1)])
def test_long_thin_pictures(width: int, height: int) -> None:
    content = encoded(Image.new("L", (width, height), 7))
    assert open_picture(content).size == picture_size(content) == (width, height)
    assert tokens_for("kimi-k2.5", width, height) == tokens_for("kimi-k3", width, height) == 256
    with pytest.raises(ImageError, match="Kimi-VL"):
        tokens_for("kimi-vl", width, height)


def test_limits_hold_for_every_source(tmp_path: Path) -> None:
    image = noise(30, 20)
    for limits, said in (
        (Limits(max_pixels=599), "30 x 20 = 600 pixels, at most 599"),
        (Limits(max_side=29), "30 x 20 pixels, at most 29 on a side"),
    ):
        for source in [*routes(image, tmp_path), image, np.asarray(image)]:
            for call in (open_picture, picture_size):
                with pytest.raises(ImageError, match=said):
                    call(source, limits)
    content = encoded(image)
    path = tmp_path / "a.png"
    path.write_bytes(content)
    small = Limits(max_bytes=len(content) - 1)
    for source in (content, bytearray(content), memoryview(content), path, str(path)):
        with pytest.raises(ImageError, match=rf"{len(content)} bytes, at most {len(content) - 1} are read"):
            open_picture(source, small)
    assert open_picture(content, Limits(max_bytes=len(content), max_pixels=600, max_side=30)).size == (30, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_bytes": 0},
        {"max_pixels": -1},
        {"max_side": 0},
        {"fetch_seconds": 0.0},
        {"fetch_seconds": float("nan")},
        {"max_redirects": -1},
    ],
)
def test_limits_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_pillows_settings_are_left_alone() -> None:
    code = (
        "from PIL import Image, ImageFile\n"
        "before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK\n"
        "import moonvit.images, moonvit.preprocess\n"
        "assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK)\n"
        "assert before[0] == 89478485\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    with pytest.raises(ImageError):
        open_picture(huge()["gif"][0])
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))


# ---- other formats --------------------------------------------------------------------------------------------------


@functools.cache
def others() -> dict[str, tuple[bytes, str]]:
    small = quad(64, 64)
    return {
        "tiff": (encoded(small, "TIFF"), "TIFF"),
        "ico": (encoded(small, "ICO", sizes=[(16, 16), (32, 32)]), "ICO"),
        "ppm": (encoded(small, "PPM"), "PPM"),
        "pgm": (encoded(small.convert("L"), "PPM"), "PGM"),
        "pbm": (encoded(small.convert("1"), "PPM"), "PBM"),
        "dds": (encoded(small, "DDS"), "DDS"),
        "icns": (b"icns" + bytes(60), "ICNS"),
        "psd": (b"8BPS\x00\x01" + bytes(60), "PSD"),
        "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "SVG is not a raster format"),
        "svg with a prolog": (
            b'\xef\xbb\xbf<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg/>',
            "SVG is not a raster format",
        ),
        "html": (b"\n <!DOCTYPE html><html>no</html>", "HTML"),
        "xml": (b"<?xml version='1.0'?><a/>", "XML"),
        "heic": (b"\x00\x00\x00\x18ftypheic" + bytes(60), "HEIC"),
        "avif": (b"\x00\x00\x00\x18ftypavif" + bytes(60), "AVIF"),
        "mp4": (b"\x00\x00\x00\x18ftypisom" + bytes(60), "MP4"),
        "webm": (b"\x1a\x45\xdf\xa3" + bytes(60), "WebM"),
        "wav": (b"RIFF\x24\x00\x00\x00WAVEfmt ", "the content"),
        "pdf": (b"%PDF-1.7\n", "PDF"),
        "jpeg xl": (b"\xff\x0a" + bytes(60), "JPEG XL"),
        "jpeg 2000": (encoded(small, "JPEG2000"), "JPEG 2000"),
        "zip": (b"PK\x03\x04" + bytes(60), "ZIP"),
        "text": (b"no picture at all", "the content"),
        "nothing much": (b"\0", "the content"),
    }


@pytest.mark.parametrize("name", sorted(others()))
def test_formats_that_are_not_read_are_named(name: str, no_decoder: None, tmp_path: Path) -> None:
    content, said = others()[name]
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    for source in (content, path, f"data:image/png;base64,{text}", f"data:image/x-icon;base64,{text}"):
        for call in (open_picture, picture_size):
            with pytest.raises(UnsupportedMediaError) as caught:
                call(source, index=2)
            assert said in caught.value.message
            assert caught.value.message.endswith("; send JPEG, PNG, WebP, GIF or BMP")
            assert caught.value.param == "images[2]"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("label", ["image/x-icon", "image/png", "text/plain", "image/svg+xml", ""])
def test_content_decides_and_not_the_label(kind: str, label: str) -> None:
    text = base64.b64encode(encoded(quad(64, 32), kind)).decode()
    assert open_picture(f"data:{label};base64,{text}").size == (64, 32)


def test_formats_are_known_by_their_first_bytes() -> None:
    names = {"JPEG": "JPEG", "PNG": "PNG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP"}
    for kind in FORMATS:
        assert detect(encoded(quad(8, 8), kind)) == names[kind]
    assert detect(b"") is None


# ---- identity -------------------------------------------------------------------------------------------------------


def test_a_digest_tells_pictures_apart() -> None:
    image = noise(512, 512)
    other = image.copy()
    other.putpixel((511, 511), (1, 2, 3))
    for kind in ("PNG", "BMP"):
        assert open_picture(encoded(image, kind)).digest != open_picture(encoded(other, kind)).digest
    assert open_picture(image).digest != open_picture(other).digest
    assert open_picture(image).digest == open_picture(image.copy()).digest == open_picture(np.asarray(image)).digest
    assert len(open_picture(image).digest) == len(open_picture(encoded(image)).digest) == 64


def test_a_digest_of_pixels_covers_what_they_mean() -> None:
    palette = noise(8, 8).convert("P")
    same_indices = palette.copy()
    same_indices.putpalette(bytes(768))
    keyed = palette.copy()
    keyed.info["transparency"] = 3
    grey = Image.new("L", (4, 8), 5)
    pictures = [palette, same_indices, keyed, grey, Image.new("L", (8, 4), 5), Image.new("P", (4, 8), 5)]
    assert len({open_picture(picture).digest for picture in pictures}) == len(pictures)


def test_no_collisions_among_many() -> None:
    assert len({open_picture(Image.new("RGB", (1, 1), (n >> 8, n & 255, 0))).digest for n in range(5000)}) == 5000
