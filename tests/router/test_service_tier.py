"""`service_tier`: what bodies may say, the priority that it becomes, and the tier that answers name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.settings.api_key_file import KeyLimits
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.router.requests.fields.service_tier import TIER_PRIORITIES
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.router.tenants.client import ANYBODY, CacheGroup, Client
from tests.router.test_tenants import headers, keys_file

CALL = CallFields(1.0, {}, "")
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hi", "max_tokens": 3},
    "chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "responses": {"input": "hi", "max_output_tokens": 3},
}
EACH_PATH = pytest.mark.parametrize("path", PROMPTS)


def asked(path: str, **fields: Any) -> ClientRequest:
    if path == "responses":
        return ResponsesBody(input="hi", **fields).request({}, CALL, [])
    body = CompletionBody(prompt="hi", **fields) if path == "completions" else ChatBody(messages=MESSAGES, **fields)
    [request] = body.requests({}, CALL)
    return request


@EACH_PATH
def test_bodies_ask_for_a_tier_or_a_priority(path: str) -> None:
    assert asked(path).service_tier is None
    for tier in ("auto", "default", "scale"):
        request = asked(path, service_tier=tier, priority=5)
        assert (request.service_tier, request.priority) == (tier, 5)
    for tier in TIER_PRIORITIES:
        request = asked(path, service_tier=tier)
        assert (request.service_tier, request.priority) == (tier, 0)
        for priority in (0, 5):
            told = f'service_tier is "{tier}" and priority {priority}: one of them is to be given'
            with pytest.raises(InvalidRequest, match=told) as refused:
                asked(path, service_tier=tier, priority=priority)
            assert refused.value.field == "service_tier"
    for unknown in ("fast", "Flex", ""):
        told = f'service_tier is "{unknown}", one of auto, default, scale, priority, flex is needed'
        with pytest.raises(InvalidRequest, match=told) as refused:
            asked(path, service_tier=unknown)
        assert refused.value.field == "service_tier"


def key(low: int, high: int) -> Client:
    return Client(key_name="alice", tenant="alice", limits=KeyLimits(min_priority=low, max_priority=high))


@pytest.mark.parametrize(
    ("client", "policy", "tier", "used", "priority"),
    [
        (ANYBODY, "priority", "priority", "priority", -1000),
        (ANYBODY, "priority", "flex", "flex", 1000),
        (ANYBODY, "priority", "auto", "default", 0),
        (ANYBODY, "priority", "scale", "default", 0),
        (ANYBODY, "priority", None, None, 0),
        # where priorities order nothing, a flex request is still the first to be refused
        (ANYBODY, "fcfs", "priority", "default", 0),
        (ANYBODY, "fcfs", "flex", "flex", 0),
        (ANYBODY, "fcfs", None, None, 0),
        (key(0, 10), "priority", "priority", "default", 0),
        (key(0, 10), "priority", "flex", "flex", 10),
        (key(0, 0), "priority", "flex", "flex", 0),
        (key(-3, 2000), "priority", "priority", "priority", -3),
        (key(-3, 2000), "priority", "flex", "flex", 1000),
        # without a tier such a key's requests have 5
        (key(5, 9), "priority", "priority", "default", 5),
        (key(5, 9), "priority", "default", "default", 5),
        (key(5, 9), "priority", "flex", "flex", 9),
        (key(-9, -5), "priority", "priority", "priority", -9),
        (key(-9, -5), "priority", "flex", "flex", -5),
        (key(5, 9), "fcfs", "flex", "flex", 5),
    ],
)
def test_a_tier_is_the_nearest_priority_of_the_key(
    client: Client, policy: str, tier: str | None, used: str | None, priority: int
) -> None:
    request = asked("completions", service_tier=tier).owned(client, CacheGroup(), policy)
    assert (request.service_tier, request.priority) == (used, priority)
    assert request.client == client


async def answers(cluster: Any, path: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole answer, and the events of a streamed one."""
    whole = await cluster.http.post(f"/v1/{path}", json={**PROMPTS[path], **fields})
    assert whole.status_code == 200, whole.text
    received = await cluster.streamed(lambda: None, f"/v1/{path}", **PROMPTS[path], **fields)
    lines = [line.removeprefix("data: ") for line in received.splitlines() if line.startswith("data: ")]
    return whole.json(), [json.loads(line) for line in lines if line != "[DONE]"]


async def test_answers_name_the_tier_that_was_used(cluster: Any) -> None:
    await cluster.start(scheduling_policy="priority")
    for tier, used in (("priority", "priority"), ("flex", "flex"), ("auto", "default"), (None, None)):
        calls = len(cluster.of("decode").calls)
        for path in PROMPTS:
            whole, events = await answers(cluster, path, service_tier=tier)
            if path == "responses":
                assert whole["service_tier"] == (used or "default")
                told = [event["response"]["service_tier"] for event in events if "response" in event]
                assert len(told) == 3
                assert set(told) == {used or "default"}
                continue
            assert whole["service_tier"] == used
            # OpenAI's chunks of completions have none
            expected = used if path == "chat/completions" and used is not None else "absent"
            assert [event.get("service_tier", "absent") for event in events] == [expected] * len(events)
        for role in ("prefill", "decode"):
            sent = [call.request.priority for call in cluster.of(role).calls[calls:]]
            assert sent == [TIER_PRIORITIES.get(str(tier), 0)] * 6


async def test_a_key_that_may_not_raise_its_priority_is_served_as_default(cluster: Any, tmp_path: Any) -> None:
    file = keys_file(tmp_path, alice="", bob="min_priority = -5")
    await cluster.start(api_keys_file=file, scheduling_policy="priority")
    for name, used, priority in (("alice", "default", 0), ("bob", "priority", -5)):
        for path, prompt in PROMPTS.items():
            body = {**prompt, "service_tier": "priority"}
            answer = await cluster.http.post(f"/v1/{path}", json=body, headers=headers(name))
            assert (answer.status_code, answer.json()["service_tier"]) == (200, used)
            assert cluster.of("decode").calls[-1].request.priority == priority


async def test_wrong_tiers_are_refused_over_http(cluster: Any) -> None:
    await cluster.start()
    for path, prompt in PROMPTS.items():
        for fields, told in (
            (
                {"service_tier": "ultra"},
                'service_tier is "ultra", one of auto, default, scale, priority, flex is needed',
            ),
            ({"service_tier": "flex", "priority": 0}, 'service_tier is "flex" and priority 0'),
        ):
            answer = await cluster.http.post(f"/v1/{path}", json={**prompt, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "service_tier")
            assert told in error["message"]
    assert not cluster.of("decode").calls
