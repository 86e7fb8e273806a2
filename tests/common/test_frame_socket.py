"""Messages between two processes: whole, in order, from any thread; and messages that are none."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.common.errors import PeerError, WorkerLost
from pdserve.common.ipc import frame_socket
from pdserve.common.ipc import frames as socket_frames
from pdserve.common.ipc.frame_socket import FrameSocket
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.client import process_client
from pdserve.engine.client.messages import Loaded, decode_from_engine
from pdserve.engine.client.process_client import ProcessClient
from pdserve.engine.request_messages import encode
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_pair import KEY


class End:
    """One end, with what it has received."""

    def __init__(self, connected: socket.socket, check: Callable[[bytes], object] = lambda _: None) -> None:
        self.received: list[bytes] = []
        self.num_ends = 0
        self._check = check
        self.socket = FrameSocket(connected, self._take, self._ended)

    def _take(self, message: bytes) -> None:
        self._check(message)
        self.received.append(message)

    def _ended(self) -> None:
        self.num_ends += 1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


async def test_messages_arrive_whole_and_in_the_order_of_each_thread(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = End(pair[0]), End(pair[1])
    sizes = random.Random(1)
    sent = [[bytes([number]) * sizes.choice((1, 100, 300_000)) for _ in range(60)] for number in range(3)]

    def send_all(messages: list[bytes]) -> None:
        for message in messages:
            one.socket.send(message)

    threads = [threading.Thread(target=send_all, args=(part,)) for part in sent]
    for thread in threads:
        thread.start()
    other.socket.send(b"back")
    await eventually(lambda: len(other.received) == 180 and one.received == [b"back"])
    for number, part in enumerate(sent):
        assert [each for each in other.received if each[0] == number] == part
    one.socket.close()
    one.socket.close()
    await eventually(lambda: other.num_ends == 1)
    other.socket.send(b"too late")
    assert one.num_ends == 0, "who closes needs no news of it"


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x01\x90", b"\x00\x00\x00\x02"],
    ids=["too long", "no msgpack", "no message", "half a message"],
)
async def test_what_cannot_be_read_ends_the_connection(pair: tuple[socket.socket, socket.socket], raw: bytes) -> None:
    end = End(pair[0], decode_from_engine)
    pair[1].sendall(raw)
    pair[1].shutdown(socket.SHUT_WR)
    await eventually(lambda: end.num_ends == 1)
    assert end.received == []
    assert pair[1].recv(1) == b""


async def test_a_bug_in_a_reader_ends_the_connection_alone(
    pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    end = End(pair[0], lambda message: 1 // len(message[1:]))
    send_frame(pair[1], b"12")
    send_frame(pair[1], b"1")
    await eventually(lambda: end.num_ends == 1)
    assert end.received == [b"12"]
    assert "could not be handled" in caplog.text


async def test_a_peer_that_reads_nothing_counts_as_ended(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_socket, "MAX_UNSENT_BYTES", 1 << 20)
    end = End(pair[0])
    for _ in range(20):
        end.socket.send(bytes(100_000))
    await eventually(lambda: end.num_ends == 1)


async def test_a_message_beyond_the_limit_is_refused_where_it_is_sent(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = End(pair[0])
    monkeypatch.setattr(socket_frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(PeerError, match="11 bytes, at most 10"):
        end.socket.send(b"12345678901")
    end.socket.send(b"1234567890")
    assert receive_frame(pair[1]) == b"1234567890"
    end.socket.close()


class DeafProcess:
    """A process that ends by SIGKILL alone."""

    pid = 1 << 22
    """No process has it."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def wait(self, timeout: float | None = None) -> int:
        if signal.SIGKILL not in self.signals:
            raise subprocess.TimeoutExpired("deaf", timeout or 0)
        return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("raw", [encode(["Unknown", 1]), b"\xc1", encode(Loaded(None, None))], ids=range(3))  # type: ignore[arg-type]
async def test_i9_a_process_that_sends_nonsense_is_killed_and_its_worker_is_told(
    monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    process, theirs = DeafProcess(), list[socket.socket]()

    def start(descriptor: int, module: str) -> DeafProcess:
        theirs.append(socket.socket(fileno=socket.dup(descriptor)))
        return process

    monkeypatch.setattr(process_client, "start_program", start)
    loop = asyncio.get_running_loop()
    client = ProcessClient(Path("anywhere"), DecodeSettings(), KEY, "any", loop)
    with theirs[0]:
        send_frame(theirs[0], raw)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(WorkerLost, match="the engine's process has ended"):
                await asyncio.wrap_future(client.loaded)
            await client.shutdown()
    assert set(process.signals) == {signal.SIGKILL}
