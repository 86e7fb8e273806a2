"""Fields that nobody knows: refused by name, or ignored with one log line per name; and fields that have no effect."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.bodies.ignored_fields import MAX_NAMES, IgnoredFields, tolerant
from pdserve.router.bodies.request_body import parse_body
from pdserve.router.http_front.tokenization_http import DetokenizeBody, TokenizeBody
from pdserve.router.openai.embeddings import EmbeddingBody
from pdserve.router.openai.no_op_fields import IGNORED
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.router.requests.fields.chat_fields import REASONING_EFFORTS
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.prompt import ChatInput, TextInput
from pdserve.v1 import inference_pb2

USER = {"role": "user", "content": "hi"}
CALL = CallFields(1.0, {}, "")
EACH_KIND = pytest.mark.parametrize("kind", [ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody])


def parsed(kind: type[Any], ignored: IgnoredFields | None = None, **body: Any) -> Any:
    return parse_body(json.dumps(body).encode(), kind, 1024, ignored)


def asked(kind: type[Any] = ChatBody, **body: Any) -> ClientRequest:
    prompt = {"messages": [USER]} if kind is ChatBody else {"prompt": "x"}
    [request] = parsed(kind, **prompt, **body).requests({}, CALL)
    assert isinstance(request, ClientRequest)
    return request


WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "user": ("u",),
    "safety_identifier": ("s",),
    "metadata": ({"a": "b"},),
    "store": (True, False),
    "prompt_cache_key": ("k",),
    "prompt_cache_options": ({"mode": "x"},),
    "prompt_cache_retention": ("24h", "in_memory"),
    "prediction": ({"type": "content", "content": "x"},),
    "session_id": ("s",),
    "stream_interval": (1, 8),
    "mm_payload": ("none", "tensors"),
    "return_mm_kwargs": (True, False),
    "return_token_offsets": (True, False),
    "routed_experts_prompt_start": (0, 3),
}


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("field", IGNORED)
def test_fields_without_effect_leave_the_request_as_it_is(kind: type[Any], field: str) -> None:
    for value in WITHOUT_EFFECT[field]:
        assert asked(kind, **{field: value}) == asked(kind)
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert asked(kind, **options) == asked(kind, stream=True)


@pytest.mark.parametrize("effort", REASONING_EFFORTS)
def test_reasoning_effort_is_a_variable_of_the_chat_template(effort: str) -> None:
    prompt = asked(reasoning_effort=effort).prompt
    assert isinstance(prompt, ChatInput)
    assert prompt.template_variables == {"reasoning_effort": effort}
    named = asked(reasoning_effort=effort, chat_template_kwargs={"reasoning_effort": "own", "x": 1}).prompt
    assert isinstance(named, ChatInput)
    assert named.template_variables == {"reasoning_effort": "own", "x": 1}


def test_fields_for_the_chat_template() -> None:
    plain = asked().prompt
    assert isinstance(plain, ChatInput)
    assert (plain.add_generation_prompt, plain.continue_final_message, plain.add_special_tokens) == (True, False, False)
    given = asked(continue_final_message=True, documents=[{"text": "a"}], add_special_tokens=True).prompt
    assert isinstance(given, ChatInput)
    assert (given.add_generation_prompt, given.continue_final_message, given.add_special_tokens) == (False, True, True)
    assert given.template_variables == {"documents": [{"text": "a"}]}
    with pytest.raises(InvalidRequest, match="both true"):
        asked(continue_final_message=True, add_generation_prompt=True)
    for add_special_tokens in (True, False):
        text = asked(CompletionBody, add_special_tokens=add_special_tokens).prompt
        assert isinstance(text, TextInput)
        assert text.add_special_tokens is add_special_tokens


def test_the_clients_id_of_a_request_in_its_body() -> None:
    for kind in (ChatBody, CompletionBody):
        assert asked(kind, request_id="mine").client_request_id == "mine"
        prompt = {"messages": [USER]} if kind is ChatBody else {"prompt": "x"}
        body = parsed(kind, request_id="mine", **prompt)
        assert body.requests({}, CallFields(1.0, {}, "of a header"))[0].client_request_id == "of a header"
        for value, told in (
            ("x" * 257, "request_id has 257 characters, at most 256"),
            ("a\n", "request_id has U.000A"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                asked(kind, request_id=value)


UNKNOWN: dict[str, Any] = {
    "temprature": 1,
    "stream_options": {"include_usage": True, "more": 1},
    "tools": [{"function": {"name": "f", "cost": 1}}, {"function": {"name": "g", "cost": {"deep": []}}}],
    "tool_choice": {"function": {"name": "f"}, "when": "now"},
    "structured_outputs": {"choice": ["a"], "mood": 1},
    "vendor": {"a": [1]},
}


def test_unknown_fields_are_refused_by_default() -> None:
    bodies = ClientBodies(RouterSettings(), 1024)
    assert bodies.ignored is None
    bodies.close()
    for name, value in UNKNOWN.items():
        with pytest.raises(InvalidRequest, match="is not a known field"):
            parsed(ChatBody, messages=[USER], **{name: value})


def test_ignored_at_every_level_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    for _ in range(3):
        body = parsed(ChatBody, ignored, messages=[USER], top_k=3, **UNKNOWN)
    assert isinstance(body, ChatBody)
    known: dict[str, Any] = {"stream_options": {"include_usage": True}, "structured_outputs": {"choice": ["a"]}}
    known |= {"tools": [{"function": {"name": name}} for name in "fg"], "tool_choice": {"function": {"name": "f"}}}
    assert msgspec.json.encode(body) == msgspec.json.encode(parsed(ChatBody, messages=[USER], top_k=3, **known))
    told = [record.getMessage() for record in caplog.records]
    assert sum("'temprature'" in line for line in told) == 1
    assert sum("'vendor'" in line for line in told) == 1
    assert len(told) == len(set(told))


def test_other_mistakes_are_still_refused_by_name() -> None:
    mistakes: list[dict[str, Any]] = [{"top_k": "x"}, {"stream_options": 7}, {"tools": [{"function": {}}]}]
    for wrong in mistakes:
        with pytest.raises(InvalidRequest) as refused:
            parsed(ChatBody, IgnoredFields(), messages=[USER], vendor=1, **wrong)
        assert next(iter(wrong)) in refused.value.message
    with pytest.raises(InvalidRequest, match="messages is missing"):
        parsed(ChatBody, IgnoredFields(), vendor=1)


def test_names_in_the_log_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ignored = IgnoredFields()
    names: dict[str, Any] = {f"n{n}\n" + "x" * 1000: "secret value" for n in range(MAX_NAMES + 50)}
    parsed(CompletionBody, ignored, prompt="x", **names)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == MAX_NAMES
    assert told[-1].endswith("further names are not logged")
    assert max(map(len, told)) < 250
    assert not any("secret" in line or "\n" in line for line in told)


@EACH_KIND
def test_a_tolerant_body_has_the_fields_of_its_kind(kind: type[Any]) -> None:
    made: Any = tolerant(kind)  # type: ignore[arg-type]
    assert issubclass(made, kind)
    assert made.__struct_fields__ == kind.__struct_fields__
    assert [(f.default, f.required) for f in msgspec.structs.fields(made)] == [
        (f.default, f.required) for f in msgspec.structs.fields(kind)
    ]


async def test_messages_of_grpc_follow_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    known = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x"))
    data = known.SerializeToString() + bytes([0xF8, 0x3F, 1])  # field 1023
    tolerant_bodies = ClientBodies(RouterSettings(unknown_fields="ignore"), 1024)
    assert await tolerant_bodies.message(data, inference_pb2.GenerateRequest.FromString) == known
    tolerant_bodies.close()
    assert "field number 1023" in caplog.text
    bodies = ClientBodies(RouterSettings(), 1024)
    with pytest.raises(InvalidRequest, match="field number 1023"):
        await bodies.message(data, inference_pb2.GenerateRequest.FromString)
    bodies.close()
