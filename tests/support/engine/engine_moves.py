"""Sequences that move between two engines at chosen moments, as a router moves them, with failures at every moment of a move."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.common.request.engine_types import EngineCoreRequest, FinishReason
from pdserve.engine.scheduler.kv_messages import IntoEngine, Migrating, OutOfEngine, Revoke
from tests.support.engine.engine_fetches import Fetches
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.engine_migration import resumed

MAX_PARTS = 12
"""Of one sequence, so that none moves for ever."""
AGAIN = ("transfer_failed", "evicted")
"""Errors after which a router resumes a sequence."""


@dataclass
class Part:
    """What one engine says of a sequence after its first move."""

    engine: str
    request_id: str
    is_moved: bool
    """False: resumed, and computed here."""


@dataclass
class Journey:
    """One sequence that has moved, or is to."""

    core: EngineCoreRequest
    index: int
    first: Callable[[], Answer]
    """What was said before its first move."""
    parts: list[Part] = field(default_factory=list)
    resting: tuple[str, Migrating] | None = None
    """The engine where it has ended, while nobody continues it."""
    is_aborted: bool = False


class Moves:
    """All moves between two engines."""

    def __init__(
        self,
        engines: Mapping[str, Harness],
        fetches: Fetches,
        post: Callable[[str, IntoEngine], None],
        draw: random.Random,
    ) -> None:
        """engines: two, by name. fetches: move the blocks. post: sends an event to an engine."""
        self._engines = engines
        self._fetches = fetches
        self._post = post
        self._draw = draw
        self._journeys: dict[tuple[str, int], Journey] = {}
        """By the client's request and index."""
        self._of_part: dict[str, tuple[str, int]] = {}
        self.num_moved = 0
        """Sequences that said something where they came to."""
        self.num_resumed = 0

    def __len__(self) -> int:
        """Moves under way."""
        return sum(
            not journey.is_aborted and (journey.resting is not None or self._to_resume(journey))
            for journey in self._journeys.values()
        )

    def begin(self, engine: str, first: Callable[[str, int], Answer], original: Callable[[str], str]) -> None:
        """Ask an engine to let one of its sequences move. first: what was said of a request's sequence before any move. original:
        of an attempt's name, the client's."""
        here = self._engines[engine]
        able = [
            request
            for request in here.scheduler.requests.values()
            if not request.core.resumable
            and not request.core.transfer_source
            # the router would end an attempt that is evicted with all of its sequences
            and (request.core.n == 1 or here.config.max_local_prefill_tokens is None)
        ]
        if not able:
            return
        request = self._draw.choice(able)
        core = request.core
        index = request.index if request.num_sequences == 1 else self._draw.randrange(core.index, core.index + core.n)
        name = core.request_id
        if name in self._of_part:
            journey = self._journeys[self._of_part[name]]
            if len(journey.parts) >= MAX_PARTS:
                return
        else:
            client = original(name)
            known = self._journeys.get((client, index))
            if known is not None and (known.parts or known.resting):
                return
            self._journeys[client, index] = Journey(core, index, lambda: first(client, index))
            self._of_part[f"{name} {index}"] = client, index
        without = self._engines["p"].has_draft_head != self._engines["d"].has_draft_head
        here.scheduler.migrate(name, index, without_draft_head=without)

    def takes(self, engine: str, message: OutOfEngine) -> bool:
        """Handle a message of an engine; False if it is of no sequence that has ended to move."""
        if not isinstance(message, Migrating):
            return False
        core_id, index = message.core_request_id, message.index
        key = self._of_part.get(core_id) or self._of_part[f"{core_id} {index}"]
        journey = self._journeys[key]
        if journey.is_aborted:
            self._post(engine, Revoke(message.request_id))
            return True
        said = self._said(journey)
        migration, prompt = message.migration, journey.core.sent_prompt_token_ids
        assert migration.token_id == said[-1], f"{key} moves after another token"
        assert migration.num_sent_tokens == len(prompt) + len(said) - 1, f"{key} moves with another length"
        journey.resting = engine, message
        return True

    def _said(self, journey: Journey) -> list[int]:
        """The whole output, that of earlier attempts too."""
        parts = [token_id for part in journey.parts for token_id in self._answer(part).token_ids]
        return [*journey.core.output_token_ids, *journey.first().token_ids, *parts]

    def _answer(self, part: Part) -> Answer:
        return self._engines[part.engine].answers.get(part.request_id, Answer())

    def _to_resume(self, journey: Journey) -> bool:
        return bool(
            journey.parts and len(journey.parts) < MAX_PARTS and self._answer(journey.parts[-1]).error_code in AGAIN
        )

    def turn(self) -> None:
        """Some sequences go on: where they move to, or, if that failed, anywhere."""
        for key, journey in self._journeys.items():
            if journey.parts and (part := journey.parts[-1]).is_moved:
                answer = self._answer(part)
                if answer.error_code or answer.finish_reason is not None:
                    self._fetches.end_move(part.engine, part.request_id)
            if journey.is_aborted or self._draw.random() < 0.4:
                continue
            if journey.resting is not None:
                source, message = journey.resting
                [target] = [name for name in self._engines if name != source]
                if self._draw.random() < 0.1:  # its next worker is lost before it could begin
                    self._post(source, Revoke(message.request_id))
                    self._go_on(key, journey, target, None)
                else:
                    self._go_on(key, journey, target, message)
                journey.resting = None
            elif self._to_resume(journey):
                self._go_on(key, journey, self._draw.choice(list(self._engines)), None)

    def _go_on(self, key: tuple[str, int], journey: Journey, target: str, message: Migrating | None) -> None:
        """message: its blocks come from where it has ended; None: they are computed."""
        request_id, index = key
        name = f"{request_id}/{index}>{len(journey.parts) + 1}"
        engine, output = self._engines[target], self._said(journey)
        if message is not None:
            output.pop()
            self.num_moved += 1
        else:
            self.num_resumed += 1
        migration = None if message is None else message.migration
        request = resumed(engine, journey.core, name, index, output, migration)
        if message is not None:
            [source] = [other for other in self._engines if other != target]
            self._fetches.begin_move(target, source, name, message)
        journey.parts.append(Part(target, name, message is not None))
        self._of_part[name] = key
        engine.submit(request)

    def abort(self, request_id: str) -> None:
        """The client leaves."""
        for (client, _), journey in self._journeys.items():
            if client != request_id:
                continue
            journey.is_aborted = True
            if journey.resting is not None:
                source, message = journey.resting
                journey.resting = None
                self._post(source, Revoke(message.request_id))
            for part in journey.parts:
                self._engines[part.engine].core.abort_request(part.request_id)

    def ended(self, request_id: str, index: int) -> tuple[list[int], Answer] | None:
        """All that was said of a sequence that has moved, and its last answer; None if it has not."""
        journey = self._journeys.get((request_id, index))
        if journey is None:
            return None
        first = journey.first()
        if not journey.parts:
            is_cut = journey.is_aborted and first.finish_reason is None and not first.error_code
            return None if not is_cut else (first.token_ids, Answer(finish_reason=FinishReason.ABORT))
        last = self._answer(journey.parts[-1])
        if journey.is_aborted and last.finish_reason is None:
            last = Answer(finish_reason=FinishReason.ABORT)
        return self._said(journey)[len(journey.core.output_token_ids) :], last
