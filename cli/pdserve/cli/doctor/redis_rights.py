"""Checks which of the services' Redis commands this user may run, by calls that change nothing."""

from __future__ import annotations

import secrets

from redis import exceptions
from redis.asyncio import Redis

from pdserve.common.registry.redis_connection import error_text
from pdserve.common.registry.registry import Keys

Command = tuple[str | int, ...]


def harmless_commands(keys: Keys) -> list[Command]:
    """Each command that a service uses, on the keys of a worker that does not exist."""
    worker_id, epoch = f"doctor-{secrets.token_hex(4)}", secrets.randbits(64)
    record, blocks, events = keys.worker(worker_id), keys.blocks(worker_id, epoch), keys.events(worker_id, epoch)
    return [
        ("HMGET", record, "epoch"), ("HGET", record, "epoch"), ("HSET", record, "epoch", "0"), ("DEL", record),
        ("PEXPIRE", record, 1), ("TYPE", record), ("TIME",),
        ("ZADD", keys.workers, "XX", 0, worker_id), ("ZREM", keys.workers, worker_id),
        ("ZREVRANGE", keys.workers, 0, 0), ("ZREMRANGEBYSCORE", keys.workers, 0, "(0"),
        ("SADD", blocks, "0"), ("SREM", blocks, "0"), ("SCARD", blocks), ("SSCAN", blocks, 0),
        ("XADD", events, "*", "seq", "0"), ("XREVRANGE", events, "+", "-"), ("XREAD", "STREAMS", events, "0"),
    ]  # fmt: skip


def transaction_commands(keys: Keys) -> list[Command]:
    """Commands of an empty transaction."""
    return [("PING",), ("WATCH", keys.workers), ("UNWATCH",), ("MULTI",), ("EXEC",)]


async def refusals(redis: Redis, keys: Keys) -> dict[str, str]:
    """Commands that this user may not run, with Redis's reasons. Raises: one of `REDIS_ERRORS` if Redis does not answer.

    Redis checks permissions when it queues a command of a transaction, so all are queued, and the connection is closed before EXEC.
    """
    refused: dict[str, str] = {}
    async with redis.client() as one:
        # all answers are QUEUED, which the commands' own response parsers would reject
        one.response_callbacks.clear()

        async def ask(command: Command) -> None:
            try:
                await one.execute_command(*command)  # type: ignore[no-untyped-call]
            except exceptions.ConnectionError:
                raise
            except exceptions.ResponseError as error:
                refused[str(command[0])] = error_text(error)

        for command in transaction_commands(keys):
            await ask(command)
        if "MULTI" not in refused:
            await ask(("MULTI",))
            for command in harmless_commands(keys):
                await ask(command)
        await one.connection_pool.disconnect()
    return refused
