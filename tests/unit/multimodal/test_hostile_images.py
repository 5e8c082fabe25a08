"""Image files of every kind become upright RGB; broken and huge ones a ``RequestError`` before they cost."""

from __future__ import annotations

import io
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import animated, bmp_header, gif_header, pixels, png, png_header, saved
from PIL import Image

from gapless.errors import ConfigError, RequestError
from gapless.multimodal.images import decode_image, to_rgb
from gapless.multimodal.limits import MediaLimits
from gapless.multimodal.loading import open_image


def decoded(image: Image.Image, format: str = "PNG", **options: object) -> np.ndarray:
    return np.asarray(decode_image(saved(image, format, **options)))


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_give_the_pixels_back(format):
    values = pixels(13, 7)
    np.testing.assert_array_equal(decoded(Image.fromarray(values), format), values)


@pytest.mark.parametrize(("format", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"quality": 95})])
def test_lossy_formats_give_nearly_the_pixels_back(format, options):
    values = np.full((16, 16, 3), (200, 100, 50), np.uint8)
    found = decoded(Image.fromarray(values), format, **options).astype(int)
    assert np.abs(found - values).max() <= 6


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "I;16", "F", "YCbCr"])
def test_every_mode_becomes_8_bit_rgb(mode):
    image = Image.new("RGB", (5, 4), (255, 255, 255))
    if mode in ("I", "I;16", "F"):
        image = Image.new(mode, (5, 4), 65535 if mode == "I;16" else 255)
    else:
        image = image.convert(mode)
    format = "TIFF" if mode in ("F", "I", "CMYK", "YCbCr") else "PNG"
    found = decode_image(saved(image, format))
    assert found.mode == "RGB"
    assert found.size == (5, 4)
    if mode != "I":  # 255 of 65535 is nearly black
        assert np.asarray(found).min() >= 254


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(0, 0), (257, 1), (32896, 128), (65535, 255)],
)
def test_sixteen_bits_are_scaled_not_cut(stored, expected):
    image = Image.fromarray(np.full((3, 3), stored, np.uint16))
    assert (decoded(image) == expected).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_many_wide_pixels_are_scaled_a_few_at_a_time(dtype):
    """A file of a few kilobytes may hold 64 million; as float64, several times over, they were gigabytes."""
    values = np.arange(3000 * 1000, dtype=np.uint32).reshape(3000, 1000) % 65536
    image = Image.fromarray(values.astype(dtype))
    tracemalloc.start()
    try:
        found = to_rgb(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * values.size
    factor = 257 if dtype is np.uint16 else 65535 / 255
    assert (np.asarray(found)[:, :, 0] == np.rint(values / factor)).all()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, (0, 255)), (0.0, 200.0, (0, 200)), (-5.0, 5.0, (0, 255)), (0.0, 1e6, (0, 255))],
)
def test_floats_are_scaled_by_their_range(low, high, expected):
    found = decoded(Image.fromarray(np.array([[low, high]], np.float32)), "TIFF")
    assert (found[0, 0, 0], found[0, 1, 0]) == expected


def test_a_flat_image_of_strange_floats_is_black():
    assert not decoded(Image.fromarray(np.full((2, 2), -7.0, np.float32)), "TIFF").any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_that_are_no_numbers_are_refused(value):
    data = saved(Image.fromarray(np.array([[0.0, value]], np.float32)), "TIFF")
    with pytest.raises(RequestError, match="not finite numbers"):
        decode_image(data)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white(mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    assert (decoded(image) == 255).all()


def test_a_transparent_palette_entry_is_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    found = decode_image(saved(image, transparency=0))
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((1, 0)) == (200, 100, 0)


def test_half_transparent_is_half_way_to_white():
    found = decoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))
    assert np.abs(found.astype(int) - 127).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_orientation_is_applied(orientation):
    upright = Image.fromarray(pixels(5, 3))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_image(saved(stored, exif=exif))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(upright))


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_that_does_not_exist_means_as_stored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decode_image(saved(Image.fromarray(pixels(5, 3)), exif=exif)).size == (5, 3)


def test_a_broken_exif_block_does_not_lose_the_picture():
    data = saved(Image.fromarray(pixels(5, 3)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert decode_image(data).size == (5, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_of_an_animation_the_first_picture_counts(format):
    found = decode_image(animated(format, [(200, 0, 0), (0, 200, 0), (0, 0, 200)]))
    red, green, blue = found.getpixel((3, 3))
    assert red > 190
    assert max(green, blue) < 10


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (3, 600)])
def test_small_and_narrow_images_are_taken(size):
    assert decode_image(png(*size)).size == size


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (2, 402 + 1)])
def test_extreme_aspect_ratios_are_refused(size):
    with pytest.raises(RequestError, match=rf"{size[0]} x {size[1]} pixels, one side over 200 times"):
        decode_image(png(*size))


