"""Checks that the fields of a caller's parameters have the types that msgspec gives them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.common.errors import InvalidRequest

P = TypeVar("P", bound=msgspec.Struct)


def checked(params: object, kind: type[P], name: str) -> P:
    """A copy of the caller's parameters, with lists as tuples. name: what the caller calls it.

    Raises: InvalidRequest for a value of another type than its field's.
    """
    if not isinstance(params, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}, not {type(params).__name__}", name)
    values = {}
    for field, type_ in field_types(kind).items():
        values[field] = converted(field, getattr(params, field), type_)
    return kind(**values)


@functools.cache
def field_types(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Field -> its type. msgspec evaluates the annotations in each call, which takes longer than all other checks."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def converted(name: str, value: object, kind: Any) -> Any:
    """The value as its field's type. name: of the field. Raises: InvalidRequest for a value of another type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} is {value!r:.60}: {error}", name) from error
