"""The content of a body or a message is counted before it is decoded; and fields that are not known."""

from __future__ import annotations

import contextlib
import time

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.security.wire_size import MAX_FIELDS, verify_num_fields
from pdserve.router.bodies import request_body
from pdserve.router.bodies.request_body import MAX_CONTAINERS, verify_num_values
from pdserve.router.bodies.unknown_fields import refuse_unknown_fields
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.worst_bodies import field, varint

GENERATE = inference_pb2.GenerateRequest


@pytest.mark.parametrize("part", [b"{}", b"[]", b'{"a":1}', b'"a",{}'])
def test_objects_and_arrays_are_counted(part):
    many = b'{"a":[' + b",".join([part] * (MAX_CONTAINERS - 2)) + b"]}"
    verify_num_values(many, 0)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CONTAINERS} objects"):
        verify_num_values(many.replace(b"[", b"[{}," + part + b",", 1), 0)


def test_values_are_counted_beside_the_models_length(monkeypatch):
    monkeypatch.setattr(request_body, "_MIN_VALUES", 10)
    verify_num_values(b"[" + b"1," * 19 + b"1]", 10)
    with pytest.raises(InvalidRequest, match="20 values"):
        verify_num_values(b"[" + b"1," * 20 + b"1]", 10)


@pytest.mark.parametrize("text", [b"{[,", rb"\"{", rb"\\\"[", rb"\\", b"{" * 100])
def test_what_stands_in_a_string_does_not_count(text):
    strings = b",".join([b'"' + text * 100 + b'"'] * 2000)
    verify_num_values(b"[" + strings + b"]", 0)


@pytest.mark.parametrize("text", [b'"' * 500_000, rb"\"" * 250_000, b"{[" * 250_000, b'"\\' * 250_000, b'{"' * 250_000])
def test_counting_what_is_no_json_takes_linear_time(text):
    def cost(data: bytes) -> float:
        began = time.thread_time()
        with contextlib.suppress(InvalidRequest):
            verify_num_values(b"{" * (MAX_CONTAINERS // 2) + b"[," * 10 + data, 0)
        return time.thread_time() - began

    assert cost(text) < 0.5


def test_fields_are_counted():
    chat = field(inference_pb2.ChatPrompt, "messages", b"")
    verify_num_fields(field(GENERATE, "chat", chat * (MAX_FIELDS - 1)), GENERATE.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        verify_num_fields(field(GENERATE, "chat", chat * MAX_FIELDS), GENERATE.DESCRIPTOR)
    for part in (varint(99 << 3) + b"\x01", varint(99 << 3 | 1) + b"x" * 8, varint(99 << 3 | 5) + b"x" * 4):
        verify_num_fields(part * MAX_FIELDS, GENERATE.DESCRIPTOR)
        with pytest.raises(InvalidRequest):
            verify_num_fields(part * (MAX_FIELDS + 1), GENERATE.DESCRIPTOR)


def test_numbers_of_a_prompt_are_not_counted_one_by_one():
    tokens = field(GENERATE, "tokens", b"\x08\x01" * (2 * MAX_FIELDS))
    verify_num_fields(tokens, GENERATE.DESCRIPTOR)
    assert len(GENERATE.FromString(tokens).tokens.token_ids) == 2 * MAX_FIELDS


@pytest.mark.parametrize(
    "data", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 100, b"\x12\x05\x0a", b"\x80" * 11]
)
def test_what_is_malformed_is_left_to_the_parser(data):
    verify_num_fields(data, GENERATE.DESCRIPTOR)


def test_groups_end_the_counting_but_not_the_parsing():
    """They are unknown fields of one message, whatever they hold."""
    data = (b"\x0b" + b"\x0c") * MAX_FIELDS * 2
    verify_num_fields(data, GENERATE.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match="field number 1,"):
        refuse_unknown_fields(GENERATE.FromString(data))


def test_unknown_fields_are_named_where_they_lie():
    unknown = varint(1000 << 3) + b"\x01"
    known = GENERATE(model="x", sampling=request_pb2.SamplingParams(top_k=1, logit_bias={1: 2.0}))
    known.chat.messages.add(role="user", content="x")
    known.chat.messages.add(role="user", content="y")
    refuse_unknown_fields(known)
    for data, where in (
        (known.SerializeToString() + unknown, "GenerateRequest has a field number 1000"),
        (known.SerializeToString() + field(GENERATE, "sampling", unknown), "sampling has a field number 1000"),
        (
            known.SerializeToString()
            + field(GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", b"") * 2)
            + field(GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", unknown)),
            r"chat.messages\[4\] has a field number 1000",
        ),
    ):
        with pytest.raises(InvalidRequest, match=where):
            refuse_unknown_fields(GENERATE.FromString(data))
