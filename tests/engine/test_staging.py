"""Arrays of a step travel in one copy, and keep shape, dtype and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.runner.device.device_runtime import ProcessorRuntime, TimedEvent
from pdserve.engine.runner.device.staging_buffer import ReadbackBuffer, StagingBuffer
from pdserve.engine.runner.inputs.block_table import BlockTable
from pdserve.engine.runner.inputs.device_batch import DeviceBlockTable, NewestTokens
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.pretend_device import DEVICE, host_copy, pretended_device

CPU = torch.device("cpu")
ARRAYS: list[NDArray[Any]] = [
    np.arange(7, dtype=np.int64),
    np.zeros(0, np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5),
    np.arange(11, dtype=np.uint8),
    np.array([-(2**63), 2**63 - 1]),
]


@dataclass
class LateEvent:
    """Reached when it is awaited."""

    log: list[str]
    name: str

    def synchronize(self) -> None:
        self.log.append(f"await {self.name}")

    def seconds_since(self, earlier: TimedEvent) -> float:
        return 0.0


@dataclass
class LateRuntime(ProcessorRuntime):
    log: list[str] = field(default_factory=list)
    num_events: int = 0

    def event(self) -> Any:
        self.num_events += 1
        return LateEvent(self.log, str(self.num_events))

    def host_memory(self, num_bytes: int) -> Tensor:
        self.log.append("memory")
        return super().host_memory(num_bytes)


def test_arrays_arrive_as_they_left() -> None:
    with pretended_device():
        for device in (CPU, DEVICE):
            staging = StagingBuffer(device, ProcessorRuntime())
            readback = ReadbackBuffer(device, ProcessorRuntime())
            for arrays in (ARRAYS[:2], ARRAYS, ARRAYS[::-1]):
                there = staging.upload(arrays)
                assert all(tensor.device == device for tensor in there)
                back = readback.start(there).wait()
                for array, tensor, returned in zip(arrays, there, back, strict=True):
                    assert (returned.dtype, returned.shape) == (array.dtype, array.shape)
                    np.testing.assert_array_equal(host_copy(tensor).numpy(), array)
                    np.testing.assert_array_equal(returned, array)


def test_memory_is_written_again_only_after_its_copy() -> None:
    """Two host buffers in turn: the third upload waits for the copy of the first, the fourth for that of the second."""
    runtime = LateRuntime()
    with pretended_device():
        staging = StagingBuffer(DEVICE, runtime)
        for _ in range(4):
            staging.upload(ARRAYS)
        assert runtime.log == ["memory", "memory", "await 1", "await 2"]
        runtime.log.clear()
        # one that needs more room, and smaller ones that find it
        for size in (1 << 20, 5, 1 << 20):
            staging.upload([np.zeros(size)])
        assert runtime.log == ["await 3", "memory", "await 4", "await 5"]


def test_a_result_is_read_before_its_memory_is_used_again() -> None:
    runtime = LateRuntime()
    with pretended_device():
        readback = ReadbackBuffer(DEVICE, runtime)
        there = [torch.arange(3.0).to(DEVICE)]
        first, second = readback.start(there), readback.start([there[0] + 1])
        assert first.wait()[0].tolist() == [0, 1, 2]
        assert second.wait()[0].tolist() == [1, 2, 3]
        assert runtime.log == ["memory", "memory", "await 1", "await 2"]


def test_a_block_table_on_the_device_follows_its_changes() -> None:
    host, random = BlockTable(6, 9, 4), np.random.default_rng(2)
    host.keep_changes()
    with pretended_device():
        there = DeviceBlockTable(6, 9, 4, DEVICE)
        num_blocks = np.zeros(6, np.int64)
        for _ in range(40):
            for row in random.permutation(6)[:3].tolist():
                if num_blocks[row] > 6:
                    host.clear(row)
                    num_blocks[row] = 0
                count = int(random.integers(0, 3))
                host.append(row, random.integers(0, 100, count).tolist())
                num_blocks[row] += count
            there.put(*(torch.from_numpy(array).to(DEVICE) for array in host.take_changes()))
            rows = np.flatnonzero(num_blocks)
            seq_lens = num_blocks[rows] * 4 - random.integers(0, 4, len(rows))
            found = there.of_step(
                torch.from_numpy(rows).to(DEVICE), torch.from_numpy(seq_lens).to(DEVICE), int(seq_lens.max())
            )
            np.testing.assert_array_equal(host_copy(found).numpy(), host.of_step(rows, seq_lens))


def test_unknown_tokens_are_the_newest_of_their_rows() -> None:
    newest = NewestTokens(5, CPU)
    newest.put(torch.tensor([4, 1]), torch.tensor([44, 11]))
    filled = newest.fill(torch.tensor([-1, 7, -1, 0]), torch.tensor([1, 1, 4, 2]))
    assert filled.tolist() == [11, 7, 44, 0]


def test_the_time_of_a_step_is_the_devices(make_engine: MakeEngine) -> None:
    """Between its own events, whatever the host does meanwhile."""

    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def synchronize(self) -> None:
            waited.append(self.at)

        def seconds_since(self, earlier: Any) -> float:
            # events of a device are reached in their order
            assert self.at <= max(waited)
            return float(self.at - earlier.at)

    class Runtime(ProcessorRuntime):
        now = 0.0

        def event(self) -> Any:
            self.now += 5
            return Event(self.now)

    waited: list[float] = []
    engine = make_engine(max_num_batched_tokens=4)
    engine.runner._runtime = Runtime()
    engine.add([1] * 10, params={"max_tokens": 3})
    for step in range(1, 6):
        engine.step()
        # three chunks of the prompt, then steps without prompt tokens
        assert engine.scheduler.prefill_s == 20.0 * min(step, 3)
