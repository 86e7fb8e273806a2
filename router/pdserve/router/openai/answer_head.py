"""`AnswerHead`: fields that answers with embeddings, classes and scores have."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdserve.common import clock
from pdserve.router.requests.usage import Usage


class AnswerHead(NamedTuple):
    """Fields of one answer."""

    request_id: str
    model: str
    usage: Usage

    @property
    def usage_fields(self) -> dict[str, Any]:
        """The field `usage`: nothing is generated."""
        return {
            "prompt_tokens": self.usage.prompt_tokens,
            "total_tokens": self.usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.usage.cached_tokens},
        }

    def fields(self, kind: str, *, listed: bool = True) -> dict[str, Any]:
        """kind: begins the answer's id. listed: True for an answer that is a list, in OpenAI's form."""
        head = {"id": f"{kind}-{self.request_id}", "model": self.model, "usage": self.usage_fields}
        return head | {"object": "list", "created": int(clock.unix_s())} if listed else head
