"""`Attempt`: one placement of a request, and its calls in one cancel scope.

The life of an attempt with two workers:

1. Both calls are submitted in the same turn of the event loop: decode attaches while the prompt waits at the prefill worker.
2. `Admitted` of each: the request is in the engine's queue.
3. `Computed` of prefill: digest and length are compared, and the first token of each sequence is relayed at once.
4. Meanwhile decode receives blocks (`Receiving`, then `Landed`). A source that releases blocks that do not land, or computes the
   prompt and publishes nothing, ends the attempt after a few seconds.
5. `Outputs` of decode are relayed per sequence in the order of positions; those that are earlier than `Computed` wait for it.
6. `Ended` of prefill: the transfer is over. After `Landed` the prefill call may end in any way.
7. A sequence ends with its last output, or here, where a stop string completes its text. After the last one the attempt is done.

With one worker 3 or 5 are all there is. Decode may have the prompt in its cache (`PrefillingLocally`: the prefill call is
cancelled), or refuse it (`NeedsPrefill`: the attempt ends and does not count). Any other error, a lost worker or the client's
leaving ends the attempt: both calls are cancelled in the same turn, and the first cause counts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from pdserve.common import clock
from pdserve.common.errors import (
    DeadlineExceeded,
    DigestMismatch,
    Draining,
    InternalError,
    PdServeError,
    PeerError,
    TransferFailed,
    WorkerLost,
)
from pdserve.common.kv_events import WorkerKey
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.timeline import Timeline
from pdserve.router.attempts.attempt_failure import AttemptFailed, PrefillNeeded
from pdserve.router.attempts.attempt_state import AttemptState, moved
from pdserve.router.attempts.call_events import (
    Admitted,
    Computed,
    DecodeCallEvent,
    Ended,
    LandedEvent,
    Migrating,
    NeedsPrefillEvent,
    Outputs,
    PrefillCallEvent,
    PrefillingLocally,
    PromptLogprobs,
    ReceivingEvent,
)
from pdserve.router.attempts.call_events import Migrated as MigratedEvent
from pdserve.router.attempts.migration import Migrated, MigrationSource
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.attempts.worker_calls import DecodeCall, PrefillCall
from pdserve.router.attempts.worker_errors import may_fail_by_itself
from pdserve.router.placement.placement import Placement
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import LoadReservation, RemoteWorker
from pdserve.text.outputs.output_processor import PositionConflict

log = logging.getLogger(__name__)

TRANSFER_ID_BYTES = 16
LANDED_WITHIN_S = 5.0
"""Seconds after the source's report of a release within which the receiver must report that all blocks have landed."""
PUBLISHED_WITHIN_S = 10.0
"""Seconds within which a source that has computed the prompt publishes further blocks of those that it was asked for."""
SOURCE_ANSWER_S = 0.25
"""Seconds from the end of a transfer at the receiver to that of the source's call, which may have the cause."""


