"""`CacheMoves`: cached blocks of a worker that drains, which other workers read before it ends.

The router knows by the workers' reports who has the blocks of a prompt, and keeps the tokens of what it has served lately. When a
worker drains, other workers of its role fetch what only it has: first prompts that were cached in part, as those of conversations
are, and the latest of them first. Each is read as far as the worker has it, if reading takes less time than computing it again, and
as long as there is room and time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence

import msgspec

from pdserve.common import clock
from pdserve.common.kv_events import WorkerKey
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.attempts.fetch_call import fetch
from pdserve.router.placement.placement import BlockRead
from pdserve.router.placement.recent_prompts import RecentPrompt, RecentPrompts
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.requests.preparation import HashedRequest, Preparation
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import RemoteWorker, WorkerState

log = logging.getLogger(__name__)

LIMIT_S = 10.0
"""Seconds within which the blocks of one worker are read."""
AT_ONCE = 4
"""Reads from a worker."""
STREAMS_FIRST_S = 2.0
"""Seconds for which running sequences move before cached blocks do."""
SHARE_OF_CACHE = 0.25
"""Of what a reader has cached, which it may lose for what it reads."""
LOOK_EVERY_S = 0.1
"""A worker that refuses a request counts as draining before it reports that."""


class CacheMoves:
    """One router's. `run` it."""

    def __init__(self, fleet: Fleet, selector: WorkerSelector, preparation: Preparation) -> None:
        self.recent = RecentPrompts()
        self._fleet = fleet
        self._selector = selector
        self._preparation = preparation
        self._begun: set[WorkerKey] = set()

    async def run(self) -> None:
        """Have the blocks of each worker that drains read by others, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for worker in await self._fleet.wait_for(self._leaving, LOOK_EVERY_S) or ():
                    self._begun.add(worker.key)
                    group.create_task(self._move(worker))

    def _leaving(self) -> list[RemoteWorker] | None:
        lives = self._fleet.lives()
        self._begun &= {worker.key for worker in lives}
        return [each for each in lives if each.state is WorkerState.DRAINING and each.key not in self._begun] or None

    async def _move(self, worker: RemoteWorker) -> None:
        try:
            await self._leave(worker)
        except Exception:
            log.exception("cached blocks of worker %s could not be moved", worker)

    async def _leave(self, worker: RemoteWorker) -> None:
        deadline = clock.monotonic() + LIMIT_S
        streams_until = clock.monotonic() + STREAMS_FIRST_S
        # two conditions and a clock end this loop, not one event
        while worker.movable and clock.monotonic() < streams_until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        leave = _Leave(self._fleet, self._selector, self._preparation, worker, deadline)
        prompts = iter(self.recent.best_first())

        async def read() -> None:
            for prompt in prompts:
                if worker.state is not WorkerState.DRAINING or clock.monotonic() > deadline:
                    return
                await leave.read(prompt)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(read())
        if leave.num_tokens:
            log.info("worker %s leaves: others have read %d tokens of its cache", worker, leave.num_tokens)


class _Leave:
    """One worker's."""

    def __init__(
        self,
        fleet: Fleet,
        selector: WorkerSelector,
        preparation: Preparation,
        worker: RemoteWorker,
        deadline: float,
    ) -> None:
        self._fleet = fleet
        self._selector = selector
        self._preparation = preparation
        self._worker = worker
        self._deadline = deadline
        self._numbers = itertools.count()
        self._name = f"cache-{secrets.token_hex(8)}"
        """Of the requests that read."""
        self._room: dict[WorkerKey, float] = {}
        """Reader -> places that it may still read."""
        self._read: set[bytes] = set()
        """Hashes of what is read, or has been."""
        self.num_tokens = 0
        """Of blocks that others have read."""

    async def read(self, prompt: RecentPrompt) -> None:
        """Have a prompt's blocks read that only this worker has, where that is worth it."""
        layout = self._worker.identity.layout
        # nobody has the key and value of the last token
        hashes = self._first(prompt, len(prompt.tokens) - 1).placement_hashes
        if not hashes or hashes[-1] in self._read:
            return  # a later turn's prompt begins with it
        others = [each for role in WorkerRole for each in self._fleet.workers(role)]
        readers = [each for each in others if each.role is self._worker.role]
        reported = self._selector.reported(hashes, layout, [self._worker, *others])
        num_here = reported[self._worker.key]
        if num_here <= max((reported[each.key] for each in others), default=0):
            return
        reader = self._reader(readers, reported, num_here)
        if reader is None:
            return
        num_there = reported[reader.key]
        if self._selector.moves.of_leaving(self._worker, reader, num_there, num_here - num_there, others) is None:
            return
        self._read.update(hashes[:num_here])
        self._room[reader.key] -= num_here - num_there
        # a prefill worker needs no more of the answer than it reads; and nothing is read of the last token
        request = self._first(prompt, num_here * layout.block_size + 1).request
        request = msgspec.structs.replace(request, request_id=self._name)
        patient = BlockRead(source=self._worker, limit_s=max(0.1, self._deadline - clock.monotonic()))
        try:
            num_tokens = await fetch(reader, request, next(self._numbers), patient)
        except CallFailed as failure:
            log.info("worker %s did not read cached blocks of %s: %s", reader, self._worker, failure.error.message)
        else:
            self.num_tokens += max(0, num_tokens - num_there * layout.block_size)

    def _first(self, prompt: RecentPrompt, num_tokens: int) -> HashedRequest:
        first = prompt.first(num_tokens, self._deadline + LIMIT_S)
        return self._preparation.hashed(first, prompt.cache, self._worker.identity.layout)

    def _reader(
        self, readers: Sequence[RemoteWorker], reported: dict[WorkerKey, int], num_here: int
    ) -> RemoteWorker | None:
        """The one that has most of it already, then the one with most room; None if none has room for the rest."""
        for reader in readers:
            if reader.key not in self._room:
                load, num_groups = reader.load, reader.identity.layout.num_groups
                num_cached = max(0, load.blocks_total - load.blocks_free - load.blocks_in_use)
                self._room[reader.key] = (load.blocks_free + SHARE_OF_CACHE * num_cached) / num_groups
        fit = [each for each in readers if num_here - reported[each.key] <= self._room[each.key]]
        readable = [each for each in fit if self._selector.moves.can_read(each, self._worker)]
        return max(readable, key=lambda each: (reported[each.key], self._room[each.key]), default=None)
