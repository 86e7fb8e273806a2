"""`TranscriptionWriter`: what is said in a sound, in OpenAI's formats."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.common.errors import PdServeError
from pdserve.common.timeline import Timeline
from pdserve.router.openai.response_writer import error_body
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput

_encode = msgspec.json.Encoder().encode


class TranscriptionWriter:
    """Writes one answer. The blanks with which a model begins a text are not part of it."""

    def __init__(self, response_format: str, language: str | None, seconds: float) -> None:
        """language: a code; None for a model of one language. seconds: of the sound."""
        self._format = response_format
        self._language = language
        self._seconds = round(seconds, 3)
        self._parts: list[str] = []

    @property
    def content_type(self) -> str:
        """Media type of a whole answer."""
        return "text/plain; charset=utf-8" if self._format == "text" else "application/json"

    def whole(self, outputs: list[CompletionOutput], usage: Usage, timeline: Timeline) -> bytes:
        """As of `AnswerWriter`."""
        text = outputs[0].text.strip()
        if self._format == "text":
            return f"{text}\n".encode(errors="replace")
        answer: dict[str, Any] = {"text": text}
        if self._format == "verbose_json":
            answer = {"task": "transcribe", "language": self._language, "duration": self._seconds} | answer
        return _encode(answer | {"usage": self._usage})

    @property
    def _usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": self._seconds}

    def chunk(self, output: CompletionOutput, usage: Usage) -> bytes:
        """As of `AnswerWriter`."""
        text = output.text if self._parts else output.text.lstrip()
        if not text:
            return b""
        self._parts.append(text)
        return _event({"type": "transcript.text.delta", "delta": text})

    def last_chunk(self, output: CompletionOutput, usage: Usage, timeline: Timeline) -> bytes:
        """As of `AnswerWriter`. The whole text follows the last part of it."""
        last = self.chunk(output, usage)
        done = {"type": "transcript.text.done", "text": "".join(self._parts), "usage": self._usage}
        return last + _event(done)

    def failed(self, error: PdServeError) -> bytes:
        """As of `AnswerWriter`. A stream without `transcript.text.done` is incomplete for clients."""
        return b"data: " + error_body(error) + b"\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
