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
from pdserve.engine.runner.loading.loaded_model import string_chars
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary, compile_grammar
from pdserve.models.model_folder import model_folder
from pdserve.router.requests.fields.tools import FunctionBody, ToolBody, tool_use
from tests.support.engine.settings_with import settings_with

LIMIT = 4
STRING = {"type": "string"}
SCHEMAS: dict[str, tuple[Any, str]] = {
    "string": (STRING, "%s"),
    "nullable": ({"type": ["string", "null"]}, "%s"),
    "nested": (
        {
            "type": "object",
            "properties": {"type": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"anyOf": [STRING, {"type": "null"}]}},
        },
        '{"type": %s}',
    ),
    "items": ({"type": "array", "prefixItems": [STRING], "items": STRING}, '["", %s]'),
    "additionalProperties": ({"type": "object", "additionalProperties": STRING}, '{"a": %s}'),
    "anything": ({}, "%s"),
    "an item of anything": (True, "[[%s]]"),
    "any object": ({"type": "object"}, '{"a": %s}'),
}
OWN: dict[str, tuple[Any, int]] = {
    "minLength": (STRING | {"minLength": 6}, 6),
    "maxLength": (STRING | {"maxLength": 9}, 9),
    "pattern": (STRING | {"pattern": "x*"}, 1000),
    "enum": (STRING | {"enum": ["x" * 20]}, 20),
    "const": (STRING | {"const": "x" * 20}, 20),
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


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


def longest(folder: Path, form: StructuredOutputsParams, around: str, whitespace_chars: int, string_chars: int) -> int:
    """Characters of the longest string that the grammar accepts in its place."""
    grammar = compile_grammar(Vocabulary(folder, 320, whitespace_chars, string_chars), form)

    def accepts(num_chars: int) -> bool:
        text = around % json.dumps("x" * num_chars)
        return bool(xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True).accept_string(text))

    return max(num for num in (0, *range(LIMIT, 12), 20, 1000) if accepts(num))


@pytest.mark.few(3)
@pytest.mark.parametrize(("schema", "around"), SCHEMAS.values(), ids=SCHEMAS)
def test_every_string_gets_the_limit(folder: Path, schema: Any, around: str) -> None:
    form = StructuredOutputsParams(json=json.dumps(schema))
    assert longest(folder, form, around, 16, LIMIT) == LIMIT
    assert longest(folder, form, around, 16, 0) == 1000


@pytest.mark.parametrize(("schema", "own"), OWN.values(), ids=OWN)
def test_what_has_a_form_of_its_own_keeps_it(folder: Path, schema: Any, own: int) -> None:
    assert longest(folder, StructuredOutputsParams(json=schema), "%s", 16, LIMIT) == own


@pytest.mark.parametrize(("form", "around"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("whitespace_chars", [0, 16])
def test_the_grammar_ends_strings(
    folder: Path, form: StructuredOutputsParams, around: str, whitespace_chars: int
) -> None:
    around = around % '{"a": %s}'
    assert longest(folder, form, around, whitespace_chars, LIMIT) == LIMIT
    assert longest(folder, form, around, whitespace_chars, 0) == 1000


def test_only_the_bundled_model_has_a_limit_by_default(tmp_path: Path) -> None:
    bundled = model_folder("demo")
    assert string_chars(DecodeSettings(), bundled) == 64
    assert string_chars(DecodeSettings(), tmp_path) == 0
    assert string_chars(settings_with(DecodeSettings, grammar_string_chars=0), bundled) == 0
    assert string_chars(settings_with(DecodeSettings, grammar_string_chars=9), tmp_path) == 9
    with pytest.raises(ConfigError, match="grammar_string_chars is -1, at least 0"):
        settings_with(DecodeSettings, grammar_string_chars=-1).verify()
