"""Options of OpenAI's clients for the form of an answer: its prompt before it, its usage in every chunk."""

from __future__ import annotations

import json

import pytest
from openai import AsyncOpenAI

from pdserve.router.openai.echo import Echo
from pdserve.router.openai.no_op_fields import IGNORED, NO_OP, REASONS, RESPONSES_NO_OP
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.prompt import TextInput
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.router.fake_worker import EOS, SPECIAL, said, tokens


@pytest.fixture
async def quick(cluster):
    return await cluster.start(prefill=0, decode=1)


def chunks(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        (tokens("hello"), ["hello"]),
        ([tokens("a"), [EOS, *tokens("b")]], ["a", SPECIAL[0] + "b"]),
    ],
)
async def test_echo_puts_the_prompt_before_each_choice(quick, prompt, echoed):
    response = await quick.complete(prompt=prompt, max_tokens=3, echo=True)
    answer = response.json()
    assert [choice["text"] for choice in answer["choices"]] == [text + said(3) for text in echoed]
    assert answer["usage"]["completion_tokens"] == 3 * len(echoed)
    streamed = ["" for _ in echoed]
    for chunk in chunks(await quick.streamed(lambda: None, prompt=prompt, max_tokens=3, echo=True)):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [text + said(3) for text in echoed]


def test_every_choice_of_a_prompt_begins_with_it_once(model_folder):
    echo = Echo([TextInput("a"), TextInput("b")], 2, Tokenizer.from_folder(model_folder))
    assert [echo.before(CompletionOutput(index=choice, text="", token_ids=[])) for choice in (0, 1, 3, 2, 0)] == [
        "a",
        "a",
        "b",
        "b",
        "",
    ]


@pytest.mark.few(5)
@pytest.mark.parametrize("include", [{}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_continuous_usage_needs_include_usage(quick, path, include):
    """As in vLLM, where a stream without it has no usage at all."""
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    options = {"continuous_usage_stats": True, **include}
    told = chunks(await quick.streamed(lambda: None, path, max_tokens=3, stream_options=options, **prompt))
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in told)


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_in_every_chunk_of_several_choices(quick, path):
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *others, last = chunks(
        await quick.streamed(lambda: None, path, max_tokens=3, n=3, stream_options=options, **prompt)
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in others]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_in_every_chunk(quick, path):
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = await quick.streamed(lambda: None, path, max_tokens=5, stream_options=options, **prompt)
    *with_text, last = chunks(received)
    if "role" in with_text[0]["choices"][0].get("delta", {}):
        assert with_text[0]["usage"]["completion_tokens"] == 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in with_text]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in with_text} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    for usage in (chunk["usage"] for chunk in with_text):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_what_the_openai_client_may_send_without_effect(quick):
    async with AsyncOpenAI(base_url=f"http://{quick.addresses[0]}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=4,
            metadata={"purpose": "test"},
            store=True,
            prediction={"type": "content", "content": "hello"},
            prompt_cache_retention="24h",
            modalities=["text"],
            verbosity="medium",
            reasoning_effort="high",
            safety_identifier="someone",
            prompt_cache_key="some key",
            user="someone",
            parallel_tool_calls=True,
        )
    assert answer.choices[0].message.content == said(4)


@pytest.mark.few(4)
@pytest.mark.parametrize("field", [field for field, neutral in NO_OP.items() if neutral])
async def test_values_that_change_nothing_are_accepted(quick, field):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    path, prompt = (
        ("chat/completions", chat) if field in ChatBody.__struct_fields__ else ("completions", {"prompt": "hi"})
    )
    for value in NO_OP[field]:
        response = await quick.http.post(f"/v1/{path}", json={**prompt, "max_tokens": 2, field: value})
        assert response.status_code == 200, response.text


def test_every_neutral_field_can_be_sent():
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert {*NO_OP, *IGNORED} <= fields
    assert set(REASONS) <= {*NO_OP, *RESPONSES_NO_OP}
