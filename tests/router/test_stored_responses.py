"""Responses that continue others, are fetched again, listed and deleted; and what other tenants learn of them: nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.common.net import body_budget
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.router.bodies import client_bodies
from pdserve.router.requests.fields.request_limits import MAX_MESSAGES
from pdserve.router.responses.response_store import MemoryResponseStore
from pdserve.v1 import prefill_pb2
from tests.router.fake_worker import ADMITTED, EOS, decode_outputs, play, said
from tests.support.processes.redis_server import redis_server
from tests.support.run.waiting import HANG_S

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob")}
SUM: dict[str, Any] = {"type": "function", "name": "sum", "parameters": {"type": "object"}}
NONE = f"resp_{'0' * 32}"


async def started(cluster: Any, **settings: Any) -> None:
    """With a worker that has room for long prompts."""
    await cluster.worker("decode", max_model_len=4096).start()
    await cluster.start(prefill=0, decode=0, **settings)


async def created(cluster: Any, given: Any = "hi", key: str = "", status: int = 200, **fields: Any) -> dict[str, Any]:
    """The response, or its error."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"input": given, "max_output_tokens": 3, **fields}
    answer = await cluster.http.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    content: dict[str, Any] = answer.json()
    return content if status == 200 else content["error"]


def prompt(cluster: Any) -> list[int]:
    """The prompt that the worker got last."""
    return list(cluster.of("decode").calls[-1].request.prompt_token_ids)


def says(text: str) -> Any:
    """A script: the worker says this, and ends by itself."""
    return play(ADMITTED, decode_outputs(0, text), decode_outputs(len(text), "", "stop", [EOS]))


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    await started(cluster)
    made = openai.AsyncOpenAI(base_url=f"http://{cluster.addresses[0]}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


async def test_a_conversation_goes_on(cluster: Any) -> None:
    await started(cluster)
    first = await created(cluster, "one", instructions="s")
    second = await created(cluster, "two", previous_response_id=first["id"], instructions="t")
    as_one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": said(3)}]
    second_prompt = prompt(cluster)
    assert second["previous_response_id"] == first["id"]
    await created(cluster, [*as_one, {"role": "user", "content": "two"}], instructions="t")
    assert prompt(cluster) == second_prompt, "instructions are not carried over"
    await created(cluster, "three", previous_response_id=second["id"])
    third_prompt = prompt(cluster)
    as_two = [{"role": "user", "content": "two"}, {"role": "assistant", "content": said(3)}]
    await created(cluster, [*as_one, *as_two, {"role": "user", "content": "three"}])
    assert prompt(cluster) == third_prompt
    # two branches of the same conversation
    await created(cluster, "three", previous_response_id=first["id"])
    assert prompt(cluster) != third_prompt


async def test_calls_and_their_results_in_two_requests(cluster: Any, client: openai.AsyncOpenAI) -> None:
    cluster.of("decode").scripts = [says('<tool_call>{"name":"sum","arguments":{"a":1}}</tool_call>')]
    tools: Any = [SUM]
    first = await client.responses.create(input="hi", tools=tools)
    [call] = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    await client.responses.create(input=[result], previous_response_id=first.id, tools=tools, max_output_tokens=2)
    continued = prompt(cluster)
    spelled: Any = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    await client.responses.create(input=spelled, tools=tools, max_output_tokens=2)
    assert prompt(cluster) == continued
    with pytest.raises(openai.BadRequestError, match="no function_call before it has this call_id"):
        await client.responses.create(input=[result | {"call_id": "x"}], previous_response_id=first.id)


@pytest.mark.few(3)
@pytest.mark.parametrize("cut", ['{"a', "{", '{"a":1}', "[1]"])
async def test_a_call_that_was_cut_stays_in_the_conversation(cluster: Any, cut: str) -> None:
    """The client was given it, and may answer it."""
    await started(cluster)
    text = '<tool_call>{"name":"sum","arguments":' + cut
    cluster.of("decode").scripts = [play(ADMITTED, decode_outputs(0, text, "length"))]
    first = await created(cluster, "one", tools=[SUM], max_output_tokens=len(text))
    assert [(item["type"], item["status"]) for item in first["output"]] == [("function_call", "incomplete")]
    call = first["output"][0]
    rest = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "no"},
        {"role": "user", "content": "two"},
    ]
    await created(cluster, rest, previous_response_id=first["id"], tools=[SUM])
    continued = prompt(cluster)
    await created(cluster, [{"role": "user", "content": "one"}, *first["output"], *rest], tools=[SUM])
    assert prompt(cluster) == continued


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_can_be_fetched_listed_and_deleted(client: openai.AsyncOpenAI, stream: bool) -> None:
    given: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    asked: dict[str, Any] = {"input": given, "max_output_tokens": 3, "metadata": {"k": "v"}}
    if stream:
        async for event in await client.responses.create(**asked, stream=True):
            if event.type == "response.incomplete":
                made = event.response
                # it is there as soon as the client knows that it is complete
                assert (await client.responses.retrieve(made.id)).status == "incomplete"
    else:
        made = await client.responses.create(**asked)
    fetched = await client.responses.retrieve(made.id)
    assert fetched.to_dict() == made.to_dict()
    page = await client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [(item.type, item.id[:4]) for item in page.data] == [("message", "msg_")] * 2
    assert [item.content[0].type for item in page.data if item.type == "message"] == ["input_text", "output_text"]
    assert page.has_more
    everything = [item async for item in client.responses.input_items.list(made.id, order="asc", limit=2)]
    assert [item.content[0].text for item in everything] == ["a", "b", "c"]  # type: ignore[union-attr,index]
    newest = await client.responses.input_items.list(made.id)
    assert [item.id for item in newest.data] == [item.id for item in everything][::-1]
    await client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            await call(made.id)


