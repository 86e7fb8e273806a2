"""`/openapi.json`, `/docs`, `/version`, and pages of other origins."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.router.http_front.fleet_http import ROLE_PATH
from pdserve.router.http_front.front_http import HttpFront
from pdserve.router.http_front.openapi import BODIES, EXAMPLES
from pdserve.router.responses.response_store import MemoryResponseStore
from pdserve.router.tenants.api_keys import ApiKeys

KEY = "a-key-of-a-client-that-is-known"
PAGE = {"origin": "https://chat.example"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}


def client_of(**settings: Any) -> httpx.AsyncClient:
    made = RouterSettings(**settings)
    inference: Any = SimpleNamespace(settings=made, keys=ApiKeys.from_settings(made), healthy=True)
    transport = httpx.ASGITransport(app=HttpFront(inference, MemoryResponseStore(made)).app)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


async def test_the_page_needs_nothing_else() -> None:
    async with client_of(api_keys=(KEY,)) as client:
        description, page = (await client.get("/openapi.json")).json(), await client.get("/docs")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    [style] = re.findall("<style>(.*?)</style>", page.text, re.DOTALL)
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
    assert not re.search(r"<script|<link|<img|src=|href=|style=", page.text)
    for path in description["paths"]:
        assert path in page.text
    for field in ("max_completion_tokens", "structured_outputs", "encoding_format"):
        assert f"<code>{field}</code>" in page.text
    chat = description["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["store"]["description"] == "accepted, without effect"
    content = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"]["messages"][0]["role"] == "user"
    assert "security" in description["paths"]["/v1/models"]["get"]
    assert "security" not in description["paths"]["/health"]["get"]


async def test_answers_and_errors_have_the_declared_form() -> None:
    async with client_of() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for path in ("/", "/live", "/ready", "/version", "/docs", "/openapi.json"):
            declared = paths[path]["get"]["responses"]["200"]["content"]
            answer = await client.get(path)
            assert [answer.headers["content-type"].partition(";")[0]] == list(declared)
            [content] = declared.values()
            required = content.get("schema", {}).get("required", ())
            assert not required or set(required) <= answer.json().keys()
        missing = (await client.get("/v1/nothing")).json()
        errors = (await client.get("/openapi.json")).json()["components"]["schemas"]["Error"]
    jsonschema.validate(missing, errors)
    assert list(paths["/v1/completions"]["post"]["responses"]["200"]["content"]) == [
        "application/json",
        "text/event-stream",
    ]
    assert paths["/health"]["get"]["responses"]["503"] == paths["/health"]["get"]["responses"]["200"]
    assert paths["/version"]["get"]["responses"].keys() == {"200", "4XX", "5XX"}


@pytest.mark.parametrize("path", BODIES)
def test_examples_are_bodies(path: str) -> None:
    body: Any = msgspec.convert(EXAMPLES[path], BODIES[path])
    assert path == ROLE_PATH or body.model is None


async def test_the_version_needs_a_key_where_all_do() -> None:
    async with client_of() as client:
        assert (await client.get("/version")).json() == {"version": version("pdserve")}
    async with client_of(api_keys=(KEY,)) as client:
        assert (await client.get("/version")).status_code == 401
        answer = await client.get("/version", headers={"authorization": f"Bearer {KEY}"})
        assert answer.json() == {"version": version("pdserve")}


async def test_a_405_names_the_methods_of_all_routes_of_a_path() -> None:
    async with client_of() as client:
        answer = await client.options("/v1/responses/x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert "it takes DELETE, GET, HEAD" in answer.json()["error"]["message"]


async def test_without_the_setting_no_origin_is_allowed() -> None:
    async with client_of() as client:
        preflight = await client.options("/v1/chat/completions", headers=PAGE | PREFLIGHT)
        assert preflight.status_code == 405
        answer = await client.get("/live", headers=PAGE)
    assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]


async def test_allowed_origins_get_a_preflight_without_a_key() -> None:
    async with client_of(cors_origins=("https://chat.example",), api_keys=(KEY,)) as client:
        preflight = await client.options("/v1/chat/completions", headers=PAGE | PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
        assert "access-control-allow-credentials" not in preflight.headers
        other = await client.options("/v1/chat/completions", headers={"origin": "https://evil.example"} | PREFLIGHT)
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        answer = await client.get("/live", headers=PAGE)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "traceparent" in answer.headers["access-control-expose-headers"]
        missing = await client.get("/nothing", headers=PAGE)
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, "https://chat.example")


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "https://a b", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins has"):
        RouterSettings(cors_origins=(origin,)).verify()


def test_origins_come_as_a_list_of_text() -> None:
    environ = {"PDSERVE_CORS_ORIGINS": "http://localhost:3000, https://[::1]:8443"}
    settings = load_settings(RouterSettings, environ=environ)
    assert settings.cors_origins == ("http://localhost:3000", "https://[::1]:8443")
