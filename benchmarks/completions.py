"""`stream_completion`: streams one answer of an OpenAI completions endpoint, with the time of each message."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Completion:
    """One answer. Times are `time.perf_counter()` seconds."""

    sent_s: float
    message_s: list[float] = field(default_factory=list)
    """When each message with a choice came."""
    token_ids: list[int] = field(default_factory=list)
    """Empty unless `return_token_ids` was asked for."""
    num_prompt_tokens: int = 0
    """This and the next are 0 unless usage was asked for."""
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.message_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two messages."""
        return [after - before for before, after in zip(self.message_s, self.message_s[1:], strict=False)]


def completion_body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A greedy request for exactly `max_tokens` tokens, with their ids and usage."""
    return {
        "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip


async def stream_completion(
    http: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    on_message: Callable[[Completion], None] = lambda completion: None,
) -> Completion:
    """Send one request and read its whole answer.

    url: of the endpoint. on_message: called after each message with a choice. Raises: httpx.HTTPStatusError; RuntimeError for an
    error in the stream and for an answer without a message.
    """
    completion = Completion(time.perf_counter())
    async with http.stream("POST", url, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"an answer ended with an error: {event['error']}")
            for choice in event["choices"]:
                completion.token_ids += choice.get("token_ids") or []
            if event["choices"]:
                completion.message_s.append(now)
                on_message(completion)
            if usage := event.get("usage"):
                completion.num_prompt_tokens = usage["prompt_tokens"]
                completion.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not completion.message_s:
        raise RuntimeError("a request had no answer")
    return completion
