"""Image files that cost a decoder more than they pay for: their metadata never reaches it, the rest is refused or an image."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import ImageLimits, ImageProcessorConfig
from pdserve.text.images.bare_image import MAX_PARTS, MAX_SCANS, bare_image
from pdserve.text.images.chat_images import ImageSource
from pdserve.text.images.image_processor import ImageProcessor
from tests.support.inputs.hostile_images import (
    HEIGHT,
    WIDTH,
    chunk,
    exif_of,
    jpeg_with,
    photo,
    png_with,
    progressive,
    saved,
    segment,
    url_of,
)
from tests.support.run.process_memory import TracedMemory

MAX_PIXELS = 10_000
UPRIGHT = 1
TURNED_RIGHT = 6


def processor() -> ImageProcessor:
    config = ImageProcessorConfig(patch_size=4, min_pixels=64, max_pixels=4096)
    return ImageProcessor(config, 5, ImageLimits(MAX_PIXELS))


def rgb_of(data: bytes) -> np.ndarray:
    """`[H, W, 3]`: what a model gets. Raises: InvalidRequest."""
    [image] = processor().process_all([ImageSource("image", url_of(data))], "messages")
    _, height, width = image.grid_thw
    return np.frombuffer(image.data, np.uint8).reshape(height * 4, width * 4, 3)


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as refused:
        rgb_of(data)
    assert refused.value.field == "messages"
    return refused.value.message


def is_near(pixel: np.ndarray, *colour: int) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() < 24)


def check_photo(data: bytes) -> None:
    seen = rgb_of(data)
    assert seen.shape == (HEIGHT, WIDTH, 3)
    assert is_near(seen[12, 4], 255, 0, 0)
    assert is_near(seen[12, -4], 0, 0, 255)


EXIF = exif_of((0x0112, 3, 1, TURNED_RIGHT))
METADATA: list[tuple[str, bytes, bytes]] = [
    ("comments", jpeg_with(*[segment(0xFE, b"x" * 90)] * 9000), jpeg_with()),
    # Pillow would join its parts, each time all of them
    ("exif-parts", jpeg_with(*[segment(0xE1, b"Exif\0\0" + bytes(9))] * 16_000), jpeg_with()),
    ("profiles", jpeg_with(*[segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))] * 40), jpeg_with()),
    # a preview has scans and an end of its own
    ("preview", jpeg_with(segment(0xE1, b"Exif\0\0" + EXIF[:8] + saved("JPEG") * 5)), jpeg_with()),
    ("trailer", jpeg_with() + b"\xff\xda\xff\xd9" * 9000, jpeg_with()),
    ("texts", png_with(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 16)))] * 9000), png_with()),
    ("private", png_with(*[chunk(b"prVt", b"")] * 16_000), png_with()),
    ("header-again", png_with(chunk(b"IHDR", struct.pack(">IIBBBBB", 1 << 16, 1 << 16, 8, 2, 0, 0, 0))), png_with()),
    ("after-pixels", png_with(image=saved("PNG")[:-12] + chunk(b"prVt", bytes(99)) * 9000), png_with()),
    ("gif-comments", saved("GIF")[:-1].replace(b",", b"!\xfe" + (b"\xff" + b"x" * 255) * 9000 + b"\0,", 1), b""),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("data", "plain"), [case[1:] for case in METADATA], ids=[case[0] for case in METADATA])
def test_metadata_never_reaches_the_decoder(data: bytes, plain: bytes) -> None:
    with TracedMemory() as memory:
        bare = bare_image(data)
        assert memory.peak_bytes < 2 * len(data) + (4 << 20)
    assert bare.data == bare_image(plain or saved("GIF")[:-1]).data
    assert bare.num_scans == 1
    check_photo(data)


def test_frames_after_the_first_and_its_control_block() -> None:
    frames = [photo(), Image.new("RGB", (WIDTH, HEIGHT), "green")]
    animated = saved("PNG", frames[0], save_all=True, append_images=frames[1:], duration=50)
    assert b"acTL" in animated
    assert bare_image(animated).data == bare_image(png_with()).data
    clear = Image.new("P", (WIDTH, HEIGHT), 0)
    clear.putpalette([9, 9, 9, 200, 10, 10])
    clear.paste(1, (0, 0, WIDTH // 2, HEIGHT))
    for kind in ("GIF", "PNG"):
        seen = rgb_of(saved(kind, clear, transparency=0))
        assert is_near(seen[12, 4], 200, 10, 10), kind
        assert is_near(seen[12, -4], 255, 255, 255), kind
    half = clear.copy()
    seen = rgb_of(saved("PNG", half, transparency=bytes((128, 255))))
    assert is_near(seen[12, -4], 132, 132, 132)


def test_more_parts_than_are_walked_over() -> None:
    too_many = MAX_PARTS + 1
    gif = saved("GIF")
    # where the first frame begins
    head = bare_image(gif).data.index(b",")
    cases = [
        (jpeg_with(*[segment(0xFE, b"")] * too_many), "segments"),
        (jpeg_with(b"\xff" * too_many), "segments"),
        (png_with(*[chunk(b"IDAT", b"")] * too_many), "chunks"),
        (gif[:head] + b"!\xfe\0" * too_many + gif[head:], "blocks before its first frame"),
        (gif[:head] + b"!\xfe" + b"\1x" * too_many + b"\0" + gif[head:], "blocks before its first frame"),
        (gif[:head] + bytes(too_many) + gif[head:], "blocks before its first frame"),
    ]
    for data, parts in cases:
        assert refusal(data) == f"image has more than {MAX_PARTS} {parts}"


def test_scans_that_would_be_decoded_for_hours() -> None:
    found = bare_image(progressive(40, 24, 0))
    assert 3 < found.num_scans < 12
    assert bare_image(progressive(40, 24, 5)).num_scans == found.num_scans + 5
    assert rgb_of(progressive(40, 24, 20)).shape == (24, 40, 3)
    told = refusal(progressive(40, 24, MAX_SCANS))
    assert f"scans of 40 x 24 pixels; at most {MAX_SCANS} scans, of {16 * MAX_PIXELS} pixels together" in told
    # the largest image has 16 at most
    assert rgb_of(progressive(100, 100, 2)).shape[0] > 50
    assert "scans of 100 x 100 pixels" in refusal(progressive(100, 100, 16))


ORIENTATIONS: list[tuple[bytes, int]] = [
    (EXIF, TURNED_RIGHT),
    (exif_of((0x0112, 3, 1, 3), order=">"), 3),
    (exif_of((0x0112, 4, 1, 8), order=">"), 8),
    (exif_of((0x0110, 2, 9, 5000), (0x0112, 3, 1, 5)), 5),
    (b"", UPRIGHT),
    (b"II*\0", UPRIGHT),
    (b"??*\0" + EXIF[4:], UPRIGHT),
    (exif_of((0x0112, 3, 1, 0)), UPRIGHT),
    (exif_of((0x0112, 3, 1, 9)), UPRIGHT),
    (exif_of((0x0112, 3, 2, 6)), UPRIGHT),
    (exif_of((0x0112, 5, 1, 6)), UPRIGHT),
    (exif_of((0x0112, 3, 1, 6), first=1 << 31), UPRIGHT),
    (exif_of((0x0112, 3, 1, 6), first=9), UPRIGHT),
    # says more entries than there are
    (EXIF[:8] + b"\xff\xff" + EXIF[10:12], UPRIGHT),
    (exif_of(*[(tag, 7, 1 << 30, 8) for tag in range(0x8000, 0x9000)]), UPRIGHT),
]


@pytest.mark.parametrize(("exif", "expected"), ORIENTATIONS, ids=range(len(ORIENTATIONS)))
def test_orientation_alone_is_read_of_exif_data(exif: bytes, expected: int) -> None:
    webp = saved("WEBP", lossless=True)
    canvas = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    parts = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x08\0\0\0" + canvas + webp[12:]
    parts += b"EXIF" + struct.pack("<I", len(exif)) + exif + bytes(len(exif) & 1)
    files = [
        jpeg_with(segment(0xE1, b"Exif\0\0" + exif)), png_with(chunk(b"eXIf", exif)),
        b"RIFF" + struct.pack("<I", len(parts)) + parts,
    ]  # fmt: skip
    for data in files:
        assert bare_image(data).orientation == expected
        seen = rgb_of(data)
        assert (seen.shape == (WIDTH, HEIGHT, 3)) is (expected > 4)
    assert is_near(rgb_of(files[0])[2, 2], *((0, 0, 255) if expected in (3, 8) else (255, 0, 0)))


def test_sizes_that_other_parts_of_a_file_say() -> None:
    gif = saved("GIF")
    place = bare_image(gif).data.index(b",")
    large = gif[:place] + b"," + struct.pack("<HHHH", 60_000, 0, 5000, 5000) + gif[place + 9 :]
    assert "image has 65000 x 5000 pixels" in refusal(large)
    wide = saved("JPEG", Image.new("L", (9000, 1)))
    frame = wide.index(b"\xff\xc0") + 5
    assert "image has 65535 x 65535 pixels" in refusal(wide[:frame] + b"\xff" * 4 + wide[frame + 4 :])
    assert "image has 9000 x 0 pixels" in refusal(wide[:frame] + b"\0\0" + wide[frame + 2 :])
    # the canvas is small, and its frame is not
    frame_of = saved("WEBP", Image.new("RGB", (900, 900)), lossless=True)[12:]
    parts = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\3\0\0\3\0\0" + frame_of
    refusal(b"RIFF" + struct.pack("<I", len(parts)) + parts)


BASE64 = base64.b64encode(saved("PNG")).decode()
LONG = base64.b64encode(png_with(chunk(b"prVt", bytes(1 << 20)))).decode()
URLS: list[tuple[str, str]] = [
    ("data:image/png;base64," + BASE64[:-3], "is not valid base64"),
    ("data:image/png;base64," + BASE64 + "=", "is not valid base64"),
    ("data:image/png;base64," + BASE64 + "AAAA" if BASE64.endswith("=") else "data:image/png;base64,=", "not valid base64"),
    ("data:image/png;base64,\n" + BASE64, "is not valid base64"),
    ("data:image/png;base64," + BASE64.replace("/", "_").replace("+", "-") + "_", "is not valid base64"),
    # what ends a piece of what is decoded at once does not end the file
    ("data:image/png;base64," + LONG[: (1 << 20) - 1] + "=" + LONG[1 << 20 :], "is not valid base64: data after its end"),
    ("data:image/png;base64,é", "is not valid base64"),
    ("data:image/png" + ";a" * (1 << 20) + ";base64," + BASE64, "begins with 'data:'"),
    ("data:" + "a" * (1 << 20) + ";base64," + BASE64, "begins with 'data:'"),
    ("data:;base64," + BASE64, "has the type '', image/... is needed"),
    ("data:application/octet-stream;base64," + BASE64, "has the type 'application/octet-stream'"),
    ("DATA:image/png;base64," + BASE64, "begins with 'DATA:'"),
    ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "6 bytes that are no image"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "message"), URLS, ids=range(len(URLS)))
def test_urls_that_hold_no_file(url: str, message: str) -> None:
    with TracedMemory() as memory:
        with pytest.raises(InvalidRequest) as refused:
            processor().process_all([ImageSource("image", url)], "messages")
        assert memory.peak_bytes < 8 << 20
    assert message in refused.value.message
    assert len(refused.value.message) < 400


def test_a_long_url_is_decoded_in_pieces() -> None:
    assert len(LONG) > 1 << 20
    [image] = processor().process_all([ImageSource("image", f"data:image/jpeg;name=a.jpg;base64,{LONG}")], "messages")
    assert image.grid_thw == (1, HEIGHT // 4, WIDTH // 4)


@pytest.mark.slow
def test_a_large_webp_file_is_decoded_in_a_process_of_its_own() -> None:
    """Pillow lets no other thread of its process run while it decodes WebP."""
    image = photo().resize((1700, 1300))
    image.putalpha(image.getchannel("R"))
    config = ImageProcessorConfig(patch_size=4, min_pixels=64, max_pixels=4096)
    images = ImageProcessor(config, 5, ImageLimits(1 << 22))
    data = saved("WEBP", image, lossless=True, method=0)
    with mock.patch("PIL.Image.open", side_effect=AssertionError("it is decoded here")):
        [found] = images.process_all([ImageSource("image", url_of(data))], "messages")
        assert images.process(image, "image").data == found.data
        with pytest.raises(InvalidRequest, match=r"image cannot be decoded: its WebP decoder ended with status 1"):
            images.process_all([ImageSource("image", url_of(data[:-500]))], "messages")


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 9))):
        changed[draw.randrange(min(len(data), draw.choice((60, 400, 1 << 20))))] = draw.randrange(256)
    return bytes(changed)


def _splice(data: bytes, draw: random.Random) -> bytes:
    first, second = sorted(draw.randrange(len(data)) for _ in range(2))
    return draw.choice(
        (data[:first] + data[second:], data[:second] + data[first:], data[:first] + bytes(9) + data[first:])
    )


@pytest.mark.parametrize("change", [_cut, _flip, _splice])
def test_changed_files_are_an_image_or_a_refusal(change: Callable[[bytes, random.Random], bytes]) -> None:
    draw = random.Random(11)
    files = [
        jpeg_with(segment(0xE1, b"Exif\0\0" + EXIF)), progressive(40, 24, 0), png_with(chunk(b"eXIf", EXIF)),
        saved("GIF"), saved("GIF", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT), "green")]),
        saved("WEBP", lossless=True), saved("WEBP", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))]),
        saved("JPEG", photo().convert("CMYK")), saved("PNG", photo().convert("P")),
    ]  # fmt: skip
    num_refused = num_seen = 0
    for _ in range(40):
        for data in files:
            try:
                seen = rgb_of(change(data, draw))
            except InvalidRequest:
                num_refused += 1
            else:
                num_seen += 1
                assert seen.shape[0] * seen.shape[1] <= 4096
    assert num_refused > 20
    assert num_seen + num_refused == 40 * len(files)
