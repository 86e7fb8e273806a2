"""`IgnoredFields`: fields of clients that are unknown to the router, where the setting `unknown_fields` ignores them."""

from __future__ import annotations

import functools
import logging
import operator
import types
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

log = logging.getLogger(__name__)

MAX_NAMES = 256
"""Names that are logged; they are clients' texts, so that their number is bounded."""
_MAX_NAME_CHARS = 64
B = TypeVar("B", bound=msgspec.Struct)


class IgnoredFields:
    """Logs each name of an ignored field once. Any thread may use it."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        """Log a field's name, shortened, unless it was logged before. Values are never logged."""
        shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 3]}..."
        if shown in self._names or len(self._names) >= MAX_NAMES:
            return
        self._names.add(shown)
        more = "; further names are not logged" if len(self._names) == MAX_NAMES else ""
        log.warning("clients send the unknown field %r, which is ignored (unknown_fields)%s", shown, more)

    def decode(self, data: bytes, kind: type[B], first: str) -> B:
        """Decode a body without its unknown fields, at every level. first: path of one of them.

        Raises: msgspec.ValidationError for other mistakes.
        """
        body: B = msgspec.json.decode(data, type=tolerant(kind))
        self.note(first)
        for name in msgspec.json.decode(data, type=dict[str, msgspec.Raw]):
            if name not in kind.__struct_fields__:
                self.note(name)
        return body


@functools.cache
def tolerant(kind: type[B]) -> type[B]:
    """A subclass of a body's type that ignores unknown fields, and so do the types of its fields."""
    hints, make_field = get_type_hints(kind), cast(Any, msgspec.field)
    fields = [
        (
            field.name,
            _tolerant_hint(hints[field.name]),
            make_field(default=field.default, default_factory=field.default_factory),
        )
        for field in msgspec.structs.fields(kind)
    ]
    made: Any = msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), module=kind.__module__, kw_only=True, forbid_unknown_fields=False
    )
    return made  # type: ignore[no-any-return]


def _tolerant_hint(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return tolerant(hint)
    arguments = tuple(map(_tolerant_hint, get_args(hint)))
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, arguments)
    origin = get_origin(hint)
    return origin[arguments] if origin in (list, dict, tuple) else hint
