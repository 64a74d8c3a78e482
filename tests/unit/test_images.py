"""Pictures from every source and of every kind: the right pixels, or a clear refusal before any work."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from moonvit.errors import ImageError, MediaFetchError, UnsupportedMediaError
from moonvit.images import MODES, open_picture, picture_size
from moonvit.preprocess import tokens_for
from tests.pictures import FORMATS, chunk, encoded, exif, noise, pixels, quad, raw_png, routes

# ---- sources --------------------------------------------------------------------------------------------------------


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
