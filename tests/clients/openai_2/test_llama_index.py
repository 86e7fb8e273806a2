"""llama-index's OpenAILike, as a chat model and as one for completions."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def model(base_url: str, *, chat: bool) -> Any:
    return OpenAILike(
        model="demo", api_base=base_url, api_key="none", is_chat_model=chat, context_window=4096, temperature=0,
        max_tokens=12, max_retries=0,
    )  # fmt: skip


def test_a_chat_whole_and_streamed(base_url: str) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    llm = model(base_url, chat=True)
    assert llm.chat(messages).message.content == ANSWER
    pieces = [piece.delta for piece in llm.stream_chat(messages)]
    assert len(pieces) > 2
    assert "".join(pieces) == ANSWER


async def test_an_async_chat(base_url: str) -> None:
    answer = await model(base_url, chat=True).achat([ChatMessage(role="user", content=QUESTION)])
    assert answer.message.content == ANSWER


@pytest.mark.parametrize("chat", [True, False])
def test_a_completion_whole_and_streamed(base_url: str, chat: bool) -> None:
    llm = model(base_url, chat=chat)
    prompt, expected = (QUESTION, ANSWER) if chat else ("The capital of France is", " Paris.")
    assert llm.complete(prompt).text.startswith(expected)
    streamed = "".join(piece.delta for piece in llm.stream_complete(prompt))
    assert streamed == llm.complete(prompt).text
