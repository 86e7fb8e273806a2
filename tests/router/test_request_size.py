"""The content of a body or a message is counted before it is decoded; and fields that are not known."""

from __future__ import annotations

import contextlib
import time

import pytest

from pdserve.common.errors import BodyTooLarge, InvalidRequest
from pdserve.common.security import wire_size
from pdserve.common.security.wire_size import MAX_FIELDS, LargeMessage, verify_num_fields
from pdserve.router.bodies import request_body
from pdserve.router.bodies.request_body import MAX_CONTAINERS, verify_num_values
from pdserve.router.bodies.unknown_fields import refuse_unknown_fields
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.worst_bodies import field, varint

GENERATE = inference_pb2.GenerateRequest


@pytest.mark.few(3)
@pytest.mark.parametrize("part", [b"{}", b"[]", b'{"a":1}', b'"a",{}'])
def test_objects_and_arrays_are_counted(part):
    many = b'{"a":[' + b",".join([part] * (MAX_CONTAINERS - 2)) + b"]}"
    verify_num_values(many, 0)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CONTAINERS} objects"):
        verify_num_values(many.replace(b"[", b"[{}," + part + b",", 1), 0)


def test_values_are_counted_beside_the_models_length(monkeypatch):
    monkeypatch.setattr(request_body, "MIN_VALUES", 10)
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
    prompt = field(GENERATE, "tokens", b"\x08\x01" * (2 * MAX_FIELDS))
    verify_num_fields(prompt, GENERATE.DESCRIPTOR)
    assert len(GENERATE.FromString(prompt).tokens.token_ids) == 2 * MAX_FIELDS


@pytest.mark.parametrize(
    "data", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 100, b"\x12\x05\x0a", b"\x80" * 11]
)
def test_what_is_malformed_is_left_to_the_parser(data):
    verify_num_fields(data, GENERATE.DESCRIPTOR)


