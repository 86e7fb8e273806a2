"""`RecentPrompts`: what this router has served lately, so that the cached blocks of it can be read by another worker."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec

from pdserve.common import clock
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.tenants.client import CacheGroup

MAX_TOKENS = 4 << 20
"""Kept in all, of 4 bytes each; then the oldest prompts are forgotten."""
KEPT_S = 900.0
"""Seconds for which a prompt may come back with another turn."""


class RecentPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt with its answer, without what the client asked of it."""

    request: GenerationRequest
    """Without tokens."""
    cache: CacheGroup
    tokens: array[int]
    was_cached: bool
    """True if a part of the prompt was cached: it goes on where an earlier one ended."""
    ended_at: float
    """`clock.monotonic()`."""

    def first(self, num_tokens: int, deadline: float) -> GenerationRequest:
        """A request for its first tokens. deadline: as of `GenerationRequest`."""
        tokens = self.tokens[:num_tokens].tolist()
        return msgspec.structs.replace(self.request, prompt_token_ids=tokens, deadline=deadline)


class RecentPrompts:
    """One router's."""

    def __init__(self) -> None:
        self._kept: deque[RecentPrompt] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request: GenerationRequest, cache: CacheGroup, output: Sequence[int], *, was_cached: bool) -> None:
        """A request has been served. output: of one of its sequences."""
        if request.prompt_embeds is not None or request.mm_features:
            return  # their blocks are named by bytes that the router does not keep
        tokens = array("I", request.prompt_token_ids)
        tokens.extend(output)
        asked = msgspec.structs.replace(
            request,
            prompt_token_ids=[],
            output_token_ids=[],
            sampling_params=SamplingParams(max_tokens=1),
            n=1,
            index=0,
        )
        now = clock.monotonic()
        self._kept.append(RecentPrompt(asked, cache, tokens, was_cached, now))
        self.num_tokens += len(tokens)
        while self.num_tokens > MAX_TOKENS or self._kept[0].ended_at < now - KEPT_S:
            self.num_tokens -= len(self._kept.popleft().tokens)

    def best_first(self) -> list[RecentPrompt]:
        """Those that have been cached before, then the others; within both, the latest first."""
        since = clock.monotonic() - KEPT_S
        kept = [prompt for prompt in self._kept if prompt.ended_at >= since]
        return sorted(kept, key=lambda prompt: (not prompt.was_cached, -prompt.ended_at))
