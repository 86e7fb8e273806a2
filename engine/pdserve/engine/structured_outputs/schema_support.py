"""`verify_enforced`: refuses JSON schemas with keywords that the grammar would silently ignore."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import FIELD

NOT_ENFORCED = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    )
)
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    )
)
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords beside which xgrammar ignores other constraints, except `type` beside the last two."""
_NEED_TYPE = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern")
)
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NEVER_EMPTY = ("anyOf", "oneOf", "allOf", "enum", "type")
"""Keywords whose list must not be empty: no value would be valid, but the grammar would accept the empty text."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": (int, float),
    "number": (int, float),
    "array": list,
    "object": dict,
}


def verify_enforced(schema: Any) -> None:
    """Raises: InvalidRequest naming the keyword and its path."""
    for path, part in parts_of(schema, "#"):
        _verify_part(path, part)


def parts_of(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name in _SCHEMAS:
        yield from parts_of(schema.get(name), f"{path}/{name}")
    if isinstance(names := schema.get("propertyNames"), dict):
        yield from parts_of({"type": "string", **names}, f"{path}/propertyNames")
    for name in _LISTS:
        if isinstance(entries := schema.get(name), list):
            for place, entry in enumerate(entries):
                yield from parts_of(entry, f"{path}/{name}/{place}")
    for name in _MAPS:
        if isinstance(named := schema.get(name), dict):
            for key, entry in named.items():
                yield from parts_of(entry, f"{path}/{name}/{key}")


def _verify_part(path: str, schema: dict[str, Any]) -> None:
    for name in schema:
        _require(name not in NOT_ENFORCED, path, f"{name} is not supported")
    for name in _NEVER_EMPTY:
        _require(schema.get(name) != [], path, f"{name} has no entry, at least 1 is needed")
    _require(schema.get("uniqueItems") in (None, False), path, "uniqueItems is not supported")
    _require("pattern" not in schema or not schema.keys() & {"minLength", "maxLength"}, path, "pattern beside a length")
    pattern = schema.get("pattern")
    plain = not (isinstance(pattern, str) and _LOOK_AROUND.search(pattern))
    _require(plain, path, "look-around in a pattern is not supported")
    ref = schema.get("$ref")
    _require(ref is None or ref == "#" or str(ref).startswith("#/"), path, "$ref must begin with '#/'")
    if isinstance(entries := schema.get("allOf"), list):
        _require(len(entries) == 1, path, "allOf of more than one schema is not supported")
    _verify_neighbours(path, schema)
    _verify_required(path, schema)


def _verify_neighbours(path: str, schema: dict[str, Any]) -> None:
    alone = next((name for name in _ALONE if name in schema), None)
    constraints = schema.keys() - _ANNOTATIONS
    if alone is None:
        bare = sorted(constraints & _NEED_TYPE)
        _require(not bare or "type" in schema, path, f"{bare and bare[0]} needs a type beside it")
        return
    others = sorted(constraints - {alone} - ({"type"} if alone in ("enum", "const") else set()))
    _require(not others, path, f"{others and others[0]} beside {alone} is not supported")
    if "type" in schema and alone in ("enum", "const"):
        values = schema["enum"] if alone == "enum" else [schema["const"]]
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        fits = isinstance(values, list) and all(any(_is_of(value, name) for name in types) for value in values)
        _require(fits, path, f"{alone} has a value that is not of the type beside it")


def _is_of(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(name, str) and name in _TYPES and isinstance(value, _TYPES[name])


def _verify_required(path: str, schema: dict[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list):
        known = properties if isinstance(properties, dict) else {}
        unknown = [str(name) for name in required if name not in known]
        _require(not unknown, path, f"required names {unknown and unknown[0]!r:.80}, which is not among the properties")


def _require(ok: bool, path: str, reason: str) -> None:
    if not ok:
        raise InvalidRequest(f"{FIELD}: the JSON schema at {path:.200}: {reason}", FIELD)
