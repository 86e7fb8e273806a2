"""Fields by which a body describes its caller: they have no effect, and OpenAI's limits of length."""

from __future__ import annotations

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import shown

MAX_CALLER_CHARS = 64
"""Characters of each field of `CALLER_FIELDS`."""
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
CALLER_FIELDS = ("user", "prompt_cache_key", "safety_identifier")


def verify_caller(body: object) -> None:
    """Raises: InvalidRequest for a field of the body, or a key or value of its `metadata`, that is too long."""
    for field in CALLER_FIELDS:
        value: str | None = getattr(body, field, None)
        if value is not None and len(value) > MAX_CALLER_CHARS:
            raise InvalidRequest(
                f"{field} has {len(value)} characters, at most {MAX_CALLER_CHARS} are allowed: {shown(value)}", field
            )
    metadata: dict[str, str] = getattr(body, "metadata", None) or {}
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequest(
                f"metadata has a key of {len(key)} characters, at most {MAX_METADATA_KEY_CHARS} are allowed: {shown(key)}",
                "metadata",
            )
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata.{key} has {len(value)} characters, at most {MAX_METADATA_VALUE_CHARS} are allowed: {shown(value)}",
                "metadata",
            )
