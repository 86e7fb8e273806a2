"""A batch through an engine that the caller's thread steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.output_stream import engine_error


class BatchItem(Protocol):
    """A request that processes its own outputs."""

    @property
    def core(self) -> EngineCoreRequest: ...

    @property
    def finished(self) -> bool:
        """True if nothing more is wanted; true at the latest with the engine's last output."""

    def process(self, output: EngineCoreOutput) -> object: ...

    def ended_here(self, output: EngineCoreOutput) -> bool:
        """True if a stop string has ended the output's sequence, which the engine does not know."""


R = TypeVar("R", bound=BatchItem)
GRAMMAR_POLL_S = 0.05
"""While only grammars are awaited: how often to look at their deadlines."""


def run_batch(core: EngineCore, requests: Sequence[R], on_finished: Callable[[R], None]) -> None:
    """Step until every request has ended.

    Raises: InvalidRequest for one that the engine does not take, before any is added; the error with which it ended one.
    """
    for request in requests:
        core.verify(request.core)
    unfinished = {request.core.request_id: request for request in requests}
    for request in requests:
        core.add_request(request.core)
    while unfinished:
        if not core.has_work:
            raise InternalError(f"the engine has nothing to do, but {len(unfinished)} requests have not ended")
        core.wait_for_grammar(GRAMMAR_POLL_S)
        for output in core.step().outputs:
            asked = unfinished.get(output.request_id)
            if asked is None:
                continue  # the last output of a request that a stop string has ended
            if output.error_code:
                raise engine_error(output)
            asked.process(output)
            if asked.ended_here(output):
                core.end_sequence(output.request_id, output.index)
            if asked.finished:
                del unfinished[output.request_id]
                on_finished(asked)
