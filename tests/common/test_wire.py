"""Our types on the wire: what goes out comes back, and what a stranger sends is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.kv_layout import BlockShape, KvLayout
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.wire.messages import (
    PIECE_BYTES,
    finish_reason_from_wire,
    finish_reason_to_wire,
    layout_from_wire,
    layout_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    moments_from_wire,
    moments_to_wire,
    prompt_logprobs_to_wire,
)
from pdserve.common.request.wire.params_wire import pooling_from_wire, sampling_from_wire
from pdserve.v1 import kv_source_pb2, request_pb2
from tests.support.inputs.request_strategies import TOKENS, sampling_params
from tests.support.inputs.sampling_message import sampling_to_wire
from tests.support.models.kv_layouts import make_layout


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


def test_an_output_kind_that_is_none_is_refused_on_arrival() -> None:
    with pytest.raises(InvalidRequest, match="output_kind is 9"):
        sampling_from_wire(request_pb2.SamplingParams(output_kind=9))  # type: ignore[arg-type]


def test_pooling_params_that_are_wrong_or_left_out() -> None:
    assert pooling_from_wire(request_pb2.PoolingParams()) == PoolingParams()
    for wrong, field in (
        (request_pb2.PoolingParams(pooling_type=7), "pooling_type"),  # type: ignore[arg-type]
        (request_pb2.PoolingParams(dimensions=0), "dimensions"),
    ):
        with pytest.raises(InvalidRequest, match=field) as refused:
            pooling_from_wire(wrong)
        assert refused.value.field == field


SHAPES = st.builds(
    BlockShape,
    num_layers=TOKENS,
    num_kv_heads=TOKENS,
    total_num_kv_heads=TOKENS,
    head_dim=TOKENS,
    block_size=TOKENS,
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "another"]),
    rows_per_token=TOKENS,
)
LAYOUT = make_layout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16)


@given(
    st.builds(
        KvLayout,
        format=st.integers(1, 2**32 - 1),
        tp_rank=TOKENS,
        tp_size=TOKENS,
        block_size=TOKENS,
        model_fingerprint=st.text(max_size=9),
        shapes=st.lists(SHAPES, max_size=3).map(tuple),
        group_shapes=st.lists(TOKENS, max_size=4).map(tuple),
        group_windows=st.lists(TOKENS, max_size=4).map(tuple),
        draft_head=st.sampled_from(["", "mtp"]),
    )
)
def test_layouts_come_back_and_differ_field_by_field(layout: KvLayout) -> None:
    back = layout_from_wire(kv_source_pb2.KvLayout.FromString(layout_to_wire(layout).SerializeToString()))
    assert back == layout
    of_ranks = ("num_kv_heads", "tp_rank", "tp_size")

    def differing(ours: Any, theirs: Any, place: str = "") -> list[str]:
        names = [n for n in ours.__struct_fields__ if n not in ("shapes", *of_ranks)]
        return [f"{place}{n}" for n in names if getattr(ours, n) != getattr(theirs, n)]

    moved = layout.without_draft_head()  # LAYOUT has none
    expected = differing(LAYOUT, moved)
    if len(moved.shapes) != 1:
        expected.append("shapes")
    if moved.shapes:
        expected += differing(LAYOUT.shapes[0], moved.shapes[0])
    names = [line.partition(":")[0] for line in LAYOUT.differences(layout)]
    assert names == expected or (not expected and names == ["tp_size"])


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
