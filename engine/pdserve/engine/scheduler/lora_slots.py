"""`LoraSlots`: the slots of the device and the adapters in them.

An adapter without a running sequence gives way to another one, the least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from pdserve.engine.scheduler_output import LoraLoad

NO_SLOT = -1


class LoraSlots:
    """Slots of one engine; adapters are named by their fingerprints, "" is none."""

    def __init__(self, max_loras: int) -> None:
        self._free = list(range(max_loras - 1, -1, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()
        """Fingerprint -> slot, least recently used first."""
        self._running: Counter[str] = Counter()
        """Fingerprint -> running sequences; none has 0."""
        self._loads: dict[int, str] = {}
        """Slot -> adapter that no step has loaded yet."""
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def loaded(self) -> list[str]:
        """Adapters that have a slot."""
        return list(self._slots)

    def fits(self, fingerprint: str) -> bool:
        """True if a sequence with this adapter may run together with the running ones."""
        return not fingerprint or fingerprint in self._slots or bool(self._free) or self._idle() is not None

    def enter(self, fingerprint: str) -> None:
        """Note that a sequence runs; its adapter gets a slot. Raises: RuntimeError if it does not fit."""
        if not fingerprint:
            return
        if fingerprint not in self._slots:
            self._slots[fingerprint] = self._take()
            self._loads[self._slots[fingerprint]] = fingerprint
            self.num_loads += 1
        self._slots.move_to_end(fingerprint)
        self._running[fingerprint] += 1

    def leave(self, fingerprint: str) -> None:
        """Note that a sequence runs no more. Its adapter keeps the slot until another needs it."""
        if fingerprint:
            self._running[fingerprint] -= 1
            if not self._running[fingerprint]:
                del self._running[fingerprint]

    def slot(self, fingerprint: str) -> int:
        """The slot of a running sequence's adapter; `NO_SLOT` for none."""
        return self._slots.get(fingerprint, NO_SLOT)

    def forget(self, fingerprint: str) -> None:
        """Note that an adapter could not be loaded; no sequence with it runs."""
        if (slot := self._slots.pop(fingerprint, None)) is not None:
            self._free.append(slot)

    def take_loads(self) -> list[LoraLoad]:
        """Adapters that got a slot since the last call."""
        loads, self._loads = self._loads, {}
        return [LoraLoad(slot, fingerprint) for slot, fingerprint in loads.items()]

    def _idle(self) -> str | None:
        """The least recently used adapter without a running sequence."""
        return next((fingerprint for fingerprint in self._slots if fingerprint not in self._running), None)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        idle = self._idle()
        if idle is None:
            raise RuntimeError("an adapter entered although every slot is in use")
        self.num_evictions += 1
        return self._slots.pop(idle)
