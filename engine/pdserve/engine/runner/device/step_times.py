"""`StepTimes`: points of one step in the device's work, and the `ModelRunnerStats` that they give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from pdserve.common.request.engine_types import ModelRunnerStats
from pdserve.engine.runner.device.device_runtime import DeviceRuntime, TimedEvent


class LayerTimes:
    """In place of `before_layer`: calls it, and records the point at which each layer of a step begins."""

    def __init__(self, runtime: DeviceRuntime, before_layer: Callable[[], None] | None) -> None:
        self._runtime = runtime
        self._before_layer = before_layer
        self._begun: list[TimedEvent] = []

    def __call__(self) -> None:
        if self._before_layer is not None:
            self._before_layer()
        self._begun.append(self._runtime.event())

    def take(self) -> list[TimedEvent]:
        """The points since the last call."""
        begun, self._begun = self._begun, []
        return begun


class StepTimes:
    """Made when a step begins; then `prepared`, `forwarded`, `sampling` and `ended` are set, in this order."""

    __slots__ = ("_layers", "ended", "forwarded", "num_reqs", "num_tokens", "prepared", "sampling", "started")

    def __init__(self, started: TimedEvent, num_reqs: int, num_tokens: int) -> None:
        self.started = self.prepared = self.forwarded = self.sampling = self.ended = started
        self.num_reqs = num_reqs
        self.num_tokens = num_tokens
        self._layers: list[TimedEvent] = []

    def add_layers(self, begun: list[TimedEvent]) -> None:
        """begun: the point at which each layer begins."""
        self._layers = begun

    def stats(self) -> ModelRunnerStats:
        """The stages' seconds, of the device; `ended` must have been reached."""
        layers = [*self._layers, self.forwarded] if self._layers else []
        return ModelRunnerStats(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            prepare_s=self.prepared.seconds_since(self.started),
            forward_s=self.forwarded.seconds_since(self.prepared),
            sample_s=self.ended.seconds_since(self.sampling),
            layer_s=[end.seconds_since(begin) for begin, end in pairwise(layers)],
        )
