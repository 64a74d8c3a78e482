"""Untrusted files: first frames only, damage and bombs refused by name before a decoder works, formats told apart."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin, WebPImagePlugin

from moonvit import images
from moonvit.errors import ConfigError, ImageError, UnsupportedMediaError
from moonvit.headers import detect
from moonvit.images import Limits, open_picture, picture_size
from moonvit.preprocess import tokens_for
from tests.pictures import FORMATS, chunk, encoded, exif, noise, pixels, quad, raw_png, routes

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
