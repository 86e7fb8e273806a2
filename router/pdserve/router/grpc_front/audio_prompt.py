"""`audio_prompt`: sound in a `GenerateRequest`, checked before samples are made of it."""

from __future__ import annotations

from pdserve.common.errors import InvalidRequest
from pdserve.router.requests.preparation import Preparation
from pdserve.text.prompt import TranscriptInput
from pdserve.v1 import inference_pb2

AUDIO_FIELD = "audio.file"
"""Name of the file, for errors."""


def audio_prompt(request: inference_pb2.GenerateRequest, preparation: Preparation) -> TranscriptInput:
    """The limits are those of `/v1/audio/transcriptions`. Raises: InvalidRequest naming the field."""
    audio = preparation.audio
    if audio is None or audio.transcript is None:
        raise InvalidRequest("audio is given, and this model reads no sound", "audio")
    if request.use_beam_search:
        raise InvalidRequest("use_beam_search is true, and beams are not searched for sound", "use_beam_search")
    if request.HasField("truncate_prompt_tokens"):
        raise InvalidRequest("truncate_prompt_tokens is given, and the prompt is sound", "truncate_prompt_tokens")
    given = request.audio
    language = audio.transcript.language(given.language if given.HasField("language") else None, "audio.language")
    file = given.file  # a copy each time
    audio.sound_file(file, AUDIO_FIELD)
    return TranscriptInput(file, language, text=given.prompt, text_field="audio.prompt")