class Attempt:
    """One placement of a request. `run` once."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        placement: Placement,
        timeline: Timeline,
        relay: Callable[[Outputs], bool],
        relay_prompt: Callable[[PromptLogprobs], None] | None = None,
        source: MigrationSource | None = None,
    ) -> None:
        """relay: receives outputs, per sequence in the order of positions; returns True if the sequence has ended, and raises
        PdServeError for outputs that contradict earlier ones. source: `placement.source`'s call."""
        self.number = number
        self.state = AttemptState.PLACED
        self.request = request
        self.placement = placement
        self._timeline = timeline
        self._relay = relay
        self._relay_prompt = relay_prompt
        self._source = source
        self._transfer_id = b""
        if source is not None:
            self._transfer_id = source.transfer_id
        elif self._remote:
            self._transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        self.transfer_bytes = 0
        """Bytes that have landed at the decode worker, by its report."""
        self.pause_s: float | None = None
        """Of a sequence of another worker: seconds from its last token there to its first here."""
        self._computed = False
        self._landed = False
        self._awaits_source = False
        """True if the decode worker waits for blocks that the source has not published."""
        self._early: list[Outputs] = []
        """Outputs of the decode call from before the first token was known."""
        self._ended_sequences: set[int] = set()
        """Those that migrate, too."""
        self._migrating: dict[int, tuple[WorkerKey, bytes]] = {}
        """Sequences that are to end for another worker to continue -> that worker, and their transfers."""
        self._sources: dict[int, MigrationSource] = {}
        """Those that have."""
        self._has_migrated = False
        """True after the end of an attempt whose decode call goes on as the source of blocks."""
        self._only_index = request.index if request.is_resumed else None
        self._ended: asyncio.Future[None] | None = None
        self._waits: asyncio.TimerHandle | None = None
        """Ends the attempt, unless something else does before."""
        self._prefill_call: PrefillCall | MigrationSource | None = None
        self._decode_call: DecodeCall | None = None
        self._calls: list[PrefillCall | MigrationSource | DecodeCall] = []
        """Both, also after `_drop_prefill`."""
        self._reservations: list[LoadReservation] = []
        self._unsubscribe: list[Callable[[], None]] = []

    async def run(self) -> None:
        """Serve the request to its end. Both calls have ended when this returns or raises, but for `Migrated`.

        Raises: AttemptFailed; PrefillNeeded, if the decode worker did nothing; Migrated.
        """
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._open()
            await self._ended
            self._move(AttemptState.DONE)
        except Migrated:
            self._move(AttemptState.DONE)
            raise
        except asyncio.CancelledError:
            self._move(AttemptState.CANCELLED)
            raise
        except BaseException:
            self._move(AttemptState.FAILED)
            raise
        finally:
            self._cancel_calls()
            if self._ended.done() and not self._ended.cancelled():
                # retrieve the result, also after a cancellation
                self._ended.exception()

    def migrate(self, receiver: RemoteWorker) -> None:
        """Let the receiver continue the sequences that have not ended, each after its next token; ends the attempt with `Migrated`
        when the last of them has ended here. No effect on sequences that migrate already."""
        if self._decode_call is None or self._over:
            return
        first = self.request.index if self.request.is_resumed else 0
        for index in range(first, first + self.request.n):
            if index not in self._ended_sequences and index not in self._migrating:
                transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
                self._migrating[index] = receiver.key, transfer_id
                self._decode_call.migrate(index, transfer_id, receiver)

    @property
    def _sender(self) -> RemoteWorker | None:
        """The worker from which the decode worker gets the prompt's blocks, or that computes without one."""
        return self.placement.prefill or self.placement.source

    @property
    def _remote(self) -> bool:
        return self._sender is not None and self.placement.decode is not None

    def _move(self, state: AttemptState) -> None:
        self.state = moved(self.state, state)

    def _open(self) -> None:
        """Open both calls at once, so that the decode worker attaches while the prompt waits at the prefill worker."""
        prefill, decode, source = self.placement.prefill, self.placement.decode, self._source
        self._move(AttemptState.STREAMING if self._sender is None else AttemptState.PREFILLING)
        outgoing = OutgoingRequest(self.request)
        shares = self.placement.prefill_share, self.placement.decode_share
        for worker, share in zip((prefill, decode), shares, strict=True):
            if worker is not None:
                self._reservations.append(worker.reserve(share))
                self._unsubscribe.append(worker.subscribe_lost(self._on_lost))
        if prefill is not None:
            call = PrefillCall(prefill, outgoing, self.number, self._transfer_id, decode, self.placement.move)
            self._prefill_call = call
            self._calls.append(call)
        elif source is not None:
            self._prefill_call = source
            self._calls.append(source)
            self._unsubscribe.insert(0, source.worker.subscribe_lost(self._on_lost))
        if decode is not None:
            self._decode_call = DecodeCall(
                decode,
                outgoing if self._sender is None else outgoing.for_receiver(),
                self.number,
                transfer_id=self._transfer_id,
                source=self._sender,
                without_draft_head=source is not None and source.without_draft_head,
                prefill_here=self.placement.prefill_here,
                local_prefill_tokens=self.placement.local_prefill_tokens,
                move=self.placement.move if prefill is None else None,
            )
            self._calls.append(self._decode_call)
        if self._prefill_call is not None:
            self._prefill_call.follow(self._prefill_event, self._prefill_ended)
        if self._decode_call is not None:
            self._decode_call.follow(self._decode_event, self._decode_ended)

    def _cancel_calls(self) -> None:
        """Cancel both calls; takes effect in this turn of the event loop."""
        self._go_on()
        for call in self._calls:
            if not (self._has_migrated and call is self._decode_call):
                call.cancel()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for reservation in self._reservations:
            reservation.end()

    def _end(self, failure: Exception | None = None) -> None:
        """End the attempt; the first cause counts."""
        if self._ended is None or self._ended.done():
            return
        self._has_migrated = isinstance(failure, Migrated)
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)
        # here and not after run() wakes, so that no further event of the calls is read
        self._cancel_calls()

    def _end_later(self, seconds: float, error: TransferFailed) -> None:
        """End the attempt because of the source, unless something else happens before; the last call counts."""
        self._go_on()
        failed = AttemptFailed(error, self._sender, in_transfer=True)
        self._waits = asyncio.get_running_loop().call_later(seconds, self._end, failed)

    def _go_on(self) -> None:
        """The receiver has made progress, so that nothing is waited for."""
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    @property
    def _over(self) -> bool:
        return self._ended is None or self._ended.done()

    @property
    def _decode_finished(self) -> bool:
        """True if decode has sent its last outputs before the first token is known."""
        num_finished = sum(outputs.finish_reason is not None for outputs in self._early)
        return num_finished == self.request.n

    def _prefill_event(self, event: PrefillCallEvent) -> None:
        try:
            self._on_prefill(event)
        except Exception as error:
            self._fail(error, self._sender)

    def _prefill_ended(self, failure: CallFailed | None) -> None:
        worker = self._sender
        if failure is None:
            self._on_prefill_lost(worker, WorkerLost(f"worker {worker} ended its call early"), died=False)
            return
        if isinstance(failure.error, Draining) and worker is not None:
            worker.refuse_more()
        self._on_prefill_lost(worker, failure.error, failure.died)

    def _decode_event(self, event: DecodeCallEvent) -> None:
        if isinstance(event, MigratedEvent):
            if (source := self._sources.get(event.index)) is not None:
                source.ended(event.ended)
        elif not self._has_migrated:
            try:
                self._on_decode(event)
            except Exception as error:
                self._fail(error, self.placement.decode)

    def _decode_ended(self, failure: CallFailed | None) -> None:
        worker = self.placement.decode
        if self._has_migrated:
            for source in list(self._sources.values()):
                source.failed(failure)
        elif failure is not None:
            self._on_decode_lost(worker, failure)
        elif not self._decode_finished:
            error = WorkerLost(f"decode worker {worker} ended its call before the last token")
            self._end(AttemptFailed(error, worker))

    def _fail(self, error: Exception, worker: RemoteWorker | None) -> None:
        """End the attempt because of an event that a worker sent."""
        if isinstance(error, DigestMismatch) and self._source is not None:
            # the sequence itself has been served before: it goes on without its blocks
            self._end(AttemptFailed(TransferFailed(error.message), worker, in_transfer=True))
            return
        if isinstance(error, PdServeError):
            self._end(AttemptFailed(error, worker))
            return
        log.error("request %s: a call failed in the router", self.request.request_id, exc_info=error)
        self._end(AttemptFailed(InternalError(f"the router failed: {type(error).__name__}")))

    def _on_prefill(self, event: PrefillCallEvent) -> None:
        match event:
            case Admitted(moments):
                self._timeline.merge(moments)
            case PromptLogprobs():
                self._take_prompt(event)
            case Computed():
                self._on_computed(event)
            case Ended():
                self._timeline.merge(event.moments)
                if event.released and self._remote and not self._landed and not self._over:
                    # the receiver's own report may still arrive, and does soon if the source is right
                    self._end_later(
                        LANDED_WITHIN_S,
                        TransferFailed(f"worker {self._sender} released a transfer that has not landed"),
                    )
                self._landed |= event.released
                if not event.released and self._remote:
                    error = TransferFailed(f"worker {self._sender} gave the transfer up: {event.cause}")
                    self._on_prefill_lost(self._sender, error, died=False)

    def _on_computed(self, computed: Computed) -> None:
        if self._computed:
            return
        self._computed = True
        if self.placement.prefill is not None:
            self._reservations[0].computed()
        self._timeline.merge(computed.moments)
        expected = len(self.request.given_token_ids)
        if computed.request_digest != self.request.request_digest or computed.num_tokens != expected:
            raise DigestMismatch(
                f"worker {self._sender} computed {computed.num_tokens} tokens of another request, "
                f"{expected} of this one were requested"
            )
        if self.state is AttemptState.PREFILLING:
            self._move(AttemptState.STREAMING)
        for outputs in computed.first_outputs:
            self._take(outputs)
        self._take_early()
        if self._awaits_source and not self._landed:
            self._limit_publishing()
        if not self._remote and not self._over:
            raise PeerError(f"prefill worker {self.placement.prefill} did not end a request of one token")

    def _on_decode(self, event: DecodeCallEvent) -> None:
        match event:
            case Outputs():
                if self._source is not None and self.pause_s is None:
                    self.pause_s = clock.monotonic() - self._source.ended_at
                self._go_on()
                self._reservations[-1].computed()
                if self.state is AttemptState.PREFILLING:
                    self._early.append(event)
                else:
                    self._take(event)
            case Admitted(moments):
                self._timeline.merge(moments)
            case PromptLogprobs():
                self._take_prompt(event)
            case LandedEvent():
                self._go_on()
                self._landed = True
                self.transfer_bytes = event.transfer_bytes
                self._timeline.merge(event.moments)
            case ReceivingEvent(awaits_source):
                if self._landed or self._prefill_call is None or self._over:
                    return
                self._awaits_source = awaits_source
                self._go_on()
                if awaits_source and self._computed:
                    self._limit_publishing()
            case PrefillingLocally():
                self._go_on()
                self._drop_prefill()
            case NeedsPrefillEvent(uncached_tokens):
                self._end(PrefillNeeded(uncached_tokens))
            case Migrating():
                self._on_migrating(event)

    def _limit_publishing(self) -> None:
        """The source has computed the prompt, and is to publish what it was asked for; each report of the receiver begins anew."""
        if not self._over:
            self._end_later(
                PUBLISHED_WITHIN_S,
                TransferFailed(
                    f"worker {self._sender} computed the prompt and published no blocks for {PUBLISHED_WITHIN_S:g} s"
                ),
            )

    def _take(self, outputs: Outputs) -> None:
        if self._over:
            return
        if outputs.moments:
            self._timeline.merge(outputs.moments)
        if outputs.finish_reason is not None and outputs.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise PeerError(
                f"a worker ended sequence {outputs.index} with {outputs.finish_reason} in place of an error"
            )
        if self._only_index is not None and outputs.index != self._only_index:
            raise PositionConflict(
                f"outputs of sequence {outputs.index} arrived, but sequence {self._only_index} was requested"
            )
        if not self._relay(outputs) or outputs.index in self._ended_sequences:
            return
        self._sequence_ended(outputs.index)
        if not self._over and outputs.finish_reason is None and self._decode_call is not None:
            # a stop string has ended its text, so decode need not continue it
            self._decode_call.end_sequence(outputs.index)

    def _sequence_ended(self, index: int) -> None:
        self._ended_sequences.add(index)
        if len(self._ended_sequences) == self.request.n:
            self._end(Migrated(self._sources) if self._sources else None)

    def _on_migrating(self, event: Migrating) -> None:
        target, worker = self._migrating.get(event.index), self.placement.decode
        if target is None or worker is None or self._over:
            raise PeerError(f"a worker let sequence {event.index} migrate, which was not asked for")
        if event.index in self._ended_sequences:
            return  # a stop string has ended its text
        self._sources[event.index] = MigrationSource(
            worker,
            *target,
            event.computed,
            lambda: self._leave_source(event.index),
            without_draft_head=event.without_draft_head,
        )
        self._sequence_ended(event.index)

    def _leave_source(self, index: int) -> None:
        """A migrated sequence needs nothing of the decode call any more."""
        self._sources.pop(index, None)
        if not self._sources and self._decode_call is not None:
            self._decode_call.cancel()

    def _take_early(self) -> None:
        """Relay the decode outputs that arrived before the first token; their errors are not the prefill worker's."""
        early, self._early = self._early, []
        try:
            for outputs in early:
                self._take(outputs)
        except PdServeError as error:
            self._end(AttemptFailed(error, self.placement.decode))

    def _take_prompt(self, logprobs: PromptLogprobs) -> None:
        if self._relay_prompt is not None and not self._over:
            self._relay_prompt(logprobs)

    def _drop_prefill(self) -> None:
        """Cancel the prefill call, because the decode worker prefills itself."""
        if self._prefill_call is not None:
            call, self._prefill_call = self._prefill_call, None
            call.cancel()
            self._reservations[0].end()
            self._unsubscribe[0]()
        if self.state is AttemptState.PREFILLING:
            self._move(AttemptState.STREAMING)
        self._take_early()

    def _on_prefill_lost(self, worker: RemoteWorker | None, error: PdServeError, died: bool) -> None:
        """Handle the end of the prefill call, which is a failure only if its first token or blocks have not arrived."""
        if self._prefill_call is None or (self._computed and self._landed):
            return
        kv_lost = self._remote and isinstance(error, (TransferFailed, WorkerLost))
        self._end(_lost(self._prefill_call, worker, error, died=died, in_transfer=kv_lost))

    def _on_decode_lost(self, worker: RemoteWorker | None, failure: CallFailed) -> None:
        error = failure.error
        if isinstance(error, Draining) and worker is not None:
            worker.refuse_more()
        if self._decode_finished:
            return
        if isinstance(error, DigestMismatch) and self._source is not None:
            self._fail(error, self._sender)
        elif isinstance(error, TransferFailed) and self._remote:
            if self._prefill_call is None or self._computed or not may_fail_by_itself(self.request):
                self._end(AttemptFailed(error, self._sender, in_transfer=True))
            else:
                self._awaits_source = False
                # the source may have refused the request for its content; its own call then has the cause
                self._end_later(SOURCE_ANSWER_S, error)
        elif isinstance(error, DeadlineExceeded):
            self._end(AttemptFailed(error))
        else:
            self._end(_lost(self._decode_call, worker, error, died=failure.died))

    def _on_lost(self, worker: RemoteWorker) -> None:
        error = WorkerLost(f"worker {worker} is lost: {worker.cause_of_death}")
        if worker is self._sender:
            self._on_prefill_lost(worker, error, died=True)
        elif not self._decode_finished:
            self._end(_lost(self._decode_call, worker, error, died=True))


def _lost(
    call: PrefillCall | MigrationSource | DecodeCall | None,
    worker: RemoteWorker | None,
    error: PdServeError,
    *,
    died: bool,
    in_transfer: bool = False,
) -> AttemptFailed:
    """The failure of the attempt by a lost call. call: None if it was not open yet."""
    never_admitted = call is None or not call.has_answered
    return AttemptFailed(error, worker, died=died, never_admitted=never_admitted, in_transfer=in_transfer)
