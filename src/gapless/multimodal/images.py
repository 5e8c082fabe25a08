"""Bytes of an image file to an RGB image, or a refusal that says what is wrong.

Only formats of ``FORMATS`` are tried, by their contents: neither a name nor a declared type decides, and no
program is run over what came (PostScript, SVG). The size in the header is judged before a pixel is decoded.
Whatever a file holds becomes upright 8-bit RGB: palettes and CMYK converted, transparency laid over white, 16
bits and floats scaled down, the camera's orientation applied, of an animation the first picture. Safe to call
from many threads: nothing here is shared. Read ``loading.py`` for where bytes come from.
"""

from __future__ import annotations

import io
import math
import struct

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from gapless.errors import RequestError
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits

# Imported by name, so that Pillow's table of formats is complete before the first thread asks.
_PLUGINS = (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PIXELS_AT_ONCE = 1 << 20
_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""From how the camera was held (EXIF) to what makes the picture upright."""
_BROKEN = (
    *(OSError, SyntaxError, ValueError, struct.error, EOFError, KeyError, IndexError, TypeError),
    *(OverflowError, AttributeError, ZeroDivisionError, AssertionError, NotImplementedError),
)
"""What Pillow raises for broken files: the first two for most, the others out of its parsers."""


def decode_image(data: bytes, *, limits: MediaLimits = DEFAULT_LIMITS, name: str = "image") -> Image.Image:
    """``name`` begins every error. Raises ``RequestError``."""
    if not data:
        raise RequestError(f"{name}: it has no bytes")
    if len(data) > limits.max_image_bytes:
        raise RequestError(
            f"{name}: it has {len(data)} bytes, the limit is {limits.max_image_bytes}; send a smaller file, "
            "or raise the server's --max-image-bytes"
        )
    with _opened(data, name) as image:
        _check_size(image.size, limits, name)
        try:
            image.load()
        except Image.DecompressionBombError:
            raise _too_many_pixels(name, image.size, limits) from None
        except MemoryError:
            raise RequestError(f"{name}: there is not enough memory to decode it") from None
        except _BROKEN as error:
            raise RequestError(
                f"{name}: the {image.format} file is broken or cut short ({_line(error)})"
            ) from None
        return to_rgb(image, limits=limits, name=name)


def to_rgb(image: Image.Image, *, limits: MediaLimits = DEFAULT_LIMITS, name: str = "image") -> Image.Image:
    """An upright RGB image of an opened one: that itself where it is all this and has no file. Raises
    ``RequestError``."""
    _check_size(image.size, limits, name)
    turn = _TURNS.get(_orientation(image))
    try:
        image.load()  # what the caller's own program has only opened
    except _BROKEN as error:
        raise RequestError(f"{name}: the image cannot be read ({_line(error)})") from None
    try:
        rgb = _converted(image, name)
    except RequestError:
        raise
    except _BROKEN as error:
        raise RequestError(
            f"{name}: an image of mode {image.mode} cannot be turned into RGB ({_line(error)}); "
            "save it as 8-bit RGB"
        ) from None
    return rgb if turn is None else rgb.transpose(turn)


def from_pixels(pixels_HWC: np.ndarray) -> Image.Image:
    """An RGB image of 8-bit pixels."""
    return Image.fromarray(pixels_HWC)


def _opened(data: bytes, name: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise RequestError(
            f"{name}: its header announces more than {2 * Image.MAX_IMAGE_PIXELS} pixels; "  # type: ignore[operator]
            "send a smaller image"
        ) from None
    except _BROKEN as error:
        head = data[:256].lstrip().lower()
        if head.startswith((b"<svg", b"<?xml")) or b"<svg" in head:
            raise RequestError(f"{name}: SVG is a drawing, not pixels; send it as PNG") from None
        if isinstance(error, Image.UnidentifiedImageError):
            formats = ", ".join(FORMATS)
            raise RequestError(f"{name}: these bytes are no image that can be read ({formats})") from None
        raise RequestError(f"{name}: the file is broken ({_line(error)})") from None


def _check_size(size: tuple[int, int], limits: MediaLimits, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{name}: it is {width} x {height} pixels; at least 1 x 1 is needed")
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(name, size, limits)
    if max(size) > limits.max_aspect_ratio * min(size):
        raise RequestError(
            f"{name}: it is {width} x {height} pixels, one side over {limits.max_aspect_ratio} times the "
            "other; crop it"
        )


def _too_many_pixels(name: str, size: tuple[int, int], limits: MediaLimits) -> RequestError:
    return RequestError(
        f"{name}: it is {size[0]} x {size[1]} pixels, the limit is {limits.max_image_pixels} in all; scale "
        "it down, or raise the server's --max-image-pixels"
    )


def _orientation(image: Image.Image) -> int:
    """1 (as stored) where there is none or its block cannot be read: browsers show such pictures, too."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _BROKEN:
        return 1
    return value if isinstance(value, int) else 1


def _converted(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_as_bytes(np.asarray(image), name)).convert("RGB")
    if image.has_transparency_data:
        pixels = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, pixels).convert("RGB")
    if image.mode == "RGB":
        return image if type(image) is Image.Image else image.copy()
    return image.convert("RGB")


def _as_bytes(values_HW: np.ndarray, name: str) -> np.ndarray:
    """Grey values of another range as 0 to 255.

    Integers up to 65535 are 16-bit, whatever wider type they come in. Floats from 0 to 1 are shares, up to
    255 grey values; of any other range the lowest becomes black and the highest white.
    """
    is_float = values_HW.dtype.kind == "f"
    low, high = float(values_HW.min()), float(values_HW.max())
    if not (math.isfinite(low) and math.isfinite(high)):  # NaN anywhere makes both NaN
        raise RequestError(f"{name}: it has pixels that are not finite numbers; save it as 8-bit RGB")
    if low < 0 or high > (255 if is_float else 65535):
        first, scale = low, 255 / (high - low) if high > low else 0.0
    elif is_float:
        first, scale = 0.0, 255.0 if high <= 1 else 1.0
    else:
        first, scale = 0.0, 1 / 257
    grey_HW = np.empty(values_HW.shape, np.uint8)
    rows = max(1, _PIXELS_AT_ONCE // values_HW.shape[1])
    for start in range(0, len(values_HW), rows):  # a file of a few kilobytes may hold 64 million pixels
        band = slice(start, start + rows)
        grey_HW[band] = np.rint((values_HW[band].astype(np.float64) - first) * scale)
    return grey_HW


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:119] + "…"
