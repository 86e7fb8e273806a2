"""Which cached blocks of a worker that drains others read, in which order, and within which bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pdserve.common.errors import WorkerLost
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement import recent_prompts
from pdserve.router.placement.placement import BlockMove
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.placement.recent_prompts import RecentPrompts
from pdserve.router.placement.worker_selector import WorkerSelector
from pdserve.router.requests import cache_moves as cache_moves_module
from pdserve.router.requests.cache_moves import CacheMoves
from pdserve.router.requests.preparation import HashedRequest
from pdserve.router.tenants.client import CacheGroup
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import RemoteWorker, WorkerState
from tests.router.candidates import worker
from tests.router.fake_worker import LAYOUT
from tests.support.run.waiting import eventually

BLOCK = LAYOUT.block_size
ROOM: dict[str, Any] = {"blocks_total": 1000, "blocks_free": 500}


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """Of the full blocks: all tokens so far."""
    return [bytes(tokens[: end * BLOCK]) for end in range(1, len(tokens) // BLOCK + 1)]


class FakePreparation:
    def hashed(self, request: GenerationRequest, cache: CacheGroup, layout: object) -> HashedRequest:
        return HashedRequest(request, hashes_of(request.prompt_token_ids), b"")


class FakeFleet:
    def __init__(self, workers: Sequence[RemoteWorker]) -> None:
        self.all = list(workers)
        self.changed = asyncio.Event()

    def lives(self) -> list[RemoteWorker]:
        return self.all

    def workers(self, role: WorkerRole) -> list[RemoteWorker]:
        return [each for each in self.all if each.role is role and each.state is WorkerState.LIVE]

    async def wait_for(self, look: Any, timeout_s: float) -> Any:
        while (found := look()) is None:
            self.changed.clear()
            await self.changed.wait()
        return found


class World:
    """A router's view of some workers; the first drains. What they have is told by `has`."""

    def __init__(self, workers: Sequence[RemoteWorker], patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.workers = workers
        self.index = PrefixIndex()
        self.fleet = FakeFleet(workers)
        self.fails: CallFailed | None = None
        self.fetched: list[tuple[str, int, str]] = []
        """Reader, tokens of the prompt, source."""
        selector = WorkerSelector(cast(Any, self.fleet), self.index, RouterSettings(**settings))
        self.moves = CacheMoves(cast(Any, self.fleet), selector, cast(Any, FakePreparation()))
        patch.setattr(cache_moves_module, "fetch", self._fetch)

    async def _fetch(self, reader: RemoteWorker, request: GenerationRequest, number: int, move: BlockMove) -> int:
        assert move.limit_s > 1
        tokens = request.prompt_token_ids
        self.fetched.append((reader.identity.worker_id, len(tokens), move.source.identity.worker_id))
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        self.has(reader, tokens)
        return len(tokens)

    def has(self, worker: RemoteWorker, tokens: Sequence[int]) -> None:
        self.index.stored(worker.key, hashes_of(tokens))

    def served(self, tokens: Sequence[int], *, was_cached: bool = False) -> None:
        half = len(tokens) // 2
        request = GenerationRequest(prompt_token_ids=list(tokens[:half]))
        self.moves.recent.add(request, CacheGroup(), tokens[half:], was_cached=was_cached)

    async def drain(self) -> None:
        """Until the reads are over."""
        running = asyncio.create_task(self.moves.run())
        await asyncio.sleep(0)
        assert not self.fetched, "nobody drains"
        self.workers[0].refuse_more()
        self.fleet.changed.set()
        before = -1
        while before != len(self.fetched):
            before = len(self.fetched)
            await asyncio.sleep(0.05)
        assert not running.done()
        running.cancel()


def text(first: int, num_blocks: int) -> list[int]:
    """So many blocks and a token."""
    return [(first + place) % 250 for place in range(num_blocks * BLOCK + 1)]


@pytest.fixture
def decoders() -> list[RemoteWorker]:
    return [worker("d0", **ROOM), worker("d1", **ROOM), worker("p0", "prefill", prefill_tokens_per_s=100.0, **ROOM)]


async def test_the_latest_and_those_that_were_cached_come_first(
    decoders: list[RemoteWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(decoders, monkeypatch)
    for number, was_cached in enumerate((False, True, False, True)):
        tokens = text(60 * number, 3 + number)
        world.has(decoders[0], tokens)
        world.served(tokens, was_cached=was_cached)
    await world.drain()
    assert world.fetched == [("d1", num_blocks * BLOCK + 1, "d0") for num_blocks in (6, 4, 5, 3)]


async def test_readers_have_the_role_of_the_worker_now(
    decoders: list[RemoteWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they were started with."""
    _, other, prefill = decoders
    other.role, prefill.role = WorkerRole.PREFILL, WorkerRole.DECODE
    world = World(decoders, monkeypatch)
    world.has(decoders[0], text(0, 4))
    world.served(text(0, 4))
    await world.drain()
    assert [name for name, _, _ in world.fetched] == ["p0"]


async def test_what_others_have_or_a_later_turn_begins_with_is_not_read(
    decoders: list[RemoteWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(decoders, monkeypatch)
    talk, known, gone = text(0, 6), text(60, 4), text(120, 4)
    for tokens in (talk[: 3 * BLOCK + 1], talk, known, gone):
        world.served(tokens)
    world.has(decoders[0], talk)
    world.has(decoders[0], known)
    world.has(decoders[2], known)
    await world.drain()
    assert [num_tokens for _, num_tokens, _ in world.fetched] == [len(talk)]


@pytest.mark.parametrize(
    ("settings", "rate", "free", "expected"),
    [
        ({}, 100.0, 500, 3),
        ({}, 0.0, 500, 0),
        ({}, 1e9, 500, 0),
        ({"block_moves": "always"}, 0.0, 500, 3),
        ({"block_moves": "never"}, 100.0, 500, 0),
        ({}, 100.0, 0, 0),
        ({}, 100.0, 9, 2),
    ],
    ids=["pays", "no rate", "computed sooner", "always", "never", "no room", "room for two"],
)
async def test_only_what_pays_and_has_room_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], rate: float, free: int, expected: int
) -> None:
    load: dict[str, Any] = {"blocks_total": 1000, "blocks_free": free, "blocks_in_use": 1000 - free}
    workers = [worker("d0"), worker("d1", **load), worker("p0", "prefill", prefill_tokens_per_s=rate)]
    world = World(workers, monkeypatch, **settings)
    for number in range(3):
        world.has(workers[0], text(60 * number, 4))
        world.served(text(60 * number, 4))
    await world.drain()
    assert len(world.fetched) == expected


async def test_a_quarter_of_what_a_reader_has_cached_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [worker("d0"), worker("d1", blocks_total=40), worker("p0", "prefill", prefill_tokens_per_s=100.0)]
    world = World(workers, monkeypatch)
    for number in range(3):
        world.has(workers[0], text(60 * number, 4))
        world.served(text(60 * number, 4))
    await world.drain()
    assert len(world.fetched) == 2


async def test_a_read_that_fails_ends_no_other(decoders: list[RemoteWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(decoders, monkeypatch)
    world.fails = CallFailed(WorkerLost("gone"), True)
    for number in range(3):
        world.has(decoders[0], text(60 * number, 4))
        world.served(text(60 * number, 4))
    await world.drain()
    assert len(world.fetched) == 3


async def test_streams_move_first(decoders: list[RemoteWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        num_output_tokens = 3

        def move(self) -> None: ...

        def stay(self) -> None: ...

    world, stream = World(decoders, monkeypatch), Stream()
    world.has(decoders[0], text(0, 4))
    world.served(text(0, 4))
    decoders[0].movable.add(stream)
    await world.drain()
    assert not world.fetched
    decoders[0].movable.clear()
    running = asyncio.create_task(world.moves._leave(decoders[0]))
    await eventually(lambda: len(world.fetched) == 1)
    await running


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_TOKENS", 100)
    recent = RecentPrompts()
    for number in range(10):
        request = GenerationRequest(prompt_token_ids=[number] * 20)
        recent.add(request, CacheGroup(), [7] * 10, was_cached=False)
    assert (len(recent), recent.num_tokens) == (3, 90)
    assert [prompt.tokens[0] for prompt in recent.best_first()] == [9, 8, 7]
    first = recent.best_first()[0].first(25, 3.0)
    assert (first.prompt_token_ids, first.output_token_ids, first.deadline) == ([9] * 20 + [7] * 5, [], 3.0)
    monkeypatch.setattr(recent_prompts, "KEPT_S", -1.0)
    assert recent.best_first() == []


def test_prompts_with_images_are_not_kept() -> None:
    recent, feature = (
        RecentPrompts(),
        MultiModalFeatureSpec(
            identifier="0" * 32, mm_position=PlaceholderRange(offset=0, length=1), grid_thw=(1, 2, 2)
        ),
    )
    recent.add(GenerationRequest(prompt_token_ids=[1], mm_features=[feature]), CacheGroup(), [2], was_cached=False)
    assert not len(recent)
