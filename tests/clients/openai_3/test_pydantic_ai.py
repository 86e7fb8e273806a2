"""pydantic-ai over its chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from openai import AsyncOpenAI
from pydantic import Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.forms import City

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
GREEDY: Any = {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
Number = Annotated[int, Field(ge=0, le=99)]


@pytest.fixture
async def model(base_url: str) -> AsyncIterator[Any]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))


async def test_an_agent_answers(model: Any) -> None:
    result = await Agent(model, instructions="Be brief.", model_settings=GREEDY).run(QUESTION)
    assert result.output == ANSWER
    assert result.usage.output_tokens > 0


async def test_an_agent_streams(model: Any) -> None:
    async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 2
    assert "".join(pieces) == ANSWER


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
async def test_an_output_type(model: Any, form: Any) -> None:
    agent = Agent(model, output_type=form(City), model_settings=GREEDY, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, City)


async def test_a_tool_is_offered_and_its_result_goes_back(model: Any) -> None:
    agent = Agent(model, model_settings=GREEDY)

    @agent.tool_plain
    def add(a: Number, b: Number) -> int:
        """Add two numbers."""
        return a + b

    # the bundled model calls no tool unless it must: another model makes the call, and the server gets the history
    history = (await agent.run("What is 7 plus 5?", model=TestModel())).all_messages()
    plain = await agent.run(QUESTION)
    followed = await agent.run(QUESTION, message_history=history)
    assert plain.output == ANSWER
    assert isinstance(followed.output, str)
    assert followed.usage.input_tokens > plain.usage.input_tokens
