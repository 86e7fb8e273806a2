"""`Request`: one sequence in the engine, a small state machine whose fields cannot disagree."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from typing import TYPE_CHECKING

from pdserve.common import clock
from pdserve.common.request.cached_tokens import NOTHING_CACHED, CachedTokens
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    StreamingUpdate,
)

if TYPE_CHECKING:
    from pdserve.engine.structured_outputs.grammar import Grammar

_arrivals = itertools.count()


class RequestStatus(enum.Enum):
    """vLLM's states; `LEGAL_MOVES` lists the legal transitions."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self in FINISHED


FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))

LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: FINISHED | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS},
    RequestStatus.WAITING_FOR_FSM: FINISHED | {RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING},
    RequestStatus.WAITING_FOR_REMOTE_KVS: FINISHED | {RequestStatus.WAITING, RequestStatus.PREEMPTED},
    RequestStatus.WAITING_FOR_STREAMING_REQ: FINISHED | {RequestStatus.WAITING_FOR_FSM, RequestStatus.WAITING},
    RequestStatus.RUNNING: FINISHED | {RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_STREAMING_REQ},
    RequestStatus.PREEMPTED: FINISHED | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS},
    **{status: frozenset() for status in FINISHED},
}

FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class IllegalMove(RuntimeError):
    """A status change that is not in `LEGAL_MOVES`: a bug in the engine, never a peer's doing."""


class Wait(enum.Enum):
    """Conditions that a request may wait for before it can be scheduled; the status names the first pending one in this order."""

    GRAMMAR = enum.auto()
    REMOTE_KV = enum.auto()
    """Blocks from another worker."""
    OFFER = enum.auto()
    """What another worker's prefix cache has of the prompt."""
    LOOKUP = enum.auto()
    """What a store that workers share has of it."""

    @property
    def status(self) -> RequestStatus:
        return RequestStatus.WAITING_FOR_FSM if self is Wait.GRAMMAR else RequestStatus.WAITING_FOR_REMOTE_KVS


