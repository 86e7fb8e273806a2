"""`grammar_of_schema`: a JSON schema as a grammar in which each repetition ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from pdserve.engine.structured_outputs.schema.containers import Layout, array, object_of
from pdserve.engine.structured_outputs.schema.disjoint import are_disjoint
from pdserve.engine.structured_outputs.schema.ebnf import MAX_RULES, Rules, TooLarge, literal, one_of
from pdserve.engine.structured_outputs.schema.keywords import (
    MAX_LENGTH,
    parts_of,
    refuse,
    types_of,
    verify_keywords,
)
from pdserve.engine.structured_outputs.schema.numbers import Range, integer, number
from pdserve.engine.structured_outputs.schema.strings import NAME_CHARS, any_string, format_string, other_name, regex

MAX_NESTING = 16
"""Levels of a value without a schema, and of a schema that refers to itself."""
_ANY = ("string", "number", "boolean", "null", "array", "object")
_NAMES: dict[str, Any] = {"type": "string", "maxLength": NAME_CHARS}


class NoValue(Exception):
    """No value is valid by a schema, at least none within `MAX_NESTING`. Arguments: place, reason, value."""


def grammar_of_schema(schema: Any, whitespace_chars: int | None, string_chars: int = 0) -> str:
    """A grammar in xgrammar's EBNF.

    whitespace_chars: longest white space between the values and signs, 0: no limit; None: one space after commas and colons, and
    no other. string_chars: limit of strings without a form of their own, 0: no limit. Raises: InvalidRequest naming the keyword,
    its place and its value, for schemas that cannot be enforced.
    """
    verify_keywords(schema)
    try:
        grammar = SchemaGrammar(schema, Layout.of(whitespace_chars), string_chars)
        return grammar.rules.text(grammar.value(schema, "#", 0))
    except NoValue as error:
        path, reason, value = error.args
        refuse(path, f"no value is valid: {reason}", value)
    except (TooLarge, RecursionError):
        refuse("#", f"it needs more than {MAX_RULES} rules", None)


class SchemaGrammar:
    """The rules of one schema."""

    def __init__(self, schema: Any, layout: Layout, string_chars: int) -> None:
        self.rules = Rules()
        self._schema = schema
        self._layout = layout
        self._string_chars = string_chars
        self._cyclic = self._pointers_on_cycles()
        self._impossible: dict[tuple[str, int], NoValue] = {}

    # ---- references

    def _resolve(self, path: str, pointer: str) -> Any:
        """Raises: InvalidRequest."""
        place = self._schema
        for part in unquote(pointer[2:]).split("/") if pointer != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isascii() and key.isdigit() and int(key) < len(place):
                place = place[int(key)]
            else:
                refuse(path, f"$ref names nothing: there is no {key!r:.80}", pointer)
        for _ in parts_of(place, pointer):
            pass
        return place

    def _followed(self, schema: Any) -> Any:
        """A schema that is no reference; a circle of references is any value."""
        for _ in range(MAX_NESTING):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._resolve("#", schema["$ref"])
        return True

    def _pointers_on_cycles(self) -> set[str]:
        """References that lead to themselves."""
        leads: dict[str, set[str]] = {}
        waiting = [(path, part["$ref"]) for path, part in parts_of(self._schema, "#") if "$ref" in part]
        while waiting:
            path, pointer = waiting.pop()
            if pointer in leads:
                continue
            target = self._resolve(path, pointer)
            verify_keywords(target)  # a reference may name what is no part of the schema elsewhere
            found = [(place, part["$ref"]) for place, part in parts_of(target, pointer) if "$ref" in part]
            leads[pointer] = {name for _, name in found}
            waiting += found
        return {pointer for pointer in leads if pointer in _reached(leads, pointer)}

    def _reference(self, path: str, pointer: str, depth: int) -> str:
        depth += pointer in self._cyclic
        if depth > MAX_NESTING:
            raise NoValue(path, f"$ref nests deeper than {MAX_NESTING} levels", pointer)
        key = pointer, depth
        if key in self._impossible:
            raise self._impossible[key]
        try:
            return self.rules.once(key, lambda own: self.value(self._resolve(path, pointer), pointer, depth))
        except NoValue as error:
            self._impossible[key] = error
            raise

    # ---- values

    def value(self, schema: Any, path: str, depth: int) -> str:
        """The name of a rule, or an expression that may stand in a sequence. Raises: NoValue, InvalidRequest, TooLarge."""
        if schema is False:
            raise NoValue(path, "the schema is false", False)
        if schema is True:
            return self.anything()
        if "$ref" in schema:
            return self._reference(path, schema["$ref"], depth)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return self.rules.add(one_of(dict.fromkeys(literal(_json(value)) for value in values)))
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._branches(schema[name], name, f"{path}/{name}", depth)
        types = types_of(schema)
        if not types:
            return self.anything()
        ways = self._each(
            [(lambda kind=kind: self._typed(kind, schema, path, depth)) for kind in _without_integer(types)]
        )
        return self.rules.add(one_of(ways))

    def _branches(self, branches: list[Any], name: str, path: str, depth: int) -> str:
        if name == "oneOf":
            for place, one in enumerate(branches):
                for before, other in enumerate(branches[:place]):
                    if not are_disjoint(one, other, self._followed):
                        told = f"oneOf may have a value that is valid by both entries {before} and {place}, use anyOf"
                        refuse(path.removesuffix("/oneOf"), told, one)
        ways = self._each(
            [
                (lambda place=place, each=each: self.value(each, f"{path}/{place}", depth))
                for place, each in enumerate(branches)
            ]
        )
        return self.rules.add(one_of(ways))

    def _each(self, makers: list[Any]) -> list[str]:
        """The expressions of those that have a value. Raises: NoValue if none has."""
        ways: list[str] = []
        failure: NoValue | None = None
        for make in makers:
            try:
                ways.append(make())
            except NoValue as error:
                failure = failure or error
        if not ways and failure is not None:
            raise failure
        return list(dict.fromkeys(ways))

    def _typed(self, kind: str, schema: dict[str, Any], path: str, depth: int) -> str:
        match kind:
            case "null":
                return '"null"'
            case "boolean":
                return self.rules.add('"true" | "false"')
            case "integer" | "number":
                return self._number(kind, schema, path)
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path, depth)
        return self._object(schema, path, depth)

    def anything(self, levels: int = MAX_NESTING) -> str:
        """Any value of at most this many levels."""
        kinds = _ANY if levels else _ANY[:4]
        return self.rules.once(("any", levels), lambda own: one_of(self._any_of(kind, levels) for kind in kinds))

    def _any_of(self, kind: str, levels: int) -> str:
        if kind == "array":
            return array(self.rules, self._layout, [], self.anything(levels - 1), 0, None) or ""
        if kind == "object":
            names = self._string(_NAMES, "#")
            return object_of(self.rules, self._layout, [], [(names, self.anything(levels - 1))], 0, None) or ""
        return self._typed(kind, {}, "#", 0)

    def _number(self, kind: str, schema: dict[str, Any], path: str) -> str:
        least = [
            (Decimal(repr(schema[name])), name.startswith("excl"))
            for name in ("minimum", "exclusiveMinimum")
            if name in schema
        ]
        most = [
            (Decimal(repr(schema[name])), name.startswith("excl"))
            for name in ("maximum", "exclusiveMaximum")
            if name in schema
        ]
        low, excludes_low = max(least, default=(None, False))
        high, excludes_high = min(((value, not excl) for value, excl in most), default=(None, True))
        values = Range(low, high, excludes_low, not excludes_high)
        if values.is_empty:
            raise NoValue(path, "minimum greater than maximum", [str(low), str(high)])
        if kind == "integer" or "multipleOf" in schema:
            made = integer(self.rules, values, int(schema.get("multipleOf", 1)))
        else:
            made = number(self.rules, values)
        if made is None:
            raise NoValue(path, f"no {kind} is within the bounds", [str(low), str(high)])
        return made

    def _string(self, schema: dict[str, Any], path: str) -> str:
        if "pattern" in schema:
            return regex(self.rules, schema["pattern"])
        if "format" in schema:
            return format_string(self.rules, schema["format"])
        least = int(schema.get("minLength", 0))
        most = int(min(schema["maxLength"], MAX_LENGTH)) if "maxLength" in schema else None
        if most is not None and most < least:
            raise NoValue(path, "minLength greater than maxLength", [least, most])
        if most is None and self._string_chars:
            most = max(self._string_chars, least)
        return any_string(self.rules, least, most)

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> str:
        prefix, items = schema.get("prefixItems"), schema.get("items")
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems")
        if items is None:
            items = schema.get("unevaluatedItems", prefix is None)
        first: list[str] = []
        try:
            for place, each in enumerate(prefix or ()):
                first.append(self.value(each, f"{path}/prefixItems/{place}", depth))
            rest: str | None = self.value(items, f"{path}/items", depth)
        except NoValue:
            rest = None  # no array is longer than what came before
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        made = array(self.rules, self._layout, first, rest, least, None if most is None else int(min(most, MAX_LENGTH)))
        if made is None:
            raise NoValue(path, "minItems needs more items than there may be", least)
        return made

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> str:
        required = set(schema.get("required", ()))
        named: list[tuple[str, str, bool]] = []
        for name, each in schema.get("properties", {}).items():
            try:
                named.append(
                    (literal(_json(name)), self.value(each, f"{path}/properties/{name}", depth), name in required)
                )
            except NoValue:
                if name in required:
                    raise
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        others = list(self._others(schema, path, depth))
        made = object_of(
            self.rules, self._layout, named, others, least, None if most is None else int(min(most, MAX_LENGTH))
        )
        if made is None:
            raise NoValue(path, "minProperties and maxProperties do not fit the properties", [least, most])
        return made

    def _others(self, schema: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, str]]:
        """Names and values of properties that are not named."""
        for pattern, each in schema.get("patternProperties", {}).items():
            try:
                yield regex(self.rules, pattern), self.value(each, f"{path}/patternProperties/{pattern}", depth)
            except NoValue:
                continue
        is_bare = not schema.keys() & {"properties", "patternProperties"}
        values = schema.get("additionalProperties", schema.get("unevaluatedProperties", is_bare))
        if values is False:
            return
        names = schema.get("propertyNames", True)
        try:
            value = self.value(values, f"{path}/additionalProperties", depth)
            if names is not True:
                key = self._names(names, path, depth)
            elif known := schema.get("properties"):
                key = other_name(self.rules, known)
            else:
                key = self._string(_NAMES, path)
        except NoValue:
            return
        yield key, value

    def _names(self, names: dict[str, Any], path: str, depth: int) -> str:
        """The names of `propertyNames`."""
        if "enum" in names or "const" in names:
            return self.value(names, f"{path}/propertyNames", depth)
        least = names.get("minLength", 0)
        limits = {} if "pattern" in names or "format" in names else {"maxLength": max(NAME_CHARS, least)}
        return self._string(limits | names, f"{path}/propertyNames")


def _reached(leads: dict[str, set[str]], pointer: str) -> set[str]:
    """The pointers that one leads to, over any number of references."""
    reached: set[str] = set()
    waiting = list(leads[pointer])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += leads[name]
    return reached


def _without_integer(types: list[str]) -> list[str]:
    """The types, each once; `number` includes `integer`."""
    return [kind for kind in dict.fromkeys(types) if not (kind == "integer" and "number" in types)]


def _json(value: Any) -> str:
    """A value as JSON; surrogates, which no text has, as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)
