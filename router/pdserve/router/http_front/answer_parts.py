"""`send_body`: an answer's body in parts, until the client has taken them; `AnswersInParts`: all whole answers are sent so.

uvicorn takes a body whole, whatever the client reads, and calls the response complete. What is unread would then be outside of
every limit: of the budget of unread answers, and of the sequences that a tenant may have.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.common.errors import Overloaded
from pdserve.common.net.body_budget import BodyBudget
from pdserve.common.net.chunk_writer import chunk_writer
from pdserve.router.http_front.error_response import error_response

PART_BYTES = 64 << 10
"""The server waits between parts until the client has read most of those before. A smaller answer is sent at once, and outside of
the budget: as much may be unread of a stream."""


async def send_body(body: bytes, scope: Scope, send: Send, on_part: Callable[[], None] = lambda: None) -> None:
    """Send a body that ends the response; returns when the system has taken all of it, or the client has left.

    on_part: called whenever a part was taken.
    """
    if len(body) <= PART_BYTES:
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    # without copies of what waits
    rest = memoryview(body)
    while rest:
        await send({"type": "http.response.body", "body": bytes(rest[:PART_BYTES]), "more_body": True})
        on_part()
        rest = rest[PART_BYTES:]
    if (chunks := chunk_writer(scope)) is not None:
        await chunks.taken()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def abandon(scope: Scope) -> None:
    """Drop the connection of an answer that has begun and is not read in time."""
    if (chunks := chunk_writer(scope)) is not None:
        chunks.abandon()


class AnswersInParts:
    """Middleware. An answer that its application sends in parts by itself passes unchanged."""

    def __init__(self, app: ASGIApp, budget: Callable[[], BodyBudget]) -> None:
        """budget: gives that of all answers that are not read."""
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        is_given_up = False

        async def send_parts(message: Message) -> None:
            nonlocal start, is_given_up
            if is_given_up:
                return
            if message["type"] == "http.response.start":
                start = message
                return
            begin, start = start, None
            body = message.get("body", b"")
            if begin is None or message.get("more_body", False) or len(body) <= PART_BYTES:
                if begin is not None:
                    await send(begin)
                await send(message)
                return
            try:
                async with self._budget().room(len(body)) as room:
                    await send(begin)
                    begin = None
                    await room.read(send_body(body, scope, send), None)
            except Overloaded as error:
                is_given_up = True
                if begin is not None:
                    await error_response(error)(scope, receive, send)
                else:
                    abandon(scope)

        await self._app(scope, receive, send_parts)
