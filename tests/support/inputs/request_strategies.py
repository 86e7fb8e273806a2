"""Sampling and pooling parameters of any kind, for hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from pdserve.common.request.pooling_params import POOLING_TYPES, PoolingParams
from pdserve.common.request.sampling_params import NamedLogitsProcessor, RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams

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


@st.composite
def pooling_params(draw: st.DrawFn) -> PoolingParams:
    return PoolingParams(
        pooling_type=draw(st.sampled_from(POOLING_TYPES)),
        normalize=draw(st.booleans()),
        dimensions=draw(st.none() | st.integers(1, 2**32 - 1)),
    )
