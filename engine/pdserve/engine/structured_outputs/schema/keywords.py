"""`verify_keywords`: refuses JSON schemas with keywords, values or combinations that `SchemaGrammar` does not enforce."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.structured_outputs.schema.patterns import NotSupported, Pattern
from pdserve.engine.structured_outputs.schema.strings import FORMATS

MAX_LENGTH = 65_536
"""Largest `minLength`, `minItems` and `minProperties`; larger maxima mean this one."""
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXTUAL = ("minLength", "maxLength", "pattern", "format")
OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
)
OF_ARRAYS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords next to which no other constraint is enforced, except `type` next to the last two."""
NOT_ENFORCED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    *("disallow", "extends", "divisibleBy"),
)
CONSTRAINTS = frozenset(("type", *NUMERIC, *TEXTUAL, *OF_OBJECTS, *OF_ARRAYS, *ALONE))
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NEVER_EMPTY = ("anyOf", "oneOf", "allOf", "enum", "type")
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": (int, float),
    "number": (int, float),
    "array": list,
    "object": dict,
}


def verify_keywords(schema: Any) -> None:
    """Raises: InvalidRequest naming the keyword, its place and its value."""
    for path, part in parts_of(schema, "#"):
        _verify_part(path, part)


def parts_of(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its place as a JSON pointer. Raises: InvalidRequest for a value that is no schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse(path, "a schema is an object or a boolean", schema)
    yield path, schema
    for name in _SCHEMAS:
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            yield from parts_of(schema[name], f"{path}/{name}")
    if "propertyNames" in schema:
        names = schema["propertyNames"]
        yield from parts_of({"type": "string", **names} if isinstance(names, dict) else names, f"{path}/propertyNames")
    for name in _LISTS:
        if name in schema and not (name == "items" and not isinstance(schema[name], list)):
            _require(isinstance(schema[name], list), path, f"{name} must be a list", schema[name])
            for place, entry in enumerate(schema[name]):
                yield from parts_of(entry, f"{path}/{name}/{place}")
    for name in _MAPS:
        if name in schema:
            _require(isinstance(schema[name], dict), path, f"{name} must be an object", schema[name])
            for key, entry in schema[name].items():
                yield from parts_of(entry, f"{path}/{name}/{escaped(key)}")


def escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def refuse(path: str, reason: str, value: Any) -> NoReturn:
    """Raises: InvalidRequest."""
    told = json.dumps(value, ensure_ascii=True, default=str)
    raise InvalidRequest(f"{FIELD}: the JSON schema at {path:.200}: {reason}: {told:.120}", FIELD)


def _require(ok: bool, path: str, reason: str, value: Any) -> None:
    if not ok:
        refuse(path, reason, value)


def types_of(schema: dict[str, Any]) -> list[str]:
    """The types that a schema allows: those it names, else the one that its keywords are for; empty for any."""
    if "type" in schema:
        return [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if any(name in schema for name in OF_OBJECTS):
        return ["object"]
    return ["array"] if any(name in schema for name in OF_ARRAYS) else []


def _verify_part(path: str, schema: dict[str, Any]) -> None:
    for name in NOT_ENFORCED:
        _require(name not in schema, path, f"{name} is not supported", schema.get(name))
    for name in _NEVER_EMPTY:
        _require(schema.get(name) != [], path, f"{name} has no entry, at least 1 is needed", [])
    for name, is_valid, told in _VALUES:
        _require(name not in schema or is_valid(schema[name]), path, f"{name} must be {told}", schema.get(name))
    _require(schema.get("uniqueItems", False) is False, path, "uniqueItems is not supported", schema.get("uniqueItems"))
    if "allOf" in schema:
        _require(len(schema["allOf"]) == 1, path, "allOf of more than one schema is not supported", schema["allOf"])
    for name in ("const", "enum"):
        _require(_is_finite(schema.get(name)), path, f"{name} has a number that JSON does not have", schema.get(name))
    _verify_neighbours(path, schema)
    _verify_texts(path, schema)
    _verify_object(path, schema)


def _verify_neighbours(path: str, schema: dict[str, Any]) -> None:
    alone = next((name for name in ALONE if name in schema), None)
    constraints = schema.keys() & CONSTRAINTS
    if alone is None:
        types = types_of(schema)
        for names, needed in ((NUMERIC, {"integer", "number"}), (TEXTUAL, {"string"})):
            for name in sorted(constraints.intersection(names)):
                _require("type" in schema, path, f"{name} needs a type next to it", schema[name])
                if name == "multipleOf" and needed.intersection(types):
                    told = "multipleOf is supported only if it is an integer from 1 to 10000"
                    _require(is_count(schema[name]) and 1 <= schema[name] <= 10_000, path, told, schema[name])
        mixed = "object" in types and constraints.intersection(OF_ARRAYS) and "type" not in schema
        _require(not mixed, path, "keywords of objects and of arrays need a type next to them", sorted(constraints))
        return
    others = sorted(constraints - {alone} - ({"type"} if alone in ("enum", "const") else set()))
    if others:
        refuse(path, f"{others[0]} next to {alone} is not supported", schema[others[0]])
    if "type" in schema:
        for value in schema["enum"] if alone == "enum" else [schema["const"]]:
            fits = any(_is_of(value, name) for name in types_of(schema))
            _require(fits, path, f"{alone} has a value that is not of the type next to it", value)


def _verify_texts(path: str, schema: dict[str, Any]) -> None:
    if "string" not in types_of(schema):
        return
    form = next((name for name in ("pattern", "format") if name in schema), None)
    for name in ("minLength", "maxLength", "format"):
        is_with_form = form is not None and name != form and name in schema
        _require(
            not is_with_form, path, f"{form} next to a length or a format is not supported", schema.get(form or "")
        )
    if "pattern" in schema:
        verify_pattern(path, "pattern", schema["pattern"])
    if "format" in schema:
        told = f"format is not supported (supported are {', '.join(FORMATS)})"
        _require(schema["format"] in FORMATS, path, told, schema["format"])


def _verify_object(path: str, schema: dict[str, Any]) -> None:
    properties, patterns = schema.get("properties", {}), list(schema.get("patternProperties", {}))
    for name in schema.get("required", ()):
        told = f"required names {name!r:.80}, which is not among the properties"
        _require(name in properties, path, told, schema["required"])
    starts = [verify_pattern(path, "patternProperties", pattern) for pattern in patterns]
    for place, (pattern, start) in enumerate(zip(patterns, starts, strict=True)):
        for name in properties:
            told = "patternProperties has a pattern that matches a property"
            _require(not re.search(pattern, name), path, told, name)
        for other in starts[:place]:
            apart = start and other and not start.startswith(other) and not other.startswith(start)
            told = "patternProperties is supported with several patterns only if they begin with different text after ^"
            _require(bool(apart), path, told, patterns)
    for name in ("additionalProperties", "unevaluatedProperties"):
        is_open = schema.get(name, False) is not False
        _require(
            not (is_open and patterns), path, f"{name} next to patternProperties is not supported", schema.get(name)
        )
    names = schema.get("propertyNames", True)
    if names is not True:
        for name in ("properties", "patternProperties"):
            _require(not schema.get(name), path, f"propertyNames next to {name} is not supported", names)
        known = isinstance(names, dict) and names.keys() & CONSTRAINTS <= {"type", *TEXTUAL, "enum", "const"}
        _require(known, path, "propertyNames is supported only with pattern, format, lengths, enum or const", names)
        for value in names.get("enum", [names["const"]] if "const" in names else []):
            _require(isinstance(value, str), path, "propertyNames has a value that is no string", value)
        if names.keys() & set(TEXTUAL):
            _require(types_of(names) in ([], ["string"]), path, "propertyNames must be of the type string", names)


def verify_pattern(path: str, keyword: str, pattern: str) -> str:
    """The text that strings with an anchored pattern begin with, "" if there is none. Raises: InvalidRequest."""
    try:
        return Pattern(pattern).start
    except NotSupported as error:
        refuse(path, f"a {keyword} {error.args[0]}", pattern)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_small(value: Any) -> bool:
    return is_count(value) and value <= MAX_LENGTH


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and (value == "#" or value.startswith("#/"))


_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("type", _is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    *((name, is_number, "a number") for name in NUMERIC),
    *((name, _is_small, f"an integer from 0 to {MAX_LENGTH}") for name in _COUNTS if name.startswith("min")),
    *((name, is_count, "an integer of at least 0") for name in _COUNTS if name.startswith("max")),
    *((name, lambda value: isinstance(value, str), "a string") for name in ("pattern", "format")),
    ("enum", lambda value: isinstance(value, list), "a list"),
    ("required", _are_strings, "a list of strings"),
    ("uniqueItems", lambda value: isinstance(value, bool), "a boolean"),
    ("$ref", _is_reference, "'#', or begin with '#/',"),
)
"""Keyword, its check, and what it must be."""


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
