"""Pictures from anywhere to one upright ``Picture``: bytes, paths, URLs, PIL images, arrays. Every limit is held first.

JPEG, PNG, WebP, GIF and BMP are read; content decides, never a name or a label. Everything else is refused with the
name of its format. Sizes are checked from the header before a decoder sees the file. Pillow's process-wide settings are
not changed; one has its effect: a process that sets ``LOAD_TRUNCATED_IMAGES`` gets files that are cut short. Exif
orientation is applied; colour profiles are not, as in the official processors.

Pictures keep their own mode, since the resize rules differ by it, with these exceptions: 16 bits become 8 by their high
byte, and premultiplied modes become plain ones.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from moonvit.errors import ImageError, MediaFetchError, UnsupportedMediaError
from moonvit.headers import (
    READABLE,
    BrokenError,
    Header,
    detect,
    exif_orientation,
    jpeg_pixels,
    png_pixels,
    read_header,
)
from moonvit.sources import (
    DEFAULT_LIMITS,
    FetchPolicy,
    Limits,
    data_url_bytes,
    failure,
    fetch_bytes,
    is_address,
    is_data_url,
)

__all__ = [
    "DEFAULT_LIMITS",
    "FetchPolicy",
    "Limits",
    "Picture",
    "check_size",
    "data_url_bytes",
    "fetch_bytes",
    "open_picture",
    "picture_size",
]

MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})
"""Pillow modes of a ``Picture``."""

_PLUGINS: dict[str, Callable[[BinaryIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
}
_STRIPPED = {"JPEG": jpeg_pixels, "PNG": png_pixels}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PLAIN = {"La": "LA", "RGBa": "RGBA"}
_NO_EXIF = ("xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""Where Pillow looks for an orientation when there is no Exif, and viewers do not."""
_BAND = 64
"""Rows that are worked on at a time where numpy is needed: no second copy of a picture."""
_HEAD = 1024
_SAID = 100
"""Characters of a decoder's complaint that are passed on."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One decoded picture.

    Attributes:
        image: Upright, in one of ``MODES``. It may be the caller's own image where nothing had to change.
        size: Its width and height in pixels.
        content: sha256 of the encoded bytes it came from, None where there were none.
    """

    image: Image.Image
    size: tuple[int, int]
    content: str | None = None

    @cached_property
    def digest(self) -> str:
        """sha256 in hex, of the encoded bytes, or of mode, size and pixels where there are none.

        It names the content and nothing else: a cache key also needs the settings and the model.
        """
        return self.content or _pixel_digest(self.image)


def open_picture(
    source: Any,
    limits: Limits = DEFAULT_LIMITS,
    fetch: FetchPolicy | None = None,
    index: int = 0,
    *,
    allow_paths: bool = True,
) -> Picture:
    """Decode a picture, whatever it comes as.

    Args:
        source: Encoded bytes, a path, a ``data:`` or http(s) URL, a PIL image, or a uint8 array (H, W), (H, W, 3) or
            (H, W, 4). Of an animation the first frame is read and no other is decoded.
        limits: Bytes, pixels and side.
        fetch: Which hosts may be asked; None refuses http(s) addresses.
        index: Place of the picture in the request, for messages.
        allow_paths: Whether local files may be read; a server says no.

    Returns:
        The picture.

    Raises:
        UnsupportedMediaError: The content is of a format that is not read.
        MediaFetchError: An address may not be asked, or gave nothing.
        ImageError: It is damaged, over a limit, or nothing that a picture can be read from.
        MissingDependencyError: An address needs ``httpx``.
    """
    if isinstance(source, Image.Image):
        return _from_pil(source, limits, index)
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, index)
    content = _content(source, limits, fetch, index, allow_paths)
    return Picture(*_decode(content, limits, index), hashlib.sha256(content).hexdigest())


def picture_size(
    source: Any,
    limits: Limits = DEFAULT_LIMITS,
    index: int = 0,
    *,
    fetch: FetchPolicy | None = None,
    allow_paths: bool = True,
) -> tuple[int, int]:
    """Size of a picture from its header alone.

    Args:
        source: As ``open_picture`` takes it. Of a file only the header is read; an address is fetched whole.
        limits: Bytes, pixels and side.
        index: Place of the picture in the request, for messages.
        fetch: Which hosts may be asked; None refuses http(s) addresses.
        allow_paths: Whether local files may be read.

    Returns:
        Width and height in pixels, upright.

    Raises:
        UnsupportedMediaError: The content is of a format that is not read.
        MediaFetchError: An address may not be asked, or gave nothing.
        ImageError: The header is damaged, the picture is over a limit, or this is nothing a picture can be read from.
        MissingDependencyError: An address needs ``httpx``.
    """
    if isinstance(source, Image.Image):
        check_size(source.size, limits, index)
        if source.format == "TIFF":  # Pillow turns these itself, and forgets that it did, when it decodes them
            _load(source, index)
        width, height = source.size
        return (height, width) if _pil_orientation(source) >= 5 else (width, height)
    if isinstance(source, np.ndarray):
        return _array_size(source, limits, index)
    if _is_path(source):
        with _open_file(source, limits, index, allow_paths) as stream:
            return _header(stream, limits, index).upright
    content = _content(source, limits, fetch, index, allow_paths)
    return _header(io.BytesIO(content), limits, index).upright


