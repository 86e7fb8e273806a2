"""`docs/openai.md` lists the endpoints, the fields of every body, and the values that change nothing, as the code has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.http_front.front_http import HttpFront
from pdserve.router.http_front.openapi import BODIES, FORMS, openapi
from pdserve.router.http_front.tokenization_http import DetokenizeBody, TokenizeBody
from pdserve.router.openai.embeddings import EmbeddingBody
from pdserve.router.openai.no_op_fields import IGNORED, NO_OP, RESPONSES_NO_OP
from pdserve.router.openai.pooling_bodies import ClassifyBody, RerankBody, ScoreBody
from pdserve.router.openai.protocol import ChatBody, CompletionBody, GenerationBody, StreamOptions
from pdserve.router.openai.transcription_body import TranscriptionBody
from pdserve.router.responses.input_items import KINDS
from pdserve.router.responses.response_store import MemoryResponseStore
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.router.tenants.api_keys import ApiKeys

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/openai.md"
COMMON = set(GenerationBody.__struct_fields__)
SECTIONS = {
    "Completions and chat completions": COMMON,
    "Completions only": set(CompletionBody.__struct_fields__) - COMMON,
    "Chat completions only": set(ChatBody.__struct_fields__) - COMMON,
    "Responses": set(ResponsesBody.__struct_fields__),
    "Embeddings": set(EmbeddingBody.__struct_fields__),
    "Classify": set(ClassifyBody.__struct_fields__),
    "Score": set(ScoreBody.__struct_fields__),
    "Rerank": set(RerankBody.__struct_fields__),
    "Transcriptions": set(TranscriptionBody.__struct_fields__),
    "Tokenize": set(TokenizeBody.__struct_fields__),
    "Detokenize": set(DetokenizeBody.__struct_fields__),
}


def rows(heading: str, table: int = 0) -> list[list[str]]:
    """Cells of one of the section's tables, without its head."""
    section = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[table].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_endpoint() -> None:
    inference: Any = SimpleNamespace(settings=RouterSettings(), keys=ApiKeys(None))
    routes = [
        route
        for route in HttpFront(inference, MemoryResponseStore(inference.settings)).app.routes
        if isinstance(route, Route)
    ]
    served = {
        (method, route.path.replace("{model:path}", "{id}"))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method, path.strip("`")) for method, path, _ in rows("Endpoints")} == served


def described() -> dict[str, Any]:
    inference: Any = SimpleNamespace(settings=RouterSettings(), keys=ApiKeys(None))
    return openapi(
        route
        for route in HttpFront(inference, MemoryResponseStore(inference.settings)).app.routes
        if isinstance(route, Route)
    )


def test_openapi_has_every_endpoint_and_every_field_that_is_parsed() -> None:
    description = described()
    served = {(method.upper(), path) for path, operations in description["paths"].items() for method in operations}
    assert {(m, path.strip("`").replace("models/{id}", "models/{model}")) for m, path, _ in rows("Endpoints")} == served
    assert {path for path, operations in description["paths"].items() if "post" in operations} == {
        *BODIES,
        *FORMS,
        "/ping",
        "/workers/{worker_id}/drain",
    }
    names = [one["operationId"] for operations in description["paths"].values() for one in operations.values()]
    assert len(set(names)) == len(names)
    for path, kind in BODIES.items():
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = description["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert schema["additionalProperties"] is False
    assert msgspec.json.decode(msgspec.json.encode(description)) == description


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field(heading: str) -> None:
    written = [field for first, *_ in rows(heading) for field in re.findall(r"`(\w+)`", first)]
    assert len(written) == len(set(written))
    assert set(written) == SECTIONS[heading]


def test_every_item_and_every_value_of_a_response_that_changes_nothing() -> None:
    neutral, items = ({row[0].strip("`"): row[1] for row in rows("Responses", table)} for table in (1, 2))
    assert neutral == {field: ", ".join(map(json.dumps, values)) or "none" for field, values in RESPONSES_NO_OP.items()}
    assert set(items) == set(KINDS)


def test_every_stream_option() -> None:
    [told] = [meaning for field, meaning in rows("Completions and chat completions") if field == "`stream_options`"]
    assert set(StreamOptions.__struct_fields__) <= set(re.findall(r"`(\w+)`", told))


def test_every_field_without_effect() -> None:
    assert [field for first, _ in rows("Accepted without effect") for field in re.findall(r"`(\w+)`", first)] == [
        *IGNORED
    ]


def test_every_value_that_changes_nothing() -> None:
    written = {field.strip("`"): values for field, values in rows("Accepted only where they change nothing")}
    assert written == {field: ", ".join(map(json.dumps, values)) or "none" for field, values in NO_OP.items()}
