"""Names of peers: the system's resolver may take as long as it likes, whoever dials does not."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from pdserve.kv_transfer.tcp.tcp_stream import StreamBroken, dial, resolve
from tests.support.run.waiting import HANG_S, wait_until

TIMEOUT_S = 0.2


@pytest.fixture
def peer():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


class SlowResolver:
    """Answers nothing until `answer`; `names` it was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.answer = threading.Event()
        self._ask = socket.getaddrinfo

    def __call__(self, host, port, *args, **kwargs):
        if host.startswith("127."):
            return self._ask(host, port, *args, **kwargs)
        self.names.append(host)
        assert self.answer.wait(HANG_S)
        return self._ask("127.0.0.1", port, *args, **kwargs)


@pytest.fixture
def slow(monkeypatch):
    resolver = SlowResolver()
    monkeypatch.setattr("socket.getaddrinfo", resolver)
    yield resolver
    resolver.answer.set()
    for thread in threading.enumerate():
        if thread.name.startswith("resolve-"):
            thread.join(HANG_S)


def connect(host, port, timeout_s=HANG_S):
    dial(host, port, timeout_s, 1.0, 1.0).close()


def test_a_name_that_is_not_resolved_in_time_breaks_the_stream(slow, peer):
    started = time.monotonic()
    with pytest.raises(StreamBroken, match=r"peer\.example was not resolved within 0\.2 s"):
        connect("peer.example", peer, TIMEOUT_S)
    assert time.monotonic() - started < 10
    # an address needs no resolver, another name its own answer
    connect("127.0.0.1", peer)
    with pytest.raises(StreamBroken, match="not resolved"):
        connect("other.example", peer, TIMEOUT_S)
    # however often it is asked for, nobody asks again before there is an answer
    for _ in range(5):
        with pytest.raises(StreamBroken, match="not resolved"):
            connect("peer.example", peer, TIMEOUT_S)
    assert slow.names == ["peer.example", "other.example"]


def test_whoever_waits_gets_the_answer_and_later_ones_ask_again(slow, peer):
    answers = []
    asking = [
        threading.Thread(target=lambda: answers.append(resolve("peer.example", peer, HANG_S)), daemon=True)
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    wait_until(lambda: slow.names)
    slow.answer.set()
    for thread in asking:
        thread.join(HANG_S)
    assert [[address for _, address in answer] for answer in answers] == [[("127.0.0.1", peer)]] * 3
    before = len(slow.names)
    connect("peer.example", peer)
    assert len(slow.names) == before + 1


def test_names_that_are_known_or_cannot_be(monkeypatch, peer):
    connect("localhost", peer)
    with pytest.raises(StreamBroken, match="label"):
        connect("x" * 64 + ".example", peer)

    def unknown(host, port, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(StreamBroken, match="Name or service not known"):
        connect("peer.example", peer)


def test_the_next_address_is_tried_when_one_does_not_answer(monkeypatch, peer):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in (nobody, peer)]
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: found)
    connect("peer.example", peer)
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: found[:1])
    with pytest.raises(StreamBroken, match="refused"):
        connect("peer.example", peer)
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: [])
    with pytest.raises(StreamBroken, match="no address"):
        connect("peer.example", peer)
