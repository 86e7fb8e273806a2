"""The record of traffic: a line per prompt without content, which a replay can use, and which costs no request anything."""

from __future__ import annotations

import asyncio
import errno
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.bench.traces.read_trace import read_trace
from pdserve.common.errors import ConfigError
from pdserve.common.settings.api_key_file import key_hash
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.router.telemetry import traffic_record
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.telemetry.router_metrics import RouterMetrics
from pdserve.router.telemetry.traffic_record import Numbers, TrafficRecord
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import ADMITTED, forever, play
from tests.support.engine.settings_with import settings_with
from tests.support.run.full_disk import full_disk
from tests.support.run.waiting import HANG_S, wait_until

BLOCK = 16
SECRET = "tell nobody of this text, which is long enough for some blocks"


async def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The lines of the record, once there are so many."""
    async with asyncio.timeout(HANG_S):
        while len(found := path.read_text().splitlines()) < count:  # noqa: ASYNC110, ASYNC240 - a thread writes them
            await asyncio.sleep(0.01)
    assert len(found) == count
    return [json.loads(line) for line in found]


# ---- what a line says


async def test_each_prompt_has_a_line_in_mooncakes_format_without_its_content(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "record"
    await cluster.start(record=str(path), scheduling_policy="priority")
    body = {"prompt": [SECRET, SECRET[:40]], "n": 2, "max_tokens": 5}
    await cluster.http.post("/v1/completions", json=body)
    await cluster.complete(SECRET, service_tier="flex", user="alice", metadata={"who": "alice"})
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "priority": -5}
    await cluster.http.post("/v1/chat/completions", json=chat)
    first, second, third, fourth = await lines(path, 4)
    # the tokenizer here has a token per character
    assert {name: first[name] for name in ("input_length", "output_length", "n", "block_size", "outcome")} == {
        "input_length": len(SECRET), "output_length": 5, "n": 2, "block_size": BLOCK, "outcome": "length",
    }  # fmt: skip
    assert (first["tenant"], first["priority"], first["attempts"]) == (0, 0, 1)
    assert (first["prefill"], first["decode"], first["cached_tokens"]) == ("prefill0", "decode0", 3)
    assert 0 < first["ttft_ms"] < HANG_S * 1e3
    assert 0 <= first["tpot_ms"] < HANG_S * 1e3
    assert "service_tier" not in first
    assert (third["service_tier"], third["priority"], third.get("n")) == ("flex", 1000, None)
    assert (fourth["priority"], fourth["output_length"]) == (-5, 3)
    assert [line["timestamp"] for line in (first, second)] == [first["timestamp"]] * 2
    assert first["timestamp"] <= third["timestamp"] <= fourth["timestamp"] < HANG_S * 1e3
    num_full = len(SECRET) // BLOCK
    assert len(first["hash_ids"]) == num_full + 1, "the last block, which is not full, has a number, too"
    assert first["hash_ids"][:num_full] == third["hash_ids"][:num_full]
    assert first["hash_ids"][num_full] != third["hash_ids"][num_full], "of its own"
    assert second["hash_ids"][:2] == first["hash_ids"][:2]
    numbers = [number for line in (first, second, third, fourth) for number in line["hash_ids"]]
    assert max(numbers) < len(numbers), "numbers are small and consecutive"
    text = path.read_text()
    assert "nobody" not in text
    assert "alice" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sessions = read_trace(path, 10)
    assert [request.input_tokens for session in sessions for request in session.requests] == [
        line["input_length"] for line in (first, second, third, fourth)
    ]


async def test_tenants_are_numbers_and_share_no_blocks(cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(name)}"\n' for name in ("alice", "bob")))
    path = tmp_path / "record"
    await cluster.start(record=str(path), api_keys_file=str(keys))
    for name in ("bob", "alice", "bob"):
        headers = {"authorization": f"Bearer {name}"}
        await cluster.http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2}, headers=headers)
    told = await lines(path, 3)
    assert [line["tenant"] for line in told] == [0, 1, 0]
    hashes = [set(line["hash_ids"]) for line in told]
    assert not hashes[0] & hashes[1]
    assert len(hashes[0] & hashes[2]) == len(SECRET) // BLOCK
    assert not {"alice", "bob"} & set(path.read_text().replace('"', " ").split())


async def test_turns_of_a_session_contain_the_blocks_of_those_before(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "record"
    await cluster.start(record=str(path))
    call: Any = cluster.grpc.Session()  # type: ignore[call-arg]
    for text in (SECRET, SECRET[:30], SECRET):
        await call.write(
            inference_pb2.GenerateRequest(
                text=inference_pb2.TextPrompt(text=text), sampling=request_pb2.SamplingParams(max_tokens=2)
            )
        )
        while not (await call.read()).finish_reason:
            pass
    call.cancel()
    first, second, third = await lines(path, 3)
    assert first["input_length"] < second["input_length"] < third["input_length"]
    for before, after in ((first, second), (second, third)):
        num_full = before["input_length"] // BLOCK
        assert after["hash_ids"][:num_full] == before["hash_ids"][:num_full]
        assert len(after["hash_ids"]) == -(-after["input_length"] // BLOCK)


async def test_requests_that_fail_have_their_cause_and_refused_ones_no_line(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "record"
    await cluster.start(record=str(path))
    assert (await cluster.complete(SECRET, bogus=1)).status_code == 400
    assert (await cluster.complete(SECRET, max_tokens=1 << 20)).status_code == 400
    cluster.of("decode").script = play(ADMITTED, forever)
    began = asyncio.Event()
    asking = asyncio.create_task(cluster.streamed(began.set, prompt=SECRET, max_tokens=5))
    async with asyncio.timeout(HANG_S):
        await began.wait()
    asking.cancel()
    [told] = await lines(path, 1)
    assert (told["outcome"], told["output_length"], told["attempts"]) == ("cancelled", 1, 1)
    assert "tpot_ms" not in told
    assert (await cluster.http.get("/metrics")).text.count('pdserve_record_lines_total{outcome="written"} 1.0') == 1


async def test_an_embedding_is_a_prompt_without_output(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "record"
    await cluster.start(record=str(path))
    answer = await cluster.http.post("/v1/embeddings", json={"input": [SECRET, SECRET]})
    assert answer.status_code == 200, answer.text
    first, second = await lines(path, 2)
    assert (first["output_length"], first["outcome"], first.get("decode", "")) == (0, "stop", "")
    assert set(first["hash_ids"][:3]) == set(second["hash_ids"][:3])


async def test_requests_are_served_while_the_disk_is_full(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    await cluster.start(record=str(path))
    await cluster.text()
    await lines(path, 1)

    def write(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("pdserve.common.telemetry.line_writer.os.write", write)
        assert len({await cluster.text() for _ in range(20)}) == 1
        async with asyncio.timeout(HANG_S):
            while 'record_lines_total{outcome="dropped"} 20.0' not in (await cluster.http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await cluster.text()
    told = await lines(path, 2)
    assert told[0]["hash_ids"] != told[1]["hash_ids"], "of the prompt's block, which is not full"


# ---- numbers


def test_numbers_are_consecutive_and_those_used_last_are_known() -> None:
    numbers = Numbers(8)
    assert numbers.of(["a", "b", "c"]) == [0, 1, 2]
    assert numbers.of(["a", "b", "d"]) == [0, 1, 3]
    assert numbers.draw() == 4
    assert numbers.of(["a", "b", "e"]) == [0, 1, 5]
    # of five keys those used within the last four are known
    assert numbers.of(["a", "b", "f"]) == [0, 1, 6]
    assert numbers.of(["a", "g", "h", "i"]) == [0, 7, 8, 9]
    assert numbers.of(["a", "b", "f"]) == [0, 1, 6]
    assert numbers.of(["c"]) == [10], "c was used longest ago, and is forgotten"


def test_numbers_take_bounded_memory() -> None:
    numbers = Numbers(1000)
    for first in range(0, 100_000, 50):
        assert numbers.of(range(first, first + 50)) == list(range(first, first + 50))
        assert len(numbers) <= 1000 + 50
        assert numbers.of(range(max(0, first - 400), first)) == list(range(max(0, first - 400), first))


# ---- files


class Recorded:
    """A record, and prompts that end as they do in a router."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.record = TrafficRecord(settings_with(RouterSettings, record=str(path), **settings))

    def end(self, num_blocks: int = 1, first: int = 0) -> None:
        """A prompt whose blocks have these numbers."""
        metrics = object.__new__(RouterMetrics)
        request = RequestTrace(metrics, now_unix_ns(), None, {}, is_recorded=True)
        prompt = request.run(Timeline())
        prompt.num_prompt_tokens = num_blocks * BLOCK
        prompt.hashed([(first + place).to_bytes(8, "little") for place in range(num_blocks)], BLOCK)
        prompt.finish_reason = "stop"
        self.record.ended(request, "")

    def close(self) -> list[list[dict[str, Any]]]:
        """Lines of FILE, FILE.1 and so on, as far as there are files."""
        self.record.close()
        files = [self.path, *(self.path.with_name(f"{self.path.name}.{number}") for number in range(1, 100))]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def flat(files: list[list[dict[str, Any]]]) -> list[int]:
    """The first hash id of each line, the oldest file first."""
    return [line["hash_ids"][0] for lines in reversed(files) for line in lines]


