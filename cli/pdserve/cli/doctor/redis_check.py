"""Redis: whether it is reachable, new and fast enough, and permits the services' commands; which services use the namespace."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio import Redis

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.protocol import version_objection
from pdserve.common.registry.redis_connection import REDIS_ERRORS, error_kind, error_text, make_redis
from pdserve.common.registry.redis_url import RedisUrl, parse_redis_url
from pdserve.common.registry.registry import (
    RECORD_FIELDS,
    Keys,
    RecordSigner,
    WorkerRecord,
    read_record,
    read_worker_id,
)
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.worker_settings import WorkerSettings

OLDEST = (6, 2)
_NEWER = f"use Redis {OLDEST[0]}.{OLDEST[1]} or newer"
NUM_PINGS = 5
SLOW_S = 0.005
"""Round-trip time above which routers learn of cached prefixes late; no request waits for Redis."""
MAX_SHOWN = 32
_ANSWER_S = 10.0
_ADVICE = {
    "unreachable": "start it, or correct the host and port in the redis setting (and redis_ca_file for rediss://)",
    "timeout": "look for a firewall that drops packets, or a Redis that is overloaded",
    "denied": "correct the user and password in the redis setting; docs/protocol.md lists the required rights",
    "loading": "wait until Redis has loaded its data",
}


def check_redis(settings: ServiceSettings) -> list[Finding]:
    """Check the server, this user's rights, and the services in the namespace. Writes nothing to Redis."""
    if settings.redis is None:
        return [ok("not used: routers are configured with the addresses of workers")]
    url = parse_redis_url(settings.redis)
    try:
        # resolve in this thread first, which is allowed to hang: asyncio resolves names in threads that are joined at exit
        socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [failed(f"{url}: {url.host} does not resolve: {error.strerror}", _ADVICE["unreachable"])]
    return asyncio.run(_look(settings, url))


async def _look(settings: ServiceSettings, url: RedisUrl) -> list[Finding]:
    redis = make_redis(url, settings.redis_ca_file)
    keys = Keys(settings.redis_namespace)
    try:
        async with asyncio.timeout(_ANSWER_S):
            findings = [await _server(redis, url), await _rights(redis, keys)]
            return [*findings, *await _workers(redis, keys, settings)]
    except REDIS_ERRORS as error:
        kind = error_kind(error)
        advice = _ADVICE.get(kind, "check Redis's own log")
        return [failed(f"{url} cannot be used: {error_text(error)} ({kind})", advice)]
    finally:
        await redis.aclose()


async def _workers(redis: Redis, keys: Keys, settings: ServiceSettings) -> list[Finding]:
    """Services in the namespace, and whether they are compatible with this service."""
    try:
        members = await redis.zrevrange(keys.workers, 0, MAX_SHOWN - 1)
        records = [await _record(redis, keys, member) for member in members]
    except REDIS_ERRORS as error:
        if error_kind(error) == "denied":
            return []  # the missing permission is already reported
        raise
    except InvalidRequest as error:
        advice = "another program writes there: use a redis_namespace of your own"
        return [failed(f"namespace {keys.namespace} holds something else: {error.message}", advice)]
    live = [record for record in records if record is not None]
    names = ", ".join(f"{record.worker_id} ({record.role}, {record.address})" for record in live)
    shown = f"namespace {keys.namespace} has {len(live)} live workers{': ' if names else ''}{names}"
    return [ok(shown), *_strangers(live, settings)]


def _strangers(live: list[WorkerRecord], settings: ServiceSettings) -> Iterator[Finding]:
    if others := [record.worker_id for record in live if not _verifies(record, settings)]:
        yield failed(f"{', '.join(others)}: a different deployment key", "give all services the same key")
    for record in live:
        if (why := version_objection(record.protocol_version)) is not None:
            yield warning(f"{record.worker_id}: {why}", "run versions of pdserve that work together")
    if isinstance(settings, WorkerSettings) and settings.worker_id in [record.worker_id for record in live]:
        what = f"a worker with the id {settings.worker_id} is already registered"
        yield warning(what, "expected just before a restart that replaces it; otherwise set a different worker_id")


