"""`AgentPool`: makes agents in the background for announced peers, before the first read from them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer

log = logging.getLogger(__name__)

MAX_SPARES = 16
MAX_KNOWN = 1024


class AgentPool:
    """Spare agents. Thread-safe. A thread runs only while agents are being made."""

    def __init__(self, make: Callable[[], NixlPeer], closing: threading.Event, close_wait_s: float) -> None:
        self._make = make
        self._closing = closing
        self._close_wait_s = close_wait_s
        self._lock = threading.Lock()
        self._spares: deque[NixlPeer] = deque()
        self._known: dict[Hashable, None] = {}
        self._num_wanted = 0
        self._thread: threading.Thread | None = None

    def expect(self, peer: Hashable) -> None:
        """Make one more agent, unless this peer was announced before. Returns at once."""
        with self._lock:
            if peer in self._known or self._closing.is_set():
                return
            if len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[peer] = None
            self._num_wanted = min(self._num_wanted + 1, MAX_SPARES)
            if self._thread is None and self._num_wanted > len(self._spares):
                self._thread = threading.Thread(target=self._fill, name="nixl-spares", daemon=True)
                self._thread.start()

    def take(self) -> NixlPeer:
        """An agent without a source: a spare agent, or a new one. Raises: TransferFailed."""
        with self._lock:
            if self._spares:
                self._num_wanted -= 1
                return self._spares.popleft()
        return self._make()

    def close(self) -> None:
        """Destroy the remaining agents, after `closing` was set. Idempotent."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            spares, self._spares = self._spares, deque()
        for spare in spares:
            spare.destroy(self._closing, self._close_wait_s)

    def _fill(self) -> None:
        while True:
            with self._lock:
                if self._closing.is_set() or len(self._spares) >= self._num_wanted:
                    self._thread = None
                    return
            try:
                spare = self._make()
            except TransferFailed as error:
                log.warning("no agent could be made ahead of time: %s", error.message)
                with self._lock:
                    self._num_wanted = len(self._spares)
                continue
            with self._lock:
                self._spares.append(spare)
