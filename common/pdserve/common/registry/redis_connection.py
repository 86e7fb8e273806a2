"""Connections to Redis: one function that makes a client, and names of its errors."""

from __future__ import annotations

import asyncio

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdserve.common.registry.redis_url import RedisUrl

OPERATION_S = 1.0
"""Seconds for one round trip. Only stored responses are waited for by requests."""
MAX_CONNECTIONS = 8


def make_redis(url: RedisUrl, ca_file: str | None = None) -> Redis:
    """A client whose round trips end within `OPERATION_S` and are never repeated by the client itself.

    ca_file: PEM certificates to trust instead of the system's, for rediss://; settings have checked it.
    """
    tls = {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": ca_file}
    return Redis(
        host=url.host,
        port=url.port,
        db=url.db,
        username=url.username,
        password=url.password,
        socket_timeout=OPERATION_S,
        socket_connect_timeout=OPERATION_S,
        retry=Retry(NoBackoff(), 0),
        max_connections=MAX_CONNECTIONS,
        # the same answers from every server and client version
        protocol=2,
        **(tls if url.tls else {}),  # type: ignore[arg-type]
    )


REDIS_ERRORS = (exceptions.RedisError, OSError, TimeoutError)
"""Errors that a round trip may raise."""


def raise_if_cancelled() -> None:
    """Called in loops after round trips. Raises: CancelledError when this task was cancelled.

    redis-py writes inside `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives as it finishes.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


ERROR_KINDS = ("unreachable", "timeout", "loading", "denied", "read_only", "full", "wrong_type", "refused")


def error_kind(error: BaseException) -> str:
    """One of `ERROR_KINDS`."""
    match error:
        case exceptions.BusyLoadingError():
            return "loading"
        case exceptions.AuthenticationError() | exceptions.AuthorizationError() | exceptions.NoPermissionError():
            return "denied"
        case exceptions.TimeoutError() | TimeoutError():
            return "timeout"
        case exceptions.ConnectionError() | OSError():
            return "unreachable"
        case exceptions.ReadOnlyError():
            return "read_only"
        case exceptions.OutOfMemoryError():
            return "full"
    text = str(error)
    if "WRONGTYPE" in text or "XADD" in text:
        # XADD is refused where a foreign entry took the last possible id
        return "wrong_type"
    if "NOPERM" in text or "NOAUTH" in text or "WRONGPASS" in text:
        return "denied"
    return "full" if "OOM " in text else "refused"


def concerns_keys(kind: str) -> bool:
    """True if a failure of this kind is caused by the content of our keys, rather than by Redis itself."""
    return kind == "wrong_type"


def error_text(error: BaseException) -> str:
    """One line for the log."""
    return " ".join(str(error).split())[:200] or type(error).__name__
