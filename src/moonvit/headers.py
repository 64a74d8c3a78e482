"""What encoded bytes are, and how large the picture in them is, without a decoder.

Only what these functions accept reaches Pillow: the format decided by content, the size checked against the limits, and
JPEG and PNG stripped to what their pixels need, so that no profile, text, thumbnail or later frame is ever parsed.
"""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

READABLE = ("JPEG", "PNG", "WebP", "GIF", "BMP")
"""Formats that are read. Of an animation it is the picture a viewer without animation shows."""

_PNG = b"\x89PNG\r\n\x1a\n"
_MAGIC = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, _PNG, "PNG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (8, b"WEBP", "WebP"),
    (0, b"BM", "BMP"),
    (0, b"II*\x00", "TIFF"),
    (0, b"MM\x00*", "TIFF"),
    (0, b"II+\x00", "TIFF"),
    (0, b"MM\x00+", "TIFF"),
    (0, b"\x00\x00\x01\x00", "ICO"),
    (0, b"\x00\x00\x02\x00", "CUR"),
    (0, b"icns", "ICNS"),
    (0, b"8BPS", "PSD"),
    (0, b"DDS ", "DDS"),
    (0, b"qoif", "QOI"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (0, b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM video"),
    (8, b"AVI ", "AVI video"),
    (0, b"PK\x03\x04", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    *((0, b"P%d" % n + space, kind) for n, kind in ((1, "PBM"), (2, "PGM"), (3, "PPM")) for space in (b"\n", b" ")),
    *((0, b"P%d" % n + space, kind) for n, kind in ((4, "PBM"), (5, "PGM"), (6, "PPM")) for space in (b"\n", b" ")),
    (0, b"P7\n", "PAM"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"
)
_PIECES = 100_000
"""Segments, chunks or blocks that are walked over in one file."""
_JUNK = 65_536
"""Bytes between the segments of a JPEG that are skipped."""
_SCANS = 64
"""Scans of a JPEG, each of which goes over the whole picture; encoders make ten or so, 24 for four colours."""
_EXIF = 1 << 20
"""Bytes of Exif that are looked through."""
_ORIENTATION = 0x0112


class BrokenError(Exception):
    """The bytes are not what their first ones promise."""


class Header(NamedTuple):
    """What the header of a picture says.

    Attributes:
        format: One of ``READABLE``.
        width: Pixels as stored.
        height: Pixels as stored.
        orientation: Exif orientation, 1 to 8; 1 where there is none, or none that can be read.
        bits: Bits of a channel as stored; 8 for every format but PNG.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    bits: int = 8

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height once the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def detect(head: bytes) -> str | None:
    """Name a format by its first bytes.

    Args:
        head: The first 1,024 bytes, or all there are.

    Returns:
        One of ``READABLE``, the name of another format, or None.
    """
    for offset, magic, name in _MAGIC:
        if head.startswith(magic, offset) and (name not in ("WebP", "AVI video") or head.startswith(b"RIFF")):
            return name
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "MP4 or QuickTime video")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<"):
        if b"<svg" in text:
            return "SVG"
        return "HTML" if text.startswith((b"<!doctype html", b"<html")) else "XML"
    return None


def read_header(stream: BinaryIO, name: str) -> Header:
    """Read size and orientation.

    Args:
        stream: The encoded picture, seekable.
        name: Its format, one of ``READABLE``.

    Returns:
        The header; no side is zero.

    Raises:
        BrokenError: The header is cut short or makes no sense.
    """
    header = _READERS[name](stream)
    if header.width < 1 or header.height < 1:
        raise BrokenError(f"its header says {header.width} x {header.height} pixels")
    return header


def _take(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise BrokenError("it is cut short")
    return data


def exif_orientation(exif: bytes) -> int:
    r"""The orientation tag of an Exif block.

    Args:
        exif: A TIFF structure, with or without ``Exif\0\0`` before it.

    Returns:
        1 to 8; 1 where there is no such tag, or the block is damaged.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, place)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(order + {3: "H", 4: "I"}[kind], tiff, place + 8)
                return value if 1 <= value <= 8 else 1
    except (struct.error, KeyError):
        pass
    return 1


# ---- JPEG -----------------------------------------------------------------------------------------------------------

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
_NEEDED = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xE1), 0xEE})
"""Frames, tables, scans, and the two application segments that say how colours are stored."""
_LONG = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])", re.DOTALL)
"""Markers that end coded pixels. Those below them are refused or stepped over by decoders, their length unread."""


