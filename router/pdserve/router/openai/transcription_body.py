"""`TranscriptionBody`: the fields of `/v1/audio/transcriptions`, by OpenAI's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import FormData, UploadFile

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.bodies.ignored_fields import IgnoredFields
from pdserve.router.bodies.request_body import shown
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.audio.transcript_prompt import TranscriptPrompt
from pdserve.text.prompt import TranscriptInput

FORMATS = ("json", "text", "verbose_json")
_REFUSED = {
    "timestamp_granularities": "no timestamps are written",
    "include": "no log-probabilities are written",
    "chunking_strategy": "a file is read at once",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
}
"""Field of OpenAI -> the reason for which it is refused."""


class TranscriptionBody(msgspec.Struct, kw_only=True):
    """A client's fields, read."""

    file: bytes
    model: str | None = None
    language: str | None = None
    """A code, such as `en`; None: the model's default."""
    prompt: str = ""
    """A text that precedes the sound."""
    response_format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    # extensions with vLLM's names
    max_completion_tokens: int | None = None
    seed: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, form: FormData, ignored: IgnoredFields | None) -> TranscriptionBody:
        """ignored: None refuses unknown fields. Raises: InvalidRequest naming the field."""
        file = form.get("file")
        if not isinstance(file, UploadFile):
            told = "is missing" if file is None else "is a text"
            raise InvalidRequest(f"file {told}, a part of the body with a filename is needed", "file")
        values: dict[str, Any] = {}
        unknown: list[str] = []
        for name in form:
            given = form.getlist(name)
            plain = name.removesuffix("[]")
            if len(given) > 1 and (name == "file" or name in _READERS):
                raise InvalidRequest(f"{name} is there {len(given)} times", name)
            if name == "file":
                continue
            if isinstance(given[0], UploadFile):
                unknown.append(name)
                continue
            if plain in _REFUSED:
                raise InvalidRequest(f"{plain} is {shown(given[0])}, and {_REFUSED[plain]}", plain)
            if (read := _READERS.get(name)) is None:
                unknown.append(name)
                continue
            if given[0] or name in ("prompt", "model"):
                values[name] = read(given[0], name)
        for name in unknown:
            if ignored is None:
                raise InvalidRequest(f"{name[:80]} is not a known field", name[:80])
            ignored.note(name)
        return cls(file=file.file.read(), **values)

    def verify(self) -> None:
        """Raises: InvalidRequest naming the field."""
        if self.response_format not in FORMATS:
            raise InvalidRequest(
                f"response_format is {shown(self.response_format)}, one of {', '.join(FORMATS)} is needed",
                "response_format",
            )
        if self.stream and self.response_format != "json":
            raise InvalidRequest(
                f"stream is true, and response_format {self.response_format}; a stream has the format json",
                "response_format",
            )

    def request(self, transcript: TranscriptPrompt, call: CallFields) -> ClientRequest:
        """Raises: InvalidRequest."""
        params = SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        return ClientRequest(
            prompt=TranscriptInput(self.file, transcript.language(self.language), text=self.prompt),
            field="file",
            sampling_params=params,
            max_tokens=self.max_completion_tokens,
            max_tokens_field="max_completion_tokens",
            **call._asdict(),
        )


def _text(value: str, name: str) -> str:
    return value


def _number(value: str, name: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is {shown(value)}, a number is needed", name)
    return number


def _integer(value: str, name: str) -> int:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise InvalidRequest(f"{name} is {shown(value)}, an integer is needed", name)
    return int(value)


def _boolean(value: str, name: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is {shown(value)}, true or false is needed", name)
    return value.lower() in ("true", "1")


_READERS: dict[str, Callable[[str, str], Any]] = {
    "model": _text,
    "language": _text,
    "prompt": _text,
    "response_format": _text,
    "temperature": _number,
    "stream": _boolean,
    "max_completion_tokens": _integer,
    "seed": _integer,
    "top_p": _number,
}
