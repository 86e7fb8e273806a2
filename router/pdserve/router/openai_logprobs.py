"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from pdserve.text.output_processor import CompletionOutput, Logprob

LEAST_LOGPROB = -9999.0
"""Stands for everything below it: JSON has no infinity."""


def chat_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Of a chat choice: the sampled token and the `num_top` most likely, best first."""
    content = []
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=True):
        top = [_chat_entry(candidate) for candidate in most_likely(candidates, num_top)]
        content.append(_chat_entry(candidates[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Of a completion's choice: up to `num_top` + 1 candidates a token, because the sampled one is always there."""
    sampled, top = [], []
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=True):
        sampled.append(candidates[token_id])
        named: dict[str, float] = {}
        for candidate in (candidates[token_id], *most_likely(candidates, num_top)):
            # pieces of characters all look the same; the likelier one counts
            named.setdefault(candidate.decoded_token, _finite(candidate.logprob))
        top.append(named)
    return {
        "tokens": [candidate.decoded_token for candidate in sampled],
        "token_logprobs": [_finite(candidate.logprob) for candidate in sampled],
        "top_logprobs": top,
        "text_offset": output.text_offsets or [],
    }


def most_likely(candidates: dict[int, Logprob], num_top: int) -> list[Logprob]:
    """Best first; the sampled token only if it is one of them."""
    return sorted((c for c in candidates.values() if c.rank <= num_top), key=lambda candidate: candidate.rank)


def _chat_entry(candidate: Logprob) -> dict[str, Any]:
    return {
        "token": candidate.decoded_token,
        "logprob": _finite(candidate.logprob),
        "bytes": list(candidate.decoded_bytes),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
