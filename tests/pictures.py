"""Pictures made for tests, and everything one picture can come as."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from moonvit.images import Picture

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


def routes(image: Image.Image, folder: Path, kind: str = "PNG", **options: Any) -> Iterator[Any]:
    """One picture as everything it can come as."""
    content = encoded(image, kind, **options)
    path = folder / "picture"
    path.write_bytes(content)
    yield from (content, bytearray(content), memoryview(content), path, str(path))
    yield f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
    yield Image.open(io.BytesIO(content))