def test_a_file_that_is_full_becomes_the_next_one_and_the_oldest_is_deleted(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "record", record_mib=1, max_record_files=3)
    for number in range(60):
        recorded.end(10_000, first=10_000 * number)
    files = recorded.close()
    assert len(files) == 3
    assert not (tmp_path / "record.3").exists()
    assert recorded.record.counts == {"written": 60, "dropped": 0}
    kept = flat(files)
    assert kept == [10_000 * number for number in range(60 - len(kept), 60)], "the newest, and numbers go on"
    for name in ("record", "record.1", "record.2"):
        assert (tmp_path / name).stat().st_size <= 1 << 20
    assert (tmp_path / "record.1").stat().st_size > (1 << 20) - 80_000


def test_a_single_file_begins_again_when_it_is_full(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "record", record_mib=1, max_record_files=1)
    for number in range(40):
        recorded.end(10_000, first=10_000 * number)
    assert flat(recorded.close())[-1] == 390_000
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_a_line_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "record", record_mib=1)
    for number in range(3):
        recorded.end(200_000, first=200_000 * number)
    assert [len(lines) for lines in recorded.close()] == [1, 1, 1]


def test_a_new_start_keeps_the_record_before_it_apart(tmp_path: Path) -> None:
    """Its times and numbers begin again."""
    for _ in range(2):
        recorded = Recorded(tmp_path / "record")
        recorded.end()
        files = recorded.close()
    assert flat(files) == [0, 0]
    assert [len(lines) for lines in files] == [1, 1]
    Recorded(tmp_path / "record").close()
    assert [len(lines) for lines in Recorded(tmp_path / "record").close()] == [0, 1, 1], "an empty file is used again"


