"""The Responses API: the openai package, and the clients that use it by default."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import Field
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.forms import City

set_tracing_disabled(True)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
Number = Annotated[int, Field(ge=0, le=99)]
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": _NUMBER, "b": _NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def asynchronous(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def respond(client: OpenAI, given: Any = QUESTION, **fields: Any) -> Any:
    return client.responses.create(model="demo", input=given, temperature=0, **fields)


def test_a_response(client: OpenAI) -> None:
    done = respond(client, instructions="Be brief.")
    assert (done.object, done.status, done.output_text) == ("response", "completed", ANSWER)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0


def test_a_stream_has_the_same_answer(client: OpenAI) -> None:
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_a_history_of_responses(client: OpenAI) -> None:
    first = respond(client)
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is the capital of Peru?"}]}
    second = respond(client, [{"role": "user", "content": QUESTION}, *first.output, question])
    assert second.output_text == "The capital of Peru is Lima."
    assert second.usage.input_tokens > first.usage.total_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=["required", "named"])
def test_a_call_and_its_result(client: OpenAI, choice: Any) -> None:
    called = respond(client, tools=[ADD], tool_choice=choice, parallel_tool_calls=False)
    [call] = called.output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "add", {"a", "b"})
    events = list(respond(client, tools=[ADD], tool_choice=choice, parallel_tool_calls=False, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    followed = respond(client, [{"role": "user", "content": QUESTION}, call, result], tools=[ADD])
    assert followed.output[0].type == "message"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_the_router_keeps(client: OpenAI, stream: bool) -> None:
    second: Any
    first = respond(client)
    fields = {"given": "What is the capital of Peru?", "previous_response_id": first.id}
    if stream:
        with client.responses.stream(
            model="demo", input=fields["given"], temperature=0, previous_response_id=first.id
        ) as events:
            second = events.get_final_response()
    else:
        second = respond(client, **fields)
    assert second.output_text == "The capital of Peru is Lima."
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id).output[0].id == second.output[0].id
    listed: Any = client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in listed]
    assert texts == [QUESTION, ANSWER, fields["given"]]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not stored here"):
        respond(client, **fields)
    assert respond(client, "And now?", previous_response_id=second.id).usage.input_tokens > second.usage.total_tokens


def test_the_result_of_a_call_alone(client: OpenAI) -> None:
    first = respond(client, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "12"}
    second = respond(client, [result], tools=[ADD], previous_response_id=first.id)
    spelled = respond(client, [{"role": "user", "content": QUESTION}, first.output[0], result], tools=[ADD])
    assert second.output_text == spelled.output_text
    assert second.usage.input_tokens == spelled.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_parse_of_a_form(client: OpenAI) -> None:
    done = client.responses.parse(model="demo", input=QUESTION, temperature=0, text_format=City)
    assert isinstance(done.output_parsed, City)


def test_an_answer_that_the_limit_cuts_off_is_told(client: OpenAI) -> None:
    done = respond(client, max_output_tokens=3)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_p": 2}, "top_p"),
    ],
    ids=["hosted tool", "background", "truncation", "range"],
)
def test_what_is_refused_names_the_field(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **fields)
    assert str(refused.value.param).startswith(param)


def test_langchain(base_url: str) -> None:
    model = ChatOpenAI(
        model="demo", base_url=base_url, api_key="none", temperature=0, max_retries=0, use_responses_api=True
    )
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)
    keeping = model.model_copy(update={"use_previous_response_id": True})
    first = keeping.invoke(QUESTION)
    again = keeping.invoke([HumanMessage(QUESTION), first, HumanMessage("What is the capital of Peru?")])
    assert again.text == "The capital of Peru is Lima."


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents(asynchronous: AsyncOpenAI, stream: bool) -> None:
    calls = []

    @function_tool
    def add(a: Number, b: Number) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return str(a + b)

    model = OpenAIResponsesModel(model="demo", openai_client=asynchronous)
    plain = Agent(name="a", model=model, model_settings=ModelSettings(temperature=0))
    assert (await Runner.run(plain, QUESTION)).final_output == ANSWER
    done = await Runner.run(plain, QUESTION)
    again = await Runner.run(plain, "What is the capital of Peru?", previous_response_id=done.last_response_id)
    assert again.final_output == "The capital of Peru is Lima."
    settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    agent = Agent(name="a", model=model, tools=[add], model_settings=settings)
    if stream:
        streamed = Runner.run_streamed(agent, "What is 7 plus 5?")
        kinds = {event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"}
        assert {"tool_called", "tool_output", "message_output_created"} <= kinds
    else:
        assert isinstance((await Runner.run(agent, "What is 7 plus 5?")).final_output, str)
    assert len(calls) == 1


async def test_pydantic_ai(asynchronous: AsyncOpenAI) -> None:
    model = PydanticModel("demo", provider=OpenAIProvider(openai_client=asynchronous))
    greedy: Any = {"temperature": 0, "max_tokens": 400}
    assert (await PydanticAgent(model, model_settings=greedy).run(QUESTION)).output == ANSWER
    async with PydanticAgent(model, model_settings=greedy).run_stream(QUESTION) as result:
        assert "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)]) == ANSWER
