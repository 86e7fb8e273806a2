"""Image files with more metadata, scans and parts than a decoder should read."""

from __future__ import annotations

import base64
import io
import struct
import zlib

from PIL import Image

WIDTH, HEIGHT = 40, 24


def url_of(data: bytes, kind: str = "image/png") -> str:
    """A data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def photo() -> Image.Image:
    """Red at its left, blue at its right."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "blue")
    image.paste("red", (0, 0, WIDTH // 2, HEIGHT))
    return image


def saved(kind: str, image: Image.Image | None = None, **options: object) -> bytes:
    """A file of `image`, or of `photo`."""
    (image or photo()).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def exif_of(*entries: tuple[int, int, int, int], order: str = "<", first: int = 8) -> bytes:
    """entries: tag, type, count, and the number in place of a value or of its offset."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", first)
    rows = [struct.pack(f"{order}HHI{'HH' if kind == 3 else 'I'}", tag, kind, count, value, *((0,) if kind == 3 else ()))
            for tag, kind, count, value in entries]  # fmt: skip
    return head + struct.pack(f"{order}H", len(rows)) + b"".join(rows) + bytes(4)


def segment(marker: int, data: bytes) -> bytes:
    """Part of a JPEG file."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def jpeg_with(*segments: bytes, image: bytes | None = None) -> bytes:
    """The segments precede all others."""
    data = image or saved("JPEG", quality=95, subsampling=0)
    return data[:2] + b"".join(segments) + data[2:]


def chunk(name: bytes, data: bytes) -> bytes:
    """Part of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with(*chunks: bytes, image: bytes | None = None) -> bytes:
    """The chunks follow the header."""
    data = image or saved("PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def progressive(width: int, height: int, num_more: int) -> bytes:
    """A file with so many further scans of its last kind."""
    whole = saved("JPEG", Image.effect_noise((width, height), 60), progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * (num_more + 1) + b"\xff\xd9"
