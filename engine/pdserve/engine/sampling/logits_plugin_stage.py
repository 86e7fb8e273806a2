"""The sampler's stage of plug-ins: each runs once per step over all rows that request it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.common.errors import InternalError, LogitsProcessorFailed
from pdserve.common.request.sampling_params import NamedLogitsProcessor
from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.logits_processors import LogitsProcessor, LogitsProcessors, LogitsRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessorCall:
    """One plug-in, and the rows of the logits that request it at this place of their lists."""

    name: str
    processor: LogitsProcessor
    places: list[int]
    rows: list[LogitsRow]

    def run(self, logits: Tensor, failed: dict[int, InternalError]) -> None:
        """logits `[N, V]`; changed in place. failed: index -> cause; rows in it are skipped, and others may be added."""
        turn = [(place, row) for place, row in zip(self.places, self.rows, strict=True) if place not in failed]
        if not turn:
            return
        places, rows = [place for place, _ in turn], [row for _, row in turn]
        index = torch.tensor(places).to(logits.device)
        before = logits[index]
        after = before.clone()
        try:
            self.processor.apply(after, rows)
        except Exception as error:
            if len(rows) > 1:
                # run each row by itself to find the rows that fail
                for place, row in turn:
                    ProcessorCall(self.name, self.processor, [place], [row]).run(logits, failed)
                return
            log.exception("logits processor %s failed", self.name)
            failed[places[0]] = LogitsProcessorFailed(
                f"logits processor {self.name!r} failed with {type(error).__name__}; the worker's log has the traceback"
            )
            return
        after.masked_fill_(before.isneginf(), -torch.inf)
        broken = after.isnan().any(-1).cpu().numpy()
        for place in np.array(places)[broken].tolist():
            failed[place] = LogitsProcessorFailed(f"logits processor {self.name!r} made a logit that is NaN")
        logits[index] = torch.where(after.isnan(), before, after)


@dataclass(frozen=True, slots=True)
class LogitsProcessorStage:
    """The plug-ins of one step's rows, in the order in which each row names them."""

    calls: list[ProcessorCall]

    def apply(self, logits: Tensor) -> dict[int, InternalError]:
        """logits `[N, V]`; changed in place. Returns row -> error that ends its request."""
        failed: dict[int, InternalError] = {}
        for turn in self.calls:
            turn.run(logits, failed)
        return failed


class PluginTable:
    """The plug-ins of the sequences in the batch, by row."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self._processors = processors
        self._asked: dict[int, Sequence[NamedLogitsProcessor]] = {}

    def add(self, row: int, asked: Sequence[NamedLogitsProcessor]) -> None:
        if asked:
            self._asked[row] = asked

    def remove(self, row: int) -> None:
        """Forget a row; no effect if it has no plug-ins."""
        self._asked.pop(row, None)

    def of_step(
        self, rows: IntArray, lengths: IntArray, token_ids: IntArray, num_prompt: IntArray
    ) -> LogitsProcessorStage | None:
        """For logits whose row i is the batch's row `rows[i]` after `lengths[i]` tokens.

        token_ids, num_prompt: the batch's, by its rows.
        """
        if not self._asked:
            return None
        calls: dict[tuple[int, str], ProcessorCall] = {}
        for place, row in enumerate(rows.tolist()):
            for turn, one in enumerate(self._asked.get(row, ())):
                if (turn, one.name) not in calls:
                    calls[turn, one.name] = ProcessorCall(one.name, self._processors[one.name], [], [])
                prompt, output = token_ids[row, : num_prompt[row]], token_ids[row, num_prompt[row] : lengths[place]]
                prompt.flags.writeable = output.flags.writeable = False
                calls[turn, one.name].places.append(place)
                calls[turn, one.name].rows.append(LogitsRow(one.args, prompt, output))
        return LogitsProcessorStage([calls[key] for key in sorted(calls)]) if calls else None
