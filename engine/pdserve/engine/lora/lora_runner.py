"""`LoraRunner`: loads the adapters of a step and sets which rows of the layers have which."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pdserve.common.errors import NotFound, PdServeError
from pdserve.engine.arrays import IntArray
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.engine.scheduler_output import LoraLoad, RequestFailure
from pdserve.kernels.rank_group import RankGroup
from pdserve.models.lora.lora_targets import LoraWeights

log = logging.getLogger(__name__)


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
        """Fill slots; returns fingerprint -> error of those that could not be loaded, whose slots then hold nothing.

        All ranks that share a model take part.
        """

    def with_folders(self, loads: Sequence[LoraLoad]) -> list[LoraLoad]:
        """The same for the other ranks, which have no folders."""

    def set_rows(self, slots: IntArray, counts: IntArray) -> bool:
        """Prepare the next forward pass. slots `[S]`: of each row, -1 for none; counts `[S]`: tokens of each row, single ones
        first. Returns True if a row has an adapter."""

    def set_any_rows(self) -> bool:
        """Prepare captures of forward passes. See `LoraOps.set_any_rows`."""


class ModelLoraRunner:
    """The adapters of a decoder with `LoraTargets`."""

    def __init__(self, store: AdapterStore, group: RankGroup | None = None) -> None:
        """group: the ranks that share the model; None for one."""
        self.store = store
        self._targets = store.targets
        self._group = group

    def load(self, loads: Sequence[LoraLoad]) -> dict[str, RequestFailure]:
        failed = {}
        for load in loads:
            weights, failure = self._read(load)
            if self._group is not None and not self._group.minimum(failure is None) and failure is None:
                # a text of which some ranks have the adapter would be nobody's
                weights = {}
                failure = RequestFailure.of(
                    NotFound(
                        f"the adapter with the fingerprint {load.fingerprint} cannot be read by another rank of the model"
                    )
                )
            self._targets.put(load.slot, weights)
            if failure is not None:
                failed[load.fingerprint] = failure
        return failed

    def _read(self, load: LoraLoad) -> tuple[LoraWeights, RequestFailure | None]:
        try:
            return self.store.get(load.fingerprint, Path(load.folder) if load.folder else None).weights, None
        except PdServeError as error:
            if load.folder:
                log.warning("cannot read the adapter with the fingerprint %s: %s", load.fingerprint, error.message)
            return {}, RequestFailure.of(error)

    def with_folders(self, loads: Sequence[LoraLoad]) -> list[LoraLoad]:
        return [
            LoraLoad(load.slot, load.fingerprint, str(self.store.folder_of(load.fingerprint) or "")) for load in loads
        ]

    def set_rows(self, slots: IntArray, counts: IntArray) -> bool:
        return self._targets.ops.set_rows(slots, counts)

    def set_any_rows(self) -> bool:
        return self._targets.ops.set_any_rows()