@pytest.mark.parametrize(
    "bomb",
    [
        *(png_header(20_000, 20_000), png_header(2**31 - 1, 2**31 - 1), png_header(9_000, 9_000)),
        *(bmp_header(12_000, 12_000), gif_header(60_000, 60_000), gif_header(65_535, 65_535)),
    ],
    ids=["png", "png_largest", "png_over_ours", "bmp", "gif", "gif_largest"],
)
def test_a_bomb_is_refused_by_its_header(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="pixels"):
            decode_image(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_the_limits_of_pixels_and_bytes_are_exact():
    data = png(10, 10)
    assert decode_image(data, limits=MediaLimits(max_image_pixels=100)).size == (10, 10)
    with pytest.raises(RequestError, match=r"10 x 10 pixels, the limit is 99 in all.*--max-image-pixels"):
        decode_image(data, limits=MediaLimits(max_image_pixels=99))
    assert decode_image(data, limits=MediaLimits(max_image_bytes=len(data))).size == (10, 10)
    with pytest.raises(RequestError, match=rf"{len(data)} bytes, the limit is {len(data) - 1}"):
        decode_image(data, limits=MediaLimits(max_image_bytes=len(data) - 1))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_truncated_files_are_refused(format, share):
    data = saved(Image.fromarray(pixels(40, 40)), format)
    with pytest.raises(RequestError, match="image"):
        decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no bytes"),
        (b"\x89PNG\r\n\x1a\n", "broken|no image"),
        (b"not an image at all", "no image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG is a drawing"),
        (b"<?xml version='1.0'?><svg/>", "SVG is a drawing"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),
        (b"%PDF-1.7\n", "no image that can be read"),
        (b"P6 4 4 255\n" + bytes(48), "no image that can be read"),
        (b"GIF89a" + bytes(7), "image"),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 " + bytes(8), "image"),
        (b"BM" + bytes(60), "image"),
        (b"II*\x00" + struct.pack("<I", 2**32 - 1), "image"),
    ],
)
def test_what_is_no_image_is_refused(data, message):
    with pytest.raises(RequestError, match=message):
        decode_image(data)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=12),
    st.integers(0, 10**6),
)
def test_any_damage_gives_an_image_or_a_request_error(format, changes, cut):
    data = bytearray(saved(Image.fromarray(pixels(9, 9)), format))
    for position, value in changes:
        data[position % len(data)] = value
    try:
        image = decode_image(bytes(data[: len(data) - cut % 30]))
    except RequestError:
        return
    assert image.mode == "RGB"
    image.tobytes()


def test_threads_decode_at_the_same_time():
    files = {seed: png(30, 20, seed=seed) for seed in range(8)}
    found: dict[int, np.ndarray] = {}

    def work(seed: int) -> None:
        for _ in range(5):
            found[seed] = np.asarray(decode_image(files[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in files:
        np.testing.assert_array_equal(found[seed], pixels(30, 20, seed=seed))


def test_a_program_passes_images_in_many_forms(tmp_path):
    values = pixels(6, 5)
    data = saved(Image.fromarray(values))
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    for source in (values, Image.fromarray(values), data, path, str(path)):
        np.testing.assert_array_equal(np.asarray(open_image(source)), values)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/file.png", "cannot be read"),
        ("/", "is no file"),
        (3, "int is no image"),
        (np.zeros((4, 4), np.uint8), r"shape \(4, 4\) and type uint8 is no image"),
        (np.zeros((4, 4, 3)), "type float64 is no image"),
        (np.zeros((0, 4, 3), np.uint8), "0 pixels|no image|at least"),
    ],
)
def test_forms_that_are_no_image_are_refused(source, message):
    with pytest.raises(RequestError, match=message):
        open_image(source)


def test_the_callers_image_is_left_as_it_was():
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert to_rgb(image).getpixel((0, 0)) == (255, 255, 255)
    assert image.mode == "RGBA"
    plain = Image.new("RGB", (4, 4))
    assert to_rgb(plain) is plain, "megabytes need no copy that nobody writes to"


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_opened_file_that_is_cut_short_and_a_closed_image_are_said_to_be_that(mode):
    whole = saved(Image.fromarray(pixels(64, 64)).convert(mode), "PNG")
    with (
        Image.open(io.BytesIO(whole[: len(whole) // 2])) as image,
        pytest.raises(RequestError, match=r"^image 2: the image cannot be read \(image file is truncated"),
    ):
        open_image(image, name="image 2")
    closed = Image.new(mode, (4, 4))
    closed.close()
    with pytest.raises(RequestError, match=r"^image: the image cannot be read \(.* closed image\)"):
        open_image(closed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_image_pixels", 0), ("max_image_pixels", 89_478_486), ("max_image_bytes", -1)),
        *(("max_aspect_ratio", 201), ("max_video_frames", True), ("max_video_seconds", 1.5)),
    ],
)
def test_limits_are_checked_when_made(field, value):
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        MediaLimits(**{field: value})
