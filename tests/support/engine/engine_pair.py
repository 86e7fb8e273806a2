"""Two engines whose KV messages the test exchanges in place of worker and transfer, with chosen delays, repetitions and ends.

A read copies one block of P's pool into D's. Abandoned reads continue to write garbage into their blocks until their hold is
returned, as real reads may.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.errors import TransferFailed
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.multimodal import without_pixels
from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from pdserve.engine.scheduler.kv_messages import (
    HoldReturned,
    IntoEngine,
    Landed,
    Missed,
    ReceiveFailed,
    ReceiveInto,
    Revoke,
    Settled,
    SourceFinished,
    StopReceiving,
    Want,
)
from tests.support.engine.engine_fetches import SOURCE, Fetches
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.engine_moves import Moves
from tests.support.engine.pool_blocks import RUBBISH, block_at, num_without_gap, places_of

_AGAIN = "~again"


@dataclass
class Transfer:
    """One request on its way from P to D."""

    prompt: list[int]
    n: int = 1
    output: list[int] = field(default_factory=list)
    """Output of earlier attempts."""
    source_holds: list[PinnedBlocks] = field(default_factory=list)
    published: dict[int, tuple[tuple[int, int], Any]] = field(default_factory=dict)
    """index -> P's block and its content when it was published."""
    room: ReceiveInto | None = None
    landed: set[int] = field(default_factory=set)
    first_tokens: dict[int, int] = field(default_factory=dict)
    """Sequence -> token."""
    said_finished: bool = False
    wanted: bool = False
    runs_again: bool = False
    stopped: bool = False
    """D reads no more; its blocks may still be written to."""
    over: bool = False
    """At the source."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request, for its next attempt."""

    @property
    def num_landed(self) -> int:
        return num_without_gap(self.landed, self.room.first_index) if self.room is not None else 0


