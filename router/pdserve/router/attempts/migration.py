"""`MigrationSource`: the decode call of a sequence that another worker continues, as the source of the sequence's blocks.

An attempt that lets its sequences migrate ends with `Migrated`. The next one reads the blocks from `MigrationSource`, as others
read those of a prompt from a prefill call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pdserve.common import clock
from pdserve.common.errors import TransferFailed
from pdserve.common.kv_events import WorkerKey
from pdserve.router.attempts.call_events import Computed, Ended, PrefillCallEvent
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import RemoteWorker


class MigrationSource:
    """One sequence. `follow` it once, or `cancel` it; both may be late."""

    has_answered = True
    """As of `WorkerCall`."""

    def __init__(
        self,
        worker: RemoteWorker,
        receiver: WorkerKey,
        transfer_id: bytes,
        computed: Computed,
        leave: Callable[[], None],
        *,
        without_draft_head: bool,
    ) -> None:
        """receiver: the only worker that may read its blocks. leave: called once, after the transfer's end or `cancel`: nothing of
        the sequence is needed any more."""
        self.worker = worker
        self.receiver = receiver
        self.transfer_id = transfer_id
        self.computed = computed
        self.without_draft_head = without_draft_head
        """True if the blocks of a draft head are not moved."""
        self.ended_at = clock.monotonic()
        """When the sequence ended at this worker."""
        self._leave = leave
        self._is_over = False
        self._has_begun = False
        self._on_event: Callable[[PrefillCallEvent], None] = _ignore
        self._on_end: Callable[[CallFailed | None], None] = _ignore
        self._ended: Ended | None = None
        self._failure: CallFailed | None = None

    def follow(self, on_event: Callable[[PrefillCallEvent], None], on_end: Callable[[CallFailed | None], None]) -> None:
        """As `WorkerCall.follow`: the sequence's last token, then the end of the transfer."""
        self._on_event, self._on_end = on_event, on_end
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if not self._is_over:
            self._has_begun = True
            self._on_event(self.computed)
            self._tell_end()

    def cancel(self) -> None:
        """As `WorkerCall.cancel`."""
        if not self._is_over:
            self._is_over = True
            self._leave()

    def ended(self, ended: Ended) -> None:
        """The worker reports the end of the transfer."""
        self._ended = self._ended or ended
        self._tell_end()

    def failed(self, failure: CallFailed | None) -> None:
        """The decode call has ended; None: well."""
        self._failure = (
            self._failure
            or failure
            or CallFailed(TransferFailed("the call of the source has ended"), died=False, is_answer=True)
        )
        self._tell_end()

    def _tell_end(self) -> None:
        if not self._has_begun or self._is_over:
            return
        if self._ended is not None:
            self._is_over = True
            self._on_event(self._ended)
            self._leave()
        elif self._failure is not None:
            self._is_over = True
            self._on_end(self._failure)
            self._leave()


def _ignore(_: object) -> None:
    pass


class Migrated(Exception):
    """The attempt's sequences have ended, some of them for another worker to continue."""

    def __init__(self, sources: Mapping[int, MigrationSource]) -> None:
        """sources: by index of the sequence."""
        super().__init__(f"{len(sources)} sequences migrate")
        self.sources = dict(sources)
