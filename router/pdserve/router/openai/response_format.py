"""The constraint of an output, from OpenAI's `response_format` or vLLM's `structured_outputs`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.router.bodies.request_body import writing
from pdserve.router.requests.fields.output_constraint import OutputConstraint

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TYPES = ("text", "json_object", "json_schema")


class JsonSchemaBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    schema: dict[str, Any] | bool | None = None
    """None: any JSON object."""
    strict: bool | None = None
    """No effect: the answer always follows the schema."""
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    json_schema: JsonSchemaBody | None = None


def output_form(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputsParams | None
) -> OutputConstraint:
    """Raises: InvalidRequest for a wrong `response_format`, and for two constraints.

    A `structured_outputs` without a constraint gives the options of the other field's constraint.
    """
    by_format = None if response_format is None else _of_response_format(response_format)
    if structured_outputs is None:
        return OutputConstraint(by_format, "response_format")
    if by_format is None:
        return OutputConstraint(structured_outputs)
    if structured_outputs.constraints:
        raise InvalidRequest("response_format and structured_outputs both ask for a form", "response_format")
    return OutputConstraint(by_format.with_options_of(structured_outputs), "response_format")


def _of_response_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type not in _TYPES:
        raise InvalidRequest(
            f"response_format.type is {given.type[:40]!r}, one of {', '.join(_TYPES)} is needed", "response_format"
        )
    if (given.json_schema is not None) != (given.type == "json_schema"):
        told = "is missing" if given.json_schema is None else f"goes with type json_schema, not {given.type}"
        raise InvalidRequest(f"response_format.json_schema {told}", "response_format")
    if given.json_schema is None:
        return StructuredOutputsParams(json_object=True) if given.type == "json_object" else None
    return of_schema(given.json_schema.name, given.json_schema.schema, "response_format.json_schema")


def of_schema(name: str, schema: dict[str, Any] | bool | None, where: str) -> StructuredOutputsParams:
    """The constraint of a named schema. schema: None for any JSON object. where: its path in the body. Raises: InvalidRequest."""
    field = where.removesuffix(".json_schema")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name is {name[:80]!r}, 1 to 64 letters, digits, underscores and hyphens are needed", field
        )
    if schema is None:
        return StructuredOutputsParams(json_object=True)
    with writing(field):
        return StructuredOutputsParams(json=msgspec.json.encode(schema).decode())
