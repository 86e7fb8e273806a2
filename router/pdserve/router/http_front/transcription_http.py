"""`/v1/audio/transcriptions`: OpenAI's endpoint for what is said in a sound."""

from __future__ import annotations

from typing import NamedTuple

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.form_data import form_bytes
from pdserve.router.bodies.request_body import body_form
from pdserve.router.http_front.generation_response import GenerationResponse, call_fields
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.openai.transcription_body import TranscriptionBody
from pdserve.router.openai.transcription_writer import TranscriptionWriter
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.tenants.client import Client
from pdserve.text.prompt import TranscriptInput


class _Prepared(NamedTuple):
    """A body and what is made of it once."""

    body: TranscriptionBody
    request: ClientRequest
    seconds: float
    """Length of the sound."""


class TranscriptionHttp:
    """The endpoint over one `Inference`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self.routes = [Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"])]

    async def transcribe(self, request: Request) -> Response:
        inference = self._inference
        with inference.telemetry.count_rejections():
            client = await authenticated(inference.keys, request)
            call = call_fields(request, inference.settings.limits.request_timeout_s)
            async with body_form(request, inference.bodies) as form:
                prepared = await inference.bodies.in_background_pool(
                    form_bytes(form), lambda: self._prepared(form, call, client)
                )
            body = prepared.body
            generation = inference.generation([prepared.request], stream=body.stream, client=client)
        prompt = prepared.request.prompt
        language = prompt.language if isinstance(prompt, TranscriptInput) else None
        answer = TranscriptionWriter(body.response_format, language, prepared.seconds)
        return GenerationResponse(
            generation, answer, inference.bodies, stream=body.stream, content_type=answer.content_type
        )

    def _prepared(self, form: FormData, call: CallFields, client: Client) -> _Prepared:
        """Raises: InvalidRequest, NotFound."""
        inference = self._inference
        body = TranscriptionBody.of(form, inference.bodies.ignored)
        body.verify()
        adapted = call._replace(lora_name=inference.models.lora_name(body.model, client))
        audio = inference.preparation.audio
        if audio is None or audio.transcript is None:
            raise InvalidRequest("file is given, and this model reads no sound", "file")
        request = body.request(audio.transcript, adapted)
        return _Prepared(body, request, audio.sound_file(body.file, "file").seconds)