def _segments(stream: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment of a JPEG, up to the first scan."""
    stream.seek(2)
    skipped = 0
    for _ in range(_PIECES):
        byte = _take(stream, 1)
        while byte != b"\xff" or (byte := _take(stream, 1)) in (b"\xff", b"\0"):
            skipped += 1
            if skipped > _JUNK:
                raise BrokenError(f"more than {_JUNK} bytes between its segments")
            if byte != b"\xff":
                byte = _take(stream, 1)
        marker = byte[0]
        if marker in _BARE:
            continue
        if marker == _END:
            raise BrokenError("it ends before its picture")
        start = stream.tell() - 2
        (length,) = struct.unpack(">H", _take(stream, 2))
        if length < 2:
            raise BrokenError(f"a segment of {length} bytes")
        yield marker, start, start + 2 + length
        if marker == _SCAN:
            return
        stream.seek(start + 2 + length)
    raise BrokenError(f"more than {_PIECES} segments before its picture")


def _jpeg(stream: BinaryIO) -> Header:
    size: tuple[int, int] | None = None
    orientation: int | None = None
    for marker, start, end in _segments(stream):
        if marker in _FRAMES:
            if size is not None:
                raise BrokenError("it has two frames")
            _, height, width = struct.unpack(">BHH", _take(stream, 5))
            size = width, height
        elif marker == _APP1 and orientation is None:
            payload = stream.read(end - start - 4)
            if payload.startswith(b"Exif\0\0"):
                orientation = exif_orientation(payload)
    if size is None:
        raise BrokenError("it has no frame")
    return Header("JPEG", *size, orientation or 1)


def jpeg_pixels(stream: BinaryIO, content: bytes) -> bytes:
    """A JPEG without what its pixels do not need: Exif, profiles, thumbnails, comments.

    Args:
        stream: ``content`` as a stream.
        content: The whole file.

    Returns:
        The file with these segments cut out.

    Raises:
        BrokenError: The segments make no sense, or there are too many scans.
    """
    view = memoryview(content)
    kept: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, start, end in _segments(stream):
        if marker == _SCAN:
            scans = _scans(content, start)
            if scans > _SCANS:
                raise BrokenError(f"{scans} scans, at most {_SCANS} are decoded")
            kept.append(view[start:])
        elif marker in _NEEDED:
            kept.append(view[start:end])
    return b"".join(kept)


def _scans(content: bytes, place: int) -> int:
    """Scans from the first one on to the end of the picture; what follows it, such as a video, is not looked at."""
    scans = 0
    for _ in range(_PIECES):
        found = _LONG.search(content, place)
        if found is None or found[1][0] == _END:
            return scans
        scans += found[1][0] == _SCAN
        # Behind a marker comes a length, which may lead over an end that is none.
        place = found.end() + max(2, int.from_bytes(content[found.end() : found.end() + 2], "big"))
    raise BrokenError(f"more than {_PIECES} segments in its picture")


# ---- PNG ------------------------------------------------------------------------------------------------------------


def _chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and length of the data of each chunk of a PNG, IEND included."""
    place = len(_PNG)
    for _ in range(_PIECES):
        stream.seek(place)
        length, kind = struct.unpack(">I4s", _take(stream, 8))
        if not kind.isalpha() or length > 0x7FFFFFFF:
            raise BrokenError("a chunk makes no sense")
        yield kind, place + 8, length
        if kind == b"IEND":
            return
        place += 12 + length
    raise BrokenError(f"more than {_PIECES} chunks")


def _png(stream: BinaryIO) -> Header:
    stream.seek(len(_PNG))
    length, kind, width, height, bits = struct.unpack(">I4sIIB", _take(stream, 17))
    if kind != b"IHDR" or length != 13:
        raise BrokenError("it does not begin with its header")
    orientation = 1
    try:
        for kind, _, length in _chunks(stream):
            if kind == b"eXIf":
                orientation = exif_orientation(stream.read(min(length, _EXIF)))
                break
    except BrokenError:
        pass  # what comes after the header counts when the picture is decoded, not before
    return Header("PNG", width, height, orientation, bits)


def png_pixels(stream: BinaryIO, content: bytes) -> bytes:
    """A PNG without what its pixels do not need: text, profiles, Exif, animation frames.

    Args:
        stream: ``content`` as a stream.
        content: The whole file.

    Returns:
        Header, palette, transparency, data and end.

    Raises:
        BrokenError: It is cut short, or a checksum is wrong.
    """
    view = memoryview(content)
    kept: list[bytes | memoryview] = [_PNG]
    for number, (kind, start, length) in enumerate(_chunks(stream)):
        end = start + length + 4
        if end > len(content):
            raise BrokenError("it is cut short")
        if (kind == b"IHDR") != (number == 0):
            raise BrokenError("it has two headers" if number else "it does not begin with its header")
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            # Pillow checks no data checksum, and zlib's own comes after the last pixel.
            if struct.unpack(">I", view[end - 4 : end])[0] != zlib.crc32(view[start - 4 : end - 4]):
                raise BrokenError(f"the checksum of its {kind.decode()} chunk is wrong")
            kept.append(view[start - 8 : end])
        elif kind[:1].isupper():
            raise BrokenError(f"it needs {kind.decode()}, which is no part of PNG")
    return b"".join(kept)


# ---- WebP, GIF, BMP -------------------------------------------------------------------------------------------------


def _webp(stream: BinaryIO) -> Header:
    stream.seek(12)
    kind, _ = struct.unpack("<4sI", _take(stream, 8))
    if kind == b"VP8X":
        flags, *rest = _take(stream, 10)
        width, height = (rest[n] | rest[n + 1] << 8 | rest[n + 2] << 16 for n in (3, 6))
        return Header("WebP", width + 1, height + 1, _webp_orientation(stream) if flags & 8 else 1)
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack("<3x3sHH", _take(stream, 10))
        if start_code == b"\x9d\x01\x2a":
            return Header("WebP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        signature, packed = struct.unpack("<BI", _take(stream, 5))
        if signature == 0x2F:
            return Header("WebP", (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1)
    raise BrokenError("it does not begin with its header")


def _webp_orientation(stream: BinaryIO) -> int:
    place = 12
    for _ in range(_PIECES):
        stream.seek(place)
        head = stream.read(8)
        if len(head) < 8:
            return 1
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return exif_orientation(stream.read(min(length, _EXIF)))
        place += 8 + length + length % 2
    raise BrokenError(f"more than {_PIECES} chunks")


def _gif(stream: BinaryIO) -> Header:
    stream.seek(6)
    width, height, flags = struct.unpack("<HHBxx", _take(stream, 7))
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    pieces = itertools.count()
    while next(pieces) < _PIECES:
        stream.seek(place)
        kind = _take(stream, 1)
        if kind == b",":
            left, top, wide, high = struct.unpack("<HHHH", _take(stream, 8))
            return Header("GIF", max(width, left + wide), max(height, top + high))
        if kind == b"!":
            _take(stream, 1)
            while (length := _take(stream, 1)[0]) and next(pieces) < _PIECES:
                stream.seek(length, 1)
            place = stream.tell()
        elif kind == b";":
            raise BrokenError("it ends before its picture")
        else:
            place += 1  # stray bytes between blocks are skipped by every reader
    raise BrokenError(f"more than {_PIECES} blocks before its picture")


def _bmp(stream: BinaryIO) -> Header:
    stream.seek(14)
    (length,) = struct.unpack("<I", _take(stream, 4))
    width, height = struct.unpack("<HH" if length == 12 else "<ii", _take(stream, 4 if length == 12 else 8))
    return Header("BMP", width, abs(height))


_READERS = {"JPEG": _jpeg, "PNG": _png, "WebP": _webp, "GIF": _gif, "BMP": _bmp}