def test_groups_are_counted_and_end_no_counting():
    """They are unknown fields of one message, whatever they hold; the parser reads on after them."""
    group = b"\x0b" + b"\x12\x03abc\x0b\x08\x01\x0c" + b"\x0c"
    assert verify_num_fields(group, GENERATE.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match="field number 1,"):
        refuse_unknown_fields(GENERATE.FromString(group))
    with pytest.raises(InvalidRequest, match="fields"):
        verify_num_fields(group * (MAX_FIELDS // 6 + 1), GENERATE.DESCRIPTOR)
    chat = field(GENERATE, "chat", field(inference_pb2.ChatPrompt, "messages", b"") * MAX_FIELDS)
    verify_num_fields(group + field(GENERATE, "model", b"x"), GENERATE.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match="fields"):
        verify_num_fields(group + chat, GENERATE.DESCRIPTOR)


LARGE = LargeMessage(1000, 5000, frozenset(["pdserve.v1.EmbedsPrompt.safetensors"]), "max_request_bytes")


def tokens(content):
    return field(GENERATE, "tokens", content)


def packed(content):
    return tokens(field(inference_pb2.TokenPrompt, "token_ids", content))


def sampling(name, content):
    return field(GENERATE, "sampling", field(request_pb2.SamplingParams, name, content))


def bad_words(content):
    return sampling("bad_words_token_ids", field(request_pb2.TokenSequence, "token_ids", content))


def inputs(content):
    prompt = field(inference_pb2.TokenPrompt, "token_ids", content)
    return field(inference_pb2.EmbedRequest, "inputs", field(inference_pb2.EmbedInput, "tokens", prompt))


GROUP = b"\x0b\x0c"
LISTS = {
    "a prompt": (lambda n: packed(b"\x01" * n), "tokens.token_ids"),
    "large numbers": (lambda n: packed(b"\xff\x01" * n), "tokens.token_ids"),
    "many lists": (lambda n: packed(b"\x01\x02") * (n // 2) + packed(b"\x01" * (n % 2)), "tokens.token_ids"),
    "one by one": (lambda n: tokens(b"\x08\x01" * n), "tokens.token_ids"),
    "both": (lambda n: tokens(b"\x08\x01" * 10) + packed(b"\x01" * (n - 10)), "tokens.token_ids"),
    "behind a group": (lambda n: GROUP + tokens(GROUP) + packed(b"\x01" * n), "tokens.token_ids"),
    "stop tokens": (lambda n: sampling("stop_token_ids", b"\x01" * n), "sampling.stop_token_ids"),
    "stop tokens one by one": (lambda n: field(GENERATE, "sampling", b"\x48\x01" * n), "sampling.stop_token_ids"),
    "allowed tokens": (lambda n: sampling("allowed_token_ids", b"\x01" * n), "sampling.allowed_token_ids"),
    "bad words": (
        lambda n: bad_words(b"\x01" * (n - 7)) + bad_words(b"\x01" * 7),
        "sampling.bad_words_token_ids.token_ids",
    ),
    "inputs": (lambda n: inputs(b"\x01" * (n - 7)) + inputs(b"\x01" * 7), "inputs.tokens.token_ids"),
}


@pytest.mark.parametrize("name", LISTS)
def test_numbers_of_a_large_message_are_counted(name):
    make, where = LISTS[name]
    kind = inference_pb2.EmbedRequest if name == "inputs" else GENERATE
    bounds = LARGE._replace(max_bytes=1 << 20)
    assert verify_num_fields(make(1000), kind.DESCRIPTOR, large=bounds) is ("group" in name)
    with pytest.raises(
        InvalidRequest, match=f"with {where}, the message has more than 1000 numbers in its lists"
    ) as found:
        verify_num_fields(make(1001), kind.DESCRIPTOR, large=bounds)
    assert found.value.field == where
    assert kind.FromString(make(1001))


def test_numbers_of_all_lists_are_counted_across_the_parts_that_are_counted_at_once(monkeypatch):
    monkeypatch.setattr(wire_size, "_COUNTED_AT_ONCE", 7)
    for count in (0, 1, 6, 7, 8, 999, 1000):
        assert verify_num_fields(packed(b"\x80\x01" * count), GENERATE.DESCRIPTOR, large=LARGE) is False
    with pytest.raises(InvalidRequest):
        verify_num_fields(packed(b"\x80\x01" * 1001), GENERATE.DESCRIPTOR, large=LARGE)


def test_a_message_is_large_for_its_files_alone():
    file = field(GENERATE, "embeds", field(inference_pb2.EmbedsPrompt, "safetensors", b"x" * 100_000))
    text = field(GENERATE, "text", field(inference_pb2.TextPrompt, "text", b"x" * 5000))
    assert verify_num_fields(file, GENERATE.DESCRIPTOR, large=LARGE) is False
    shorter = field(GENERATE, "text", field(inference_pb2.TextPrompt, "text", b"x" * 3300))
    for data in (text, text + file, file + text, file + packed(b"\x80\x01" * 900) + shorter):
        with pytest.raises(BodyTooLarge, match=r"bytes besides files, at most 5000 are allowed \(max_request_bytes\)"):
            verify_num_fields(data, GENERATE.DESCRIPTOR, large=LARGE)


@pytest.mark.parametrize(
    "part",
    [varint(99 << 3) + b"\x01", field(GENERATE, "text", varint(99 << 3) + b"\x01"), b"\x10\x01", b"\x28\x01", GROUP,
     varint(99 << 3 | 2) + b"\x01x", sampling("stop_token_ids", b"\x01") + b"\x21" + b"x" * 8],
)  # fmt: skip
def test_fields_that_may_be_unknown_are_found(part):
    """Also a known number with another wire type, which the parser keeps as an unknown field."""
    known = (
        packed(b"\x01") + sampling("top_k", b"") + sampling("stop_token_ids", b"\x01") + field(GENERATE, "model", b"x")
    )
    known = known.replace(sampling("top_k", b""), b"")
    assert verify_num_fields(known, GENERATE.DESCRIPTOR, large=LARGE) is False
    refuse_unknown_fields(GENERATE.FromString(known))
    assert verify_num_fields(known + part, GENERATE.DESCRIPTOR, large=LARGE)
    with pytest.raises(InvalidRequest):
        refuse_unknown_fields(GENERATE.FromString(known + part))
    assert verify_num_fields(known, GENERATE.DESCRIPTOR)


def test_fields_of_a_large_messages_texts_are_counted():
    part = field(GENERATE, "text", (varint(99 << 3) + b"\x01") * MAX_FIELDS)
    verify_num_fields(part, GENERATE.DESCRIPTOR)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        verify_num_fields(part, GENERATE.DESCRIPTOR, large=LARGE)


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
