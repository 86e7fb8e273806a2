"""Calls to another process, and the life of a child: its messages, its end, and the end of its parent's side."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pdserve.common.errors import Cancelled, PeerError, WorkerLost
from pdserve.common.ipc import frames
from pdserve.common.ipc.calls import Calls
from pdserve.common.ipc.child import Child
from pdserve.common.ipc.frames import receive_frame, send_frame
from tests.support.run.waiting import HANG_S


def test_each_call_gets_its_own_answer_and_only_the_first() -> None:
    calls = Calls()
    (first, of_first), (second, of_second) = calls.open(), calls.open()
    calls.answer(second, None, PeerError("no"))
    calls.answer(first, 1)
    calls.answer(first, 2)
    calls.answer(99, 3)
    assert of_first.result(0) == 1
    with pytest.raises(PeerError, match="no"):
        of_second.result(0)


def test_the_end_answers_what_waits_and_what_comes_later() -> None:
    calls = Calls()
    _, waiting = calls.open()
    forgotten, unanswered = calls.open()
    calls.forget(forgotten)
    calls.end(WorkerLost("the process has ended"))
    calls.end(Cancelled("it was shut down"))
    _, late = calls.open()
    for answer in (waiting, late):
        with pytest.raises(WorkerLost, match="has ended"):
            answer.result(0)
    assert not unanswered.done()


class Process:
    """The other end, in this process."""

    pid = 1 << 22

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=socket.dup(descriptor))
        self.num_kills = 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None:
        self.num_kills += 1


class Parent:
    """Has a child whose messages a thread reads."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        started: Future[Process] = Future()

        def start(descriptor: int) -> Process:
            started.set_result(Process(descriptor))
            return started.result()

        self.child = Child(start, self.heard.put, lambda child: self.heard.put(None))
        self.process = started.result()

    def next(self) -> bytes | None:
        return self.heard.get(timeout=HANG_S)


@pytest.fixture
def parent() -> Iterator[Parent]:
    before = set(threading.enumerate())
    made = Parent()
    yield made
    made.child.close(HANG_S)
    made.child.close(HANG_S)
    made.process.socket.close()
    assert set(threading.enumerate()) == before


def test_a_child_is_spoken_to_from_any_thread(parent: Parent) -> None:
    sent = [bytes([number]) * (1 + 200_000 * number) for number in range(5)]
    for payload in sent:
        parent.child.send(payload)
    parent.process.socket.settimeout(HANG_S)
    assert [receive_frame(parent.process.socket) for _ in sent] == sent
    send_frame(parent.process.socket, b"back")
    assert parent.next() == b"back"


def test_a_message_beyond_the_limit_is_refused_where_it_is_sent(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(PeerError, match="11 bytes, at most 10"):
        parent.child.send(bytes(11))


def test_the_end_of_a_child_is_told_once(parent: Parent) -> None:
    parent.process.socket.close()
    assert parent.next() is None
    parent.child.send(b"too late")
    parent.child.close(HANG_S)
    assert parent.heard.empty()
    assert not parent.process.num_kills


def test_the_end_of_the_socket_ends_the_child(parent: Parent) -> None:
    parent.child.hang_up()
    parent.process.socket.settimeout(HANG_S)
    assert receive_frame(parent.process.socket) is None
    assert parent.heard.empty(), "who hangs up needs no news of it"
