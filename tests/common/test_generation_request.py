"""Requests in calls between services."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import DigestMismatch, InvalidRequest, PdServeError, PeerError
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import NamedLogitsProcessor, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire.request_bytes import decode_request, encode_request, num_entries
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.worker.request_reader import RequestReader
from tests.support.inputs.request_strategies import TOKENS, pooling_params, sampling_params

HASHER = BlockHasher(DeploymentKey(b"0123456789abcdef"), 4)
PARENT = f"00-{'1' * 32}-{'2' * 16}-01"
ROOT = b"r" * 16


def read(
    request: GenerationRequest | bytes, max_model_len: int = 12, vocab_size: int | None = None
) -> GenerationRequest:
    data = request if isinstance(request, bytes) else encode_request(request)
    return RequestReader(HASHER, max_model_len, vocab_size).request(data)


def good(**changes: Any) -> GenerationRequest:
    tokens = changes.get("prompt_token_ids", [1] * 9) + changes.get("output_token_ids", [])
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": [1] * 9,
        "hash_root": ROOT,
        "request_digest": HASHER.request_digest(ROOT, HASHER.extend(ROOT, tokens), tokens),
        "deadline": time.monotonic() + 60,
    }
    return GenerationRequest(**fields | changes)


def encoded(**changes: Any) -> bytes:
    """A good request's map with these fields, whatever they are."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_request(good())) | changes)


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=40))
    pooling = draw(st.none() | pooling_params())
    params = draw(sampling_params()) if pooling is None else SamplingParams()
    index, output, n = 0, [], params.n
    if pooling is None and draw(st.booleans()):
        index, n = draw(st.integers(0, params.n - 1)), 1
        output = draw(st.lists(TOKENS, min_size=params.n == 1, max_size=20))
    root = draw(st.binary(min_size=16, max_size=16))
    return GenerationRequest(
        request_id=draw(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)),
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=pooling,
        output_token_ids=output,
        index=index,
        n=n,
        eos_token_ids=tuple(draw(st.lists(TOKENS, max_size=3))),
        hash_root=root,
        request_digest=HASHER.request_digest(root, HASHER.extend(root, tokens + output), tokens + output),
        deadline=time.monotonic() + draw(st.floats(100, 86_000)),
        trace_headers=draw(
            st.sampled_from([{}, {"traceparent": PARENT}, {"traceparent": PARENT, "tracestate": "a=b"}])
        ),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        tenant=draw(st.binary(max_size=16)),
        client_request_id=draw(st.text(st.characters(categories=("L", "N", "P")), max_size=8)),
    )


@given(request=requests())
def test_requests_come_back_but_for_the_moment_of_their_deadline(request: GenerationRequest) -> None:
    back = read(request, 60)
    for name in GenerationRequest.__struct_fields__:
        if name not in ("deadline", "timeout_s", "request_id"):
            assert getattr(back, name) == getattr(request, name), name
    assert back.request_id == f"{request.request_id}.0.{request.index}"
    assert abs(back.deadline - request.deadline) < 50
    assert 0 < back.remaining_s <= 86_400


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "r" * 129}, "request_id is .* of 129 characters, 1 to 128"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"eos_token_ids": (1,) * 1025}, "eos_token_ids has 1025 tokens, at most 1024"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 13}, "13 tokens, max_model_len is 12"),
        ({"output_token_ids": [1] * 4}, "13 tokens, max_model_len is 12"),
        ({"hash_root": b""}, "hash_root"),
        ({"request_digest": b"d" * 17}, "request_digest"),
        ({"deadline": 0.0}, "timeout_s"),
        ({"deadline": float("nan")}, "timeout_s"),
        ({"deadline": float("inf")}, "timeout_s"),
        ({"index": 1, "output_token_ids": [1]}, r"index is 1, below n \(1\)"),
        ({"tenant": b"t" * 17}, "tenant has 17 bytes"),
        ({"client_request_id": "c" * 257}, "client_request_id has 257 characters"),
    ],
)
def test_a_request_that_does_not_fit_together_is_refused(changes: dict[str, Any], named: str) -> None:
    read(good())
    with pytest.raises(InvalidRequest, match=named):
        read(good(**changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"index": -1}, "index"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"n": 2**60}, "n"),
        ({"priority": 2**31}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2**32]}, "prompt_token_ids"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids"),
        ({"prompt_token_ids": {"1": 1}}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"priority": "first"}, "priority"),
        ({"priority": [[[1]]]}, "priority"),
        ({"hash_root": "text"}, "hash_root"),
        ({"sampling_params": [1]}, None),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"sampling_params": {"stop": [1]}}, "sampling_params"),
        ({"sampling_params": {"output_kind": 9}}, "sampling_params"),
        ({"pooling_params": {"pooling_type": "max"}}, "pooling_params"),
        ({"pooling_params": {}, "sampling_params": {"n": 4}}, "sampling_params"),
        ({"pooling_params": {}, "output_token_ids": [5]}, "output_token_ids"),
        ({"trace_headers": {f"x-{number}": "y" for number in range(65)}}, "trace_headers"),
        ({"ignorable": ["x"] * 65}, "ignorable"),
        ({"ignorable": "x"}, "ignorable"),
    ],
)
def test_fields_of_another_type_or_size_are_refused_by_name(changes: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(encoded(**changes))
    assert refused.value.field == field


def test_an_unknown_field_is_refused_by_name_unless_it_may_be_ignored() -> None:
    for unknown in ({"colour": "red"}, {"sampling_params": {"max_tokens": 2, "colour": [1]}}):
        name = "colour" if "colour" in unknown else "sampling_params.colour"
        with pytest.raises(
            InvalidRequest, match=f"{name.rpartition('.')[2]}.* is a field that this worker does not know"
        ) as refused:
            decode_request(encoded(**unknown), 12)
        assert refused.value.field == name
        with pytest.raises(InvalidRequest, match="does not know"):
            decode_request(encoded(**unknown, ignorable=["other"]), 12)
        request = decode_request(encoded(**unknown, ignorable=[name]), 12)
        assert request.prompt_token_ids == [1] * 9
        assert request.sampling_params.max_tokens == (2 if "sampling_params" in unknown else 16)


def test_a_field_that_comes_twice_is_refused() -> None:
    # only the last of them would be counted
    few, many = msgspec.msgpack.encode([1]), msgspec.msgpack.encode([1] * 60_000)
    key = msgspec.msgpack.encode("prompt_token_ids")
    with pytest.raises(InvalidRequest, match="request has a field twice"):
        decode_request(b"\x82" + key + many + key + few, 12)


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\xff" * 40, b"\x81", b"\x81\xa1x\xdd\xff\xff\xff\xff", b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
             b"\x81\xa2\xff\xfe\xc0", encoded() + b"\x00"]
)  # fmt: skip
def test_bytes_that_are_no_request_are_the_peers_error(data: bytes) -> None:
    with pytest.raises((PeerError, InvalidRequest)):
        decode_request(data, 12)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [1] * 1_000_000},
        {"output_token_ids": [[]] * 1_000_000},
        {"colour": [{}] * 1_000_000},
        {"ignorable": ["colour"], "colour": [{}] * 1_000_000},
        {"sampling_params": {"stop_token_ids": [1] * 1_000_000}},
        {"sampling_params": {"allowed_token_ids": [1] * 1_000_000}},
        {"sampling_params": {"bad_words_token_ids": [[1] * 1_000_000]}},
        {"sampling_params": {"logits_processors": [{"name": "x", "args": {"x": [{}] * 1_000_000}}]}},
        {"sampling_params": {"structured_outputs": {"json": {"x": [{}] * 1_000_000}}}},
        {"sampling_params": {"structured_outputs": {"choice": ["x"] * 1_000_000}}},
        {str(number): 1 for number in range(100_000)},
    ],
    ids=lambda changes: "-".join(list(changes)[:2]),
)
def test_a_large_request_takes_no_more_memory_than_its_bytes(changes: dict[str, Any]) -> None:
    data = encoded(**changes)
    del changes
    tracemalloc.start()
    try:
        # what may be ignored is served without it
        assert decode_refuses(data) == (b"ignorable" not in data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data) + (1 << 20)


