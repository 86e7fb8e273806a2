"""The test's end of `pausing_worker.py`: name a phase, wait until a worker has come to it, let it go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.run.waiting import eventually

from .cluster_processes import Cluster, Service


@dataclass
class PhasePauses:
    """One pause at a time, in whichever worker of the cluster comes first to the phase."""

    folder: Path
    """A folder of these pauses alone, shared with the workers; made here if it is missing."""

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)

    @property
    def worker_program(self) -> Sequence[str]:
        """The program that stands for `pdserve` where a worker is started."""
        return (str(Path(__file__).with_name("pausing_worker.py")), str(self.folder))

    def arm(self, phase: str) -> None:
        """Let the next worker that comes to `phase` pause there."""
        for path in self.folder.iterdir():
            path.unlink()
        (self.folder / "armed.new").write_text(phase)
        (self.folder / "armed.new").rename(self.folder / "armed")

    async def reached(self, cluster: Cluster) -> Service:
        """Wait for the worker that pauses."""
        return await eventually(lambda: self._pausing(cluster), "a worker comes to this phase")

    async def reached_unless(self, cluster: Cluster, is_over: Callable[[], bool]) -> Service | None:
        """Wait for the worker that pauses, or until `is_over` returns true. Returns: None if no worker pauses."""
        await eventually(lambda: is_over() or self._pausing(cluster), "a worker comes to this phase")
        return self._pausing(cluster)

    def _pausing(self, cluster: Cluster) -> Service | None:
        for path in self.folder.glob("reached.*"):
            pid = int(path.suffix[1:])
            pids = {pid, psutil.Process(pid).ppid()}  # an engine's process belongs to its worker
            return next(service for service in cluster.services.values() if service.process.pid in pids)
        return None

    def go_on(self) -> None:
        """End the pause, and let no other worker begin one."""
        (self.folder / "armed").unlink(missing_ok=True)
        (self.folder / "go").touch()
