"""Bodies of `/v1/audio/transcriptions`: parts, fields, and hostile ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.datastructures import FormData, Headers, UploadFile

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.form_data import MAX_FIELD_BYTES, MAX_FIELDS, MAX_FILES, form_bytes, parse_form
from pdserve.router.openai.transcription_body import TranscriptionBody

TYPE = "multipart/form-data; boundary=xyz"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


FILE = part("file", b"RIFF\r\n--xy\0\xff", "a.wav")


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


async def parsed(data: bytes, size: int = 1 << 16) -> FormData:
    """size: bytes that arrive at once."""

    async def parts() -> AsyncGenerator[bytes, None]:
        for first in range(0, len(data), size):
            yield data[first : first + size]

    return await parse_form(Headers({"content-type": TYPE}), parts())


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
async def test_fields_and_a_file(size: int) -> None:
    form = await parsed(body(FILE, part("language", b"en"), part("prompt", "hé".encode())), size)
    read = TranscriptionBody.of(form, None)
    assert (read.file, read.language, read.prompt, read.temperature) == (b"RIFF\r\n--xy\0\xff", "en", "hé", 0.0)
    assert form_bytes(form) == 12 + 2 + 2
    await form.close()


async def test_a_file_is_never_written_to_a_disk() -> None:
    form = await parsed(body(part("file", bytes(3 << 20), "a.wav")))
    file = form["file"]
    assert isinstance(file, UploadFile)
    assert file.size == 3 << 20
    assert file._in_memory
    await form.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is cut: its last boundary is missing"),
        (b"{}", "the body cannot be read as multipart/form-data"),
        (body(FILE)[:-9], "the body is cut"),
        (body(*[part(f"f{number}", b"") for number in range(MAX_FIELDS + 1)]), f"number of fields is {MAX_FIELDS}"),
        (body(*[part("file", b"", "a") for _ in range(MAX_FILES + 1)]), f"number of files is {MAX_FILES}"),
        (body(part("prompt", b"a" * (MAX_FIELD_BYTES + 1))), "maximum size of 64KB"),
        (body(b"--xyz\r\nX: " + b"a" * 9000 + b"\r\n\r\n\r\n"), "cannot be read as multipart/form-data"),
        (body(b"--xyz\r\nContent-Type: a/b\r\n\r\nx\r\n"), '"name" must be provided'),
    ],
    ids=range(8),
)
async def test_hostile_bodies(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await parsed(data)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data"])
async def test_other_types(cluster: Any, kind: str) -> None:
    await cluster.start(prefill=0, decode=1)
    answer = await cluster.http.post("/v1/audio/transcriptions", content=body(FILE), headers={"content-type": kind})
    assert answer.status_code == 415
    assert "only multipart/form-data with a boundary is understood" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "message", "field"),
    [
        ([part("model", b"m")], "file is missing", "file"),
        ([part("file", b"RIFF")], "file is a text", "file"),
        ([FILE, part("speed", b"2")], "speed is not a known field", "speed"),
        ([FILE, FILE], "file is there 2 times", "file"),
        ([FILE, part("other", b"x", "b.wav")], "other is not a known field", "other"),
        ([FILE, part("temperature", b"hot")], 'temperature is "hot", a number is needed', "temperature"),
        ([FILE, part("temperature", b"nan")], 'temperature is "nan", a number is needed', "temperature"),
        ([FILE, part("seed", b"1.5")], 'seed is "1.5", an integer is needed', "seed"),
        ([FILE, part("stream", b"maybe")], 'stream is "maybe", true or false', "stream"),
        ([FILE, part("language", b"en"), part("language", b"de")], "language is there 2 times", "language"),
        ([FILE, part("timestamp_granularities[]", b"word")], "no timestamps are written", "timestamp_granularities"),
        ([FILE, part("response_format", b"srt")], 'response_format is "srt", one of json', "response_format"),
        (
            [FILE, part("stream", b"true"), part("response_format", b"text")],
            "a stream has the format",
            "response_format",
        ),
    ],
    ids=range(13),
)
async def test_refused_fields(parts: list[bytes], message: str, field: str) -> None:
    form = await parsed(body(*parts))
    with pytest.raises(InvalidRequest, match=message) as caught:
        TranscriptionBody.of(form, None).verify()
    await form.close()
    assert caught.value.field == field
