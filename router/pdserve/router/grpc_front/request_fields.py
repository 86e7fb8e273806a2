"""Fields of gRPC requests: chats as `ChatFields`, beam searches as `BeamFields`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.bodies.body_thread import ON_LOOP_BYTES
from pdserve.router.bodies.request_body import verify_num_values
from pdserve.router.requests.fields.beam_fields import BeamFields
from pdserve.router.requests.fields.chat_fields import ChatFields
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.fields.request_limits import MAX_MESSAGES
from pdserve.router.requests.fields.tools import MAX_TOOLS, FunctionBody, NamedFunction, NamedTool, ToolBody
from pdserve.text.beam_search import BeamSearchParams
from pdserve.text.parsers.tool_call_parser import ForcedCalls
from pdserve.text.prompt import ChatInput
from pdserve.v1 import inference_pb2

J = TypeVar("J")


@contextmanager
def _in_chat() -> Iterator[None]:
    """Context in which errors name a chat's fields as fields of `chat`."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"chat.{error.message}", f"chat.{error.field}") from None


def verify_chat_counts(chat: inference_pb2.ChatPrompt, model_len: int) -> None:
    """Raises: InvalidRequest for more entries, or values in JSON, than a chat may have, before they are converted.

    model_len: the model's length in tokens.
    """
    for field, most in (("messages", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        if (num := len(getattr(chat, field))) > most:
            raise InvalidRequest(f"chat.{field} must be at most {most} {field}, not {num}", "chat")
    schemas = [tool.function.parameters for tool in chat.tools]
    data = ",".join([chat.chat_template_kwargs, chat.documents, *schemas]).encode()
    if len(data) > ON_LOOP_BYTES:
        verify_num_values(data, model_len)


def chat_input(
    chat: inference_pb2.ChatPrompt, form: OutputConstraint, forced_calls: ForcedCalls
) -> tuple[ChatInput, OutputConstraint, int | None]:
    """The prompt, the form of the answer, and the most calls in it. form: what `sampling` asks for.

    forced_calls: texts around the calls that `tool_choice` forces. Raises: InvalidRequest naming the field.
    """
    with _in_chat():
        prompt, tools = ChatFields(
            messages=[_message(message, f"messages[{place}]") for place, message in enumerate(chat.messages)],
            tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(chat.tools)],
            tool_choice=_tool_choice(chat.tool_choice),
            parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            chat_template_kwargs=_json(chat.chat_template_kwargs, dict[str, Any], "chat_template_kwargs"),
            continue_final_message=chat.continue_final_message,
            documents=_json(chat.documents, list[dict[str, Any]], "documents"),
            reasoning_effort=chat.reasoning_effort if chat.HasField("reasoning_effort") else None,
            add_special_tokens=chat.add_special_tokens,
        ).prompt(forced_calls)
        return prompt, form.forced(tools.form), tools.max_calls


def beam_params(
    request: inference_pb2.GenerateRequest, sampling: SamplingParams, form: OutputConstraint
) -> BeamSearchParams | None:
    """The beam search that a request asks for. Raises: InvalidRequest."""
    early = request.early_stopping if request.HasField("early_stopping") else None
    return BeamFields(
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty if request.HasField("length_penalty") else None,
        early_stopping=early == "true" if early in ("true", "false") else early,
    ).params(sampling, form)


def _message(message: inference_pb2.ChatMessage, where: str) -> dict[str, Any]:
    """A message in OpenAI's shape, for the chat template. where: its place, for errors."""
    if message.content and message.parts:
        raise InvalidRequest(f"{where} has content and parts, one of them is needed", "messages")
    content: str | list[dict[str, str]] = message.content
    if message.parts:
        content = [_part(part, f"{where}.parts[{place}]") for place, part in enumerate(message.parts)]
    told: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if message.HasField(name):
            told[name] = getattr(message, name)
    if message.tool_calls:
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    return told


def _part(part: inference_pb2.ContentPart, where: str) -> dict[str, str]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "image_url":
            return {"type": "image_url", "image_url": part.image_url}
    raise InvalidRequest(f"{where} is empty, text or image_url is needed", "messages")


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: inference_pb2.Tool, where: str) -> ToolBody:
    function = tool.function
    parameters = _json(function.parameters, dict[str, Any], f"{where}.function.parameters")
    description = function.description if function.HasField("description") else None
    return ToolBody(function=FunctionBody(name=function.name, description=description, parameters=parameters))


def _tool_choice(choice: inference_pb2.ToolChoice) -> str | NamedTool | None:
    match choice.WhichOneof("choice"):
        case "mode":
            return choice.mode
        case "function":
            return NamedTool(function=NamedFunction(name=choice.function))
        case _:
            return None


def _json(text: str, kind: type[J], where: str) -> J | None:
    """The value of a JSON text; None if it is empty. Raises: InvalidRequest for another type."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not of the right form: {error!s:.200}", where.partition("[")[0]) from None
