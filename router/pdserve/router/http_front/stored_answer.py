"""`StoredAnswer`: an answer that is made and sent within the budget of all whole answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import DeadlineExceeded, Overloaded
from pdserve.common.net.body_budget import BodyBudget, BodyRoom
from pdserve.router.http_front.answer_parts import abandon, send_body
from pdserve.router.http_front.error_response import JSON


class StoredAnswer(Response):
    """Has room in the budget from before it is loaded until all of it is read.

    While others wait for room, the client that has read for longest loses its connection after `body_budget.FAIR_SHARE_S`.
    """

    def __init__(
        self, budget: BodyBudget, most_bytes: int, timeout_s: float, load: Callable[[BodyRoom], Awaitable[bytes]]
    ) -> None:
        """most_bytes: of what `load` takes. timeout_s: for the client to read it. load: the body, from the room that it has; its
        errors are the answer's."""
        super().__init__()
        self._budget = budget
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._budget.room(self._most_bytes) as room:
            body = await self._load(room)
            room.shrink(len(body))
            headers = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await room.read(send_body(body, scope, send), self._timeout_s)
            except (Overloaded, DeadlineExceeded):
                abandon(scope)
