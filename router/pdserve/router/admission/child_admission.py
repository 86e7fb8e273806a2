"""`ChildAdmission`: what one router process has entered into its parent's `Admission`. It all ends with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized

from pdserve.common.errors import PeerError
from pdserve.router.admission import admission_calls as calls
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.place import Capacity, HeldPlace
from pdserve.router.process_link import Handler

MAX_ENTRIES = 1 << 17
"""Requests, places and sessions of one process, each; more than its connections and limits allow."""


class ChildAdmission:
    """Serves the calls of one `SharedAdmission`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.capacity: Capacity | None = None
        """Capacity of the workers, as the process knows it; None before its first report, and after its end."""
        self._entered: dict[int, tuple[calls.Enter, Callable[[], None]]] = {}
        self._waiting: dict[int, asyncio.Task[HeldPlace]] = {}
        self._held: dict[int, HeldPlace] = {}
        self._sessions: dict[int, Callable[[], None]] = {}
        self.handlers = {
            calls.ENTER: Handler(calls.Enter, self._enter),
            calls.LEAVE: Handler(int, self._leave),
            calls.PLACE: Handler(calls.AskPlace, self._place),
            calls.PLACED: Handler(int, self._placed),
            calls.PRODUCED: Handler(calls.Produced, self._produced),
            calls.END_PLACE: Handler(calls.Produced, self._end_place),
            calls.OPEN_SESSION: Handler(calls.OpenSession, self._open_session),
            calls.CLOSE_SESSION: Handler(int, self._close_session),
            calls.CAPACITY: Handler(Capacity, self._report),
        }

    def end(self) -> None:
        """Give back all that the process holds: it has ended."""
        self.capacity = None
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()
        for held in self._held.values():
            held.end()
        self._held.clear()
        for close in self._sessions.values():
            close()
        self._sessions.clear()
        for number in list(self._entered):
            self._leave(number)
        self._admission.recheck()

    def _enter(self, entering: calls.Enter) -> None:
        """Raises: as `Admission.enter`."""
        _verify_room(self._entered)

        def expel() -> None:
            """Nothing: the process ends its requests itself when it leaves."""

        self._admission.enter(
            entering.num_requests,
            expel,
            client=entering.client,
            num_sequences=entering.num_sequences,
            timeout_s=entering.timeout_s,
            flex_id=entering.flex_id,
        )
        self._entered[entering.number] = entering, expel

    def _leave(self, number: int) -> None:
        # a request that was refused is not here
        entered, expel = self._entered.pop(number, (None, None))
        if entered is not None and expel is not None:
            self._admission.leave(
                entered.num_requests,
                expel,
                client=entered.client,
                num_sequences=entered.num_sequences,
                flex_id=entered.flex_id,
            )

    async def _place(self, asked: calls.AskPlace) -> None:
        """Raises: as `Admission.place`."""
        _verify_room(self._waiting)
        holding = asyncio.ensure_future(
            self._admission.hold(asked.cost, asked.priority, client=asked.client, flex_id=asked.flex_id)
        )
        self._waiting[asked.number] = holding
        holding.add_done_callback(lambda task: self._granted(asked.number, task))
        await holding

    def _granted(self, number: int, holding: asyncio.Task[HeldPlace]) -> None:
        is_wanted = self._waiting.pop(number, None) is not None
        if holding.cancelled() or holding.exception() is not None:
            return
        if is_wanted:
            self._held[number] = holding.result()
        else:
            # the request has left since the grant
            holding.result().end()

    def _placed(self, number: int) -> None:
        if (held := self._held.get(number)) is not None:
            held.place.placed()

    def _produced(self, produced: calls.Produced) -> None:
        if (held := self._held.get(produced.number)) is not None:
            held.place.produced(produced.num_tokens)

    def _end_place(self, produced: calls.Produced) -> None:
        self._produced(produced)
        if (waiting := self._waiting.pop(produced.number, None)) is not None:
            waiting.cancel()
        elif (held := self._held.pop(produced.number, None)) is not None:
            held.end()

    def _open_session(self, opening: calls.OpenSession) -> None:
        """Raises: as `Admission.open_session`."""
        _verify_room(self._sessions)
        self._sessions[opening.number] = self._admission.open_session(opening.client)

    def _close_session(self, number: int) -> None:
        if (close := self._sessions.pop(number, None)) is not None:
            close()

    def _report(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._admission.recheck()


def largest(capacities: Sequence[Capacity]) -> Capacity:
    """Capacity of the workers, by the process that has reached most of them; the others are just starting."""
    return max(capacities, key=lambda each: each.num_requests, default=Capacity(num_requests=0))


def _verify_room(entries: Sized) -> None:
    """Raises: PeerError."""
    if len(entries) >= MAX_ENTRIES:
        raise PeerError(f"a router process has {len(entries)} entries in admission, at most {MAX_ENTRIES} are possible")
