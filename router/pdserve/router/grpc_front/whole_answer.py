"""`write_whole`: a whole answer over gRPC, held in the budget of unread answers until the client has read it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import grpc.aio

from pdserve.common.errors import Cancelled, DeadlineExceeded, Overloaded
from pdserve.common.method_handler import Context
from pdserve.common.net.body_budget import BodyBudget, BodyRoom
from pdserve.common.net.connection_watch import close_connection
from pdserve.router.requests import generation

UNCOUNTED_BYTES = 64 << 10
"""Smaller answers take no room in the budget."""


def room_for(budget: BodyBudget, num_bytes: int) -> BodyRoom | nullcontext[None]:
    """Context in which a whole answer is made and written. Raises: Overloaded if there is no room in time."""
    return budget.room(num_bytes) if num_bytes > UNCOUNTED_BYTES else nullcontext()


async def write_whole(context: Context, response: Any, room: BodyRoom | None) -> None:
    """Write the answer; returns when gRPC has passed it on, as far as the client reads. room: of `room_for`.

    A client that reads nothing for `UNREAD_S`, or too slowly while others wait for its room, loses its connection: an answer that
    is left to gRPC stays in memory for as long as the client likes. Raises: Cancelled if the client has left; CancelledError when
    it has lost its connection.
    """
    try:
        if room is not None:
            await room.read(context.write(response), generation.UNREAD_S)
            return
        async with asyncio.timeout(generation.UNREAD_S):
            await context.write(response)
    except grpc.aio.InternalError:
        raise Cancelled("the client left") from None
    except (DeadlineExceeded, Overloaded, TimeoutError):
        await close_connection(context.peer())
        raise asyncio.CancelledError from None
