"""Strings in JSON of structured outputs: with `grammar_string_chars` each ends, unless its schema has a form of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from pdserve.common.errors import ConfigError
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.loaded_model import string_chars
from pdserve.engine.structured_outputs.bounded_strings import with_bounded_strings
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary, compile_grammar
from pdserve.models.model_folder import model_folder
from pdserve.router.requests.fields.tools import FunctionBody, ToolBody, tool_use

LIMIT = 4
STRING = {"type": "string"}
BOUNDED = {"type": "string", "maxLength": LIMIT}
SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "string": (STRING, BOUNDED),
    "nullable": ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": LIMIT}),
    "nested": (
        {"type": "object", "properties": {"type": STRING}, "$defs": {"a": {"anyOf": [STRING, {"type": "null"}]}}},
        {"type": "object", "properties": {"type": BOUNDED}, "$defs": {"a": {"anyOf": [BOUNDED, {"type": "null"}]}}},
    ),
    "items": (
        {"type": "array", "prefixItems": [STRING], "items": STRING},
        {"type": "array", "prefixItems": [BOUNDED], "items": BOUNDED},
    ),
    "minLength": (STRING | {"minLength": 6}, {"type": "string", "minLength": 6, "maxLength": 6}),
    "additionalProperties": (
        {"type": "object", "additionalProperties": STRING},
        {"type": "object", "additionalProperties": BOUNDED},
    ),
}
UNTOUCHED: dict[str, Any] = {
    "maxLength": STRING | {"maxLength": 9},
    "pattern": STRING | {"pattern": "a*"},
    "format": STRING | {"format": "date"},
    "enum": STRING | {"enum": ["much longer"]},
    "const": STRING | {"const": "much longer"},
    "number": {"type": "number"},
    "anything": {},
    "boolean": True,
    "a value": {"default": {"type": "string"}},
}
OBJECT = {"type": "object", "properties": {"a": STRING}, "required": ["a"], "additionalProperties": False}
TAG = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": OBJECT}})
OLDER_TAG = {"structures": [{"begin": "<a>", "schema": OBJECT, "end": "</a>"}], "triggers": ["<a>"]}
FORCED = tool_use([ToolBody(function=FunctionBody(name="f", parameters=OBJECT))], "required", None).form
FORMS = {
    "json": (StructuredOutputsParams(json=OBJECT), "%s"),
    "structural_tag": (StructuredOutputsParams(structural_tag=TAG), "%s"),
    "older structural_tag": (StructuredOutputsParams(structural_tag=json.dumps(OLDER_TAG)), "<a>%s</a>"),
    "tools": (
        FORCED or StructuredOutputsParams(),
        '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    ),
}


@pytest.mark.parametrize(("schema", "bounded"), SCHEMAS.values(), ids=SCHEMAS)
def test_every_string_gets_the_limit(schema: dict[str, Any], bounded: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert with_bounded_strings(schema, LIMIT) == bounded
    assert json.dumps(schema) == before


@pytest.mark.parametrize("schema", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_has_a_form_of_its_own_stays(schema: Any) -> None:
    assert with_bounded_strings(schema, LIMIT) == schema


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.mark.parametrize(("form", "around"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("whitespace_chars", [0, 16])
def test_the_grammar_ends_strings(
    folder: Path, form: StructuredOutputsParams, around: str, whitespace_chars: int
) -> None:
    def longest(string_chars: int) -> int:
        grammar = compile_grammar(Vocabulary(folder, 320, whitespace_chars, string_chars), form)

        def accepts(num_chars: int) -> bool:
            text = around % json.dumps({"a": "x" * num_chars})
            return bool(xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True).accept_string(text))

        return max(num for num in (0, LIMIT, LIMIT + 1, 1000) if accepts(num))

    assert longest(LIMIT) == LIMIT
    assert longest(0) == 1000


def test_only_the_bundled_model_has_a_limit_by_default(tmp_path: Path) -> None:
    bundled = model_folder("demo")
    assert string_chars(DecodeSettings(), bundled) == 64
    assert string_chars(DecodeSettings(), tmp_path) == 0
    assert string_chars(DecodeSettings(grammar_string_chars=0), bundled) == 0
    assert string_chars(DecodeSettings(grammar_string_chars=9), tmp_path) == 9
    with pytest.raises(ConfigError, match="grammar_string_chars is -1, at least 0"):
        DecodeSettings(grammar_string_chars=-1).verify()
