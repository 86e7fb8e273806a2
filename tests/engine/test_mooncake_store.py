"""`MooncakeStore` over a real master: what engines share, and what the death of each process costs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.security.block_digest import Gmac
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.ranks.rank_messages import MooncakeOptions
from pdserve.engine.runner.pool import mooncake_store
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.runner.pool.mooncake_messages import Write
from pdserve.engine.runner.pool.mooncake_store import MooncakeStore
from pdserve.engine.scheduler import store_lookups
from pdserve.engine.scheduler.scheduler import Scheduler
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import STATE, greedy_answer, prompt_of
from tests.support.processes.mooncake_master import MooncakeMaster, mooncake_master
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = pytest.mark.process

KEY = bytes(range(32))
BLOCK_BYTES = 1000
TINY: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": (8,), "max_model_len": 48, "block_size": 4}
"""A pool of 48 tokens, and host memory for 32."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model is faster than any store: its blocks would not be read. A client is soon started again."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda self, num_tokens: 3600.0 * num_tokens)
    monkeypatch.setattr(mooncake_store, "RESTART_S", 0.2)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("master")) as started:
        yield started


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """One that the test may stop and kill."""
    with mooncake_master(tmp_path) as started:
        yield started


Open = Callable[..., SealedStore]


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """`opened(master, prefix=, rank=, segment_mib=, key=)`: a store, whose process has ended after the test."""
    made: list[MooncakeStore] = []

    def open_one(
        master: MooncakeMaster,
        prefix: str = "",
        rank: int = 0,
        segment_mib: int = 64,
        key: bytes = KEY,
        *,
        has_metadata_server: bool = True,
    ) -> SealedStore:
        url = MooncakeUrl.parse(master.url(segment_mib, has_metadata_server=has_metadata_server))
        made.append(MooncakeStore(url, prefix or request.node.name, rank))
        return SealedStore(made[-1], Gmac(key))

    yield open_one
    for store in made:
        store.close()
        assert not store._thread.is_alive()
        assert store._process is None or not Path(f"/proc/{store._process.pid}").exists()


def client_of(store: SealedStore) -> MooncakeStore:
    assert isinstance(store.store, MooncakeStore)
    return store.store


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block_of(number: int, num_bytes: int = BLOCK_BYTES) -> memoryview:
    return memoryview(random.Random(number).randbytes(num_bytes))


def write(store: SealedStore, *numbers: int) -> list[bytes]:
    return [lost for number in numbers for lost in store.write(name_of(number), block_of(number))]


def has(store: SealedStore, number: int, num_bytes: int = BLOCK_BYTES) -> bool:
    """Read a block; what comes back is right."""
    into = memoryview(bytearray(num_bytes))
    is_there = store.read(name_of(number), into)
    assert not is_there or into == block_of(number, num_bytes)
    return is_there


