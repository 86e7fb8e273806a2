"""`CopiedBlocks`: what an engine's executor copies to the host-memory tier and back, by shape of blocks."""

from __future__ import annotations

from collections import Counter

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.engine.sequence_blocks import BlockCounts


class CopiedBlocks:
    """Counts the copies of one engine from now on."""

    def __init__(self, core: EngineCore) -> None:
        self._num_shapes = core.scheduler.pool.num_shapes
        self._stored, self._loaded = Counter[int](), Counter[int]()
        copy = core.executor.copy_blocks

        def counted(scheduled: SchedulerOutput) -> DeviceEvent | None:
            for counts, copies in ((self._stored, [scheduled.kv_stores]), (self._loaded, scheduled.kv_loads.values())):
                for by_shape in copies:
                    counts.update({shape: len(pairs) for shape, pairs in enumerate(by_shape)})
            return copy(scheduled)

        core.executor.copy_blocks = counted  # type: ignore[method-assign]

    @property
    def stored(self) -> BlockCounts:
        """Blocks copied into the tier."""
        return tuple(self._stored[shape] for shape in range(self._num_shapes))

    @property
    def loaded(self) -> BlockCounts:
        """Blocks copied back."""
        return tuple(self._loaded[shape] for shape in range(self._num_shapes))