# ---- encoded pictures -----------------------------------------------------------------------------------------------


def _is_path(source: Any) -> bool:
    if isinstance(source, str):
        return not is_data_url(source) and not is_address(source)
    return isinstance(source, os.PathLike)


def _content(source: Any, limits: Limits, fetch: FetchPolicy | None, index: int, allow_paths: bool) -> bytes:
    """The encoded bytes of anything that has some."""
    if _is_path(source):
        with _open_file(source, limits, index, allow_paths) as stream:
            try:
                content = stream.read(limits.max_bytes + 1)
            except OSError as error:
                raise failure(ImageError, index, f"the file cannot be read: {error.strerror or error}") from None
    elif isinstance(source, str):
        if is_data_url(source):
            return data_url_bytes(source, limits, index)
        return fetch_bytes(source, fetch, limits, index)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        size = memoryview(source).nbytes
        if size > limits.max_bytes:
            raise failure(ImageError, index, f"{size} bytes, at most {limits.max_bytes} are read")
        content = bytes(source)
    else:
        raise failure(
            ImageError,
            index,
            f"a picture cannot be read from {type(source).__name__}; give bytes, a path, a URL, a PIL image or a uint8 "
            "array",
        )
    if len(content) > limits.max_bytes:
        raise failure(ImageError, index, f"more than {limits.max_bytes} bytes")
    if not content:
        raise failure(ImageError, index, "there are no bytes in it")
    return content


