"""`Usage`: the token counts of one request."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, kw_only=True):
    """Token counts that the client gets, from the router's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing."""
