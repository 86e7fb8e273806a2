"""Our types on the wire: what goes out comes back, and what a stranger sends is refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import DigestMismatch, InvalidRequest, PeerError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.pooling_params import POOLING_TYPES, PoolingParams
from pdserve.common.request.prepared_request import PreparedRequest, ResumeState
from pdserve.common.request.sampling_params import NamedLogitsProcessor, RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.request.wire import (
    PIECE_BYTES,
    finish_reason_from_wire,
    finish_reason_to_wire,
    layout_from_wire,
    layout_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    moments_from_wire,
    moments_to_wire,
    pooling_from_wire,
    prepared_from_wire,
    prepared_to_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.v1 import kv_source_pb2, request_pb2

HASHER = BlockHasher(DeploymentKey(b"0123456789abcdef"), 4)
TOKENS = st.integers(0, 2**32 - 1)


def structured_outputs() -> st.SearchStrategy[StructuredOutputsParams]:
    text = st.text(min_size=1, max_size=9)
    forms: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.builds(lambda title: {"json": json.dumps({"title": title})}, text),
        st.fixed_dictionaries({"regex": text}),
        st.fixed_dictionaries({"choice": st.lists(text, min_size=1, max_size=3).map(tuple)}),
        st.fixed_dictionaries({"grammar": text}),
        st.just({"json_object": True}),
        st.just({"structural_tag": "{}"}),
    )
    return st.builds(
        lambda form, whitespace, properties: StructuredOutputsParams(
            disable_any_whitespace=whitespace, disable_additional_properties=properties, **form
        ),
        forms,
        st.booleans(),
        st.booleans(),
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return SamplingParams(
        temperature=draw(st.floats(0, 100)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=9), max_size=4))),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=4))),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        spaces_between_special_tokens=draw(st.booleans()),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0, 50, exclude_min=True)),
        logit_bias=draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(TOKENS, min_size=1, max_size=4).map(tuple)),
        bad_words=tuple(draw(st.lists(st.text(min_size=1, max_size=9), max_size=4))),
        bad_words_token_ids=tuple(draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3))),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        output_kind=draw(st.sampled_from(RequestOutputKind)),
        logits_processors=tuple(draw(st.lists(logits_processors(), max_size=2))),
        n=draw(st.integers(1, 8)),
        best_of=draw(st.none() | st.integers(8, 16)),
        structured_outputs=draw(st.none() | structured_outputs()),
    )


@st.composite
def logits_processors(draw: st.DrawFn) -> NamedLogitsProcessor:
    values = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=4)
    args = draw(st.dictionaries(st.text(max_size=4), values | st.lists(values, max_size=3), max_size=3))
    return NamedLogitsProcessor(name=draw(st.text(min_size=1, max_size=9)), args=args)


@given(sampling_params())
def test_sampling_params_come_back_as_they_were(params: SamplingParams) -> None:
    message = request_pb2.SamplingParams.FromString(sampling_to_wire(params).SerializeToString())
    assert sampling_from_wire(message) == params


def test_absent_fields_take_the_given_defaults_and_then_ours() -> None:
    message = request_pb2.SamplingParams(top_k=7)
    assert sampling_from_wire(message) == SamplingParams(top_k=7)
    assert sampling_from_wire(message, {"temperature": 0.3, "top_k": 9}) == SamplingParams(top_k=7, temperature=0.3)


def test_sequences_without_text_come_back_too() -> None:
    params = SamplingParams(detokenize=False)
    assert sampling_from_wire(sampling_to_wire(params)) == params
    assert sampling_from_wire(request_pb2.SamplingParams()).detokenize


@pytest.mark.parametrize("args", ["{", "[1]", "5", '"x"', "[" * 5000])
def test_arguments_of_a_plug_in_that_are_no_object(args: str) -> None:
    message = request_pb2.SamplingParams(logits_processors=[request_pb2.LogitsProcessor(name="x", args=args)])
    with pytest.raises(InvalidRequest, match=r"logits_processors\[0\].args must be a JSON object"):
        sampling_from_wire(message)


def test_values_outside_their_limits_are_refused_on_arrival() -> None:
    with pytest.raises(InvalidRequest, match="output_kind is 9"):
        sampling_from_wire(request_pb2.SamplingParams(output_kind=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="top_p"):
        sampling_from_wire(request_pb2.SamplingParams(top_p=float("nan")))


@st.composite
def pooling_params(draw: st.DrawFn) -> PoolingParams:
    return PoolingParams(
        pooling_type=draw(st.sampled_from(POOLING_TYPES)),
        normalize=draw(st.booleans()),
        dimensions=draw(st.none() | st.integers(1, 2**32 - 1)),
    )


def test_pooling_params_that_are_wrong_or_left_out() -> None:
    assert pooling_from_wire(request_pb2.PoolingParams()) == PoolingParams()
    for wrong, field in (
        (request_pb2.PoolingParams(pooling_type=7), "pooling_type"),  # type: ignore[arg-type]
        (request_pb2.PoolingParams(dimensions=0), "dimensions"),
    ):
        with pytest.raises(InvalidRequest, match=field) as refused:
            pooling_from_wire(wrong)
        assert refused.value.field == field


PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@st.composite
def prepared_requests(draw: st.DrawFn) -> PreparedRequest:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=40))
    pooling = draw(st.none() | pooling_params())
    params = draw(sampling_params()) if pooling is None else SamplingParams()
    resumed = st.builds(ResumeState, index=st.integers(0, params.n - 1), output_token_ids=st.lists(TOKENS, max_size=20))
    resume = draw(st.none() | resumed) if pooling is None else None
    given_ids = [*tokens, *(() if resume is None else resume.output_token_ids)]
    root = draw(st.binary(min_size=16, max_size=16))
    hashes = HASHER.extend(root, given_ids)
    return PreparedRequest(
        request_id=draw(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)),
        prompt_token_ids=tokens,
        sampling_params=params,
        resume=resume,
        eos_token_ids=tuple(draw(st.lists(TOKENS, max_size=3))),
        block_hashes=hashes,
        hash_root=root,
        request_digest=HASHER.request_digest(root, hashes, given_ids),
        deadline=time.monotonic() + draw(st.floats(1, 86_000)),
        trace_headers=draw(
            st.sampled_from([{}, {"traceparent": PARENT}, {"traceparent": PARENT, "tracestate": "a=b"}])
        ),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        pooling_params=pooling,
        client_request_id=draw(st.text(st.characters(categories=("L", "N", "P")), max_size=8)),
    )


@given(prepared_requests())
def test_prepared_requests_come_back_but_for_the_moment_of_their_deadline(request: PreparedRequest) -> None:
    message = request_pb2.PreparedRequest.FromString(prepared_to_wire(request).SerializeToString())
    back = prepared_from_wire(message, HASHER, 60)
    for name in PreparedRequest.__struct_fields__:
        if name != "deadline":
            assert getattr(back, name) == getattr(request, name)
    assert abs(back.deadline - request.deadline) < 1
    assert 0 < back.remaining_s <= 86_400


def replace_field(message: Any, field: str, value: object) -> None:
    message.ClearField(field)
    message.MergeFrom(type(message)(**{field: value}))


def good_message() -> request_pb2.PreparedRequest:
    return request_pb2.PreparedRequest(
        request_id="r",
        prompt_token_ids=[1] * 9,
        hash_root=b"r" * 16,
        request_digest=HASHER.request_digest(b"r" * 16, HASHER.extend(b"r" * 16, [1] * 9), [1] * 9),
        deadline_s=3.0,
    )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("request_id", "", "request_id"),
        ("request_id", "r" * 129, "request_id is .* of 129 characters, 1 to 128"),
        ("request_id", "two\nlines", "request_id"),
        ("eos_token_ids", [1] * 1025, "eos_token_ids has 1025 tokens, at most 1024"),
        ("prompt_token_ids", [], "prompt_token_ids"),
        ("prompt_token_ids", [1] * 13, "13 tokens, max_model_len is 12"),
        ("resume", request_pb2.ResumeState(output_token_ids=[1] * 4), "13 tokens, max_model_len is 12"),
        ("hash_root", b"", "hash_root"),
        ("request_digest", b"d" * 17, "request_digest"),
        ("deadline_s", 0.0, "deadline_s"),
        ("deadline_s", -1.0, "deadline_s"),
        ("deadline_s", float("nan"), "deadline_s"),
        ("deadline_s", float("inf"), "deadline_s"),
        ("resume", request_pb2.ResumeState(index=1), r"resume.index is 1, below n \(1\)"),
    ],
)
def test_a_prepared_request_that_does_not_fit_together_is_refused(field: str, value: object, named: str) -> None:
    message = good_message()
    prepared_from_wire(message, HASHER, 12)
    replace_field(message, field, value)
    with pytest.raises(InvalidRequest, match=named):
        prepared_from_wire(message, HASHER, 12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_token_ids", [1] * 8 + [2]),
        ("prompt_token_ids", [2] + [1] * 8),
        ("prompt_token_ids", [1] * 10),
        ("resume", request_pb2.ResumeState(output_token_ids=[1])),
        ("hash_root", b"s" * 16),
        ("request_digest", b"d" * 16),
    ],
)
def test_a_digest_that_is_not_that_of_the_tokens_is_refused(field: str, value: object) -> None:
    message = good_message()
    replace_field(message, field, value)
    with pytest.raises(DigestMismatch):
        prepared_from_wire(message, HASHER, 12)


def test_trace_headers_that_are_no_trace_context_are_left_out() -> None:
    message = good_message()
    for number in range(100):
        message.trace_headers[f"x-{number}"] = "y"
    assert prepared_from_wire(message, HASHER, 12).trace_headers == {}
    message.trace_headers["traceparent"] = PARENT
    assert prepared_from_wire(message, HASHER, 12).trace_headers == {"traceparent": PARENT}


def test_an_embedding_reads_no_sampling_and_resumes_nothing() -> None:
    message = good_message()
    message.pooling.SetInParent()
    message.sampling.n = 99
    message.sampling.structured_outputs.json_object = True
    assert prepared_from_wire(message, HASHER, 12).sampling_params == SamplingParams()
    message.resume.SetInParent()
    with pytest.raises(InvalidRequest, match="an embedding has no output to go on from"):
        prepared_from_wire(message, HASHER, 12)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (request_pb2.SamplingParams(stop=["x"] * 17), "stop"),
        (request_pb2.SamplingParams(stop_token_ids=[1] * 257), "stop_token_ids"),
        (request_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
        (request_pb2.SamplingParams(bad_words=["x"] * 129), "bad_words"),
        (request_pb2.SamplingParams(bad_words_token_ids=[request_pb2.TokenSequence(token_ids=[1])] * 257), "bad_words_token_ids"),
        (request_pb2.SamplingParams(bad_words_token_ids=[request_pb2.TokenSequence(token_ids=[1] * 1026)]), "bad_words_token_ids"),
        (request_pb2.SamplingParams(logits_processors=[request_pb2.LogitsProcessor(name="x")] * 9), "logits_processors"),
        (request_pb2.SamplingParams(allowed_token_ids=[1] * 65), "allowed_token_ids"),
        (request_pb2.SamplingParams(structured_outputs=request_pb2.StructuredOutputs(choice=["x"] * 1025)), "structured_outputs"),
    ],
)  # fmt: skip
def test_entries_are_counted_before_anything_is_made_of_them(sampling: request_pb2.SamplingParams, field: str) -> None:
    message = good_message()
    message.sampling.CopyFrom(sampling)
    with pytest.raises(InvalidRequest, match=f"{field}.* must (be at most|have)") as refused:
        prepared_from_wire(message, HASHER, 12, 64)
    assert refused.value.field == field


def test_hashes_are_of_the_workers_own_making_whatever_the_caller_sends() -> None:
    sent = good_message().SerializeToString()
    # field 5 carried block hashes in version 1
    forged = request_pb2.PreparedRequest.FromString(sent + b"\x2a\x10" + b"h" * 16)
    assert prepared_from_wire(forged, HASHER, 12).block_hashes == HASHER.extend(b"r" * 16, [1] * 9)
    other = BlockHasher(DeploymentKey(b"fedcba9876543210"), 4)
    with pytest.raises(DigestMismatch):
        prepared_from_wire(good_message(), other, 12)


LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype="float32", model_fingerprint="f" * 32)


@given(
    st.builds(
        KvLayout,
        num_layers=TOKENS,
        num_kv_heads=TOKENS,
        head_dim=TOKENS,
        block_size=TOKENS,
        dtype=st.sampled_from(["float32", "bfloat16", "float16", "another"]),
        model_fingerprint=st.text(max_size=9),
    )
)
def test_layouts_come_back_and_differ_field_by_field(layout: KvLayout) -> None:
    back = layout_from_wire(kv_source_pb2.KvLayout.FromString(layout_to_wire(layout).SerializeToString()))
    assert back == layout
    assert layout.differences(back) == []
    names = [line.partition(":")[0] for line in LAYOUT.differences(layout)]
    assert names == [n for n in KvLayout.__struct_fields__ if getattr(LAYOUT, n) != getattr(layout, n)]


def test_a_block_is_one_run_of_bytes() -> None:
    assert LAYOUT.block_shape == (2, 2, 3, 16, 8)
    assert LAYOUT.block_bytes == 2 * 2 * 3 * 16 * 8 * 4


def test_finish_reasons_come_back_and_unknown_ones_are_errors() -> None:
    for reason in (None, *FinishReason):
        assert finish_reason_from_wire(finish_reason_to_wire(reason)) is reason
    assert finish_reason_from_wire(99) is FinishReason.ERROR  # type: ignore[arg-type]


def test_moments_travel_as_wall_clock() -> None:
    now = time.monotonic()
    back = moments_from_wire(moments_to_wire({"arrived": now, "placed": now + 1.5}))
    assert back["placed"] - back["arrived"] == pytest.approx(1.5e9, abs=1000)
    assert abs(back["arrived"] - time.time_ns()) < 1e9


@given(st.integers(1, 21), st.integers(1, 5), st.data())
def test_log_probabilities_come_back_as_they_were(width: int, count: int, data: st.DataObject) -> None:
    values = st.lists(st.floats(-100, 0, width=32), min_size=width, max_size=width)
    lists = LogprobsLists(
        [data.draw(st.lists(TOKENS, min_size=width, max_size=width)) for _ in range(count)],
        [data.draw(values) for _ in range(count)],
        data.draw(st.lists(st.integers(1, 2**31), min_size=count, max_size=count)),
    )
    message = logprobs_to_wire(lists)
    assert message is not None
    assert logprobs_from_wire(request_pb2.Logprobs.FromString(message.SerializeToString())) == lists
    assert logprobs_to_wire(None) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"width": 1, "token_ids": [1], "logprobs": [-1.0], "sampled_ranks": [1, 2]},
        {"width": 2, "token_ids": [1, 2], "logprobs": [-1.0], "sampled_ranks": [1]},
        {"width": 0, "token_ids": [1], "logprobs": [-1.0], "sampled_ranks": [1]},
    ],
)
def test_log_probabilities_whose_lists_do_not_fit_are_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="log-probabilities"):
        logprobs_from_wire(request_pb2.Logprobs(**fields))


def test_a_long_prompts_logprobs_go_in_pieces_that_fit_into_messages() -> None:
    num_tokens, width = 20_000, 21
    entry = [2**31 - 1] * width
    lists = LogprobsLists([entry] * num_tokens, [[-0.5] * width] * num_tokens, [7] * num_tokens)
    pieces = list(prompt_logprobs_to_wire(lists))
    assert len(pieces) > 2
    assert all(piece.ByteSize() <= PIECE_BYTES for piece in pieces)
    place = 1
    for piece in pieces:
        assert piece.first_position == place
        assert logprobs_from_wire(piece.logprobs).logprob_token_ids[0] == entry
        place += len(piece.logprobs.sampled_ranks)
    assert place == num_tokens + 1
    assert list(prompt_logprobs_to_wire(None)) == []