async def test_what_is_not_stored(cluster: Any) -> None:
    await started(cluster)
    first = await created(cluster, store=False)
    assert first["store"] is False
    second = await created(cluster, previous_response_id=(await created(cluster))["id"], store=False)
    cluster.of("decode").scripts = [play(ADMITTED, decode_outputs(0, "ab"), prefill_pb2.PrefillEvent())] * 3
    events = (await cluster.http.post("/v1/responses", json={"input": "hi", "stream": True})).text
    failed = json.loads(events.split("\n\n")[0].partition("data: ")[2])["response"]
    assert "response.failed" in events
    for response_id in (first["id"], second["id"], failed["id"], NONE, "x", "resp_" + "0" * 200):
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            answer = await cluster.http.request(method, f"/v1/responses/{response_id}{path}")
            assert answer.status_code == 404
            assert "is not stored here" in answer.json()["error"]["message"]
            assert len(answer.text) < 500
        error = await created(cluster, previous_response_id=response_id, status=404)
        assert "is not stored here" in error["message"]


async def test_another_tenants_response_is_as_none(cluster: Any) -> None:
    await started(cluster, api_keys=tuple(KEYS.values()))
    made = await created(cluster, "secret", KEYS["alice"])
    headers = {"authorization": f"Bearer {KEYS['bob']}"}
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        told = []
        for response_id in (made["id"], NONE):
            answer = await cluster.http.request(method, f"/v1/responses/{response_id}{path}", headers=headers)
            told.append((answer.status_code, answer.text.replace(response_id, "")))
        assert told[0] == told[1]
        assert told[0][0] == 404
        assert (await cluster.http.request(method, f"/v1/responses/{made['id']}{path}")).status_code == 401
    errors = [await created(cluster, "hi", KEYS["bob"], 404, previous_response_id=name) for name in (made["id"], NONE)]
    assert errors[0]["message"].replace(made["id"], "") == errors[1]["message"].replace(NONE, "")
    await created(cluster, "hi", KEYS["alice"], previous_response_id=made["id"])


async def test_routers_with_redis_store_responses_there(cluster: Any, tmp_path: Path) -> None:
    key = "0123456789abcdef"
    with redis_server(tmp_path) as server:
        await cluster.worker("decode", max_model_len=4096, key=DeploymentKey(key.encode())).start()
        await cluster.start(prefill=0, decode=0, redis=server.url, deployment_key=key)
        first = await created(cluster, "secret")
        [name] = server.do("KEYS", "{pdserve}:response:*")
        assert name.endswith(first["id"].encode())
        await created(cluster, "go on", previous_response_id=first["id"])
        server.do("DEL", name)
        await created(cluster, "go on", previous_response_id=first["id"], status=404)


