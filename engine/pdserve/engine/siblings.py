"""`Siblings`: the living sequences of each request that n > 1 sequences continue, once its prompt is computed."""

from __future__ import annotations

from pdserve.engine.request import Request


class Siblings:
    """By the request's own id. A request with one sequence never comes here."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Request]] = {}

    def add(self, request: Request) -> None:
        self._of.setdefault(request.core.request_id, {})[request.index] = request

    def remove(self, request: Request) -> None:
        """It has ended. Harmless when it was never here."""
        if (living := self._of.get(request.core.request_id)) is not None:
            living.pop(request.index, None)
            if not living:
                del self._of[request.core.request_id]

    def of(self, request_id: str) -> list[Request]:
        """Empty for a request that is unknown, has not forked, or has ended."""
        return list(self._of.get(request_id, {}).values())
