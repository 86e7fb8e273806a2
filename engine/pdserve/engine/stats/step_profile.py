"""`StepProfile`: the stages of an engine's steps, as sums, and as lines of the log where a setting asks for them."""

from __future__ import annotations

import logging

from pdserve.common import clock
from pdserve.common.request.engine_types import ModelRunnerStats

log = logging.getLogger(__name__)


class StepProfile:
    """Seconds of the steps since the start. Used by the engine's thread."""

    def __init__(self, interval_s: float = 0.0, max_steps: int = 0) -> None:
        """interval_s: least seconds between two lines of the log; 0: a single line, after `max_steps`.

        max_steps: steps after which nothing is logged any more; 0: no limit. With both 0 nothing is logged.
        """
        self.scheduling_s = 0.0
        self.update_s = 0.0
        """From a step's result to its outputs."""
        self.num_steps = 0
        """Steps that computed something."""
        self.num_tokens = 0
        """Tokens of these steps."""
        self._interval_s = interval_s
        self._num_left = max_steps
        self._lines: _Lines | None = _Lines() if interval_s or max_steps else None

    def add(self, scheduling_s: float, update_s: float, computed: ModelRunnerStats) -> None:
        """Count one step, and log the mean of the last ones when that is due."""
        self.scheduling_s += scheduling_s
        self.update_s += update_s
        self.num_steps += 1
        self.num_tokens += computed.num_tokens
        if (lines := self._lines) is None:
            return
        lines.add(scheduling_s, update_s, computed)
        self._num_left -= 1
        is_last = self._num_left == 0
        if is_last or (self._interval_s and clock.monotonic() - lines.since >= self._interval_s):
            lines.write()
        if is_last:
            self._lines = None

    def forget(self) -> None:
        """Set the sums to 0; lines of the log go on."""
        self.scheduling_s = self.update_s = 0.0
        self.num_steps = self.num_tokens = 0


class _Lines:
    """Sums since the last line of the log."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.since = clock.monotonic()
        self._num_steps = self._num_reqs = self._num_tokens = 0
        self._stages_s = dict.fromkeys(("schedule", "inputs", "forward", "sample", "update"), 0.0)
        self._layers_s: list[float] = []

    def add(self, scheduling_s: float, update_s: float, computed: ModelRunnerStats) -> None:
        self._num_steps += 1
        self._num_reqs += computed.num_reqs
        self._num_tokens += computed.num_tokens
        seconds = (scheduling_s, computed.prepare_s, computed.forward_s, computed.sample_s, update_s)
        for stage, stage_s in zip(self._stages_s, seconds, strict=True):
            self._stages_s[stage] += stage_s
        if computed.layer_s:
            before = self._layers_s or [0.0] * len(computed.layer_s)
            self._layers_s = [one + other for one, other in zip(before, computed.layer_s, strict=True)]

    def write(self) -> None:
        """Log the means per step, then begin again."""
        num = self._num_steps
        stages = ", ".join(f"{stage} {1000 * stage_s / num:.3f}" for stage, stage_s in self._stages_s.items())
        layers = "; layers " + " ".join(f"{1000 * layer_s / num:.3f}" for layer_s in self._layers_s)
        log.info(
            "%d steps in %.1f s, per step: %.1f sequences, %.1f tokens, %.3f ms: %s%s",
            num, clock.monotonic() - self.since, self._num_reqs / num, self._num_tokens / num,
            1000 * sum(self._stages_s.values()) / num, stages, layers if self._layers_s else "",
        )  # fmt: skip
        self._clear()