def test_a_file_that_was_moved_is_opened_again(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "record")
    recorded.end()
    wait_until(lambda: recorded.record.counts["written"] == 1, "the first line")
    (tmp_path / "record").rename(tmp_path / "mine")
    recorded.end()
    assert [len(lines) for lines in recorded.close()] == [1]
    assert len((tmp_path / "mine").read_text().splitlines()) == 1


def test_a_full_disk_costs_lines_and_leaves_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = Recorded(tmp_path / "record")
    room = full_disk(monkeypatch, 250)
    for _ in range(20):
        recorded.end()
    wait_until(lambda: sum(recorded.record.counts.values()) == 20, "the writer's thread")
    num_written = recorded.record.counts["written"]
    assert 0 < num_written < 5
    room[0] = 1 << 20
    recorded.end(first=7)
    [told] = recorded.close()
    assert len(told) == num_written + 1
    assert recorded.record.counts == {"written": num_written + 1, "dropped": 20 - num_written}
    warnings = [record.message for record in caplog.records]
    assert warnings == ["record: a line could not be written: No space left on device"]


def test_a_folder_that_is_gone_costs_lines_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    recorded = Recorded(folder / "record")
    (folder / "record").unlink()
    folder.rmdir()
    recorded.end()
    wait_until(lambda: recorded.record.counts["dropped"] == 1, "the writer's thread")
    folder.mkdir()
    recorded.end()
    assert [len(lines) for lines in recorded.close()] == [1]


def test_a_disk_that_hangs_costs_lines_and_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    recorded = Recorded(tmp_path / "record")
    writer = recorded.record._writer
    assert writer is not None
    real = writer._sink.write
    monkeypatch.setattr(writer._sink, "write", lambda line: released.wait() and real(line))
    for number in range(100):
        recorded.end(100_000, first=number)
    per_line = 100_000 * 8 + traffic_record._LINE_BYTES
    num_kept = traffic_record.MAX_WAITING_BYTES // per_line
    assert recorded.record.counts == {"written": 0, "dropped": 100 - num_kept}
    released.set()
    recorded.close()
    assert recorded.record.counts == {"written": num_kept, "dropped": 100 - num_kept}


# ---- starts that are refused


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda folder: folder / "none" / "record", "No such file or directory"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: Path("/dev/full"), "not a regular file"),
    ],
)
def test_a_file_that_cannot_be_written_stops_the_start(
    tmp_path: Path, make: Callable[[Path], Path], cause: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=f"record is {path}, which cannot be written: {cause}"):
        Recorded(path)


def test_two_routers_cannot_share_a_file(tmp_path: Path) -> None:
    first = Recorded(tmp_path / "record")
    with pytest.raises(ConfigError, match="cannot be written: another process writes it"):
        Recorded(tmp_path / "record")
    first.close()
    Recorded(tmp_path / "record").close()


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"record": " "}, "record is given but empty"),
        ({"record": "x", "audit_log": "./x"}, "record and audit_log are both x"),
        ({"record_mib": 0}, "record_mib is 0, 1 to 16777216"),
        ({"max_record_files": 0}, "max_record_files is 0, 1 to 1000"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(flags: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load_settings(RouterSettings, flags=flags, environ={})


def test_without_the_setting_nothing_is_kept(tmp_path: Path) -> None:
    record = TrafficRecord(settings_with(RouterSettings))
    request = RequestTrace(object.__new__(RouterMetrics), now_unix_ns(), None, {}, is_recorded=record.is_on)
    prompt = request.run(Timeline())
    prompt.hashed([b"12345678"], BLOCK)
    assert (record.is_on, prompt.block_size, prompt.block_hashes) == (False, 0, b"")
    record.ended(request, "")
    assert record.counts == {"written": 0, "dropped": 0}
    record.close()
