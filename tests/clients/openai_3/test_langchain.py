"""langchain-openai: chats, streams, batches, tools, forms, completions, embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.clients.forms import City

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture
def model(base_url: str) -> Any:
    return ChatOpenAI(model="demo", base_url=base_url, api_key="none", temperature=0, max_retries=0)


@tool
def add(a: int = Field(ge=0, le=99), b: int = Field(ge=0, le=99)) -> int:
    """Add two numbers."""
    return a + b


def test_invoke(model: Any) -> None:
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.content == ANSWER
    assert answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 0


def test_stream(model: Any) -> None:
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert len(chunks) > 2
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == ANSWER
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] == model.invoke(QUESTION).usage_metadata["output_tokens"]


async def test_async_stream(model: Any) -> None:
    assert "".join([chunk.content async for chunk in model.astream(QUESTION)]) == ANSWER


def test_batch(model: Any) -> None:
    answers = model.batch([f"What is {number} plus 5?" for number in range(6)])
    assert [answer.content for answer in answers] == [f"{number} plus 5 is {number + 5}." for number in range(6)]


def test_a_tool_and_its_result(model: Any) -> None:
    called = model.bind_tools([add], tool_choice="add", parallel_tool_calls=False).invoke("What is 7 plus 5?")
    [call] = called.tool_calls
    assert call["name"] == "add"
    result = add.invoke(call)
    assert result.content == str(call["args"]["a"] + call["args"]["b"])
    followed = model.bind_tools([add]).invoke([HumanMessage("What is 7 plus 5?"), called, result])
    assert isinstance(followed, AIMessage)
    assert isinstance(result, ToolMessage)
    assert followed.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


def test_a_streamed_tool(model: Any) -> None:
    chunks = list(model.bind_tools([add], tool_choice="any", parallel_tool_calls=False).stream("What is 7 plus 5?"))
    [call] = sum(chunks[1:], chunks[0]).tool_calls
    assert call["name"] == "add"
    assert set(call["args"]) == {"a", "b"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(City, method=method).invoke(QUESTION)
    assert isinstance(found, City)


class Defaults(BaseModel):
    city: str = "Paris"


def test_structured_output_in_json_mode(model: Any, only_braces: dict[str, Any]) -> None:
    bound = model.model_copy(update={"extra_body": only_braces})
    assert bound.with_structured_output(Defaults, method="json_mode").invoke("JSON, please.") == Defaults()


def test_completions(base_url: str) -> None:
    model = OpenAI(model="demo", base_url=base_url, api_key="none", temperature=0, max_tokens=8, max_retries=0)
    assert model.invoke("The capital of France is", stop=["."]) == " Paris"
    assert "".join(model.stream("The capital of France is", stop=["."])) == " Paris"


def test_embeddings(base_url: str) -> None:
    # by default the package sends token ids of a tokenizer that it downloads
    model = OpenAIEmbeddings(
        model="demo", base_url=base_url, api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    documents = model.embed_documents(["Paris", "Rome"])
    assert documents[0] == pytest.approx(model.embed_query("Paris"), abs=1e-5)
    assert documents[0] != pytest.approx(documents[1], abs=1e-2)
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-4) for vector in documents)
