"""`LoraRunner`: loads the adapters that a step needs, and tells the layers which rows have which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pdserve.common.errors import PdServeError
from pdserve.engine.arrays import IntArray
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.engine.scheduler_output import LoraLoad, RequestFailure


class Adapters(Protocol):
    """The adapters that an engine may use; an `AdapterStore`."""

    def add(self, folder: Path) -> str:
        """See `AdapterStore.add`."""

    def remove(self, folder: Path) -> None:
        """See `AdapterStore.remove`."""

    def has(self, fingerprint: str) -> bool:
        """See `AdapterStore.has`."""


class LoraRunner(Protocol):
    """Adapters of one model on one device, for the model runner."""

    @property
    def store(self) -> Adapters: ...

    def load(self, loads: Sequence[LoraLoad]) -> dict[str, RequestFailure]:
        """Fill slots; returns fingerprint -> error of those that could not be loaded, whose slots then hold nothing."""

    def set_rows(self, slots: IntArray, counts: IntArray) -> bool:
        """Prepare the next forward pass. slots `[S]`: of each row, -1 for none; counts `[S]`: tokens of each row, single ones
        first. Returns True if a row has an adapter."""

    def set_any_rows(self) -> bool:
        """Prepare captures of forward passes. See `LoraOps.set_any_rows`."""


class ModelLoraRunner:
    """The adapters of a decoder with `LoraTargets`."""

    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self._targets = store.targets

    def load(self, loads: Sequence[LoraLoad]) -> dict[str, RequestFailure]:
        failed = {}
        for load in loads:
            try:
                self._targets.put(load.slot, self.store.get(load.fingerprint).weights)
            except PdServeError as error:
                self._targets.put(load.slot, {})
                failed[load.fingerprint] = RequestFailure.of(error)
        return failed

    def set_rows(self, slots: IntArray, counts: IntArray) -> bool:
        return self._targets.ops.set_rows(slots, counts)

    def set_any_rows(self) -> bool:
        return self._targets.ops.set_any_rows()
