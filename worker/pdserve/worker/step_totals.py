"""`StepTotals`: sums over the steps of an engine, for `/metrics`."""

from __future__ import annotations

from pdserve.common.request.engine_types import ModelRunnerStats


class StepTotals:
    """Seconds since the start, by stage and by layer."""

    def __init__(self) -> None:
        self.stage_s = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        self.layer_s: list[float] = []
        """Empty unless `collect_layer_times` is set."""

    def add(self, step: ModelRunnerStats) -> None:
        """Count one step."""
        self.stage_s["prepare"] += step.prepare_s
        self.stage_s["forward"] += step.forward_s
        self.stage_s["sample"] += step.sample_s
        if step.layer_s:
            self.layer_s = self.layer_s or [0.0] * len(step.layer_s)
            for layer, layer_s in enumerate(step.layer_s):
                self.layer_s[layer] += layer_s
