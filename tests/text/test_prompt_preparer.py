"""Prompts and parameters as router and `LLM` prepare them: what is filled in, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.text.prompt import ChatInput, EmbedsInput, Prompt, TextInput, TokenInput, Truncation
from pdserve.text.prompt_preparer import ModelLimits, PromptPreparer, PromptRequest, embeds_fields
from pdserve.text.tokenization.tokenizer import Tokenizer

LIMITS = ModelLimits(max_model_len=40, vocab_size=300, hidden_size=4, max_logprobs=5, max_n_sequences=3)
EMBEDS = EmbedsInput(PromptEmbeds.of(2, 4, "float32", bytes(32)))


def prepared(tokenizer: Tokenizer, prompt: Prompt, *, num_before: int = 0, **fields: Any) -> GenerationRequest:
    preparer = PromptPreparer(tokenizer, None, None)
    request = PromptRequest(prompt=prompt, field="p", **(fields | embeds_fields(prompt)))
    token_ids = preparer.encode(request, LIMITS.room, num_before).token_ids
    if request.pooling_params is not None:
        return preparer.complete_pooling(request, token_ids, LIMITS)
    bad_words = preparer.bad_words(request.sampling_params)
    return preparer.complete(request, token_ids, LIMITS, bad_words, num_before)


def test_what_the_client_left_open_is_filled_in(byte_level_tokenizer: Tokenizer) -> None:
    text = TextInput("abc", add_special_tokens=False)
    made = prepared(byte_level_tokenizer, text, sampling_params=SamplingParams(bad_words=("no",)), priority=3)
    assert len(made.prompt_token_ids) == 3
    assert made.sampling_params.max_tokens == 16
    assert len(made.sampling_params.bad_words_token_ids) == 2
    assert made.priority == 3
    assert type(made) is GenerationRequest
    assert prepared(byte_level_tokenizer, text, takes_rest=True).sampling_params.max_tokens == 37
    assert prepared(byte_level_tokenizer, text, max_tokens=7).sampling_params.max_tokens == 7
    assert prepared(byte_level_tokenizer, text, num_before=30).sampling_params.max_tokens == 7
    chat = prepared(byte_level_tokenizer, ChatInput([{"role": "user", "content": "a"}]))
    assert chat.sampling_params.max_tokens == 40 - len(chat.prompt_token_ids)


def test_a_prompt_that_is_pooled_needs_no_room_for_output(byte_level_tokenizer: Tokenizer) -> None:
    whole = TokenInput([5] * 40)
    assert (
        prepared(byte_level_tokenizer, whole, pooling_params=PoolingParams(task="embed")).prompt_token_ids == [5] * 40
    )
    with pytest.raises(PromptTooLong, match="p has 40 tokens; the model's length is 40 tokens"):
        prepared(byte_level_tokenizer, whole)
    with pytest.raises(PromptTooLong, match="p has 41 tokens"):
        prepared(byte_level_tokenizer, TokenInput([5] * 41), pooling_params=PoolingParams(task="embed"))


def test_a_truncated_prompt_leaves_room_for_what_is_asked(byte_level_tokenizer: Tokenizer) -> None:
    long = TokenInput(list(range(100)))
    made = prepared(byte_level_tokenizer, long, truncation=Truncation(-1), max_tokens=10)
    assert made.prompt_token_ids == list(range(70, 100))


def test_embeddings_are_placeholders_that_are_not_drafted(byte_level_tokenizer: Tokenizer) -> None:
    made = prepared(byte_level_tokenizer, EMBEDS)
    assert len(made.prompt_token_ids) == 2
    assert (made.prompt_embeds, made.speculative_tokens) == (EMBEDS.embeds, 0)


TEXT = TextInput("abc")


@pytest.mark.parametrize(
    ("prompt", "fields", "message", "field"),
    [
        (EMBEDS, {"truncation": Truncation(1)}, "prompt_embeds are not truncated", "truncate_prompt_tokens"),
        (EmbedsInput(PromptEmbeds.of(1, 8, "float32", bytes(32))), {}, "the model's hidden size is 4", "prompt_embeds"),
        (TokenInput([300]), {}, r"p\[0\] is 300, outside the vocabulary", "p"),
        (TokenInput([]), {}, "p is empty", "p"),
        (TEXT, {"cache_salt": "x" * 257}, "cache_salt has 257 characters", "cache_salt"),
        (TEXT, {"priority": 1 << 40}, "priority", "priority"),
        (TEXT, {"max_tokens": 99, "max_tokens_field": "m"}, "m is 99 and p has", "m"),
        (
            TEXT,
            {"sampling_params": SamplingParams(logprobs=6), "logprobs_field": "top"},
            "top must be from 0 to 5",
            "top",
        ),
        (TEXT, {"sampling_params": SamplingParams(n=4)}, "n must be from 1 to 3, not 4", "n"),
        (TEXT, {"sampling_params": SamplingParams(bad_words=("",))}, "bad_words must be 1 to", "bad_words"),
        (TEXT, {"sampling_params": SamplingParams(temperature=-1)}, "temperature must be from 0", "temperature"),
        (TEXT, {"pooling_params": PoolingParams(task="embed", dimensions=9)}, "dimensions", "dimensions"),
    ],
    ids=range(12),
)
def test_refusals(
    byte_level_tokenizer: Tokenizer, prompt: Prompt, fields: dict[str, Any], message: str, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        prepared(byte_level_tokenizer, prompt, **fields)
    assert refused.value.field == field
