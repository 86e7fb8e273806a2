"""Images of chats: data URLs, hostile files, and parts of messages. Sizes are refused before anything is decoded."""

from __future__ import annotations

import base64
import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import ImageLimits, ImageProcessorConfig
from pdserve.text.images.chat_images import ImagePart, ImageSource, without_images
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.images.image_url import open_image_url
from pdserve.text.templates.chat_template import ChatTemplate

MAX_PIXELS = 10_000


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    image.save(file := io.BytesIO(), kind)
    return file.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, *, rows: bytes = b"") -> bytes:
    """A PNG file that says this size, whatever its rows are."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def webp(width: int, height: int, kind: bytes) -> bytes:
    """The head of a WebP file of this size."""
    if kind == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + (width - 1 | height - 1 << 14).to_bytes(4, "little") + bytes(5)
    else:
        body = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + kind + struct.pack("<I", 50) + body + bytes(40)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    image = open_image_url(
        url_of(file_of(Image.new("RGB", (20, 30), "red"), kind)), "url", "messages", MAX_PIXELS
    ).image
    assert image.size == (20, 30)
    red, green, blue = image.convert("RGB").getpixel((3, 3))  # type: ignore[misc]
    assert red > 240
    assert green < 20
    assert blue < 20


BIG = (1 << 14) - 1
CASES: list[tuple[str, str]] = [
    ("https://example.com/a.png", "url begins with 'https:'; images are taken as data:image"),
    ("file:///etc/passwd", "url begins with 'file:'"),
    ("/etc/passwd", "url begins with '/etc/passwd'"),
    ("", "url begins with ''"),
    ("data:text/html;base64,AAAA", "url has the type 'text/html'"),
    ("data:image/png,AAAA", "url begins with 'data:'"),
    ("data:image/png;base64,%%%%", "url is not valid base64"),
    (url_of(b""), "url has 0 bytes that are no image of PNG, JPEG, WEBP, GIF"),
    (url_of(b"<svg/>"), "url has 6 bytes that are no image"),
    (url_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "are no image of"),
    (url_of(file_of(Image.new("RGB", (4, 4)), "TIFF")), "are no image of"),
    (url_of(png(50_000, 50_000)), "url has 50000 x 50000 pixels, at most 10000 are decoded"),
    (url_of(png(101, 100)), "url has 101 x 100 pixels, at most 10000 are decoded"),
    (url_of(file_of(Image.new("1", (9000, 9000)), "GIF")), "url has 9000 x 9000 pixels"),
    (url_of(webp(BIG, BIG, b"VP8X")), f"url has {BIG} x {BIG} pixels"),
    (url_of(webp(BIG, BIG, b"VP8L")), f"url has {BIG} x {BIG} pixels"),
    (url_of(webp(BIG, BIG, b"VP8 ")), f"url has {BIG} x {BIG} pixels"),
]


@pytest.mark.parametrize(("url", "message"), CASES, ids=range(len(CASES)))
def test_urls_that_are_refused(url: str, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=message) as refused:
            open_image_url(url, "url", "messages", MAX_PIXELS)
        assert refused.value.field == "messages"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def processor(limits: ImageLimits) -> ImageProcessor:
    return ImageProcessor(ImageProcessorConfig(patch_size=4, min_pixels=64, max_pixels=1024), 5, limits)


def sources(*files: bytes) -> list[ImageSource]:
    return [ImageSource(f"images[{place}]", url_of(data)) for place, data in enumerate(files)]


def rgb_of(data: bytes, kind: str = "image/png") -> np.ndarray:
    """`[H, W, 3]`: what a model gets of a file."""
    [image] = processor(ImageLimits(MAX_PIXELS)).process_all([ImageSource("image", url_of(data, kind))], "messages")
    _, height, width = image.grid_thw
    return np.frombuffer(image.data, np.uint8).reshape(height * 4, width * 4, 3)


def is_near(pixel: np.ndarray, *colour: int) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() < 12)


def test_colours_of_other_modes() -> None:
    cyan = file_of(Image.new("CMYK", (32, 32), (255, 0, 0, 0)), "JPEG")
    assert is_near(rgb_of(cyan, "image/jpeg")[16, 16], 0, 255, 255)
    # 16 bits per pixel
    grey = Image.fromarray(np.full((32, 32), 0x4080, np.uint16))
    assert Image.open(io.BytesIO(file_of(grey))).mode == "I;16"
    assert is_near(rgb_of(file_of(grey))[16, 16], 64, 64, 64)
    assert is_near(rgb_of(file_of(Image.new("1", (32, 32), 0)))[16, 16], 0, 0, 0)
    assert is_near(rgb_of(file_of(Image.new("LA", (32, 32), (0, 0))))[16, 16], 255, 255, 255)
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([0, 0, 0, 200, 10, 10])
    assert is_near(rgb_of(file_of(palette))[16, 16], 200, 10, 10)
    assert is_near(rgb_of(file_of(palette, "GIF"), "image/gif")[16, 16], 200, 10, 10)


def test_a_photo_stands_upright() -> None:
    photo = Image.new("RGB", (64, 32), "white")
    photo.paste("red", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    photo.save(file := io.BytesIO(), "JPEG", exif=exif, quality=95)
    seen = rgb_of(file.getvalue(), "image/jpeg")
    assert seen.shape[0] > seen.shape[1]
    assert is_near(seen[4, 8], 255, 0, 0)
    assert is_near(seen[-4, 8], 255, 255, 255)


def test_of_an_animation_the_first_frame_is_seen() -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "green")]
    for kind in ("GIF", "WEBP", "PNG"):
        frames[0].save(file := io.BytesIO(), kind, save_all=True, append_images=frames[1:], duration=50)
        assert is_near(rgb_of(file.getvalue(), f"image/{kind.lower()}")[16, 16], 255, 0, 0), kind


def test_long_and_small_images() -> None:
    assert rgb_of(file_of(Image.new("RGB", (1, 1), "red"))).shape == (8, 8, 3)
    assert rgb_of(file_of(Image.new("RGB", (1, 150), "red")))[100, 4].tolist() == [255, 0, 0]
    with pytest.raises(InvalidRequest, match="image is 1 x 300, the sides of an image may differ by a factor of 200"):
        rgb_of(file_of(Image.new("RGB", (1, 300))))


def test_files_that_are_refused_while_they_are_decoded() -> None:
    images = processor(ImageLimits(MAX_PIXELS))
    whole = file_of(Image.effect_noise((90, 90), 50), "JPEG")
    for data in (whole[:-800], png(90, 90), png(90, 90, rows=b"\xff" * 90), png(90, 90)[:-30]):
        with pytest.raises(InvalidRequest, match=r"images\[0\] (cannot be decoded|has \d+ bytes that are no image)"):
            images.process_all(sources(data), "messages")


def test_numbers_and_bytes_are_bounded() -> None:
    small = file_of(Image.new("RGB", (32, 32)))
    limits = ImageLimits(MAX_PIXELS, max_images=3, max_bytes=2 * 32 * 32 * 3)
    assert len(processor(limits).process_all(sources(small, small), "messages")) == 2
    with pytest.raises(InvalidRequest, match="messages has 4 images, at most 3 are allowed"):
        processor(limits).process_all(sources(*[b"not decoded"] * 4), "messages")
    with pytest.raises(InvalidRequest, match=r"images\[2\]: with it, images have 9216 bytes .* at most 6144"):
        processor(limits).process_all(sources(small, small, small), "messages")


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_parts_of_messages() -> None:
    text = {"type": "text", "text": "What is it?"}
    by_object = {"type": "image_url", "image_url": {"url": "data:1", "detail": "low"}}
    by_text = {"type": "image_url", "image_url": "data:2"}
    plain, found = without_images([{"role": "system", "content": "a"}, *user(text, by_object, by_text)])
    assert [source.url for source in found] == ["data:1", "data:2"]
    assert [source.where for source in found] == [
        "messages[1].content[1].image_url",
        "messages[1].content[2].image_url",
    ]
    assert plain[0] == {"role": "system", "content": "a"}
    assert plain[1]["content"] == [text, ImagePart(), ImagePart()]
    for part, message in (
        ({"type": "image_url"}, r"messages\[0\].content\[0\].image_url.url must be a string, not NoneType"),
        ({"type": "image_url", "image_url": {"url": 5}}, "must be a string, not int"),
        ({"type": "image_url", "image_url": {"url": "", "detail": "x"}}, "detail is 'x', one of auto, low, high"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            without_images(user(part))


def test_templates_see_parts() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {}, "file")
    assert template.render(user(ImagePart(), {"type": "text", "text": "What?"})) == "<image>What?"
    # a client's own part is none
    with pytest.raises(InvalidRequest, match=r"content\[0\] has type 'image'; this model takes only text"):
        template.render(user({"type": "image"}, {"type": "text", "text": "What?"}))
    with pytest.raises(InvalidRequest, match="continue_final_message is true, and the last message has images"):
        template.render(user(ImagePart()), continue_final_message=True)


def test_a_folder_without_images_has_no_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert ImageProcessor.from_folder(tmp_path) is None
