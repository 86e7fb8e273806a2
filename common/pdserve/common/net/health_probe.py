"""Answers of `/live` and `/ready`, and the names under which gRPC's health service gives the same."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

LIVE_SERVICE = "live"
"""gRPC health: SERVING as long as the process answers."""
READY_SERVICES = ("", "ready")
"""gRPC health: SERVING while requests could be served."""


def probe_response(ok: bool) -> Response:
    """200 or 503, with a body of one word."""
    return PlainTextResponse("ok\n" if ok else "unavailable\n", 200 if ok else 503)


async def answer_live(request: Request) -> Response:
    """`/live`: the process answers, and so its event loop turns."""
    return probe_response(True)
