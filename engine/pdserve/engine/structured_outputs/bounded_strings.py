"""`with_bounded_strings`: a JSON schema whose strings all end."""

from __future__ import annotations

import copy
from typing import Any

from pdserve.engine.structured_outputs.schema_support import parts_of

_OWN_FORM = frozenset(("maxLength", "pattern", "format", "enum", "const"))


def with_bounded_strings(schema: Any, max_chars: int) -> Any:
    """The schema with a `maxLength` of `max_chars`, or of a larger `minLength`, in each string that has no form of its own.

    Values without a `type`, and names of properties, stay as they are.
    """
    bounded = copy.deepcopy(schema)
    for _, part in parts_of(bounded, "#"):
        kind = part.get("type")
        if (kind == "string" or (isinstance(kind, list) and "string" in kind)) and not part.keys() & _OWN_FORM:
            least = part.get("minLength")
            part["maxLength"] = max(max_chars, least) if isinstance(least, int) else max_chars
    return bounded
