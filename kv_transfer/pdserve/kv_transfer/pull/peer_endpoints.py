"""`PeerEndpoints`: the endpoints of each worker's current epoch, so that what is kept for them can be dropped when it is over."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_WORKERS = 256


@dataclass(slots=True)
class _Life:
    epoch: int
    ways: dict[str, bytes] = field(default_factory=dict)


class PeerEndpoints:
    """The worker that was read from longest ago is forgotten when there are too many. Not thread-safe."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, _Life] = OrderedDict()

    def reached(self, worker_id: str, epoch: int, connector: str, metadata: bytes) -> dict[str, bytes]:
        """This epoch is read from at this endpoint. Returns the endpoints, by connector, of another epoch that it ends."""
        ended = self.begun(worker_id, epoch)
        life = self._lives.setdefault(worker_id, _Life(epoch))
        life.ways[connector] = metadata
        self._lives.move_to_end(worker_id)
        if len(self._lives) > MAX_WORKERS:
            self._lives.popitem(last=False)
        return ended

    def begun(self, worker_id: str, epoch: int) -> dict[str, bytes]:
        """This epoch has started: any other of this worker is over. Returns that one's endpoints."""
        life = self._lives.get(worker_id)
        return {} if life is None or life.epoch == epoch else self._lives.pop(worker_id).ways

    def lost(self, worker_id: str, epoch: int) -> dict[str, bytes]:
        """The peer no longer responds. Returns its endpoints."""
        life = self._lives.get(worker_id)
        return self._lives.pop(worker_id).ways if life is not None and life.epoch == epoch else {}
