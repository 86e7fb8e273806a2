"""`EncoderCacheManager`: which images' encoder outputs the runner keeps, with sizes in tokens. The names are vLLM's.

An output is *referenced* by the running sequences that still compute tokens of its image, or *freeable*: kept until its room is
needed for another output; the least recently used is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict

from pdserve.common.request.multimodal import MultiModalFeatureSpec


class EncoderCacheManager:
    """Decides what is kept. The runner applies `take_changes`: it drops outputs first, then encodes images."""

    def __init__(self, cache_size: int) -> None:
        """cache_size: tokens."""
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        """Unused capacity, in tokens."""
        self.cached: dict[str, set[str]] = {}
        """Identifier -> ids of the requests that reference it."""
        self.freeable: OrderedDict[str, int] = OrderedDict()
        """Identifier -> tokens, for unreferenced outputs, least recently used first."""
        self.num_encoded = 0
        """Images encoded since the start."""
        self._sizes: dict[str, int] = {}
        self._to_encode: dict[str, MultiModalFeatureSpec] = {}
        self._freed: list[str] = []

    @property
    def num_freeable_slots(self) -> int:
        """Capacity that is unused or held by freeable outputs, in tokens."""
        return self.num_free_slots + sum(self.freeable.values())

    def has(self, identifier: str) -> bool:
        return identifier in self.cached

    def reference(self, request_id: str, identifier: str) -> None:
        """Keep a cached output for a request."""
        self.cached[identifier].add(request_id)
        self.freeable.pop(identifier, None)

    def allocate(self, request_id: str, feature: MultiModalFeatureSpec) -> None:
        """Schedule an image to be encoded for a request. There must be room: see `num_freeable_slots`."""
        size = feature.mm_position.length
        while self.num_free_slots < size:
            identifier, freed = self.freeable.popitem(last=False)
            self.num_free_slots += freed
            self._forget(identifier)
        self.num_free_slots -= size
        self.cached[feature.identifier] = {request_id}
        self._sizes[feature.identifier] = size
        self._to_encode[feature.identifier] = feature

    def free_encoder_input(self, request_id: str, identifier: str) -> None:
        """Drop a request's reference; no effect without one."""
        holders = self.cached.get(identifier)
        if holders is None or request_id not in holders:
            return
        holders.discard(request_id)
        if not holders:
            self.freeable[identifier] = self._sizes[identifier]

    def _forget(self, identifier: str) -> None:
        del self.cached[identifier], self._sizes[identifier]
        if self._to_encode.pop(identifier, None) is None:
            self._freed.append(identifier)

    def take_changes(self) -> tuple[list[MultiModalFeatureSpec], list[str]]:
        """(images to encode, identifiers to drop first). Call only for a step with tokens; until then, changes accumulate."""
        changes = list(self._to_encode.values()), self._freed
        self.num_encoded += len(self._to_encode)
        self._to_encode, self._freed = {}, []
        return changes

    def check(self, *, idle: bool) -> None:
        """Check the counts. idle: no output may be referenced. Raises: RuntimeError."""
        used = sum(self._sizes.values())
        unreferenced = {identifier for identifier, holders in self.cached.items() if not holders}
        if used + self.num_free_slots != self.cache_size or self._sizes.keys() != self.cached.keys():
            raise RuntimeError(f"encoder cache: {used} tokens used, {self.num_free_slots} free of {self.cache_size}")
        if unreferenced != self.freeable.keys():
            raise RuntimeError(
                f"encoder cache: freeable: {list(self.freeable)}, but unreferenced: {sorted(unreferenced)}"
            )
        if idle and len(unreferenced) != len(self.cached):
            raise RuntimeError(f"encoder cache: referenced while idle: {sorted(self.cached.keys() - unreferenced)}")
