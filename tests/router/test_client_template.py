"""`chat_template` of a request: refused by default, rendered where the router's setting allows it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import tokens

MESSAGES = [{"role": "user", "content": "hey"}]
TEMPLATE = "{{ messages[0].content }}{{ x }}"
CHAT = inference_pb2.ChatPrompt(
    messages=[inference_pb2.ChatMessage(role="user", content="hey")],
    chat_template=TEMPLATE,
    chat_template_kwargs='{"x": "!"}',
)
BODY = {"messages": MESSAGES, "chat_template": TEMPLATE, "chat_template_kwargs": {"x": "!"}, "max_tokens": 2}


async def test_refused_by_default(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    error = (await cluster.http.post("/v1/chat/completions", json=BODY)).json()["error"]
    assert error["param"] == "chat_template"
    assert "renders the model's own alone (trust_request_chat_template)" in error["message"]
    with pytest.raises(grpc.aio.AioRpcError, match="chat_template is given"):
        await cluster.grpc.Generate(inference_pb2.GenerateRequest(chat=CHAT)).read()
    with pytest.raises(grpc.aio.AioRpcError, match="chat_template is given"):
        await cluster.grpc.Session(iter([inference_pb2.GenerateRequest(chat=CHAT)])).read()
    assert not cluster.of("decode").calls


async def test_rendered_where_it_is_allowed(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1, trust_request_chat_template=True)
    response = await cluster.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 200, response.text
    call = inference_pb2.GenerateRequest(chat=CHAT, sampling=request_pb2.SamplingParams(max_tokens=2))
    assert [answer.usage.prompt_tokens async for answer in cluster.grpc.Generate(call)] == [4]
    for made in cluster.of("decode").calls:
        assert list(made.request.prompt_token_ids) == tokens("hey!")
    for template, told in (
        ("{% for %}", "line 1"),
        ("x" * 65_537, "has 65537 bytes"),
        ("{{ raise_exception('no') }}", "no"),
    ):
        error = (await cluster.http.post("/v1/chat/completions", json=BODY | {"chat_template": template})).json()[
            "error"
        ]
        assert told in error["message"], error


def test_special_tokens_cannot_be_plain_text_in_a_clients_template() -> None:
    with pytest.raises(ConfigError, match="trust_request_chat_template is true and parse_special false"):
        RouterSettings(trust_request_chat_template=True, parse_special=False).verify()