async def test_a_conversation_has_the_limits_of_a_body(cluster: Any) -> None:
    await started(cluster, max_request_bytes=2048)
    response_id: str | None = None
    num_turns = 0
    while True:
        body = {"input": "x" * 300, "max_output_tokens": 1, "previous_response_id": response_id}
        answer = await cluster.http.post("/v1/responses", json=body)
        if answer.status_code != 200:
            break
        response_id, num_turns = answer.json()["id"], num_turns + 1
    assert 2 < num_turns < 20
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert "bytes, at most 2048 are allowed (max_request_bytes)" in error["message"]
    kept = (await cluster.http.get(f"/v1/responses/{response_id}")).json()
    assert kept["id"] == response_id


async def test_a_conversation_has_as_many_items_as_a_chat_has_messages(cluster: Any) -> None:
    await cluster.worker("decode", max_model_len=1 << 16).start()
    await cluster.start(prefill=0, decode=0, max_request_bytes=1 << 20)
    items = [{"role": "user", "content": ""}] * (MAX_MESSAGES - 1)
    first = await created(cluster, items)
    error = await created(cluster, "x", status=400, previous_response_id=first["id"])
    assert error["param"] == "previous_response_id"
    assert (
        error["message"]
        == f"previous_response_id and input have {MAX_MESSAGES + 1} items together, at most {MAX_MESSAGES} are allowed"
    )


@pytest.mark.slow
async def test_a_conversation_has_as_many_values_as_a_body(cluster: Any) -> None:
    await started(cluster)
    part = {"type": "input_text", "text": "", "annotations": [[]] * 40_000}
    given = [{"role": "user", "content": [part]}]
    first = await created(cluster, given)
    error = await created(cluster, given, status=400, previous_response_id=first["id"])
    assert error["param"] == "previous_response_id"
    assert error["message"].startswith("previous_response_id is too complex: at most 65536 objects and arrays")
    await created(cluster, "x", previous_response_id=first["id"])


async def test_items_whose_unknown_fields_are_ignored_can_be_listed(cluster: Any) -> None:
    await started(cluster, unknown_fields="ignore")
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "content": "x"}
    made = await created(cluster, [call])
    listed = await cluster.http.get(f"/v1/responses/{made['id']}/input_items")
    assert listed.status_code == 200
    assert [item["call_id"] for item in listed.json()["data"]] == ["c"]


async def test_parameters_of_paths(cluster: Any) -> None:
    await started(cluster)
    made = (await created(cluster))["id"]
    refused = {
        "?stream=true": ("stream", 'stream is "true", only false'),
        "?include[]=x": ("include[]", "is not a parameter"),
        "/input_items?limit=0": ("limit", 'limit is "0", 1 to 100 is needed'),
        "/input_items?limit=101": ("limit", "1 to 100"),
        "/input_items?limit=%C2%B2": ("limit", "1 to 100"),
        "/input_items?limit=" + "9" * 5000: ("limit", "1 to 100"),
        "/input_items?order=up": ("order", 'order is "up", only asc and desc'),
        "/input_items?after=x": ("after", 'after is "x", which is no item'),
    }
    for query, (field, told) in refused.items():
        answer = await cluster.http.get(f"/v1/responses/{made}{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), query
        assert told in error["message"]
    assert (await cluster.http.get(f"/v1/responses/{made}?stream=false")).status_code == 200
    assert (await cluster.http.get(f"/v1/responses/{made}/input_items?limit=1")).json()["has_more"] is False


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ["", "/input_items"])
async def test_answers_share_a_budget_of_bytes(cluster: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(client_bodies, "_MIN_BUDGET_BYTES", 1 << 20)
    monkeypatch.setattr(body_budget, "MAX_WAIT_S", 0.05)
    await started(cluster, max_answer_bytes=1 << 19)
    made = await created(cluster)
    loads, get = asyncio.Event(), MemoryResponseStore.get
    is_loading = asyncio.Event()

    async def slow(store: MemoryResponseStore, tenant: str, response_id: str) -> Any:
        is_loading.set()
        await loads.wait()
        return await get(store, tenant, response_id)

    monkeypatch.setattr(MemoryResponseStore, "get", slow)
    first = asyncio.create_task(cluster.http.get(f"/v1/responses/{made['id']}{path}"))
    async with asyncio.timeout(HANG_S):
        await is_loading.wait()
    refused = await cluster.http.get(f"/v1/responses/{made['id']}{path}")
    assert refused.json()["error"]["code"] == "overloaded"
    loads.set()
    assert (await first).status_code == 200
    assert (await cluster.http.get(f"/v1/responses/{made['id']}{path}")).status_code == 200
