"""`/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.bodies.request_body import read_body
from pdserve.router.http_front.generation_response import GenerationResponse, asks_for_timeline, call_fields
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter, with_visible_markers
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.router.responses.responses_writer import ResponsesWriter, fixed_fields


class _Prepared(NamedTuple):
    """A body and what is made of it once."""

    body: ResponsesBody
    request: ClientRequest
    fixed: bytes
    """The fields of the response that repeat the body."""


class ResponsesHttp:
    """The endpoints of responses over one `Inference`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._keys = inference.keys
        self.routes = [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        inference = self._inference
        with inference.telemetry.count_rejections():
            client = await authenticated(self._keys, request)
            call = call_fields(request, inference.settings.request_timeout_s)

            def build(body: ResponsesBody) -> _Prepared:
                inference.check_model(body.model)
                body.verify()
                defaults, parsers = inference.tokenizer.generation_defaults, inference.parsers
                asked = body.request(defaults, call, inference.bodies.ignored, parsers.forced_calls)
                asked = with_visible_markers(asked, parsers)
                return _Prepared(body, asked, fixed_fields(body, asked, inference.model))

            body, asked, fixed = await read_body(request, ResponsesBody, inference.bodies, build)
            stream = bool(body.stream)
            generation = inference.generation([asked], stream=stream, client=client)
        answer = ResponsesWriter(
            generation.request_id,
            fixed,
            parsed=ChatChoiceWriter.of(asked, inference.parsers, include_reasoning=True),
            num_logprobs=body.num_logprobs,
            include_timeline=asks_for_timeline(request),
        )
        return GenerationResponse(generation, answer, inference.bodies, stream=stream)
