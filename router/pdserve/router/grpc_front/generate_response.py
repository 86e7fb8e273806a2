"""`GenerateResponse` messages."""

from __future__ import annotations

from pdserve.common.errors import InvalidRequest
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.wire.messages import finish_reason_to_wire
from pdserve.router.grpc_front.embed_servicer import moment_messages, usage_message
from pdserve.router.requests.answer_reader import AnswerReader
from pdserve.router.requests.generation import Generation
from pdserve.text.outputs.request_output import CompletionOutput, Logprob
from pdserve.text.parsers.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from pdserve.v1 import inference_pb2, request_pb2

_FINISH = {str(reason): finish_reason_to_wire(reason) for reason in FinishReason}


def generate_response(
    generation: Generation,
    output: CompletionOutput,
    sampling: request_pb2.SamplingParams,
    reader: AnswerReader | None,
    *,
    last: bool,
) -> inference_pb2.GenerateResponse:
    """The message for an output. reader: of the answer, if it is parsed. last: True for the last message of the request.

    Raises: InvalidRequest.
    """
    response = inference_pb2.GenerateResponse(
        request_id=generation.request_id, index=output.index, token_ids=output.token_ids
    )
    if reader is None:
        response.text = output.text
    else:
        _write_parts(response, reader.deltas(output, is_last=output.finish_reason is not None))
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=False):
        response.logprobs.append(_token_logprobs(token_id, candidates, sampling.logprobs))
    for of_prompt in (output.prompt_logprobs or ())[1:]:
        if of_prompt is not None:
            response.prompt_logprobs.append(_token_logprobs(next(iter(of_prompt)), of_prompt, sampling.prompt_logprobs))
    if output.finish_reason is not None:
        if output.cumulative_logprob is not None:
            response.cumulative_logprob = output.cumulative_logprob
        response.finish_reason = _FINISH[output.finish_reason]
        response.stop_reason = "" if output.stop_reason is None else str(output.stop_reason)
    if last:
        response.usage.CopyFrom(usage_message(generation.usage))
        response.moments.extend(moment_messages(generation.timeline))
    _verify_size(response)
    return response


def _verify_size(response: inference_pb2.GenerateResponse) -> None:
    """Raises: InvalidRequest for a message above the limit, which the channel would report as an overload."""
    if (num_bytes := response.ByteSize()) <= MAX_MESSAGE_BYTES:
        return
    field = "prompt_logprobs" if len(response.prompt_logprobs) > len(response.logprobs) else "logprobs"
    raise InvalidRequest(
        f"the answer is a message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} are allowed; ask for fewer {field}, "
        "for a shorter answer, or with stream for what is new alone",
        f"sampling.{field}",
    )


def _token_logprobs(token_id: int, candidates: dict[int, Logprob], num_top: int) -> inference_pb2.TokenLogprobs:
    wire = {
        candidate: inference_pb2.Logprob(
            token_id=candidate,
            token=logprob.decoded_bytes,
            logprob=logprob.logprob,
            rank=logprob.rank,
        )
        for candidate, logprob in candidates.items()
    }
    top = sorted((logprob for logprob in wire.values() if logprob.rank <= num_top), key=lambda logprob: logprob.rank)
    return inference_pb2.TokenLogprobs(sampled=wire[token_id], top=top)


def _write_parts(response: inference_pb2.GenerateResponse, parts: list[Delta]) -> None:
    for part in parts:
        match part:
            case TextDelta():
                response.text += part.text
            case ReasoningDelta():
                response.reasoning += part.text
            case ToolCallDelta():
                call = response.tool_calls.add(index=part.index, arguments=part.arguments)
                if part.name is not None:
                    call.name = part.name
                    call.id = f"call_{response.request_id}_{response.index}_{part.index}"