def _verifies(record: WorkerRecord, settings: ServiceSettings) -> bool:
    try:
        RecordSigner(settings.key()[0], settings.redis_namespace).verify(record)
    except InvalidRequest:
        return False
    except ConfigError:
        return True  # `check_key` reports it
    return True


async def _server(redis: Redis, url: RedisUrl) -> Finding:
    round_trips = []
    for _ in range(NUM_PINGS):
        started = time.monotonic()
        await redis.ping()
        round_trips.append(time.monotonic() - started)
    # needs no permission, unlike INFO
    try:
        answer = await redis.execute_command("HELLO")  # type: ignore[no-untyped-call]
    except exceptions.ResponseError as error:
        return failed(f"{url} does not report its version: {error_text(error)}", _NEWER)
    said = {bytes(name): value for name, value in zip(answer[::2], answer[1::2], strict=True)}
    version = said[b"version"].decode(errors="replace")
    fastest_s = min(round_trips)
    shown = f"{url}: Redis {version}, {fastest_s * 1e3:.2f} ms per round trip"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        return failed(shown, _NEWER)
    if said.get(b"role") != b"master":
        return failed(f"{shown}: a replica, which accepts no writes", "set redis to the primary's URL")
    if said.get(b"mode") == b"cluster":
        return failed(f"{shown}: a node of a cluster", "use one server; all keys of a deployment are in one slot")
    if fastest_s > SLOW_S:
        return warning(
            f"{shown}: slow", "move Redis closer; no request waits for it, but routers learn of cached prefixes later"
        )
    return ok(shown)


async def _rights(redis: Redis, keys: Keys) -> Finding:
    refused = await refusals(redis, keys)
    if not refused:
        return ok("this user has all the rights that services need")
    first = next(iter(refused.values()))
    return failed(
        f"Redis refuses {', '.join(sorted(refused))}: {first}",
        f"ACL SETUSER <user> ~{{{keys.namespace}}}:* {' '.join(f'+{name.lower()}' for name in sorted(refused))}",
    )


async def _record(redis: Redis, keys: Keys, member: object) -> WorkerRecord | None:
    worker_id = read_worker_id(member)
    return read_record(worker_id, await redis.hmget(keys.worker(worker_id), list(RECORD_FIELDS)))


Command = tuple[str | int, ...]


def harmless_commands(keys: Keys) -> list[Command]:
    """Each command that a service uses, on the keys of a worker that does not exist."""
    worker_id, epoch = f"doctor-{secrets.token_hex(4)}", secrets.randbits(64)
    record, blocks, events = keys.worker(worker_id), keys.blocks(worker_id, epoch), keys.events(worker_id, epoch)
    return [
        ("HMGET", record, "epoch"), ("HGET", record, "epoch"), ("HSET", record, "epoch", "0"), ("DEL", record),
        ("PEXPIRE", record, 1), ("TYPE", record), ("TIME",), ("SET", record, "0"), ("GETRANGE", record, 0, 0),
        ("MEMORY", "USAGE", record),
        ("ZADD", keys.workers, "XX", 0, worker_id), ("ZREM", keys.workers, worker_id),
        ("ZREVRANGE", keys.workers, 0, 0), ("ZREMRANGEBYSCORE", keys.workers, 0, "(0"),
        ("SADD", blocks, "0"), ("SREM", blocks, "0"), ("SCARD", blocks), ("SSCAN", blocks, 0),
        ("XADD", events, "*", "seq", "0"), ("XREVRANGE", events, "+", "-"), ("XREAD", "STREAMS", events, "0"),
    ]  # fmt: skip


def right_of(command: Command) -> str:
    """Name of a command in an ACL, in capitals."""
    return "|".join(map(str, command[: 2 if command[0] == "MEMORY" else 1]))


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
                refused[right_of(command)] = error_text(error)

        for command in transaction_commands(keys):
            await ask(command)
        if "MULTI" not in refused:
            await ask(("MULTI",))
            for command in harmless_commands(keys):
                await ask(command)
        await one.connection_pool.disconnect()
    return refused
