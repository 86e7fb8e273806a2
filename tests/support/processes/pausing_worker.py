"""A worker that pauses once at a named moment of a request's life: `python pausing_worker.py FOLDER prefill --port ...`.

The test puts the name of a phase into `FOLDER/armed`; the first worker that comes to it renames the file to
`FOLDER/reached.<pid>` and waits there, the thread that came to it and no other, until `FOLDER/go` exists. What happens
to a process then, by signals, happens to it in that phase. With `engine_process` the engine's process pauses.
An engine without requests whose encoder cache is still referenced raises, which ends its worker with a traceback in the log.

    phase      where                                        thread that waits
    queued     prefill, before the step that would begin    engine
    computing  prefill, after the first chunk of several    engine
    computed   prefill, before its blocks are published     blocks
    moving     prefill, before the second read is answered  data plane
    landed     decode, before the step that would begin     engine
    first      decode, after its first token                engine
    streaming  decode, after its eighth                     engine

Of a sequence that another decode worker continues:

    left       the old one, after its last step there       engine
    arrives    the new one, before blocks are reserved      engine
    arrived    the new one, before the step that continues  engine
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.cli.main import main
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.scheduler import Scheduler
from pdserve.engine.scheduler.transfer_events import KvSendTracker
from pdserve.engine.scheduler.waiting.remote_kv_queue import RemoteKvQueue
from pdserve.kv_transfer.tcp.tcp_source import TcpSource
from pdserve.worker import kv_transfer_manager
from pdserve.worker.kv_transfer_manager import KvTransferManager
from tests.support.processes.prepared_children import prepare_children

PHASES = ("queued", "computing", "computed", "moving", "landed", "first", "streaming")
PHASES_OF_MOVES = ("left", "arrives", "arrived")
LONGEST_S = 20.0
NUM_FIRST = 2
"""Output tokens when decode has sampled one: the first is that of the prefill."""
NUM_STREAMED = 8


class Pauses:
    """The folder in which test and workers meet."""

    def __init__(self, folder: Path) -> None:
        self._armed = folder / "armed"
        self._reached = folder / f"reached.{os.getpid()}"
        self._go = folder / "go"

    @property
    def are_armed(self) -> bool:
        """A phase is named, and no worker has come to it yet."""
        return self._armed.exists()

    def reach(self, phase: str) -> None:
        """Wait here, if it is this phase's turn, and nobody else waits already."""
        try:
            if self._armed.read_text() != phase:
                return
            self._armed.rename(self._reached)
        except FileNotFoundError:
            return
        deadline = time.monotonic() + LONGEST_S
        while not self._go.exists() and time.monotonic() < deadline:
            time.sleep(0.002)


def around(owner: type, name: str, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    """Have a method of a class preceded and followed by calls of ours."""
    real = getattr(owner, name)

    def wrapped(self: Any, *args: Any) -> Any:
        before(self, *args)
        result = real(self, *args)
        if after is not None:
            after(self, *args)
        return result

    setattr(owner, name, wrapped)


def install(pauses: Pauses) -> None:
    """Put the pauses into this process."""
    num_answers: dict[bytes, int] = {}
    # every range is digested in the block thread: asyncio's must not be the one that pauses
    kv_transfer_manager.DIGEST_HERE_BYTES = 0

    def before_schedule(scheduler: Scheduler) -> None:
        for request in scheduler.requests.values():
            if request.status is RequestStatus.WAITING:
                pauses.reach("landed" if request.core.remote_prefill else "queued")
                if _has_moved(request):
                    pauses.reach("arrived")

    def after_step(scheduler: Scheduler, scheduled: Any, computed: Any, kv_written: Any) -> None:
        for request in scheduler.running.values():
            if 0 < request.num_computed_tokens < request.num_prompt_tokens:
                pauses.reach("computing")
            # a step with drafts may pass the number
            if request.num_output_tokens >= NUM_FIRST:
                pauses.reach("first")
            if request.num_output_tokens >= NUM_STREAMED:
                pauses.reach("streaming")
        if not scheduler.requests:
            scheduler.running.encoder.cache.check(idle=True)

    def before_digest(manager: Any, message: Any, *_: Any) -> None:
        if not pauses.are_armed:
            return
        deadline = time.monotonic() + LONGEST_S
        while _computes(manager.engine.core.scheduler.requests.get(message.request_id)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        pauses.reach("computed")

    def before_answer(source: TcpSource, connection: Any, stream: Any, reader: Any, request: Any) -> None:
        num_answers[request.token] = num_answers.get(request.token, 0) + 1
        if num_answers[request.token] == 2:
            pauses.reach("moving")

    def before_reserve(receives: RemoteKvQueue, *_: Any) -> None:
        if any(_has_moved(request) for request in receives._unreserved.first(999)):
            pauses.reach("arrives")

    around(Scheduler, "schedule", before_schedule)
    around(RemoteKvQueue, "reserve", before_reserve)
    around(KvSendTracker, "migrate", lambda *_: None, lambda *_: pauses.reach("left"))
    around(Scheduler, "update_from_output", lambda *_: None, after_step)
    around(KvTransferManager, "_digest", before_digest)
    around(TcpSource, "_answer", before_answer)


def _computes(request: Request | None) -> bool:
    return request is not None and request.num_computed_tokens < request.num_prompt_tokens


def _has_moved(request: Request) -> bool:
    return request.core.remote_prefill and bool(request.core.output_token_ids)


if __name__ == "__main__":
    met = Path(sys.argv.pop(1))
    prepare_children(lambda: install(Pauses(met)))
    main()
