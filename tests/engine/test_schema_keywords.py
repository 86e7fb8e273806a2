"""Keywords of JSON Schema, in every position: what is written is valid, or the schema is refused with the keyword's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary
from pdserve.engine.structured_outputs.schema.strings import FORMATS
from pdserve.models.model_folder import model_folder
from tests.support.inputs.schema_samples import sampled

NUM_TEXTS = 12
ENFORCED: dict[str, Any] = {
    "true": True,
    "number": {"type": "number"},
    "bounds": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3},
    "one bound": {"type": "number", "exclusiveMinimum": 0},
    "bounds of a fraction": {"type": "number", "minimum": 0.125, "maximum": 0.25},
    "negative bounds": {"type": "number", "maximum": -7.5},
    "multiple of a number": {"type": "number", "multipleOf": 5, "minimum": -20, "maximum": 99},
    "integer": {"type": "integer"},
    "integer from": {"type": "integer", "minimum": 1},
    "integer between": {"type": "integer", "exclusiveMinimum": -130, "exclusiveMaximum": 1024},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf between": {"type": "integer", "multipleOf": 12, "minimum": 13, "maximum": 4000},
    "minLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "long": {"type": "string", "minLength": 258, "maxLength": 260},
    "pattern": {"type": "string", "pattern": "^(ab|c)[0-9]{2,3}$"},
    "pattern with escapes": {"type": "string", "pattern": '^["\\\\/\\n\\t]{1,2}[^a-z\\s]{2}(\\.[0-9]{1,3})?(ab+)?.$'},
    "pattern with classes": {"type": "string", "pattern": r"^\d\D\w\W\s\S[^\d]$"},
    "pattern without anchors": {"type": "string", "pattern": "(a|bc?)x{2}y"},
    "pattern of any character": {"type": "string", "pattern": "^.{3}$"},
    "enum": {"enum": ["a", 'q"\\', "\u00e9\U0001f600\u2028", 1.5, -3, None, True, [1, {"b": []}], {}]},
    "const": {"const": {"a": [1, "x"]}},
    "const with a surrogate": {"const": "a\ud800"},
    "type and enum": {"type": ["string", "null"], "enum": ["a", None]},
    "types": {"type": ["integer", "string", "null"], "minimum": 5, "maximum": 9, "maxLength": 2},
    "integer and number": {"type": ["integer", "number"], "minimum": 5, "maximum": 9},
    "anyOf": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}, False]},
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"const": None}]},
    "oneOf of constants": {"oneOf": [{"const": 1}, {"enum": [2, "a"]}]},
    "oneOf of objects": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": name}, "v": {"type": kind}}, "required": ["k"]}
            for name, kind in (("a", "boolean"), ("b", "null"))
        ],
        "discriminator": {"propertyName": "k"},
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3, "maximum": 5}], "description": "one"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "items without type": {"items": {"type": "null"}, "maxItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "minItems": 1},
    "prefixItems and items": {"prefixItems": [{"const": 0}], "items": {"const": 1}, "minItems": 3, "maxItems": 5},
    "cut prefixItems": {"prefixItems": [{"const": 0}, {"const": 1}, {"const": 2}], "maxItems": 2},
    "items as a list": {"items": [{"const": 0}, {"const": 1}], "additionalItems": {"const": 2}, "maxItems": 4},
    "unevaluatedItems": {"prefixItems": [{"const": 0}], "unevaluatedItems": {"const": 1}, "maxItems": 3},
    "no items": {"type": "array", "items": False},
    "properties": {
        "properties": {"a": {"type": "boolean"}, "b/c~": {"const": 1}, 'q"\n': {"const": 2}, "d": False},
        "required": ["b/c~"],
    },
    "minProperties": {
        "type": "object",
        "properties": {name: {"const": 1} for name in "abcde"},
        "minProperties": 2,
        "maxProperties": 3,
        "required": ["c"],
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "ab": {"type": "integer"}, "": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 2},
        "maxProperties": 4,
    },
    "additionalProperties and minProperties": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "patternProperties": {
        "type": "object",
        "properties": {"z": {"const": 0}},
        "patternProperties": {"^a[0-9]{2}$": {"const": 1}, "^b": {"const": 2}},
        "maxProperties": 3,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{2}$"},
        "additionalProperties": {"const": 1},
        "maxProperties": 2,
    },
    "propertyNames of an enum": {
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"const": 1},
        "maxProperties": 2,
    },
    "$ref": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c~0d%25"}, "c~d%": {"type": "integer"}}},
    "$ref to a place": {"prefixItems": [{"type": "boolean"}, {"$ref": "#/prefixItems/0"}], "minItems": 2},
    "a tree": {
        "$defs": {
            "n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "v": {"const": 1}}, "required": ["v"]}
        },
        "$ref": "#/$defs/n",
    },
    "a list by anyOf": {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}]},
    "annotations": {
        "type": "null",
        "title": "t",
        "x-own": 1,
        "examples": [2],
        "$comment": "c",
        "contentEncoding": "base64",
    },
    **{f"format {name}": {"type": "string", "format": name} for name in FORMATS},
}
INSIDE: dict[str, Callable[[Any], Any]] = {
    "alone": lambda schema: schema,
    "a property": lambda schema: {
        "type": "object",
        "properties": {"p": schema},
        "required": ["p"],
        "additionalProperties": False,
    },
    "items": lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
    "prefixItems": lambda schema: {"type": "array", "prefixItems": [schema], "items": False, "minItems": 1},
    "anyOf": lambda schema: {"anyOf": [{"type": "null"}, schema]},
    "allOf": lambda schema: {"allOf": [schema]},
    "$ref": lambda schema: {"$ref": "#/$defs/s", "$defs": {"s": schema}},
    "additionalProperties": lambda schema: {"type": "object", "additionalProperties": schema, "maxProperties": 1},
    "patternProperties": lambda schema: {"patternProperties": {"^k$": schema}, "maxProperties": 1},
}
"""Positions of a schema; references within it to the root do not move."""
REFUSED: dict[str, tuple[Any, str]] = {
    **{
        name: ({name: value}, f"{name} is not supported: {json.dumps(value)}")
        for name, value in {
            "not": {},
            "if": {"type": "null"},
            "then": True,
            "else": False,
            "contains": {},
            "minContains": 1,
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {},
            "dependencies": {},
            "$dynamicRef": "#a",
        }.items()
    },
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported: true"),
    "multipleOf 0.5": (
        {"type": "number", "multipleOf": 0.5},
        "multipleOf is supported only if it is an integer from 1 to 10000: 0.5",
    ),
    "multipleOf of types": ({"type": ["null", "number"], "multipleOf": 0.1}, "multipleOf is supported only if"),
    "multipleOf 0": ({"type": "integer", "multipleOf": 0}, "multipleOf is supported only if"),
    "multipleOf next to a range": (
        {"type": "integer", "multipleOf": 9, "minimum": 1, "maximum": 5},
        "no integer is within",
    ),
    "a bound without type": ({"minimum": 3}, "minimum needs a type next to it: 3"),
    "a text as a bound": ({"type": "integer", "minimum": "3"}, 'minimum must be a number: "3"'),
    "an older exclusiveMinimum": (
        {"type": "integer", "exclusiveMinimum": True},
        "exclusiveMinimum must be a number: true",
    ),
    "an unknown type": ({"type": "float"}, "type must be one of string, "),
    "an unknown format": ({"type": "string", "format": "iri"}, "format is not supported (supported are date, "),
    "a format next to a length": ({"type": "string", "format": "date", "maxLength": 3}, "format next to a length"),
    "a pattern next to a format": (
        {"type": "string", "format": "date", "pattern": "a"},
        "pattern next to a length or a format",
    ),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "a pattern with look-around is not supported"),
    "a reference in a pattern": ({"type": "string", "pattern": r"(a)\1"}, "a pattern with a reference, a condition"),
    "an anchor within": (
        {"type": "string", "pattern": "^a$|b"},
        "a pattern with an anchor or a boundary within is not supported",
    ),
    "flags": ({"type": "string", "pattern": "(?i)a"}, "a pattern with flags is not supported"),
    "a boundary": (
        {"type": "string", "pattern": r"a\bb"},
        "a pattern with an anchor or a boundary within is not supported",
    ),
    "no expression": ({"type": "string", "pattern": "(a"}, "pattern is no regular expression"),
    "minLength above maxLength": (
        {"type": "string", "minLength": 3, "maxLength": 2},
        "minLength greater than maxLength: [3, 2]",
    ),
    "a negative length": ({"type": "string", "maxLength": -1}, "maxLength must be an integer of at least 0: -1"),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf may have a value that is valid by both entries 0 and 1",
    ),
    "oneOf of open objects": (
        {"oneOf": [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]},
        "oneOf may have a value that is valid by both",
    ),
    "allOf of two": ({"allOf": [{}, {}]}, "allOf of more than one schema is not supported"),
    "next to $ref": (
        {"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {}}},
        "minimum next to $ref is not supported: 1",
    ),
    "next to anyOf": ({"anyOf": [{}], "type": "null"}, 'type next to anyOf is not supported: "null"'),
    "next to enum": ({"enum": [1], "minimum": 0}, "minimum next to enum is not supported: 0"),
    "a constant of another type": (
        {"const": 1, "type": "string"},
        "const has a value that is not of the type next to it: 1",
    ),
    "$ref elsewhere": ({"$ref": "http://a/b"}, "$ref must be '#', or begin with '#/',: \"http://a/b\""),
    "$ref to nothing": ({"$ref": "#/$defs/a~1b", "$defs": {"a~1b": {}}}, "$ref names nothing: there is no 'a/b'"),
    "$ref to itself": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "$ref nests deeper than 16 levels",
    ),
    "a tree without end": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "$ref nests deeper than 16 levels"),
    "false": (False, "no value is valid: the schema is false"),
    "an unknown required name": (
        {"properties": {}, "required": ["b"]},
        "required names 'b', which is not among the properties",
    ),
    "minProperties": ({"properties": {"a": {}}, "minProperties": 2}, "minProperties and maxProperties do not fit"),
    "minItems": ({"prefixItems": [{}], "minItems": 2}, "minItems needs more items than there may be: 2"),
    "a pattern that matches a property": (
        {"properties": {"ab": {}}, "patternProperties": {"a": {}}},
        "patternProperties has a pattern that matches a property",
    ),
    "patterns that may meet": (
        {"patternProperties": {"^a": {}, "^ab": {}}},
        "patternProperties is supported with several patterns only if",
    ),
    "propertyNames next to properties": (
        {"properties": {"a": {}}, "propertyNames": {"maxLength": 3}},
        "propertyNames next to properties",
    ),
    "NaN": ({"const": float("nan")}, "const has a number that JSON does not have"),
}


@pytest.fixture(scope="module", params=["bytes", "bundled"])
def vocabulary(request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path]) -> Iterator[Vocabulary]:
    if request.param == "bytes":
        yield Vocabulary(tiny_checkpoints("llama"), 320)
    else:
        folder = model_folder("demo")
        yield Vocabulary(folder, json.loads((folder / "config.json").read_text())["vocab_size"])


def check(vocabulary: Vocabulary, schema: Any, **options: Any) -> int:
    """Validate sampled texts; returns how many have ended."""
    draft: Any = jsonschema.Draft202012Validator
    if "additionalItems" in json.dumps(schema):
        draft = jsonschema.Draft7Validator
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    num_ended = 0
    params = StructuredOutputsParams(json=json.dumps(schema), **options)
    for text in sampled(vocabulary, params, NUM_TEXTS):
        # the bytes of characters are checked by the matcher but for surrogates and the like, which no trained model writes
        if text is not None and "\ufffd" not in text.decode(errors="replace"):
            validator.validate(json.loads(text))
            num_ended += 1
    return num_ended


@pytest.mark.diagonal
@pytest.mark.parametrize("schema", ENFORCED.values(), ids=ENFORCED)
def test_what_is_written_is_valid(vocabulary: Vocabulary, schema: Any) -> None:
    assert check(vocabulary, schema) + check(vocabulary, schema, disable_any_whitespace=True) > 0


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_its_expression(tiny: Vocabulary, name: str) -> None:
    """xgrammar reads the expressions as others do, the parts that may be missing included."""
    form = StructuredOutputsParams(json={"type": "string", "format": name})
    texts = [text for text in sampled(tiny, form, 10 * NUM_TEXTS, 600) if text is not None]
    assert len(texts) > NUM_TEXTS
    for text in texts:
        assert re.fullmatch(FORMATS[name], json.loads(text)), text


@pytest.mark.diagonal
@pytest.mark.parametrize("place", [name for name in INSIDE if name != "alone"])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, schema in ENFORCED.items()
        if not {"$ref", "additionalItems"} & set(re.findall(r"[$\w]+", json.dumps(schema)))
    ],
)
def test_what_is_written_is_valid_in_every_position(tiny: Vocabulary, name: str, place: str) -> None:
    check(tiny, INSIDE[place](ENFORCED[name]), disable_any_whitespace=True)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoints: Callable[..., Path]) -> Vocabulary:
    return Vocabulary(tiny_checkpoints("llama"), 320)


@pytest.mark.parametrize(("schema", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_enforced_is_refused(tiny: Vocabulary, schema: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(tiny, schema)
    assert told in caught.value.message
    assert caught.value.message.startswith("structured_outputs: the JSON schema at #")


WITHOUT_A_VALUE = ("no value", "greater than", "no integer", "minItems needs", "do not fit")
"""Words of refusals of schemas that no value fits: a branch of one is left out, not refused."""


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["a property", "items", "prefixItems", "anyOf", "$ref", "additionalProperties"])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (schema, told) in REFUSED.items()
        if "$ref" not in json.dumps(schema) and not any(words in told for words in WITHOUT_A_VALUE)
    ],
)
def test_what_is_not_enforced_is_refused_in_every_position(tiny: Vocabulary, name: str, place: str) -> None:
    schema, told = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        check(tiny, INSIDE[place](schema))
    assert told in caught.value.message
    assert "schema at #/" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"json_schema": {"type": "number", "multipleOf": 0.5}}, "multipleOf is supported only if"),
        ({"json_schema": {}, "style": "qwen_xml"}, 'style of a json_schema is not supported: "qwen_xml"'),
        ({"json_schema": {}, "any_order": True}, "any_order of a json_schema is not supported: true"),
        ({"json_schema": {}, "excludes": ["a"]}, 'excludes of a json_schema is not supported: ["a"]'),
        ({"json_schema": {}, "max_whitespace_cnt": -1}, "max_whitespace_cnt must be 1 to 1024, not -1"),
    ],
)
def test_a_structural_tag_is_refused_likewise(tiny: Vocabulary, fields: dict[str, Any], told: str) -> None:
    inner = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", **fields}, "end": "</a>"}
    form = StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": inner}))
    with pytest.raises(InvalidRequest) as caught:
        next(sampled(tiny, form, 1))
    assert told in caught.value.message
