"""`StructuredOutputManager`: sequences whose grammar is being compiled.

Parked sequences cost a step little: it checks whether a result has arrived, the oldest one's deadline, and the
few that waited long for their turn.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.common.errors import InvalidRequest, Overloaded, PdServeError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.request import Request, Wait
from pdserve.engine.scheduler_output import GrammarOutput
from pdserve.engine.structured_outputs.grammar import Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_host import GrammarHosts

MASK_WAIT_S = 0.02
"""Seconds that a step waits for masks; sequences without one by then get their token in a later step."""
Arrived = tuple[Request, Grammar | PdServeError]


@dataclass(slots=True)
class _Compilation:
    """One grammar's way through the compiler; `time.monotonic()` seconds."""

    turn_by: float
    began_at: float | None = None
    """Set by the thread that compiles it."""

    def begins(self) -> None:
        self.began_at = time.monotonic()


class StructuredOutputManager:
    """The scheduler's side of `GrammarCompiler`.

    A grammar that takes longer than the timeout is the request's own fault. One that waits too long for its turn is not: then
    other grammars occupy the compiler, and another worker may be faster.
    """

    def __init__(self, compiler: GrammarCompiler | None, timeout_s: float) -> None:
        """compiler: None where there is no tokenizer, and `verify` lets no grammar in.

        timeout_s: for one grammar to get its turn, and again for it to be compiled.
        """
        self._compiler = compiler
        self.hosts = GrammarHosts() if compiler is None else compiler.hosts
        """The processes in which compiled grammars are."""
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[Request, _Compilation] = OrderedDict()
        """Waiting for their turn, in order of arrival, which is that of their deadlines."""
        self._compiling: dict[Request, _Compilation] = {}
        """Those whose turn came before that deadline."""
        self._first_tokens: dict[Request, Sequence[int]] = {}
        """First tokens of those whose KV landed before their grammar was compiled."""
        self.num_landed = 0
        """Sequences of these: they hold blocks and will need further ones."""
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._something_arrived = threading.Event()
        self.on_arrival: Callable[[], None] | None = None
        """Called by another thread when there is something to `take`."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._compiling)

    @property
    def is_possible(self) -> bool:
        """True if grammars can be compiled here at all."""
        return self._compiler is not None

    def start(self, request: Request) -> None:
        """Compile the grammar of a sequence that has just arrived."""
        params = request.sampling_params.structured_outputs
        if params is None or self._compiler is None:
            raise RuntimeError(f"{request.request_id} waits for a grammar that nobody can make")
        compilation = self._waiting[request] = _Compilation(time.monotonic() + self._timeout_s)
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

    def grammar_output(self, requests: Iterable[Request]) -> GrammarOutput:
        """Masks of the next token of sequences that have a grammar, after a wait of at most `MASK_WAIT_S` for all together."""
        output, until = GrammarOutput(), time.monotonic() + MASK_WAIT_S
        for request in requests:
            mask = None if request.grammar is None else request.grammar.allowed(until)
            if mask is None:
                output.late_req_ids.append(request.request_id)
            else:
                output.structured_output_request_ids.append(request.request_id)
                output.grammar_bitmask.append(mask.tobytes())
        return output

    def close(self) -> None:
        """End what compiles and holds grammars; waits."""
        if self._compiler is not None:
            self._compiler.close()

    def take(self) -> list[Arrived]:
        """Results since the last call for sequences that still wait, and the failure of those that waited too long."""
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
        return taken + self._overdue(time.monotonic())

    def _overdue(self, now: float) -> list[Arrived]:
        overdue: list[Arrived] = []
        if self._compiler is not None and self._compiler.is_starting:
            # compiling cannot begin yet, and another worker would not be faster
            for compilation in self._waiting.values():
                compilation.turn_by = now + self._timeout_s
        while self._waiting and next(iter(self._waiting.values())).turn_by <= now:
            request, compilation = self._waiting.popitem(last=False)
            if compilation.began_at is None:
                error = f"{FIELD} waited {self._timeout_s:g} s for its turn: this worker compiles others"
                overdue.append((request, Overloaded(error)))
            else:
                self._compiling[request] = compilation
        for request, compilation in list(self._compiling.items()):
            if compilation.began_at is not None and compilation.began_at + self._timeout_s <= now:
                del self._compiling[request]
                error = f"{FIELD} could not be compiled within {self._timeout_s:g} s"
                overdue.append((request, InvalidRequest(error, FIELD)))
        return overdue

    def _stop_waiting(self, request: Request) -> bool:
        """True if it waited."""
        waiting = self._waiting.pop(request, None)
        return (self._compiling.pop(request, None) or waiting) is not None

    def wait(self, timeout_s: float) -> None:
        """Block until a result arrives, for a caller without other work."""
        self._something_arrived.wait(timeout_s)

    def hold(self, request: Request, first_tokens: Sequence[int]) -> None:
        """The KV has landed; keep the source's first tokens until the grammar is compiled."""
        self._first_tokens[request] = first_tokens
        self.num_landed += request.num_sequences

    def first_tokens(self, request: Request) -> Sequence[int] | None:
        """The tokens that `hold` kept, once."""
        first_tokens = self._first_tokens.pop(request, None)
        if first_tokens is not None:
            self.num_landed -= request.num_sequences
        return first_tokens

    def forget(self, request: Request) -> None:
        """The sequence has ended. Harmless when it is not here."""
        self._stop_waiting(request)
        self.first_tokens(request)
