"""`SamplingParams.verify`: every field at, below and above its limits."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import (
    NamedLogitsProcessor,
    RequestOutputKind,
    SamplingParams,
    clamped_logit_bias,
    verify_token_ids,
)
from pdserve.common.request.structured_outputs import StructuredOutputsParams

NAN, INF = float("nan"), float("inf")
GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": 1},
    {"max_tokens": 2**32 - 1},
    {"min_tokens": 0},
    {"min_tokens": 16, "max_tokens": 16},
    {"stop": ("x" * 256,) * 16},
    {"stop_token_ids": (0, 9) * 128},
    *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (-2.0, 0.0, 2.0)),
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 50.0},
    {"logit_bias": {0: -100.0, 9: 100.0}},
    {"allowed_token_ids": (0, 9)},
    {"bad_words": ("x" * 256,) * 128, "bad_words_token_ids": ((0, 9),)},
    {"logprobs": 0},
    {"logprobs": 20},
    {"detokenize": False},
    *({"output_kind": kind} for kind in RequestOutputKind),
    {"logits_processors": (NamedLogitsProcessor(name="x" * 128, args={"a": [1, None, "b"]}),) * 8},
    {"n": 16},
    {"n": 3, "best_of": 3},
    {"best_of": 16},
    {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
    {"structured_outputs": StructuredOutputsParams(json="true", disable_any_whitespace=True)},
    {"structured_outputs": StructuredOutputsParams(choice=["x"] * 1024)},
    {"structured_outputs": StructuredOutputsParams(regex="x" * 8192)},
    {"structured_outputs": StructuredOutputsParams(grammar="x" * 65536)},
    {"structured_outputs": StructuredOutputsParams(json_object=True, regex=None)},
    {"structured_outputs": StructuredOutputsParams(structural_tag="{}")},
]
FORMS: list[dict[str, Any]] = [
    {},
    {"json_object": False},
    {"regex": "x", "grammar": "y"},
    {"json_object": True, "choice": ["x"]},
    {"json": "[]"},
    {"json": "{"},
    {"json": {"x": {1, 2}}},
    {"json": {"x": NAN}},
    {"json": 7},
    {"json": {"x": "y" * 65536}},
    {"regex": ""},
    {"regex": 7},
    {"regex": "x" * 8193},
    {"regex": "\ud800"},
    {"choice": []},
    {"choice": "xy"},
    {"choice": ["x", ""]},
    {"choice": ["x", 7]},
    {"choice": ["x"] * 1025},
    {"choice": ["x" * 65537]},
    {"grammar": ""},
    {"grammar": "x" * 65537},
    {"json_object": 1},
    {"structural_tag": "[]"},
    {"structural_tag": {}},
    {"regex": "x", "whitespace_pattern": " "},
    {"regex": "x", "disable_any_whitespace": 1},
]
BAD: list[tuple[str, dict[str, Any]]] = [
    *(("structured_outputs", {"structured_outputs": StructuredOutputsParams(**form)}) for form in FORMS),
    *(("temperature", {"temperature": value}) for value in (-0.1, 100.1, NAN, INF, -INF)),
    *(("top_p", {"top_p": value}) for value in (0.0, -0.5, 1.0001, NAN, INF)),
    *(("top_k", {"top_k": value}) for value in (-2, 2**31, 10**30)),
    *(("min_p", {"min_p": value}) for value in (-0.01, 1.01, NAN, INF)),
    *(("seed", {"seed": value}) for value in (2**63, -(2**63) - 1)),
    *(("max_tokens", {"max_tokens": value}) for value in (0, -1, 2**32)),
    *(("min_tokens", {"min_tokens": value}) for value in (-1, 17)),
    ("stop", {"stop": ("x",) * 17}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ("x" * 257,)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * 257}),
    ("stop_token_ids", {"stop_token_ids": (10,)}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}),
    *(
        (name, {name: value})
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.01, 2.01, NAN, INF, -INF)
    ),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (0.0, -1.0, NAN, INF)),
    *(("logit_bias", {"logit_bias": value}) for value in ({0: 100.1}, {0: -100.1}, {0: NAN}, {10: 0.0}, {-1: 0.0})),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    *(("allowed_token_ids", {"allowed_token_ids": value}) for value in ((), (10,), (3, -1))),
    ("bad_words", {"bad_words": ("x",) * 129}),
    ("bad_words", {"bad_words": ("x", "")}),
    ("bad_words", {"bad_words": ("x" * 257,)}),
    ("bad_words", {"bad_words_token_ids": ((1, 10),)}),
    ("bad_words_token_ids", {"bad_words_token_ids": ((1,), ())}),
    *(("logprobs", {"logprobs": value}) for value in (-1, 21)),
    ("stop", {"stop": ("x",), "detokenize": False}),
    ("logits_processors", {"logits_processors": (NamedLogitsProcessor(name="x"),) * 9}),
    *(
        ("logits_processors", {"logits_processors": (NamedLogitsProcessor(name=name, args=args),)})
        for name, args in (("", {}), ("x" * 129, {}), ("x", {"a": "b" * 4096}), ("x", {"a": object()}))
    ),
    *(("n", {"n": value}) for value in (0, -1, 17)),
    *(("best_of", {"n": 2, "best_of": value}) for value in (0, 1, 17)),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_at_their_limits_pass(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).verify(vocab_size=10)


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:40])
def test_values_beyond_their_limits_are_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**fields).verify(vocab_size=10)
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def test_token_ids_are_held_against_the_vocabulary_where_it_is_known() -> None:
    SamplingParams(stop_token_ids=(10**9,)).verify()
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids\[2\] is 10, outside the vocabulary of 10 tokens"):
        verify_token_ids("prompt_token_ids", [0, 9, 10, 11], 10)


def test_a_bias_beyond_its_range_counts_as_the_range() -> None:
    assert clamped_logit_bias({1: 1e9, 2: -INF, 3: 5.0}) == {1: 100.0, 2: -100.0, 3: 5.0}
    with pytest.raises(InvalidRequest, match=r"logit_bias\[4\] must be from -100 to 100, not nan"):
        SamplingParams(logit_bias=clamped_logit_bias({4: NAN})).verify()


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]
    assert SamplingParams(stop=("a", "b")).stop == ("a", "b")


def test_an_engine_gives_more_log_probabilities_than_clients_may_ask_for() -> None:
    params = SamplingParams(logprobs=320)
    params.verify(vocab_size=320, max_logprobs=320)
    with pytest.raises(InvalidRequest, match="logprobs must be from 0 to 20, not 320"):
        params.verify(vocab_size=320)


def test_greedy_is_temperature_zero_or_almost() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams(temperature=1e-4).greedy