def decode_refuses(data: bytes) -> bool:
    try:
        decode_request(data, 12, 64)
    except PdServeError:
        return True
    return False


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"bad_words": ("x",) * 129}, "bad_words"),
        ({"bad_words_token_ids": ((1,),) * 257}, "bad_words_token_ids"),
        ({"bad_words_token_ids": ((1,) * 1026,)}, "bad_words_token_ids"),
        ({"logits_processors": (NamedLogitsProcessor(name="x"),) * 9}, "logits_processors"),
        ({"allowed_token_ids": (1,) * 65}, "allowed_token_ids"),
        ({"structured_outputs": StructuredOutputsParams(choice=("x",) * 1025)}, "structured_outputs"),
    ],
)
def test_entries_are_counted_before_anything_is_made_of_them(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}.* must (be at most|have)") as refused:
        read(good(sampling_params=SamplingParams(**params)), vocab_size=64)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [1] * 8 + [2]},
        {"prompt_token_ids": [2] + [1] * 8},
        {"prompt_token_ids": [1] * 10},
        {"output_token_ids": [1]},
        {"hash_root": b"s" * 16},
        {"request_digest": b"d" * 16},
    ],
)
def test_a_digest_that_is_not_that_of_the_tokens_is_refused(changes: dict[str, Any]) -> None:
    changes = {"request_digest": good().request_digest} | changes
    with pytest.raises(DigestMismatch):
        read(good(**changes))


def test_hashes_are_of_the_workers_own_making() -> None:
    assert read(good()).block_hashes == HASHER.extend(ROOT, [1] * 9)  # type: ignore[attr-defined]
    other = BlockHasher(DeploymentKey(b"fedcba9876543210"), 4)
    with pytest.raises(DigestMismatch):
        RequestReader(other, 12).request(encode_request(good()))


def test_block_hashes_of_a_caller_are_not_read() -> None:
    with pytest.raises(InvalidRequest, match=r"block_hashes.* is a field that this worker does not know"):
        read(encoded(block_hashes=[b"h" * 24]))


def test_trace_headers_that_are_no_trace_context_are_left_out() -> None:
    headers = {f"x-{number}": "y" for number in range(50)}
    assert read(good(trace_headers=headers)).trace_headers == {}
    assert read(good(trace_headers=headers | {"traceparent": PARENT})).trace_headers == {"traceparent": PARENT}


def test_a_salt_does_not_travel() -> None:
    assert decode_request(encode_request(good(cache_salt="salt")), 12).cache_salt is None


@pytest.mark.parametrize("num", [0, 1, 15, 16, 65_535, 65_536])
def test_entries_are_read_from_the_header(num: int) -> None:
    assert num_entries(msgspec.msgpack.encode([None] * num)) == num
    assert num_entries(msgspec.msgpack.encode(dict.fromkeys(range(num)))) == num


@pytest.mark.parametrize("value", [None, 5, "text", b"bytes", 1.5, "x" * 300])
def test_what_has_no_entries_has_none(value: Any) -> None:
    assert num_entries(msgspec.msgpack.encode(value)) == 0
    assert num_entries(None) == num_entries(b"") == 0
