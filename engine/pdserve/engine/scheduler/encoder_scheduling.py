"""`EncoderScheduling`: the images that a step encodes, and how many tokens of a sequence a step can compute with them.

A chunk ends before an image whose encoder output has no room, in the cache or in the step. A sequence within an image keeps its
output, so it needs no further room to leave the image: sequences never wait for each other in a circle. The prompt of a model with
an encoder is computed in one step, as it has room for it.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.engine.config import EncoderConfig
from pdserve.engine.request import Request
from pdserve.engine.scheduler.encoder_cache_manager import EncoderCacheManager


class EncoderPlan(NamedTuple):
    """A chunk of a sequence with its images."""

    num_tokens: int
    """Tokens that can be computed; 0: the sequence waits for room."""
    cached: tuple[MultiModalFeatureSpec, ...] = ()
    new: tuple[MultiModalFeatureSpec, ...] = ()


class EncoderScheduling:
    """One scheduler's. `plan` takes nothing; `commit` follows when the chunk has its blocks."""

    def __init__(self, config: EncoderConfig | None) -> None:
        """config: None for a model without images."""
        self.cache = EncoderCacheManager(0 if config is None else config.encoder_cache_size)
        self._max_input_tokens = 0 if config is None else config.max_num_encoder_input_tokens
        self._budget = self._max_input_tokens
        self.has_refused = False
        """True if a chunk of the last full schedule ended before an image without room."""

    def begin_step(self) -> None:
        """Give the step its whole budget of image tokens to encode."""
        self._budget = self._max_input_tokens
        self.has_refused = False

    def plan(self, request: Request, num_computed: int, num_tokens: int) -> EncoderPlan:
        """The chunk of at most `num_tokens` tokens from `num_computed` on."""
        encoder_prompt = request.core.encoder_prompt
        if encoder_prompt is not None:
            # each token of an encoder's prompt depends on all others: they are computed in one step
            is_whole = num_computed == 0 and num_tokens >= encoder_prompt.num_slots
            is_refused = num_computed < encoder_prompt.num_slots and not is_whole
            self.has_refused |= is_refused
            return EncoderPlan(0 if is_refused else num_tokens)
        if not request.core.mm_features:
            return EncoderPlan(num_tokens)
        budget, room = self._budget, self.cache.num_freeable_slots
        cached: dict[str, MultiModalFeatureSpec] = {}
        new: dict[str, MultiModalFeatureSpec] = {}
        for feature in request.core.mm_features:
            position, identifier = feature.mm_position, feature.identifier
            if position.offset >= num_computed + num_tokens:
                break
            if position.end <= num_computed or identifier in cached or identifier in new:
                continue
            is_cached = self.cache.has(identifier)
            # what is freeable takes room as soon as it is referenced
            size = self.cache.freeable.get(identifier, 0) if is_cached else position.length
            if size > room or (not is_cached and size > budget):
                num_tokens = max(0, position.offset - num_computed)
                self.has_refused = True
                break
            room -= size
            if is_cached:
                cached[identifier] = feature
            else:
                budget -= size
                new[identifier] = feature
        return EncoderPlan(num_tokens, tuple(cached.values()), tuple(new.values()))

    def commit(self, request: Request, plan: EncoderPlan) -> None:
        """Reference the chunk's outputs for the sequence, and encode those that are missing."""
        for feature in plan.cached:
            self.cache.reference(request.request_id, feature.identifier)
        for feature in plan.new:
            self._budget -= feature.mm_position.length
            self.cache.allocate(request.request_id, feature)

    def take_changes(self) -> tuple[list[MultiModalFeatureSpec], list[str]]:
        """As `EncoderCacheManager.take_changes`."""
        return self.cache.take_changes()

    def computed(self, request: Request) -> None:
        """Drop references to images of which all tokens have been computed."""
        for feature in request.core.mm_features:
            if feature.mm_position.end <= request.num_computed_tokens:
                self.cache.free_encoder_input(request.request_id, feature.identifier)

    def free(self, request: Request) -> None:
        """Drop all references of a sequence that leaves the batch."""
        for feature in request.core.mm_features:
            self.cache.free_encoder_input(request.request_id, feature.identifier)