@pytest.mark.parametrize("has_metadata_server", [True, False])
def test_one_reads_what_another_one_has_written(
    master: MooncakeMaster, opened: Open, has_metadata_server: bool
) -> None:
    writer, reader = (opened(master, has_metadata_server=has_metadata_server) for _ in range(2))
    assert write(writer, 1, 2, 3) == []
    assert [has(reader, number) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert reader.store.find([name_of(4), name_of(1), name_of(3)]) == [name_of(1), name_of(3)]
    assert reader.store.names() == []
    large = 8 << 20
    assert writer.write(name_of(9), block_of(9, large)) == []
    assert has(reader, 9, large)


def test_one_without_memory_of_its_own_writes_to_others(master: MooncakeMaster, opened: Open) -> None:
    opened(master)
    writer = opened(master, segment_mib=0)
    assert write(writer, 1) == []
    assert has(writer, 1)


def test_a_block_that_is_there_is_not_written_again(
    master: MooncakeMaster, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(master), opened(master)
    write(first, 1)
    sent: list[type] = []
    ask = MooncakeStore._call

    def noted(store: MooncakeStore, make: Any) -> Any:
        sent.append(type(make(0)))
        return ask(store, make)

    monkeypatch.setattr(MooncakeStore, "_call", noted)
    assert write(second, 1) == []
    assert Write not in sent


@pytest.mark.parametrize("other", [{"prefix": "another layout"}, {"rank": 1}])
def test_others_find_nothing(master: MooncakeMaster, opened: Open, other: dict[str, Any]) -> None:
    first, second = opened(master), opened(master, **other)
    write(first, 1)
    assert second.store.find([name_of(1)]) == []
    assert not has(second, 1)


def test_another_key_reads_nothing(master: MooncakeMaster, opened: Open) -> None:
    first, second = opened(master), opened(master, key=bytes(32))
    write(first, 1)
    assert not has(second, 1)


@pytest.mark.parametrize("lie", ["forged", "truncated", "longer", "swapped", "stale", "empty"])
def test_what_others_put_there_is_not_believed_and_removed(master: MooncakeMaster, opened: Open, lie: str) -> None:
    reader, liar = opened(master), opened(master)
    write(reader, 1, 2)
    client = client_of(liar)
    data, digest = bytearray(BLOCK_BYTES), client.read(name_of(1), memoryview(bytearray(BLOCK_BYTES)))
    assert digest is not None
    client.forget(name_of(1))
    match lie:
        case "forged":
            client.write(name_of(1), memoryview(data), digest)
        case "truncated":
            client.write(name_of(1), block_of(1)[:500], digest)
        case "longer":
            client.write(name_of(1), block_of(1, 5000), digest)
        case "swapped":
            other = client.read(name_of(2), memoryview(data))
            assert other is not None
            client.write(name_of(1), memoryview(data), other)
        case "stale":
            liar.write(name_of(1), block_of(7))
            client.forget(name_of(1))
            client.write(name_of(1), block_of(7), digest)
        case "empty":
            client._ask(lambda call_id: Write(call_id, client._key(name_of(1)), b"\0"))
    assert reader.store.find([name_of(1)]) == [name_of(1)]
    assert not has(reader, 1)
    wait_until(lambda: reader.store.find([name_of(1)]) == [], "the wrong block is removed")
    assert write(reader, 1) == []
    assert has(reader, 1)
    assert has(liar, 1)


def test_a_full_store_gives_up_blocks(master: MooncakeMaster, opened: Open) -> None:
    """And what it has no room for is not kept."""
    store = opened(master, segment_mib=16)
    num_bytes = 1 << 20
    lost = [name for number in range(200) for name in store.write(name_of(number), block_of(number, num_bytes))]
    found = store.store.find([name_of(number) for number in range(200)])
    assert 0 < len(found) < 200
    assert len(lost) < 200
    there = sum(has(store, int.from_bytes(name, "big"), num_bytes) for name in found)
    assert there > 0


def test_clear_takes_what_others_have_written(master: MooncakeMaster, opened: Open) -> None:
    first, second, other = opened(master), opened(master), opened(master, "another layout+(")
    write(first, 1, 2)
    write(other, 3)
    second.store.clear()
    assert first.store.find([name_of(1), name_of(2)]) == []
    assert has(other, 3)


def test_a_block_that_is_too_large_is_not_kept(master: MooncakeMaster, opened: Open) -> None:
    store = opened(master)
    large = memoryview(bytearray(mooncake_store.MAX_BLOCK_BYTES + 1))
    assert store.write(name_of(1), large) == [name_of(1)]


def test_the_death_of_the_master_costs_its_blocks(own_master: MooncakeMaster, opened: Open) -> None:
    store = opened(own_master)
    write(store, 1)
    own_master.kill()
    assert not has(store, 1)
    began_at = time.monotonic()
    for _ in range(100):  # only the first call asks
        assert not has(store, 1)
        assert write(store, 2) == [name_of(2)]
        with pytest.raises(OSError, match="does not answer"):
            store.store.find([name_of(1)])
    assert time.monotonic() < began_at + 15.0
    own_master.start()
    wait_until(lambda: client_of(store)._is_up, "the store answers again")
    wait_until(lambda: write(store, 2) == [], "the segment is there again")
    assert has(store, 2)


def test_a_master_that_is_stopped_is_not_waited_for(own_master: MooncakeMaster, opened: Open) -> None:
    store = opened(own_master)
    write(store, 1)
    own_master.signal(signal.SIGSTOP)
    began_at = time.monotonic()
    assert not has(store, 1)
    assert write(store, 2) == [name_of(2)]
    assert time.monotonic() < began_at + 2 * 10.0
    began_at = time.monotonic()
    assert not has(store, 1)
    assert time.monotonic() < began_at + 1.0
    own_master.signal(signal.SIGCONT)
    wait_until(lambda: has(store, 1) or write(store, 1) == [], "the store answers again")


def test_a_clear_that_the_master_missed_is_made_up_for(own_master: MooncakeMaster, opened: Open) -> None:
    store, other = opened(own_master), opened(own_master)
    write(other, 1)
    own_master.signal(signal.SIGSTOP)
    store.store.clear()
    own_master.signal(signal.SIGCONT)
    wait_until(lambda: client_of(store)._is_up, "the store answers again")
    assert not has(store, 1)
    wait_until(lambda: client_of(store)._is_up and store.store.find([name_of(1)]) == [], "the store is cleared")


def test_a_worker_starts_before_the_master(tmp_path: Path, opened: Open) -> None:
    with mooncake_master(tmp_path, starts=False) as master:
        store = opened(master)
        assert write(store, 1) == [name_of(1)]
        master.start()
        wait_until(lambda: write(store, 1) == [], "the store answers")
        assert has(store, 1)


def test_a_client_that_dies_is_started_again(master: MooncakeMaster, opened: Open) -> None:
    store, other = opened(master), opened(master)
    write(other, 1)
    process = client_of(store)._process
    assert process is not None
    process.kill()
    wait_until(lambda: client_of(store)._process is not process, "another process")
    wait_until(lambda: write(store, 2) == [], "it answers")
    assert has(store, 2)


@pytest.mark.parametrize("has_metadata_server", [True, False])
def test_a_machine_that_does_not_answer_holds_up_nobody_for_long(
    master: MooncakeMaster, opened: Open, monkeypatch: pytest.MonkeyPatch, has_metadata_server: bool
) -> None:
    monkeypatch.setattr(mooncake_store, "CALL_S", 0.5)
    writer = opened(master, has_metadata_server=has_metadata_server)
    reader = opened(master, segment_mib=0, has_metadata_server=has_metadata_server)
    numbers = range(mooncake_store.MAX_STUCK + 2)
    write(writer, *numbers)
    process, reading = client_of(writer)._process, client_of(reader)._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    for number in numbers:
        began_at = time.monotonic()
        assert not has(reader, number)
        assert time.monotonic() < began_at + 5.0
    # too many calls are stuck in it
    wait_until(lambda: client_of(reader)._process is not reading, "another client")
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: client_of(reader)._is_up, "it answers")
    wait_until(lambda: has(reader, 0) or write(writer, 0) == [], "it reads")


def test_a_stopped_client_is_ended(master: MooncakeMaster, opened: Open) -> None:
    store = opened(master)
    process = client_of(store)._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    store.store.close()
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize("cause", ["No module named 'mooncake'", "libibverbs.so.1: cannot open shared object file"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "store.py").write_text(f"raise ImportError({cause!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=rf'{cause}; run: pip install "pdserve\[mooncake\]"'):
        MooncakeStore(MooncakeUrl.parse("mooncake://127.0.0.1:1?segment_mib=0"), "p", 0)


# ---- engines


@pytest.fixture
def options(master: MooncakeMaster, request: pytest.FixtureRequest) -> MooncakeOptions:
    return MooncakeOptions(MooncakeUrl.parse(master.url()), request.node.name, KEY)


def books(engine: Harness) -> StoreTier:
    store = engine.scheduler.pool.store
    assert store is not None
    return store


def fill(engine: Harness, *lengths: int, window: Any = None) -> None:
    """Serve prompts that have no prefix in common, one after the other."""
    for length in lengths:
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4, window)
        run(engine)


def run(engine: Harness) -> None:
    """Until all is written."""

    def is_idle() -> bool:
        engine.step()
        return not engine.core.has_work

    wait_until(is_idle, "writes have ended")
    engine.collect()


def test_engines_share_what_they_compute(make_engine: MakeEngine, options: MooncakeOptions) -> None:
    writer, reader = make_engine(**TINY, store=options), make_engine(**TINY, store=options)
    fill(writer, 30, 31, 32, 33)
    assert books(writer).num_written >= 7
    answer = reader.ask(prompt_of(30))
    assert (answer.token_ids, answer.num_cached_tokens) == (greedy_answer(prompt_of(30), 4), 28)
    assert (books(reader).num_found, books(reader).num_read) == (7, 7)
    assert reader.ask(prompt_of(31), salt="a").num_cached_tokens == 0
    # the memory that an engine added leaves with it; what lies elsewhere is there after a restart
    reader.core.executor.close()
    again = make_engine(**TINY, store=options)
    assert again.ask(prompt_of(30)).token_ids == greedy_answer(prompt_of(30), 4)
    assert books(again).num_found > 0


def test_groups_and_states_are_shared(make_engine: MakeEngine, options: MooncakeOptions) -> None:
    windows = (None, 9, STATE)
    fields = TINY | {"num_other_blocks": (8, 3), "num_host_blocks": (8, 8, 8), "max_num_batched_tokens": 8}
    for number in range(2):
        engine = make_engine(**fields, sliding_window=windows, shapes=(0, 1, 2), store=options)
        fill(engine, *((30, 31, 32, 33) if number == 0 else (30, 31)), window=windows)
        assert (books(engine).num_read > 7) is (number == 1)
        assert books(engine).num_failed == 0


@pytest.mark.slow
def test_i1_a_master_that_dies_at_random_moments_changes_no_text(
    make_engine: MakeEngine, own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lookups, "SILENT_S", 0.1)
    draw = random.Random(0)
    options = MooncakeOptions(MooncakeUrl.parse(own_master.url()), "random", KEY)
    engines = [make_engine(**TINY, store=options) for _ in range(2)]
    prompts = [[*prompt_of(length), number] for length in (26, 30, 34) for number in range(4)]
    for _ in range(8):
        end_at = time.monotonic() + draw.uniform(0.5, 6.0)
        is_killed = False
        while time.monotonic() < end_at or not is_killed:
            if time.monotonic() >= end_at:
                own_master.kill()
                own_master.start()
                is_killed = True
            for engine in engines:
                prompt = draw.choice(prompts)
                request_id = engine.add(prompt)
                began_at = time.monotonic()
                while request_id in engine.scheduler.requests:
                    engine.step()
                    assert time.monotonic() < began_at + HANG_S
                assert engine.collect()[request_id].token_ids == greedy_answer(prompt, 4)
    for engine in engines:
        run(engine)
        assert books(engine).num_read > 0
        assert engine.scheduler.holds.num_quarantined == 0
