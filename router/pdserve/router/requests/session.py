"""`ClientSession`: a client's turns on one sequence of one decode worker, whose KV remains from turn to turn.

Each turn is a `SessionPromptTask` of its own `Generation`: limits, admission, metrics and spans are those of a request.
Between turns a session has no place; it counts for `max_sessions` of its key and of its worker until it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.errors import InternalError, Overloaded, PdServeError, PeerError, WorkerLost
from pdserve.common.kv_events import WorkerKey
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.timeline import now_unix_ns
from pdserve.router.attempts.call_events import Admitted, DecodeCallEvent, Outputs, PromptLogprobs
from pdserve.router.attempts.worker_calls import SessionCall
from pdserve.router.placement.placement import Placement, PlacementHint
from pdserve.router.requests.client_error import as_client_sees
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.preparation import ClientRequest, HashedRequest
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.prompt_task import PromptTask
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import LoadEstimate, LoadReservation, RemoteWorker
from pdserve.text.outputs.output_processor import OutputProcessor
from pdserve.text.outputs.request_output import CompletionOutput


class ClientSession:
    """Open as long as the client's call; `close` it. A turn may begin only after the last one has ended."""

    def __init__(self, session_id: str = "", on_close: Callable[[], None] = lambda: None) -> None:
        """session_id: for the log. on_close: called by each `close`."""
        self._session_id = session_id
        self._on_close = on_close
        self.token_ids: list[int] = []
        """Everything so far, prompts and answers."""
        self.hashed: HashedRequest | None = None
        """What has been hashed of it for a record of traffic; None without one."""
        self.num_kept_output_tokens: int | None = None
        """Output tokens of the last turn, where the worker has more of it than the client; else None."""
        self.worker: RemoteWorker | None = None
        self.lora_name = ""
        """The adapter of all turns; "" for none."""
        self.client_request_id = ""
        """The client's id of the session."""
        self._call: SessionCall | None = None
        self._events: asyncio.Queue[DecodeCallEvent | PdServeError] = asyncio.Queue()
        self._unsubscribe: Callable[[], None] | None = None

    def open(self, worker: RemoteWorker, call: SessionCall) -> None:
        """Attach the session to its worker, and open its call there."""
        self.worker, self._call = worker, call
        self._unsubscribe = worker.subscribe_lost(self._on_lost)
        call.follow(self._events.put_nowait, self._call_ended)

    @property
    def call(self) -> SessionCall:
        """Raises: InternalError before `open`."""
        if self._call is None:
            raise InternalError("the session has no worker")
        return self._call

    async def next(self) -> DecodeCallEvent:
        """The worker's next event. Raises: the error that ended the session."""
        event = await self._events.get()
        if isinstance(event, PdServeError):
            self._events.put_nowait(event)  # there is nothing after it
            raise event
        return event

    async def ended(self) -> None:
        """Between turns: wait for the worker to end the session. Raises: why it did, as the client sees it."""
        try:
            while True:
                await self.next()
        except PdServeError as error:
            raise as_client_sees(error, self._session_id) from None

    def close(self) -> None:
        """End the call at both ends."""
        self._on_close()
        self._end_call()

    def leave(self) -> None:
        """The worker has refused the session: it is as before `open`, and may be opened at another."""
        self._end_call()
        self.worker = self._call = self._unsubscribe = None
        self._events = asyncio.Queue()
        self.token_ids, self.hashed = [], None

    def _end_call(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._call is not None:
            self._call.cancel()

    def _call_ended(self, failure: CallFailed | None) -> None:
        ended = WorkerLost(f"decode worker {self.worker} ended the session")
        self._events.put_nowait(ended if failure is None else failure.error)

    def _on_lost(self, worker: RemoteWorker) -> None:
        self._events.put_nowait(WorkerLost(f"worker {worker} is lost: {worker.cause_of_death}"))
        self.close()


class SessionPromptTask(PromptTask):
    """One turn. The first one chooses a worker; none is ever tried again elsewhere, since the KV is there."""

    def __init__(
        self,
        session: ClientSession,
        request_id: str,
        request: ClientRequest,
        stream: ClientStream,
        services: RequestServices,
        record: RequestTrace,
    ) -> None:
        if session.worker is not None:
            # the worker has the adapter since the first turn
            request = msgspec.structs.replace(request, lora_name="")
        super().__init__(request_id, 0, request, stream, services, record)
        self._session = session
        self._turn_has_ended = False
        """True if the worker has ended the turn."""
        self._last: CompletionOutput | None = None
        """Output with which a stop string ended the turn's text, until the worker has ended the turn."""

    def _push(self, output: CompletionOutput) -> None:
        # the client's turn ends with this output, and then nothing reads what the worker still sends of the turn
        if output.finish_reason is not None and not self._turn_has_ended:
            self._last = output
        else:
            super()._push(output)

    @property
    def token_ids_before(self) -> list[int]:
        return self._session.token_ids

    async def attempts(self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState) -> None:
        session = self._session
        if session.worker is not None:
            # what it holds between turns is in the worker's own report
            share = LoadEstimate(calls=1, tokens=len(request.prompt_token_ids))
            await self._at(Placement(decode=session.worker, decode_share=share), request, processor)
            return
        refused: dict[WorkerKey, Overloaded] = {}
        while True:
            placement = await self._find_worker(request, refused)
            worker = placement.decode
            if worker is not None and worker.key in refused:
                # there is no other; sessions last too long to wait for one to end
                raise refused[worker.key]
            try:
                await self._at(placement, request, processor)
                return
            except Overloaded as error:
                if not error.by_peer or worker is None:
                    raise
                refused[worker.key] = error
                session.leave()

    async def _at(self, placement: Placement, request: GenerationRequest, processor: OutputProcessor) -> None:
        """One turn at the session's worker; the first opens it there. Raises: what ends the session."""
        session, worker = self._session, placement.decode
        if worker is None:
            raise InternalError("a session without a decode worker")
        self.timeline.mark(moments.PLACED)
        if self._record.is_recorded:
            self._record_blocks(request, placement.layout)
        reservation = worker.reserve(placement.decode_share)
        if self._holds is not None:
            self._holds.placed()
        record = self._record.attempt(0, placement)
        try:
            with record, self._services.company.serving(self._crash_guard, placement):
                if session.worker is None:
                    prepared = record.with_trace_headers(self.hashed(request, placement.layout).request)
                    self._services.deny_list.check(self._request.client, prepared.request_digest)
                    if not prepared.remaining_s:
                        # workers refuse a request without time
                        raise self.too_late()
                    session.open(worker, SessionCall(worker, prepared))
                else:
                    turn = msgspec.structs.replace(request, num_kept_output_tokens=session.num_kept_output_tokens)
                    session.call.go_on(record.with_trace_headers(turn))
                session.token_ids += request.prompt_token_ids
                await self._answer(reservation, processor)
        finally:
            reservation.end()

    def _record_blocks(self, request: GenerationRequest, layout: KvLayout) -> None:
        """Record the blocks of the whole session; the last turn's tokens are not hashed yet."""
        session = self._session
        whole = msgspec.structs.replace(request, prompt_token_ids=[*session.token_ids, *request.prompt_token_ids])
        cache = self._request.cache
        session.hashed = self._services.preparation.hashed(whole, cache, layout, session.hashed)
        self._record.hashed(session.hashed.placement_hashes, layout.block_size)

    async def raise_when_no_worker(self, *, one_token: bool) -> None:
        if self._session.worker is None:
            await super().raise_when_no_worker(one_token=False)
        else:
            await self._session.ended()

    async def _find_worker(self, request: GenerationRequest, refused: Collection[WorkerKey]) -> Placement:
        """refused: workers that had no room."""
        started_unix_ns = now_unix_ns()
        decision = await self.place(request, 0, RetryState(hint=PlacementHint.SESSION, blamed=frozenset(refused)))
        self.timeline.mark(moments.PLACED)
        self._record.routed(started_unix_ns, decision.policy, decision.placement, decision.attributes)
        return decision.placement

    async def _answer(self, reservation: LoadReservation, processor: OutputProcessor) -> None:
        """Relay until the turn's end. Raises: what ends the session."""
        session, num_tokens, is_complete = self._session, 0, False
        while True:
            event = await self._session.next()
            if isinstance(event, Admitted):
                self.timeline.merge(event.moments)
            elif isinstance(event, PromptLogprobs):
                self._relay_prompt(event)
            elif isinstance(event, Outputs):
                reservation.computed()
                self.timeline.merge(event.moments)
                if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise PeerError(f"the worker ended the turn with {event.finish_reason} in place of an error")
                num_tokens = event.first_position + len(event.token_ids)
                self._turn_has_ended = event.finish_reason is not None
                ended_here = self.relay(event)
                if self._turn_has_ended:
                    answer = processor.output_token_ids(0)
                    session.token_ids += answer
                    session.num_kept_output_tokens = len(answer) if len(answer) < num_tokens else None
                    if self._last is not None:
                        self._push(self._last)
                    return
                if ended_here and not is_complete:
                    # a stop string: the worker goes on with the session, not with this turn
                    is_complete = True
                    session.call.end_turn()