class Pair:
    """P and D, and the transfers between them."""

    def __init__(self, p: Harness, d: Harness, seed: int | None = None) -> None:
        self.p, self.d = p, d
        self.random = random.Random(seed)
        self.steady = seed is None
        """No delays: everything that can happen happens in each round."""
        self.transfers: dict[str, Transfer] = {}
        self.attempts: dict[str, list[str]] = {}
        """request_id -> the engines' names for its attempts; a further one follows each eviction."""
        self._mail: dict[str, deque[IntoEngine]] = {"p": deque(), "d": deque()}
        self.engines = {"p": p, "d": d}
        self.fetches = Fetches(self.engines, self._post, self.random, is_steady=self.steady)
        self.moves = Moves(self.engines, self.fetches, self._post, self.random)

    def add(self, prompt: list[int], request_id: str, *, fetches: bool = False, **fields: Any) -> None:
        """Both calls of one attempt. fetches: P first reads what D has of the prompt."""
        self.attempts[request_id] = [request_id]
        self._place(prompt, request_id, fields, fetches=fetches)

    def add_local(self, at: str, prompt: list[int], request_id: str, *, fetches: bool = False, **fields: Any) -> None:
        """A request that one engine, p or d, computes. fetches: after it has read what the other has of the prompt."""
        engine = self.p if at == "p" else self.d
        self._submit(at, engine.request(prompt, request_id, **fields, block_source=SOURCE if fetches else None))

    def _submit(self, at: str, request: EngineCoreRequest) -> None:
        if request.block_source is not None:
            self.fetches.begin(at, request)
        (self.p if at == "p" else self.d).submit(request)

    def _place(self, prompt: list[int], attempt: str, fields: dict[str, Any], *, fetches: bool = False) -> None:
        self.transfers[attempt] = Transfer(prompt, fields.get("n", 1), fields.get("output", []), fields=fields)
        embeds = fields.get("prompt_embeds")
        # D gets their KV alone
        of_d = fields if embeds is None else fields | {"prompt_embeds": embeds.without_data()}
        if "mm_features" in fields:
            of_d = of_d | {"mm_features": without_pixels(fields["mm_features"])}
        head: dict[str, Any] = {"without_draft_head": self.p.has_draft_head != self.d.has_draft_head}
        self.d.add(prompt, attempt, remote_prefill=True, **of_d, **head)
        source = SOURCE if fetches else None
        self._submit("p", self.p.request(prompt, attempt, transfer_source=True, block_source=source, **fields, **head))

    def _place_evicted(self) -> None:
        """Place evicted requests again, as the router does."""
        for attempts in self.attempts.values():
            last = attempts[-1]
            transfer = self.transfers[last]
            if self.d.answers.get(self._key(last, 0), Answer()).error_code == "evicted":
                self.p.core.abort_request(last)
                self._end_source(transfer)
                attempts.append(f"{attempts[0]}#{len(attempts)}")
                self._place(transfer.prompt, attempts[-1], transfer.fields)

    def _cancel_failed(self) -> None:
        """Cancel the prefill of requests that failed at D before they had blocks there, as the router does."""
        for attempts in self.attempts.values():
            last = attempts[-1]
            transfer = self.transfers[last]
            failed = self.d.answers.get(self._key(last, 0), Answer()).error_code not in ("", "evicted")
            if failed and transfer.room is None and not transfer.over:
                self.p.core.abort_request(last)
                self._end_source(transfer)

    def round(self) -> None:
        """One turn of everything, in this order or, with a seed, only some of it."""
        self.d.collect()
        self._place_evicted()
        self._cancel_failed()
        for turn in (self._step_p, self._step_d, self._move, self._deliver):
            if self.steady or self.random.random() < 0.7:
                turn()
        self.p.scheduler.check()
        self.d.scheduler.check()

    def run(self, max_rounds: int = 3000) -> None:
        for _ in range(max_rounds):
            if not self._busy:
                break
            self.round()
        assert not self._busy, f"not done after {max_rounds} rounds"
        self.p.collect()
        self.d.collect()

    @property
    def _busy(self) -> bool:
        engines = self.p.scheduler.requests or self.d.scheduler.requests
        out = any(transfer.room or transfer.source_holds for transfer in self.transfers.values())
        evicted = any(
            self.d.answers.get(self._key(attempts[-1], 0), Answer()).error_code == "evicted"
            for attempts in self.attempts.values()
        )
        return bool(
            evicted
            or engines
            or out
            or len(self.fetches)
            or len(self.moves)
            or len(self.p.scheduler.loads)
            or len(self.d.scheduler.loads)
            or any(self._mail.values())
            or self.p.outbox.messages
            or self.d.outbox.messages
        )

    # ---- what others do to a request

    def abort(self, request_id: str) -> None:
        """Abort both calls in any state, as the router does."""
        request_id = self.attempts[request_id][-1]
        self.d.core.abort_request(request_id)
        self.p.core.abort_request(request_id)
        self._end_source(self.transfers[request_id])
        self._post("p", Revoke(request_id))
        self._post("p", Revoke(request_id + _AGAIN))

    def begin_move(self, engine: str) -> None:
        """One of an engine's sequences is to go on at the other engine."""
        self.moves.begin(engine, self.answer, lambda attempt: attempt.split("#")[0])

    def break_source(self, request_id: str) -> None:
        """Fail the transfer at the source; the receiver gets the failure."""
        request_id = self.attempts[request_id][-1]
        transfer = self.transfers[request_id]
        if transfer.over:
            return
        self._end_source(transfer)
        self._post("p", Revoke(request_id))
        self._post("p", Revoke(request_id + _AGAIN))
        if not transfer.stopped:
            transfer.stopped = True
            self._post("d", ReceiveFailed(request_id, TransferFailed("the source gave up")))

    # ---- turns

    def _step_p(self) -> None:
        self.p.step()
        for request_id, transfer in self.transfers.items():
            for index in range(transfer.n):
                answer = self.p.answers.get(self._key(request_id, index))
                if answer is not None and answer.token_ids:
                    transfer.first_tokens[index] = answer.token_ids[0]
        for message in self.p.outbox.take():
            if self.moves.takes("p", message) or self.fetches.takes("p", message):
                continue
            if isinstance(message, Missed):
                self._again(message.request_id, self.transfers[message.request_id])
                continue
            assert isinstance(message, Settled)
            transfer = self.transfers[message.request_id.removesuffix(_AGAIN)]
            if transfer.over:
                self._post("p", HoldReturned(message.request_id, message.hold))
                continue
            assert transfer.wanted, "settled before it was wanted"
            transfer.source_holds.append(message.hold)
            for index, place in enumerate(places_of(message.hold), message.first_index):
                assert index not in transfer.published, "published twice"
                transfer.published[index] = (place, block_at(self.p, place).tolist())

    def _step_d(self) -> None:
        self.d.step()
        for message in self.d.outbox.take():
            if self.moves.takes("d", message) or self.fetches.takes("d", message):
                continue
            transfer = self.transfers[message.request_id]
            if isinstance(message, StopReceiving):
                transfer.stopped = True
            else:
                assert isinstance(message, ReceiveInto)
                transfer.room = message
                if not transfer.over:
                    transfer.wanted = True
                    self._post("p", Want(message.request_id, message.first_index))

    def _again(self, request_id: str, transfer: Transfer) -> None:
        if not transfer.runs_again and not transfer.over:
            assert transfer.room is not None
            transfer.runs_again = True
            params: dict[str, Any] = {"max_tokens": 60}
            if transfer.n == 1:
                params["allowed_token_ids"] = (transfer.first_tokens[0],)
            self.p.add(
                transfer.prompt,
                request_id + _AGAIN,
                n=transfer.n,
                output=transfer.output,
                transfer_source=True,
                wanted_from=transfer.room.first_index,
                params=params,
                mm_features=transfer.fields.get("mm_features", []),
                without_draft_head=self.p.has_draft_head != self.d.has_draft_head,
            )

    def _move(self) -> None:
        self.moves.turn()
        self.fetches.move()
        for request_id, transfer in self.transfers.items():
            if transfer.room is None:
                continue
            if transfer.stopped:
                self._drain(request_id, transfer)
            elif self.steady or self.random.random() < 0.8:
                self._read(request_id, transfer)

    def _read(self, request_id: str, transfer: Transfer) -> None:
        room = transfer.room
        assert room is not None
        if transfer.over:
            return  # its source serves no more reads
        before = transfer.num_landed
        for offset, place in enumerate(places_of(room.hold)):
            index = room.first_index + offset
            if (
                index in transfer.published
                and index not in transfer.landed
                and (self.steady or self.random.random() < 0.5)
            ):
                source, content = transfer.published[index]
                assert block_at(self.p, source).tolist() == content, "a pinned block was written to"
                block_at(self.d, place).copy_(block_at(self.p, source))
                transfer.landed.add(index)
        if transfer.num_landed > before:
            self._post("d", Landed(request_id, transfer.num_landed))
        done = transfer.num_landed == len(room.hold)
        if (
            len(transfer.first_tokens) == transfer.n
            and not transfer.said_finished
            and len(transfer.published) >= len(room.hold)
        ):
            transfer.said_finished = True
            tokens = tuple(transfer.first_tokens[index] for index in range(transfer.n))
            self._post("d", SourceFinished(request_id, len(transfer.prompt) + len(transfer.output), tokens))
        if done and transfer.said_finished:
            self._return_room(request_id, transfer)
            self._end_source(transfer)
            self._post("p", Revoke(request_id))

    def _drain(self, request_id: str, transfer: Transfer) -> None:
        room = transfer.room
        assert room is not None
        for offset, place in enumerate(places_of(room.hold)):
            if room.first_index + offset not in transfer.landed:
                block_at(self.d, place).fill_(RUBBISH)
        if self.steady or self.random.random() < 0.2:
            self._return_room(request_id, transfer)
            self._end_source(transfer)
            self._post("p", Revoke(request_id))

    def _return_room(self, request_id: str, transfer: Transfer) -> None:
        assert transfer.room is not None
        hold, transfer.room = transfer.room.hold, None
        self._post("d", HoldReturned(request_id, hold))

    def _end_source(self, transfer: Transfer) -> None:
        transfer.over = True
        holds, transfer.source_holds = transfer.source_holds, []
        for hold in holds:
            self._post("p", HoldReturned("whoever", hold))

    def _post(self, engine: str, event: IntoEngine) -> None:
        self._mail[engine].append(event)
        if not self.steady and not isinstance(event, HoldReturned) and self.random.random() < 0.3:
            self._mail[engine].insert(self.random.randrange(len(self._mail[engine])) + 1, event)

    def _deliver(self) -> None:
        for name, harness in (("p", self.p), ("d", self.d)):
            mail = self._mail[name]
            for _ in range(len(mail) if self.steady else self.random.randint(0, len(mail))):
                harness.core.apply(mail.popleft())

    # ---- answers

    def _key(self, request_id: str, index: int) -> str:
        return self.p.key(request_id, index) if request_id in self.p.wide else self.d.key(request_id, index)

    def answer(self, request_id: str, index: int = 0) -> Answer:
        """The client's output of a sequence: the first token from P, the rest from D."""
        key = self._key(self.attempts.get(request_id, [request_id])[-1], index)
        first, rest = self.p.answers.get(key, Answer()), self.d.answers.get(key, Answer())
        return Answer(
            first_position=first.first_position,
            token_ids=first.token_ids + rest.token_ids,
            finish_reason=rest.finish_reason,
            error_code=rest.error_code,
        )
