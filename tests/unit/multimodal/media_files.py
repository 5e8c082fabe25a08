"""Helper of the media tests: files of images and videos as bytes, good ones and hostile ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from PIL import Image


def pixels(width: int, height: int, *, seed: int = 0) -> np.ndarray:
    """``[height, width, 3]`` uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(width: int = 8, height: int = 6, *, seed: int = 0) -> bytes:
    return saved(Image.fromarray(pixels(width, height, seed=seed)))


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header announces a size, and which has next to no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def bmp_header(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 64, 0, 0, 54) + info + bytes(64)


def gif_header(width: int, height: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    picture = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + picture + b"\x3b"


def animated(format: str, colours: Sequence[tuple[int, int, int]]) -> bytes:
    first, *others = (Image.new("RGB", (12, 10), colour) for colour in colours)
    options = {"lossless": True} if format == "WEBP" else {}
    return saved(first, format, save_all=True, append_images=others, duration=100, loop=0, **options)


def video(
    greys: Sequence[int],
    *,
    codec: str = "mpeg4",
    container: str = "mp4",
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
) -> bytes:
    """One plain frame for each grey value."""
    layout = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = layout
        for grey in greys:
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), grey, np.uint8), format="rgb24")
            output.mux(stream.encode(frame.reformat(format=layout)))
        output.mux(stream.encode())
    return file.getvalue()