class Request:
    """One sequence. Only the engine thread touches it."""

    def __init__(self, core: EngineCoreRequest) -> None:
        self.core = core
        self.request_id = core.request_id
        """Unique in this engine; outputs name the request by `core.request_id` and the sequence by `index`."""
        self.index = core.index
        self.ended_elsewhere: set[int] = set()
        """Before the fork: indexes of sequences that their reader has ended, by a stop string."""
        self.migrations: dict[int, bool] = {}
        """Index -> without a draft head: of the sequences that another worker continues after their next token."""
        self.sampling_params = core.sampling_params
        self.priority = core.priority
        """Lower runs first; 0 for all if the policy is first come, first served."""
        self.token_ids = [*core.prompt_token_ids, *core.output_token_ids]
        """Prompt, then output, including output of earlier attempts."""
        self.num_prompt_tokens = len(core.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)
        """Tokens of the prompt and of output of earlier attempts, computed or received before the first new token."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in this engine's pool, without scheduled or announced ones."""
        self.num_cached_tokens = -1
        """Given tokens found in the prefix cache or received, at first admission; -1 before it. Outputs say 0 then."""
        self._cached_tokens = NOTHING_CACHED
        """The same by source."""
        self.spec_token_ids: list[int] = []
        """Drafts of the tokens after the last known one."""
        self.block_hashes = list(core.block_hashes)
        """Hashes of full blocks, prompt first; grows as output fills blocks."""
        self.waits_for: set[Wait] = {Wait.REMOTE_KV} if core.remote_prefill else set()
        if self.sampling_params.structured_outputs is not None:
            self.waits_for.add(Wait.GRAMMAR)
        if core.block_source is not None:
            self.waits_for.add(Wait.OFFER)
        self.num_offered_blocks = 0
        """Full blocks from its first that another worker has offered; 0 once they are received, or will not come."""
        self.grammar: Grammar | None = None
        """State of the grammar after the last output token, once it is compiled; kept through preemptions."""
        self.status = self._first_status()
        self.stop_reason: int | None = None
        self.wanted_from: int | None = core.wanted_from
        """Source side: index of the first block that the receiver requests; None before `Want`."""
        self.num_settled_blocks = 0
        """Source side: blocks given to the transfer so far, counted from block 0."""
        self.num_overtaken = 0
        """Number of later arrivals that got blocks while this one was first in its queue."""
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        """Drafts that were computed."""
        self.num_accepted_tokens = 0
        """Drafts that equalled the sampled token."""
        self.has_emitted = False
        """True if an output of this sequence, or of a session's turn, has left the engine."""
        self.moments: dict[str, float] = {"queued": core.arrival_time or clock.monotonic()}
        self._orders_by_time = False
        self.arrival = self._arrive()
        """Order of arrival: by time where `order_by_time` was called, and then in this engine."""
        self.events = [EngineCoreEvent(EngineCoreEventType.QUEUED, self.moments["queued"])]
        """Events since its last output."""
        self.prompt_logprobs: LogprobsLists | None = None
        """Log-probabilities of the prompt tokens computed so far, if requested; None after the first output took them."""
        self.prefill_chunks: list[tuple[float, int]] = []
        """(`clock.monotonic()` seconds, tokens) of each computed chunk of the prompt."""
        self.streaming_queue: deque[StreamingUpdate | None] = deque()
        """A session's further turns, which arrived before the turn had ended; None: the session ends then."""
        self.num_turns = 0
        """Turns of a session before this one."""
        self.num_tokens_before = 0
        """Tokens of those turns."""

    def _first_status(self) -> RequestStatus:
        for wait in Wait:
            if wait in self.waits_for:
                return wait.status
        return RequestStatus.WAITING

    def order_by_time(self) -> None:
        """Compare it with others by the time at which it arrived at the front end. Called before it enters a queue."""
        self._orders_by_time = True
        self.arrival = self._arrive()

    def _arrive(self) -> tuple[float, int]:
        return self.moments["queued"] if self._orders_by_time else 0.0, next(_arrivals)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """`num_cached_tokens` for outputs: 0 before admission, and with an encoder at most the prompt's tokens that it reads."""
        cached, encoder = max(0, self.num_cached_tokens), self.core.encoder_prompt
        if encoder is None:
            return cached
        return max(0, cached - encoder.num_slots) if encoder.is_audio else min(cached, encoder.num_tokens)

    @property
    def cached_prompt_tokens(self) -> CachedTokens:
        """`num_cached_prompt_tokens` by source."""
        return self._cached_tokens.first(self.num_cached_prompt_tokens)

    def found_cached(self, tokens: CachedTokens) -> None:
        """Note what is cached of its given tokens, at its admission; what of it does not come is found again."""
        self._cached_tokens, self.num_cached_tokens = tokens, tokens.total

    @property
    def num_found_in_pool(self) -> int:
        """Given tokens that the prefix cache had at its admission."""
        return self._cached_tokens.pool

    def lacks_pixels(self, num_computed: int) -> bool:
        """True if the tokens from `num_computed` on are in part an image's whose pixels, or sound whose samples are not here."""
        features = self.core.mm_features
        return any(not feature.data and feature.mm_position.end > num_computed for feature in features)

    @property
    def computes_one_token(self) -> bool:
        """True if only its last token is to be computed, without grammar, drafts or images: as in most steps."""
        if len(self.token_ids) - self.num_computed_tokens != 1 or self.grammar is not None:
            return False
        return not self.spec_token_ids and not self.core.mm_features

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def lacks_prompt(self) -> bool:
        """True if a part of the prompt is still to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if every token must be computed here, even if it is cached."""
        pooling = self.core.pooling_params
        return self.collects_prompt_logprobs or (pooling is not None and not pooling.reads_prefix_cache)

    @property
    def collects_prompt_logprobs(self) -> bool:
        """True if prompt log-probabilities are requested and no other worker computes the prompt."""
        if self.sampling_params.prompt_logprobs is None or self.core.remote_prefill or self.core.output_token_ids:
            return False
        return not self.num_output_tokens

    def add_prompt_logprobs(self, of_chunk: LogprobsLists) -> None:
        """Add the log-probabilities of a computed chunk, before `num_computed_tokens` includes it; the first chunk replaces all.

        Those of a session's earlier turns are dropped.
        """
        first = max(1, self.num_tokens_before)
        known = self.prompt_logprobs if self.num_computed_tokens >= first else None
        of_chunk = of_chunk.part(max(0, first - (self.num_computed_tokens + 1)))
        self.prompt_logprobs = of_chunk if known is None else known.followed_by(of_chunk)

    def take_prompt_logprobs(self) -> LogprobsLists | None:
        """The prompt log-probabilities so far, once."""
        whole, self.prompt_logprobs = self.prompt_logprobs, None
        return whole

    @property
    def num_sequences(self) -> int:
        """Number of sequences that this `Request` represents: the request's n until its prompt is computed, then 1."""
        return 1 if self.num_output_tokens else self.core.n

    def num_tokens_within(self, num_steps: int) -> int:
        """Tokens whose KV it has at most after so many steps of one token."""
        if self.core.transfer_source:
            return self.num_given_tokens
        end = self.num_prompt_tokens + self.sampling_params.output_limit - 1
        return min(self.num_tokens + num_steps, end)

    @property
    def migrates(self) -> bool:
        """True if another worker continues this sequence after its next token."""
        return bool(self.migrations) and self.num_sequences == 1 and self.index in self.migrations

    @property
    def num_forks(self) -> int:
        """Number of sequences that will be forked from this one in this engine."""
        return 0 if self.core.transfer_source else self.num_sequences - 1

    def fork(self) -> list[Request]:
        """Make the request's other sequences, at the end of the prompt like this one."""
        others = []
        for index in range(self.index + 1, self.index + self.core.n):
            other = Request(self.core)
            other.index = index
            other.priority = self.priority
            if self._orders_by_time:
                other.order_by_time()
            other.request_id = self.core.sequence_id(index)
            other.waits_for = set()
            other.grammar = None if self.grammar is None else self.grammar.fork()
            other.status = RequestStatus.WAITING
            other.num_computed_tokens = self.num_computed_tokens
            other.found_cached(self._cached_tokens)
            other.moments = dict(self.moments)
            other.prefill_chunks = self.prefill_chunks
            other.wanted_from = self.wanted_from
            other.migrations = self.migrations
            others.append(other)
        return others

    @property
    def is_unwanted_source(self) -> bool:
        """True for a transfer source without `Want`, which runs ahead and is preempted first."""
        return self.core.transfer_source and self.wanted_from is None

    @property
    def is_pinned_source(self) -> bool:
        """True for a transfer source with `Want`, which is never preempted: it needs only computation and the network to finish."""
        return self.core.transfer_source and self.wanted_from is not None

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; nothing else sets it. Raises: IllegalMove."""
        if status not in LEGAL_MOVES[self.status]:
            raise IllegalMove(f"{self.request_id}: {self.status.name} -> {status.name}")
        self.status = status

    def wait_for(self, wait: Wait) -> None:
        """Add a condition to a request that is in no queue."""
        self.waits_for.add(wait)
        status = self._first_status()
        if status is not self.status:
            self.move_to(status)

    def settle_wait(self, wait: Wait) -> None:
        """Remove a fulfilled condition; the status then names the next one, or is WAITING."""
        self.waits_for.discard(wait)
        status = self._first_status()
        if status is not self.status:
            self.move_to(status)

    def resume(self, update: StreamingUpdate) -> None:
        """Begin a session's next turn: its prompt becomes all tokens so far, followed by the new input."""
        self.sampling_params = update.sampling_params
        if self.sampling_params.structured_outputs is not None:
            self.waits_for.add(Wait.GRAMMAR)
        self.move_to(self._first_status())
        self.num_turns += 1
        self.num_tokens_before = len(self.token_ids)
        self.token_ids += update.prompt_token_ids
        self.spec_token_ids = []
        self.num_prompt_tokens = self.num_given_tokens = len(self.token_ids)
        self.moments = {"queued": update.arrival_time or clock.monotonic()}
        self.arrival = self._arrive()
        self.num_overtaken = 0
        self.stop_reason = self.prompt_logprobs = None
        self.num_cached_tokens, self._cached_tokens = -1, NOTHING_CACHED
        self.has_emitted = False
        self.prefill_chunks = []
        self.events.append(EngineCoreEvent(EngineCoreEventType.QUEUED, self.moments["queued"]))

    def mark(self, moment: str) -> None:
        """Record a moment, the first time only."""
        self.moments.setdefault(moment, clock.monotonic())

    def note(self, event: EngineCoreEventType) -> None:
        """Record an event of the scheduler with the current time."""
        self.events.append(EngineCoreEvent(event, clock.monotonic()))

    def take_events(self) -> list[EngineCoreEvent]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events

    def append_output(self, token_id: int, max_model_len: int) -> RequestStatus | None:
        """Add a sampled or received token. Returns the final status if it ends the sequence, else None.

        FINISHED_ERROR: the token does not fit the grammar, and was not added.
        """
        if self.grammar is not None and not self.grammar.accept(token_id):
            return RequestStatus.FINISHED_ERROR
        self.token_ids.append(token_id)
        self.spec_token_ids = []
        params = self.sampling_params
        if self.num_output_tokens >= params.min_tokens:
            if not params.ignore_eos and token_id in self.core.eos_token_ids:
                return RequestStatus.FINISHED_STOPPED
            if token_id in params.stop_token_ids:
                self.stop_reason = token_id
                return RequestStatus.FINISHED_STOPPED
        if self.grammar is not None and self.grammar.has_ended:
            return RequestStatus.FINISHED_STOPPED
        if self.num_output_tokens >= params.output_limit or self.num_tokens >= max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None
