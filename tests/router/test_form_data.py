"""Bodies of `/v1/audio/transcriptions`: parts, fields, and hostile ones."""

from __future__ import annotations

import pytest

from pdserve.common.errors import InvalidRequest, UnsupportedMediaType
from pdserve.router.bodies.form_data import MAX_FIELD_BYTES, MAX_PARTS, FormData
from pdserve.router.openai.transcription_body import TranscriptionBody

TYPE = "multipart/form-data; boundary=xyz"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


FILE = part("file", b"RIFF\r\n--xy\0\xff", "a.wav")


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


def test_fields_and_a_file() -> None:
    form = FormData.parse(body(FILE, part("language", b"en"), part("prompt", "hé".encode())), TYPE)
    assert form.files == {"file": b"RIFF\r\n--xy\0\xff"}
    assert form.fields == {"language": ["en"], "prompt": ["hé"]}
    read = TranscriptionBody.of(form, None)
    assert (read.file, read.language, read.prompt, read.temperature) == (b"RIFF\r\n--xy\0\xff", "en", "hé", 0.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is cut: its last boundary is missing"),
        (b"{}", "the body is no multipart/form-data"),
        (body(FILE)[:-9], "the body is cut"),
        (body(*[part(f"f{number}", b"") for number in range(MAX_PARTS + 1)]), f"more than {MAX_PARTS} parts"),
        (body(part("prompt", b"a" * (MAX_FIELD_BYTES + 1))), "prompt has more than 65536 bytes"),
        (body(part("prompt", b"\xff")), "prompt is not valid UTF-8"),
        (body(FILE, FILE), "file is there twice"),
        (body(b"--xyz\r\nX: " + b"a" * 9000 + b"\r\n\r\n\r\n"), "headers of more than 4096 bytes|no multipart"),
        (body(b"--xyz\r\nContent-Type: a/b\r\n\r\nx\r\n"), "a part of the body has no name"),
    ],
    ids=range(9),
)
def test_hostile_bodies(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FormData.parse(data, TYPE)


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + 90 * "x"]
)
def test_other_types(kind: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="only multipart/form-data with a boundary is understood"):
        FormData.parse(body(FILE), kind)


@pytest.mark.parametrize(
    ("parts", "message", "field"),
    [
        ([part("model", b"m")], "file is missing", "file"),
        ([part("file", b"RIFF")], "file is a text", "file"),
        ([FILE, part("speed", b"2")], "speed is not a known field", "speed"),
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
    ids=range(12),
)
def test_refused_fields(parts: list[bytes], message: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        TranscriptionBody.of(FormData.parse(body(*parts), TYPE), None).verify()
    assert caught.value.field == field
