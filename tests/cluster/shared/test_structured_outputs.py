"""Structured outputs and tool calls through real prefill and decode processes, with the `openai` client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.processes.shared_cluster import SharedCluster

pytestmark = pytest.mark.process

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Lima", "Oslo", "Quito"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["city", "size", "tags"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Tell me of a city. " * 10}]


def little_white_space(model: Path) -> dict[str, float]:
    """A model without training likes white space as much as anything, and JSON may have any amount of it."""
    tokenizer = Tokenizer.from_folder(model)
    texts = {token_id: tokenizer.decode([token_id], skip_special_tokens=True) for token_id in range(320)}
    return {str(token_id): -100.0 for token_id, text in texts.items() if text != text.strip() or text.isspace()}


async def test_a_form_through_p_and_d(shared: SharedCluster) -> None:
    cluster, model = shared.processes, shared.model
    client = openai.AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="none", max_retries=0)
    ask: Any = client.chat.completions.create
    given = {"model": model.name, "messages": MESSAGES, "max_tokens": 200, "logit_bias": little_white_space(model)}
    for seed in range(3):
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        whole = await ask(**given, seed=seed, response_format=form)
        assert whole.choices[0].finish_reason == "stop", whole
        jsonschema.validate(json.loads(whole.choices[0].message.content), SCHEMA)
        stream = await ask(**given, seed=seed, response_format=form, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(**given, response_format=bad)
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="parenthesis is not closed") as refused:
        await ask(**given, extra_body={"structured_outputs": {"regex": "(a"}})
    assert refused.value.param == "structured_outputs"
    chosen = await ask(**given, extra_body={"structured_outputs": {"choice": ["Lima", "Oslo"]}})
    assert chosen.choices[0].message.content in ("Lima", "Oslo")
    await check_tools(ask, given)
    await client.close()


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "A function.", "parameters": schema}}


async def check_tools(ask: Any, given: dict[str, Any]) -> None:
    tools = [tool("weather", city={"enum": ["Lima", "Oslo"]}), tool("sum", a={"enum": [1, 2]}, b={"type": "boolean"})]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for choice, names in (
        ("required", {"weather", "sum"}),
        ({"type": "function", "function": {"name": "sum"}}, {"sum"}),
    ):
        asked = given | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
        whole = (await ask(**asked)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        [call] = whole.message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])

        arguments, reasons, heads = "", [], []
        async for chunk in await ask(**asked, stream=True):
            [streamed] = chunk.choices
            assert not streamed.delta.content
            reasons += [streamed.finish_reason] if streamed.finish_reason else []
            for part in streamed.delta.tool_calls or ():
                heads += [(part.id, part.function.name)] if part.id else []
                arguments += part.function.arguments
        assert reasons == ["tool_calls"]
        assert [name for _, name in heads] == [call.function.name]
        assert arguments == call.function.arguments
    history = [
        *given["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "3"}]},
    ]
    free = (await ask(**(given | {"messages": history, "tools": tools, "max_tokens": 5}))).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)
    assert free.message.content
