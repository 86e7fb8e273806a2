"""`tokenization_kwargs` of the offline API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=3)
LONG = list(range(5, 300)) * 2


def test_the_kept_tokens_are_what_is_computed(llm: LLM) -> None:
    for kwargs, kept in (
        ({"truncate_prompt_tokens": 6}, LONG[-6:]),
        ({"truncate_prompt_tokens": 6, "truncation_side": "right"}, LONG[:6]),
        ({"truncate_prompt_tokens": -1}, LONG[-253:]),
    ):
        options: Any = kwargs
        [answer] = llm.generate(LONG, PARAMS, use_tqdm=False, tokenization_kwargs=options)
        [expected] = llm.generate(kept, PARAMS, use_tqdm=False)
        assert answer.prompt_token_ids == kept
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        [embedded] = llm.embed(LONG[:200], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 6})
        assert embedded.prompt_token_ids == LONG[:200][-6:]


def test_a_chat_and_special_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello " * 9}]
    [whole] = llm.chat(messages, PARAMS, use_tqdm=False)
    [cut] = llm.chat(messages, PARAMS, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 4})
    assert cut.prompt_token_ids == whole.prompt_token_ids[-4:]
    [plain] = llm.generate("hello", PARAMS, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert plain.prompt_token_ids == llm.get_tokenizer().encode("hello", add_special_tokens=False)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1, not 0"),
    ({"truncate_prompt_tokens": 254}, "truncate_prompt_tokens", "must be at most 253, not 254"),
    ({"truncate_prompt_tokens": True}, "tokenization_kwargs", "truncate_prompt_tokens must be int, not True"),
    ({"truncation_side": "up"}, "truncation_side", "left or right"),
    ({"padding": True}, "tokenization_kwargs", "padding is not a known option"),
]


@pytest.mark.parametrize(("kwargs", "field", "told"), BAD)
def test_refusals(llm: LLM, kwargs: Any, field: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        llm.generate("x", PARAMS, use_tqdm=False, tokenization_kwargs=kwargs)
    assert refused.value.field == field


async def test_streams_have_them_too(running: Callable[..., Any]) -> None:
    llm: AsyncLLM
    async with running() as llm:
        kwargs: Any = {"truncate_prompt_tokens": 6}
        answers = [answer async for answer in llm.generate(LONG, PARAMS, tokenization_kwargs=kwargs)]
        assert answers[-1].prompt_token_ids == LONG[-6:]
        embedded = await llm.embed(LONG, tokenization_kwargs=kwargs)
        assert embedded.prompt_token_ids == LONG[-6:]
