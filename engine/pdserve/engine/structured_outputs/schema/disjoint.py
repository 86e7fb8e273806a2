"""`are_disjoint`: whether no value is valid by two schemas, as the branches of a `oneOf` must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pdserve.engine.structured_outputs.schema.keywords import types_of

_MAX_DEPTH = 8
Resolve = Callable[[Any], Any]
"""Follows the `$ref` of a schema."""


def are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """True only if it is certain: other types, other constants, or a property that both require and that is disjoint."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
        return False
    for name in ("anyOf", "oneOf", "allOf"):
        if name in one:
            return all(are_disjoint(each, other, resolve, depth + 1) for each in one[name])
        if name in other:
            return all(are_disjoint(one, each, resolve, depth + 1) for each in other[name])
    ours, theirs = _values(one), _values(other)
    if ours is not None and theirs is not None:
        return not ours & theirs
    mine, yours = _types(one), _types(other)
    if not mine & yours:
        return True
    if mine & yours == {"object"} and "type" in one and "type" in other:
        return _have_disjoint_property(one, other, resolve, depth)
    return False


def _have_disjoint_property(one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    required = set(one.get("required", ())), set(other.get("required", ()))
    both = required[0] & required[1]
    if any(are_disjoint(one["properties"][name], other["properties"][name], resolve, depth + 1) for name in both):
        return True
    return any(
        closed.get("additionalProperties") is False
        and "patternProperties" not in closed
        and bool(names - set(closed.get("properties", {})))
        for closed, names in ((other, required[0]), (one, required[1]))
    )


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values of a schema with `const` or `enum`, numbers of equal value alike."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return None if values is None else {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_ALL = frozenset(("string", "boolean", "null", "number", "array", "object"))


def _types(schema: dict[str, Any]) -> set[str]:
    """The types of a schema's values by JSON Schema, where keywords of one type allow all values of others."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is not None:
        return {_type(value) for value in values}
    names = types_of(schema) if "type" in schema else _ALL
    return {"number" if name == "integer" else name for name in names}


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (list, "array"), (dict, "object"), (type(None), "null")):
        if isinstance(value, kind):
            return name
    return "number"
