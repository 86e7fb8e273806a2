"""`StructuredOutputManager`: sequences that wait for their grammar to be compiled.

A step costs little for them: it checks whether a result has arrived, the deadline of the oldest, and the few that have waited long
for compilation to begin.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.common import clock
from pdserve.common.errors import GrammarUnavailable, Overloaded, PdServeError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.request import Request, Wait
from pdserve.engine.scheduler_output import GrammarOutput
from pdserve.engine.structured_outputs.grammar import Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import START_S, GrammarCompiler
from pdserve.engine.structured_outputs.grammar_host import GrammarHosts
from pdserve.engine.structured_outputs.grammar_messages import WAIT_FACTOR

MASK_WAIT_S = 0.02
"""Seconds for which a step waits for masks; sequences without a mask by then get their token in a later step."""
Arrived = tuple[Request, Grammar | PdServeError]


@dataclass(slots=True)
class _Compilation:
    """Times of one grammar's compilation, `clock.monotonic()` seconds."""

    arrived_at: float
    turn_by: float
    began_at: float | None = None
    """Set by the thread that compiles it."""

    def begins(self) -> None:
        self.began_at = clock.monotonic()


class StructuredOutputManager:
    """The scheduler's side of `GrammarCompiler`.

    If compilation does not begin within the timeout, other grammars occupy the compiler; if it does not end within `WAIT_FACTOR`
    times the timeout, or the compiler is not there within `START_S`, others occupy the processors. These errors allow another
    attempt. A grammar that uses more CPU time than the timeout ends with `InvalidRequest`, which the compiler delivers.
    """

    def __init__(self, compiler: GrammarCompiler | None, timeout_s: float) -> None:
        """compiler: None without a tokenizer; `EngineCore.verify` then refuses grammars.

        timeout_s: limit until compilation begins, and of its CPU time.
        """
        self._compiler = compiler
        self.hosts = GrammarHosts() if compiler is None else compiler.hosts
        """The processes of compiled grammars."""
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[Request, _Compilation] = OrderedDict()
        """Requests whose compilation has not begun, in order of arrival and so of deadlines."""
        self._compiling: dict[Request, _Compilation] = {}
        """Requests whose compilation has begun."""
        self._first_tokens: dict[Request, Sequence[int]] = {}
        """First tokens of requests whose KV landed before their grammar was compiled."""
        self.num_landed = 0
        """Number of sequences of those requests; they hold blocks and will need further ones."""
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._something_arrived = threading.Event()
        self.on_arrival: Callable[[], None] | None = None
        """Called by another thread when there is a result to `take`."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._compiling)

    @property
    def is_possible(self) -> bool:
        """True if there is a compiler."""
        return self._compiler is not None

    def start(self, request: Request) -> None:
        """Compile the grammar of a sequence that has just arrived."""
        params = request.sampling_params.structured_outputs
        if params is None or self._compiler is None:
            raise RuntimeError(f"{request.request_id} waits for a grammar, but there is no compiler")
        now = clock.monotonic()
        compilation = self._waiting[request] = _Compilation(now, now + self._timeout_s)
        self._compiler.submit(
            GrammarJob(
                params,
                request.core.eos_token_ids,
                tuple(request.token_ids[request.num_prompt_tokens :]),
                is_wanted=lambda: Wait.GRAMMAR in request.waits_for and not request.status.is_finished,
                begins=compilation.begins,
                deliver=lambda grammar: self._deliver((request, grammar)),
                tenant=request.core.tenant,
            )
        )

    def _deliver(self, arrived: Arrived) -> None:
        self._arrived.put(arrived)
        self._something_arrived.set()
        if self.on_arrival is not None:
            self.on_arrival()

    def grammar_output(self, requests: Iterable[Request], num_drafts: Callable[[str], int]) -> GrammarOutput:
        """Masks of the next token of sequences with a grammar, and of the tokens after their drafts; waits at most `MASK_WAIT_S`
        for all together.

        num_drafts: req_id -> drafts that the step computes. The first draft without a mask after it is the last that may be
        confirmed.
        """
        output, until = GrammarOutput(), clock.monotonic() + MASK_WAIT_S
        masks: dict[str, tuple[Grammar, NDArray[np.uint8]]] = {}
        for request in requests:
            mask = None if request.grammar is None else request.grammar.allowed(until)
            if request.grammar is None or mask is None:
                output.late_req_ids.append(request.request_id)
            else:
                masks[request.request_id] = request.grammar, mask
        # drafts after all first masks: no sequence is late because another one has drafts
        for req_id, (grammar, mask) in masks.items():
            known = [mask]
            for number in range(1, num_drafts(req_id) + 1):
                if (behind := grammar.allowed(until, number)) is None:
                    break
                known.append(behind)
            output.structured_output_request_ids += [req_id] * len(known)
            output.grammar_bitmask += [each.tobytes() for each in known]
        return output

    def close(self) -> None:
        """End the compiler and its processes, and wait for their end."""
        if self._compiler is not None:
            self._compiler.close()

    def take(self) -> list[Arrived]:
        """Results since the last call for sequences that still wait, and errors for sequences that waited too long."""
        if not self and self._arrived.empty():
            return []
        self._something_arrived.clear()
        taken: list[Arrived] = []
        while not self._arrived.empty():
            request, grammar = self._arrived.get()
            if self._stop_waiting(request):
                taken.append((request, grammar))
            elif not isinstance(grammar, PdServeError):
                grammar.close()
        return taken + self._overdue(clock.monotonic())

    def _overdue(self, now: float) -> list[Arrived]:
        overdue: list[Arrived] = []
        is_starting = self._compiler is not None and self._compiler.is_starting
        if is_starting:
            # another worker would not be faster, but no request waits for ever
            for compilation in self._waiting.values():
                compilation.turn_by = min(now + self._timeout_s, compilation.arrived_at + START_S)
        while self._waiting and next(iter(self._waiting.values())).turn_by <= now:
            request, compilation = self._waiting.popitem(last=False)
            if compilation.began_at is not None:
                self._compiling[request] = compilation
            elif is_starting:
                waited_s = now - compilation.arrived_at
                error = f"the process that compiles {FIELD} was not ready within {waited_s:.0f} s"
                overdue.append((request, GrammarUnavailable(error)))
            else:
                error = f"{FIELD} waited {self._timeout_s:g} s for its turn: this worker compiles others"
                overdue.append((request, Overloaded(error)))
        for request, compilation in list(self._compiling.items()):
            if compilation.began_at is not None and compilation.began_at + WAIT_FACTOR * self._timeout_s <= now:
                del self._compiling[request]
                error = f"{FIELD} was not compiled within {WAIT_FACTOR * self._timeout_s:g} s, for lack of CPU time"
                overdue.append((request, GrammarUnavailable(error)))
        return overdue

    def _stop_waiting(self, request: Request) -> bool:
        """Remove a request; True if it waited."""
        waiting = self._waiting.pop(request, None)
        return (self._compiling.pop(request, None) or waiting) is not None

    def wait(self, timeout_s: float) -> None:
        """Block until a result arrives, for callers without other work."""
        self._something_arrived.wait(timeout_s)

    def hold(self, request: Request, first_tokens: Sequence[int]) -> None:
        """Keep the source's first tokens of a request whose KV has landed, until its grammar is compiled."""
        self._first_tokens[request] = first_tokens
        self.num_landed += request.num_sequences

    def first_tokens(self, request: Request) -> Sequence[int] | None:
        """The tokens that `hold` kept, once."""
        first_tokens = self._first_tokens.pop(request, None)
        if first_tokens is not None:
            self.num_landed -= request.num_sequences
        return first_tokens

    def forget(self, request: Request) -> None:
        """Remove an ended sequence; no effect if it does not wait."""
        self._stop_waiting(request)
        self.first_tokens(request)
