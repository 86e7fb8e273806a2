"""`StructuredOutputsParams`: the form that an output must have, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest

FIELD = "structured_outputs"
MAX_SPEC_BYTES = 64 << 10
"""Bytes of a JSON schema, a grammar, a structural tag, or all choices together."""
MAX_REGEX_CHARS = 8192
MAX_CHOICES = 1024
MAX_DEPTH = 32
"""Nesting levels of a JSON schema or structural tag: compile time grows faster than linearly with the depth."""
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """The form that an output must have. Exactly one of the first six fields is set.

    Source: the names and meanings are those of vLLM's `StructuredOutputsParams`.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema. Objects have only the properties that it names, unless it has `additionalProperties`."""
    regex: str | None = None
    """The whole output matches it."""
    choice: Sequence[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """EBNF; its first rule is `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """JSON in xgrammar's format: free text in which tags begin parts that have a fixed form."""
    disable_any_whitespace: bool = False
    """JSON is written with one space after commas and colons and no other white space; in a structural tag, at most one white
    space character in a row."""
    disable_additional_properties: bool = False
    """No effect, since this is already the default: see `json`."""
    whitespace_pattern: str | None = None
    """Recognized, but not supported."""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))

    @property
    def constraints(self) -> list[str]:
        """Names of the constraints given; a valid form has one."""
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]

    def with_options_of(self, other: StructuredOutputsParams) -> StructuredOutputsParams:
        """This constraint with the options of another form."""
        return msgspec.structs.replace(
            self,
            disable_any_whitespace=other.disable_any_whitespace,
            disable_additional_properties=other.disable_additional_properties,
            whitespace_pattern=other.whitespace_pattern,
        )

    def verify(self) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit. Only an engine can check whether it compiles."""
        given = self.constraints
        if len(given) != 1:
            problem = f"has {' and '.join(given)}" if given else "has no constraint"
            raise InvalidRequest(f"{FIELD} {problem}, exactly one of {', '.join(CONSTRAINTS)} is needed", FIELD)
        if self.whitespace_pattern is not None:
            raise InvalidRequest(
                f"{FIELD}.whitespace_pattern is not supported; use disable_any_whitespace to fix the white space",
                FIELD,
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _require_type(name, getattr(self, name), bool)
        self._verify_constraint(given[0])

    def _verify_constraint(self, name: str) -> None:
        value = getattr(self, name)
        match name:
            case "json":
                _require_type(name, value, str | dict)
                _verify_json(name, self.json_schema, bool | dict)
            case "regex":
                _require_type(name, value, str)
                _require(0 < len(value) <= MAX_REGEX_CHARS, name, f"1 to {MAX_REGEX_CHARS} characters", len(value))
                _encoded(name, value)
            case "choice":
                _verify_choices(value)
            case "grammar":
                _require_type(name, value, str)
                _require_size(name, value)
            case "json_object":
                _require_type(name, value, bool)
            case "structural_tag":
                _require_type(name, value, str)
                _verify_json(name, value, dict)

    @property
    def json_schema(self) -> str:
        """`json` as text. Raises: InvalidRequest for values that JSON cannot represent."""
        if isinstance(self.json, str):
            return self.json
        try:
            return json.dumps(self.json, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{FIELD}.json is not JSON: {error}", FIELD) from error


def _verify_choices(choices: Any) -> None:
    _require_type("choice", choices, list | tuple)
    _require(0 < len(choices) <= MAX_CHOICES, "choice", f"1 to {MAX_CHOICES} texts", len(choices))
    for place, choice in enumerate(choices):
        _require_type(f"choice[{place}]", choice, str)
        _require(bool(choice), f"choice[{place}]", "at least one character", 0)
    _require_size("choice", "".join(choices))


def _verify_json(name: str, text: str, kind: Any) -> None:
    _require_size(name, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{FIELD}.{name} is not JSON: {error}", FIELD) from error
    _require_type(name, value, kind)
    if _depth(value) > MAX_DEPTH:
        raise InvalidRequest(f"{FIELD}.{name} is nested deeper than {MAX_DEPTH} levels", FIELD)


def _depth(value: Any) -> int:
    """Levels of a JSON value; stops counting one beyond the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth


def _require_size(name: str, text: str) -> None:
    size = len(_encoded(name, text))
    _require(0 < size <= MAX_SPEC_BYTES, name, f"1 to {MAX_SPEC_BYTES} bytes", size)


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{FIELD}.{name} is not valid Unicode", FIELD) from error


def _require(ok: bool, name: str, limit: str, size: int) -> None:
    if not ok:
        raise InvalidRequest(f"{FIELD}.{name} must have {limit}, not {size}", FIELD)


def _require_type(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        names = kind.__name__ if isinstance(kind, type) else str(kind)
        raise InvalidRequest(f"{FIELD}.{name} must be {names}, not {type(value).__name__}", FIELD)
