"""`MooncakeStore`: a `BlockStore` that workers share, in Mooncake Store, which keeps values in the memory of several machines.

The client is a process of its own (`mooncake_client.py`). While it does not run, or its master does not answer, nothing is found,
read or written, and no call waits. A value is a block after its digest; its key names layout, block and rank.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from pdserve.common.errors import ConfigError, PdServeError, WorkerLost
from pdserve.common.ipc.calls import Calls
from pdserve.common.ipc.child_process import ChildProcess, start_module, wait_for_exit
from pdserve.common.ipc.frames import receive_frame, send_frame
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
    decode_from_client,
    encode,
)

log = logging.getLogger(__name__)

CLIENT_PROGRAM = "pdserve.engine.runner.pool.mooncake_client"
START_S = 60.0
"""Seconds in which the client's process says whether it can run."""
RESTART_S = 5.0
"""Seconds after which a client that has ended is started again."""
END_S = 3.0
"""Seconds for a client to end by itself."""
CALL_S = 10.0
"""Seconds that a call may take. A transfer from a machine that has vanished takes minutes."""
MAX_STUCK = NUM_THREADS - 3
"""Calls that take longer, beyond which the client is started again."""
DIGEST_BYTES = 8
MAX_BLOCK_BYTES = 32 << 20
"""Half of the client's buffer; larger blocks are not kept."""


class _MakeCall(Protocol):
    def __call__(self, call_id: int) -> Call: ...


class MooncakeStore:
    """One rank's. Its process is started, watched and ended by a thread that lives as long as it does."""

    def __init__(self, url: MooncakeUrl, prefix: str, rank: int) -> None:
        """prefix: of all keys of this deployment and layout. A master that cannot be reached is tried until it can.

        Raises: ConfigError if the client cannot run here.
        """
        self._url = url
        self._prefix = f"{prefix}/"
        self._suffix = f"/{rank}"
        self._lock = threading.Lock()
        """Of sending, and of the fields that change when a process is started."""
        self._calls = Calls()
        self._socket: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._is_up = False
        self._must_clear = False
        """What the store has is to be given up, before anything is found or read."""
        self._stuck: set[int] = set()
        """Ids of calls that take longer than they may."""
        self._is_closing = threading.Event()
        self._has_started = threading.Event()
        self._unusable: str | None = None
        self._thread = threading.Thread(target=self._keep, name="kv-store-client", daemon=True)
        self._thread.start()
        if not self._has_started.wait(START_S):
            log.warning("kv_store: its client has not started after %.0f s; it is not used before", START_S)
        if self._unusable is not None:
            raise ConfigError(
                "kv_store needs Mooncake's package and, for that, libibverbs1 and librdmacm1: "
                f'{self._unusable}; run: pip install "pdserve[mooncake]"'
            )

    def names(self) -> list[bytes]:
        return []

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        keys = [self._key(name) for name in names]
        answer = self._ask(lambda call_id: Find(call_id, keys))
        if answer is None or not answer.is_done or len(answer.found) != len(names):
            raise OSError("the store does not answer")
        return [name for name, is_there in zip(names, answer.found, strict=True) if is_there]

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        if len(data) > MAX_BLOCK_BYTES:
            return [name]
        try:
            if self.find([name]):
                return []
        except OSError:
            return [name]
        value = digest.to_bytes(DIGEST_BYTES, "big") + data
        answer = self._ask(lambda call_id: Write(call_id, self._key(name), value))
        return [] if answer is not None and answer.is_done else [name]

    def read(self, name: bytes, into: memoryview) -> int | None:
        num_bytes = DIGEST_BYTES + len(into)
        answer = self._ask(lambda call_id: Read(call_id, self._key(name), num_bytes))
        if answer is None or not answer.is_done or len(answer.value) != num_bytes:
            return None
        into[:] = answer.value[DIGEST_BYTES:]
        return int.from_bytes(answer.value[:DIGEST_BYTES], "big")

    def forget(self, name: bytes) -> None:
        self._ask(lambda call_id: Remove(call_id, self._key(name)))

    def clear(self) -> None:
        """If the store does not answer, it is cleared before it is used again."""
        self._must_clear = True
        self._clear()

    def close(self) -> None:
        """What other workers have in this one's segment is lost with it."""
        self._is_closing.set()
        # not under the lock: a client that is stopped may keep a call waiting that has it
        if (own := self._socket) is not None:
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        self._thread.join(END_S + RESTART_S)

    def _key(self, name: bytes) -> str:
        return self._prefix + name.hex() + self._suffix

    def _clear(self) -> bool:
        """True if the store is cleared, or need not be."""
        if self._must_clear:
            answer = self._call(lambda call_id: Clear(call_id, self._prefix))
            self._must_clear = answer is None or not answer.is_done
        return not self._must_clear

    def _ask(self, make: _MakeCall) -> Answer | None:
        """None if the store does not answer."""
        return self._call(make) if self._clear() else None

    def _call(self, make: _MakeCall) -> Answer | None:
        with self._lock:
            if not self._is_up or self._socket is None:
                return None
            call_id, answer = self._calls.open()
            try:
                send_frame(self._socket, encode(make(call_id)))
            except (OSError, PdServeError):
                return None
        try:
            result: Answer = answer.result(CALL_S)
        except WorkerLost:
            return None
        except TimeoutError:
            self._note_stuck(call_id, answer)
            return None
        return result

    def _note_stuck(self, call_id: int, answer: Future[Answer]) -> None:
        with self._lock:
            self._stuck.add(call_id)
            if answer.done():  # it has just come, and `_handle` may not have seen the id
                self._stuck.discard(call_id)
            if len(self._stuck) > MAX_STUCK and self._process is not None:
                log.warning("kv_store: %d calls take longer than %.0f s: the client is ended", len(self._stuck), CALL_S)
                self._process.kill()

    # ---- the thread of the client's process

    def _keep(self) -> None:
        while not self._is_closing.is_set():
            try:
                self._run()
            except OSError as error:
                log.warning("kv_store: the client cannot be started: %s", error)
            self._has_started.set()
            if self._unusable is not None or self._is_closing.wait(RESTART_S):
                return
            log.warning("kv_store: the client has ended, and is started again")

    def _run(self) -> None:
        """One life of the process."""
        own, theirs = socket.socketpair()
        with own:
            with theirs:
                process = start_module(CLIENT_PROGRAM, theirs.fileno())
            with self._lock:
                self._socket, self._process, self._calls = own, process, Calls()
                self._stuck.clear()
            if self._is_closing.is_set():
                own.shutdown(socket.SHUT_RDWR)
            try:
                send_frame(own, encode(Start(self._url)))
                while (frame := receive_frame(own)) is not None:
                    self._handle(decode_from_client(frame))
            except OSError:
                pass  # it has ended
            except (PdServeError, msgspec.MsgspecError) as error:
                log.warning("kv_store: the client is not understood: %s", error)
            with self._lock:
                self._is_up, self._socket = False, None
            self._calls.end(WorkerLost("the client of the store has ended"))
        _end(process)

    def _handle(self, message: FromClient) -> None:
        match message:
            case Unusable(text):
                self._unusable = text
            case State(is_up, text):
                self._is_up = is_up
                if is_up:
                    log.info("kv_store: the store at %s answers", self._url.master)
                else:
                    log.warning("kv_store: not used until it answers: %s", text)
                self._has_started.set()
            case Answer():
                self._calls.answer(message.call_id, message)
                self._stuck.discard(message.call_id)


def _end(process: ChildProcess) -> None:
    """A process whose socket is closed ends by itself, unless it is stopped."""
    try:
        wait_for_exit(process, END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