def _open_file(source: Any, limits: Limits, index: int, allow_paths: bool) -> BinaryIO:
    if not allow_paths:
        raise failure(MediaFetchError, index, "local files are not read here; send a data: URL or an address")
    name = os.fsdecode(source)[:200]
    try:
        # Opening a pipe would wait for its other end.
        if not stat.S_ISREG(os.stat(source).st_mode):
            raise failure(ImageError, index, f"{name!r} is not a file")
        stream = open(source, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise failure(ImageError, index, f"{name!r} cannot be read: {reason}") from None
    size = os.fstat(stream.fileno()).st_size
    if size > limits.max_bytes:
        stream.close()
        raise failure(ImageError, index, f"{name!r} has {size} bytes, at most {limits.max_bytes} are read")
    return stream


def _header(stream: BinaryIO, limits: Limits, index: int) -> Header:
    """Format, size and orientation, within the limits."""
    stream.seek(0)
    head = stream.read(_HEAD)
    name = detect(head)
    if name not in READABLE or name is None:
        listed = f"{', '.join(READABLE[:-1])} or {READABLE[-1]}"
        what = "SVG is not a raster format" if name == "SVG" else f"{name or 'the content'} cannot be read as a picture"
        raise failure(UnsupportedMediaError, index, f"{what}; send {listed}")
    try:
        header = read_header(stream, name)
    except BrokenError as error:
        raise failure(ImageError, index, f"the {name} file is damaged: {error}") from None
    check_size((header.width, header.height), limits, index)
    return header


def check_size(size: tuple[int, int], limits: Limits = DEFAULT_LIMITS, index: int = 0) -> None:
    """Refuse a size that no picture may have.

    Args:
        size: Width and height in pixels.
        limits: Pixels and side.
        index: Place of the picture in the request, for messages.

    Raises:
        ImageError: It is over a limit.
    """
    width, height = size
    if max(size) > limits.max_side:
        raise failure(ImageError, index, f"{width} x {height} pixels, at most {limits.max_side} on a side are read")
    if width * height > limits.max_pixels:
        raise failure(
            ImageError, index, f"{width} x {height} = {width * height} pixels, at most {limits.max_pixels} are decoded"
        )


def _decode(content: bytes, limits: Limits, index: int) -> tuple[Image.Image, tuple[int, int]]:
    stream = io.BytesIO(content)
    header = _header(stream, limits, index)
    try:
        strip = _STRIPPED.get(header.format)
        encoded = io.BytesIO(strip(stream, content) if strip else content)
        # The plugin and not Image.open: that warns, or not, by a setting of the whole process.
        opened = _PLUGINS[header.format](encoded)
        if opened.size != (header.width, header.height):
            raise BrokenError("it contradicts itself about its size")
        opened.load()
        image = _reduced(opened, header.bits)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly everything
        raise failure(ImageError, index, f"the {header.format} file is damaged: {str(error)[:_SAID]}") from None
    image = _turned(_allowed(image, index), header.orientation)
    return image, image.size


def _reduced(image: Image.Image, bits: int) -> Image.Image:
    """A plain image of 8 bits, without the file and the decoder behind it."""
    if bits == 16 and image.mode == "I;16":
        return _high_bytes(image)
    plain = image._new(image.im)
    key = image.info.get("transparency")
    # Pillow scales pixels of fewer or more bits to 8, but not the colour that stands for transparency.
    if isinstance(key, int) and image.mode == "L" and bits < 8:
        key = key * 255 // ((1 << bits) - 1)
    elif isinstance(key, tuple) and bits == 16:
        key = tuple(value >> 8 for value in key)
    plain.info = {} if key is None else {"transparency": key}
    return plain


def _high_bytes(image: Image.Image) -> Image.Image:
    """16-bit grey to 8 bits, and to alpha where one grey stands for transparency."""
    key = image.info.get("transparency")
    result = Image.new("L" if key is None else "LA", image.size)
    width, height = image.size
    for top in range(0, height, _BAND):
        grey = np.asarray(image.crop((0, top, width, min(top + _BAND, height))))
        band = Image.fromarray((grey >> 8).astype(np.uint8))
        if key is not None:
            band = Image.merge("LA", (band, Image.fromarray(np.where(grey == key, 0, 255).astype(np.uint8))))
        result.paste(band, (0, top))
    return result


def _allowed(image: Image.Image, index: int) -> Image.Image:
    if image.mode in _PLAIN:
        return image.convert(_PLAIN[image.mode])
    if image.mode.startswith("I;16"):
        return _high_bytes(image)
    if image.mode not in MODES:
        # I and F have no fixed range of values, LAB no fixed meaning: what they show is not guessed.
        raise failure(
            ImageError, index, f"pictures of mode {image.mode} are not read; convert it to RGB, L or I;16 first"
        )
    return image


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    if turn is None:
        return image
    upright = image.transpose(turn)
    # An orientation tag that stayed behind would turn it again.
    upright.info = {key: value for key, value in image.info.items() if key == "transparency"}
    return upright


# ---- pictures that are decoded already ------------------------------------------------------------------------------


def _pil_orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # damaged Exif is no reason to refuse a picture
        return 1
    if any(key in image.info for key in _NO_EXIF):
        exif = image.info.get("exif")
        return exif_orientation(exif) if isinstance(exif, bytes) else 1
    return value if value in _TURNS else 1


def _from_pil(source: Image.Image, limits: Limits, index: int) -> Picture:
    check_size(source.size, limits, index)
    if min(source.size) < 1:
        raise failure(ImageError, index, f"{source.width} x {source.height} pixels: a side must be at least 1")
    _load(source, index)
    image = _turned(_allowed(source, index), _pil_orientation(source))
    return Picture(image, image.size)


def _load(image: Image.Image, index: int) -> None:
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly everything
        raise failure(ImageError, index, f"the picture cannot be decoded: {str(error)[:_SAID]}") from None


def _array_size(array: np.ndarray[Any, Any], limits: Limits, index: int) -> tuple[int, int]:
    shape = array.shape
    if array.dtype != np.uint8 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        raise failure(
            ImageError,
            index,
            f"an array of shape {shape} and dtype {array.dtype}: expected uint8 (H, W), (H, W, 3) or (H, W, 4); "
            "the layout is not guessed",
        )
    if 0 in shape:
        raise failure(ImageError, index, f"an array of shape {shape} holds no pixels")
    size = shape[1], shape[0]
    check_size(size, limits, index)
    return size


def _from_array(array: np.ndarray[Any, Any], limits: Limits, index: int) -> Picture:
    size = _array_size(array, limits, index)
    image = Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    return Picture(image, size)


def _pixel_digest(image: Image.Image) -> str:
    key = image.info.get("transparency")
    digest = hashlib.sha256(repr((image.mode, image.size, key)).encode())
    palette = image.getpalette("RGBA") if image.mode in ("P", "PA") else None
    digest.update(bytes(palette or ()))
    width, height = image.size
    for top in range(0, height, _BAND):
        digest.update(image.crop((0, top, width, min(top + _BAND, height))).tobytes())
    return digest.hexdigest()
