"""The openai package: chats, completions, embeddings, models; sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.forms import City

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
COUNT: Any = [{"role": "user", "content": "Count from 1 to 50."}]


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, **fields)


def test_a_chat_has_its_answer_and_usage(client: OpenAI) -> None:
    done = chat(client)
    assert (done.object, done.model, len(done.choices)) == ("chat.completion", "demo", 1)
    [choice] = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    again = chat(client)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens == done.usage.prompt_tokens


def test_a_stream_has_the_same_answer_and_usage(client: OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == ANSWER
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == ["stop"]
    assert (last.choices, last.usage) == ([], chat(client).usage.model_copy(update=dict(last.usage)))
    assert last.usage.completion_tokens == chat(client).usage.completion_tokens


def test_a_raw_response_has_the_id_of_the_request(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=QUESTION, temperature=0)
    assert raw.status_code == 200
    parsed: Any = raw.parse()
    assert parsed.id.endswith(raw.headers["x-request-id"])
    assert parsed._request_id == raw.headers["x-request-id"]
    assert parsed.choices[0].message.content == ANSWER


def test_the_stream_helper_collects_events(client: OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == ANSWER
    assert [event.content for event in events if event.type == "content.done"] == [ANSWER]
    assert final.choices[0].message.content == ANSWER


def test_logprobs_belong_to_the_tokens(client: OpenAI) -> None:
    [choice] = chat(client, logprobs=True, top_logprobs=2).choices
    *content, end = choice.logprobs.content
    assert end.token == "<|im_end|>"
    assert "".join(entry.token for entry in content) == ANSWER
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == ANSWER
    for entry in content:
        # greedy: the likeliest token is the one that was sampled
        assert entry.top_logprobs[0].token == entry.token
        assert 0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert len(entry.top_logprobs) == 2


def test_n_choices(client: OpenAI) -> None:
    done = client.chat.completions.create(model="demo", messages=COUNT, n=3, temperature=1, seed=4, max_tokens=12)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.usage is not None
    assert done.usage.completion_tokens <= 36
    assert len({choice.message.content for choice in done.choices}) > 1


def test_a_developer_message_and_parts(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    plain = chat(client, [{"role": "developer", "content": "Be brief."}, *QUESTION])
    assert plain.choices[0].message.content == ANSWER
    in_parts = chat(client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content
    assert plain.usage.prompt_tokens > chat(client).usage.prompt_tokens


def test_parse_of_a_bounded_form(client: OpenAI) -> None:
    done = client.chat.completions.parse(model="demo", messages=QUESTION, temperature=0, response_format=City)
    [choice] = done.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)
    assert choice.message.parsed == City.model_validate_json(choice.message.content or "")


def test_parse_of_a_form_without_limits_ends_too(client: OpenAI) -> None:
    """The bundled model ends no string by itself; its workers' `grammar_string_chars` do."""

    class Place(BaseModel):
        city: str
        country: str | None

    done = client.chat.completions.parse(model="demo", messages=QUESTION, temperature=0, response_format=Place)
    place = done.choices[0].message.parsed
    assert isinstance(place, Place)
    assert max(len(place.city), len(place.country or "")) <= 64


def test_a_form_that_the_limit_cuts_off_is_told(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="demo", messages=QUESTION, temperature=0, response_format=City, max_tokens=3
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"store": True},
        {"service_tier": "flex"},
        {"prompt_cache_key": "x"},
        {"safety_identifier": "x"},
        {"metadata": {"a": "b"}},
        {"prediction": {"type": "content", "content": "The capital"}},
        {"verbosity": "medium"},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_change_no_text(client: OpenAI, fields: dict[str, Any]) -> None:
    assert chat(client, **fields).choices[0].message.content == ANSWER


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"verbosity": "low"}, "verbosity", '"low"'),
        ({"modalities": ["text", "audio"]}, "modalities", "audio"),
        ({"top_p": 2}, "top_p", "above 0 and at most 1, not 2"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "not a known field"),
        ({"max_tokens": 10**6}, "max_tokens", "4096"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions", "tools"),
    ],
    ids=["verbosity", "modalities", "range", "unknown", "length", "functions"],
)
def test_what_is_refused_names_the_field(client: OpenAI, fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert said in refused.value.message


def test_errors_have_the_classes_of_the_package(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.NotFoundError, match="no such path"):
        client.images.generate(model="demo", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt="a", suffix="b")
    assert refused.value.param == "suffix"


def test_completions_whole_and_streamed(client: OpenAI) -> None:
    done = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8, stop="."
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == (" Paris", "stop")
    stream = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8, stop=".", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == " Paris"


def test_completions_of_several_prompts_with_echo_and_logprobs(client: OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Peru is"]
    done = client.completions.create(
        model="demo", prompt=prompts, temperature=0, max_tokens=1, n=2, echo=True, logprobs=1
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(done.choices, [prompt for prompt in prompts for _ in range(2)], strict=True):
        assert choice.text.startswith(prompt)
        logprobs: Any = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        assert [
            choice.text[at:][: len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
        ] == (logprobs.tokens)


def test_embeddings_as_floats_and_base64(client: OpenAI) -> None:
    texts = ["Paris", "The capital of France", "7 plus 5"]
    # the package asks for base64 unless told otherwise, and decodes it
    decoded = client.embeddings.create(model="demo", input=texts)
    floats = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    assert [entry.index for entry in floats.data] == [0, 1, 2]
    for one, other in zip(decoded.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*other.embedding) == pytest.approx(1, abs=1e-5)
    raw: Any = client.embeddings.create(model="demo", input=texts[0], encoding_format="base64").data[0].embedding
    data = base64.b64decode(raw)
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 3


def test_embeddings_with_fewer_dimensions(client: OpenAI) -> None:
    full = client.embeddings.create(model="demo", input="Paris", encoding_format="float").data[0].embedding
    cut = client.embeddings.create(model="demo", input="Paris", dimensions=8, encoding_format="float").data[0].embedding
    length = math.hypot(*full[:8])
    assert cut == pytest.approx([value / length for value in full[:8]], abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="Paris", dimensions=100_000)


def test_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_stream_that_is_left_early(client: OpenAI) -> None:
    stream = chat(client, COUNT, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    assert next(stream).choices
    stream.close()
    assert chat(client).choices[0].message.content == ANSWER


async def test_async_calls_20_at_once(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def ask(number: int) -> tuple[int, str]:
            messages: Any = [{"role": "user", "content": f"What is {number} plus 5?"}]
            stream: Any = await client.chat.completions.create(
                model="demo", messages=messages, temperature=0, stream=True
            )
            return number, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*map(ask, range(20)))
    assert all(text.startswith(f"{number} plus 5 is {number + 5}") for number, text in answers)


async def test_async_early_close_and_timeout(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream: Any = await client.chat.completions.create(
            model="demo", messages=COUNT, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            assert chunk.choices
            break
        await stream.close()
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(
                model="demo", messages=COUNT, max_tokens=3000, extra_body={"ignore_eos": True}, timeout=0.2
            )
