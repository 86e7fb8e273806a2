"""litellm: provider prefixes, streams, embeddings, and the fields that it sends for reasoning."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.forms import City

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PREFIXES = ["openai", "hosted_vllm", "litellm_proxy", "custom_openai", "lm_studio"]


@pytest.fixture
def server(base_url: str) -> dict[str, Any]:
    return {"api_base": base_url, "api_key": "none", "temperature": 0, "num_retries": 0}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_chat_under_each_prefix(server: dict[str, Any], prefix: str) -> None:
    answer: Any = litellm.completion(model=f"{prefix}/demo", messages=QUESTION, **server)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_stream_with_usage(server: dict[str, Any], prefix: str) -> None:
    stream: Any = litellm.completion(
        model=f"{prefix}/demo", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **server
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    whole: Any = litellm.completion(model=f"{prefix}/demo", messages=QUESTION, **server)
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_an_async_chat(server: dict[str, Any]) -> None:
    answer: Any = await litellm.acompletion(model="hosted_vllm/demo", messages=QUESTION, **server)
    assert answer.choices[0].message.content == ANSWER


def test_completions(server: dict[str, Any]) -> None:
    answer: Any = litellm.text_completion(
        model="text-completion-openai/demo", prompt="The capital of France is", max_tokens=8, stop=["."], **server
    )
    assert answer.choices[0].text == " Paris"


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm", "litellm_proxy"])
def test_embeddings(base_url: str, prefix: str) -> None:
    found: Any = litellm.embedding(
        model=f"{prefix}/demo", input=["Paris", "Rome"], api_base=base_url, api_key="none", encoding_format="float"
    )
    assert [len(entry["embedding"]) for entry in found.data] == [256, 256]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_reasoning_effort(server: dict[str, Any], effort: str, drop: bool) -> None:
    answer: Any = litellm.completion(
        model="hosted_vllm/demo", messages=QUESTION, reasoning_effort=effort, drop_params=drop, **server
    )
    assert answer.choices[0].message.content == ANSWER


def test_thinking(server: dict[str, Any]) -> None:
    answer: Any = litellm.completion(
        model="hosted_vllm/demo", messages=QUESTION, thinking={"type": "enabled", "budget_tokens": 1024}, **server
    )
    assert answer.choices[0].message.content == ANSWER


def test_metadata_and_user(server: dict[str, Any]) -> None:
    answer: Any = litellm.completion(
        model="openai/demo", messages=QUESTION, user="u", metadata={"trace": "t"}, extra_body={"top_k": 1}, **server
    )
    assert answer.choices[0].message.content == ANSWER


def test_a_form(server: dict[str, Any]) -> None:
    answer: Any = litellm.completion(model="hosted_vllm/demo", messages=QUESTION, response_format=City, **server)
    assert City.model_validate_json(answer.choices[0].message.content)


def test_errors_have_the_classes_of_the_package(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p must be above 0 and at most 1, not 2"):
        litellm.completion(model="hosted_vllm/demo", messages=QUESTION, top_p=2, **server)
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(model="hosted_vllm/other", messages=QUESTION, **server)
