"""openai-agents over its chat model, and with the name of a model alone, over its default, the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.models import _openai_shared
from openai import AsyncOpenAI
from pydantic import Field

from tests.clients.forms import City

set_tracing_disabled(True)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
Number = Annotated[int, Field(ge=0, le=99)]


@pytest.fixture
async def model(base_url: str) -> AsyncIterator[Any]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield OpenAIChatCompletionsModel(model="demo", openai_client=client)


async def test_an_agent_answers(model: Any) -> None:
    agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=ModelSettings(temperature=0))
    result = await Runner.run(agent, QUESTION)
    assert result.final_output == ANSWER
    assert result.context_wrapper.usage.total_tokens > 0
    again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": QUESTION}])
    assert again.context_wrapper.usage.input_tokens > result.context_wrapper.usage.input_tokens


async def test_an_agent_streams(model: Any) -> None:
    agent = Agent(name="a", model=model, model_settings=ModelSettings(temperature=0, include_usage=True))
    result = Runner.run_streamed(agent, QUESTION)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == ANSWER
    assert result.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_a_tool(model: Any, stream: bool) -> None:
    calls = []

    @function_tool
    def add(a: Number, b: Number) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return str(a + b)

    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    agent = Agent(name="a", model=model, tools=[add], model_settings=settings)
    if stream:
        streamed = Runner.run_streamed(agent, "What is 7 plus 5?")
        kinds = {event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"}
        assert {"tool_called", "tool_output", "message_output_created"} <= kinds
        assert streamed.final_output
    else:
        result = await Runner.run(agent, "What is 7 plus 5?")
        assert isinstance(result.final_output, str)
    # once: then the package lets the model answer
    [(a, b)] = calls
    assert 0 <= a <= 99
    assert 0 <= b <= 99


async def test_an_output_type(model: Any) -> None:
    agent = Agent(name="a", model=model, output_type=City, model_settings=ModelSettings(temperature=0))
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, City)


@pytest.fixture(params=["client", "environment"])
async def default_server(
    base_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """The package's default client is one of pdserve, given to it or found by the variables of the openai package."""
    monkeypatch.setattr(_openai_shared, "_default_openai_client", None)
    if request.param == "environment":
        monkeypatch.setenv("OPENAI_BASE_URL", base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield
        return
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        set_default_openai_client(client, use_for_tracing=False)
        yield


@pytest.mark.usefixtures("default_server")
async def test_the_name_of_a_model_alone() -> None:
    calls = []

    @function_tool
    def add(a: Number, b: Number) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return str(a + b)

    done = await Runner.run(Agent(name="a", model="demo"), QUESTION)
    assert done.final_output
    assert str(done.last_response_id).startswith("resp_")
    greedy = Agent(name="a", model="demo", model_settings=ModelSettings(temperature=0))
    assert (await Runner.run(greedy, QUESTION)).final_output == ANSWER
    streamed = Runner.run_streamed(greedy, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == ANSWER
    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    await Runner.run(Agent(name="a", model="demo", tools=[add], model_settings=settings), "What is 7 plus 5?")
    assert len(calls) == 1
    form = Agent(name="a", model="demo", output_type=City, model_settings=ModelSettings(temperature=0))
    assert isinstance((await Runner.run(form, QUESTION)).final_output, City)
