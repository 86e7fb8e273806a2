"""`RankLoop`: a rank above 0, which repeats the calls of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.common.errors import PeerError
from pdserve.engine.ranks.rank_messages import ExecuteModel, NewEngine, ReadRuns, SampleTokens, ToRank, WarmUp
from pdserve.engine.runner.model_runner import ModelRunner, PendingOutput
from pdserve.engine.scheduler_output import GrammarOutput


class RankLoop:
    """Reads the tokens of a step when rank 0 does, so that both queue the same work on their devices."""

    def __init__(self, make_runner: Callable[[], ModelRunner]) -> None:
        """make_runner: a runner with an empty batch over the rank's pool."""
        self._make_runner = make_runner
        self.runner = make_runner()
        self._unread: PendingOutput | None = None

    def serve(self, message: ToRank) -> None:
        """Raises: the error of a step, after which rank 0 cannot go on."""
        match message:
            case ExecuteModel(scheduled, reads_first):
                if reads_first:
                    self._read()
                self.runner.execute_model(scheduled)
            case SampleTokens(late_req_ids):
                self._read()
                grammar = None if late_req_ids is None else GrammarOutput(late_req_ids=late_req_ids)
                self._unread = self.runner.sample_tokens(grammar)
            case ReadRuns(num_tokens):
                self._read(num_tokens)
            case WarmUp():
                self._read()
                self.runner.capture_graphs()
            case NewEngine():
                self._unread = None
                self.runner = self._make_runner()
            case _:
                raise PeerError(f"{type(message).__name__} is no message to a rank that has started")

    def _read(self, num_tokens: Mapping[str, int] | None = None) -> None:
        """num_tokens: `ReadRuns.num_tokens`."""
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.result(num_tokens)
