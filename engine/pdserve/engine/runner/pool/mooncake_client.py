"""The process that has a rank's client of Mooncake Store.

Usage, only by `MooncakeStore`: python -m pdserve.engine.runner.pool.mooncake_client DESCRIPTOR

DESCRIPTOR is this process's end of a socket pair. A process of its own, since the client's `setup` and `close` hold the interpreter
lock for as long as the master does not answer, its threads and the server for its segment would be those of the engine, and what it
lets other machines read and write is then only this process's memory, which has no key.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.processes.child_life import end_after, end_with_parent, leave_signals_to_peer
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.engine.runner.pool.mooncake_messages import (
    NUM_THREADS,
    Answer,
    Call,
    Clear,
    Find,
    FromClient,
    Read,
    Remove,
    Start,
    State,
    Unusable,
    Write,
    decode_to_client,
    encode,
)

RETRY_S = 2.0
"""Seconds between two tries to reach a master that does not answer."""
CONNECT_S = 2.0
BUFFER_BYTES = 64 << 20
"""Of the client, for values on their way."""
LAST_CALL_S = 2.0
"""Seconds in which this process ends after the engine; the client may take its memory out of the store meanwhile."""
LIMITS = {"MC_RPC_TIMEOUT_MS": "2000", "MC_RPC_CONNECT_TIMEOUT_MS": "1000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""Variables of the client, unless they are set: without them a call to a master that is stopped takes 30 s, and `setup` 90 s."""
LOG_LEVEL = "MC_LOG_LEVEL"
"""Variable of the client; unless it is set, the client's log is dropped."""
_MASTER_IS_LOST = -900
"""This and lower results say that the master did not answer."""
_EXISTS = -705
_NOT_MOVED = -800
"""The other machine does not answer. The master finds that out some seconds later, and names another one when it is asked again."""
PUT_TRIES = 3


class _Client:
    """Any thread may take a call; the engine waits for each answer before it makes another one of the kind."""

    def __init__(self, engine: socket.socket, make_store: Callable[[], Any]) -> None:
        """make_store: makes a `MooncakeDistributedStore`."""
        self._engine = engine
        self._make_store = make_store
        self._store: Any = None
        self._sending = threading.Lock()
        self._is_lost = threading.Event()
        """The master does not answer."""
        self._of_thread = threading.local()
        """`buffers`: by size, registered, for values that are read."""

    def send(self, message: FromClient) -> None:
        with self._sending:
            send_frame(self._engine, encode(message))

    def connect(self, url: MooncakeUrl) -> None:
        """Returns when the store answers; says so, and why not before."""
        is_first = True
        while text := self._setup(url):
            if is_first:
                self.send(State(is_up=False, text=text))
            is_first = False
            time.sleep(RETRY_S)
        self.send(State(is_up=True))

    def _setup(self, url: MooncakeUrl) -> str:
        try:
            with socket.create_connection((url.master_host, url.master_port), CONNECT_S) as connection:
                host = url.host or connection.getsockname()[0]
        except OSError as error:
            return f"mooncake_master at {url.master}: {error}"
        segment_bytes = url.segment_mib << 20
        self._store = self._make_store()
        result = self._store.setup(
            host, url.metadata, segment_bytes, BUFFER_BYTES, url.protocol, url.devices, url.master
        )
        return "" if result == 0 else f"mooncake_master at {url.master}: setup failed with {result}"

    def serve(self) -> None:
        """Until the end of the engine."""
        calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._answer_all, args=(calls,), daemon=True).start()
        threading.Thread(target=self._look_for_master, daemon=True).start()
        with contextlib.suppress(OSError):
            while (frame := receive_frame(self._engine)) is not None:
                call = decode_to_client(frame)
                if not isinstance(call, Start):
                    calls.put(call)

    def _answer_all(self, calls: queue.SimpleQueue[Call]) -> None:
        self._of_thread.buffers = {}
        while True:
            call = calls.get()
            answer = Answer(call.call_id, is_done=False)
            if not self._is_lost.is_set():
                with contextlib.suppress(Exception):  # whatever the client raises, it has not done it
                    answer = self._answer(call)
            self.send(answer)

    def _answer(self, call: Call) -> Answer:
        match call:
            case Find(call_id, keys):
                results = self._store.batch_is_exist(keys)
                is_done = self._noted(min(results, default=0)) >= 0
                return Answer(call_id, is_done, found=[result == 1 for result in results])
            case Read(call_id, key, num_bytes):
                return self._read(call_id, key, num_bytes)
            case Write(call_id, key, value):
                return Answer(call_id, self._noted(self._put(key, value)) in (0, _EXISTS))
            case Remove(call_id, key):
                return Answer(call_id, self._noted(self._store.remove(key, True)) == 0)
            case Clear(call_id, prefix):
                removed = self._store.remove_by_regex(f"^{re.escape(prefix)}", True)
                return Answer(call_id, self._noted(removed) >= 0)

    def _put(self, key: str, value: bytes) -> int:
        for _ in range(PUT_TRIES):
            result: int = self._store.put(key, value)
            if result != _NOT_MOVED:
                break
        return result

    def _read(self, call_id: int, key: str, num_bytes: int) -> Answer:
        buffers: dict[int, ctypes.Array[ctypes.c_char]] = self._of_thread.buffers
        if num_bytes not in buffers:
            buffers[num_bytes] = ctypes.create_string_buffer(num_bytes)
            self._store.register_buffer(ctypes.addressof(buffers[num_bytes]), num_bytes)
        buffer = buffers[num_bytes]
        result = self._noted(self._store.get_into(key, ctypes.addressof(buffer), num_bytes))
        if result == num_bytes:
            return Answer(call_id, is_done=True, value=buffer.raw)
        size = self._store.get_size(key)
        if size >= 0 and size != num_bytes:
            self._store.remove(key, True)
        return Answer(call_id, is_done=False)

    def _noted(self, result: int) -> int:
        """The result of a call, which may say that the master does not answer."""
        if result <= _MASTER_IS_LOST and not self._is_lost.is_set():
            self._is_lost.set()
            self.send(State(is_up=False, text=f"mooncake_master does not answer any more ({result})"))
        return result

    def close(self) -> None:
        """Take this machine's memory out of the store, unless that would wait for the master."""
        if not self._is_lost.is_set():
            self._store.close()

    def _look_for_master(self) -> None:
        while True:
            self._is_lost.wait()
            time.sleep(RETRY_S)
            if self._store.health_check() == 0:
                self._is_lost.clear()
                self.send(State(is_up=True))


def _load() -> Callable[[], Any]:
    """Raises: ImportError, also where a library of the system is missing."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    has_log = LOG_LEVEL in os.environ
    from mooncake.store import MooncakeDistributedStore

    if not has_log:
        # it logs each second while the master is away, and each value that has no room
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
    store: Callable[[], Any] = MooncakeDistributedStore
    return store


def main() -> int:
    end_with_parent()
    leave_signals_to_peer()
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        end_after(engine, LAST_CALL_S)
        frame = receive_frame(engine)
        start = None if frame is None else decode_to_client(frame)
        if not isinstance(start, Start):
            return 0
        try:
            make_store = _load()
        except ImportError as error:
            send_frame(engine, encode(Unusable(str(error))))
            return 1
        client = _Client(engine, make_store)
        client.connect(start.url)
        client.serve()
        client.close()
        # the end of the interpreter would wait for a master that is away
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
