"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.text.outputs.request_output import CompletionOutput, Logprob

LEAST_LOGPROB = -9999.0
"""Replaces lower values, because JSON has no infinity."""


def chat_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Log-probabilities of a chat choice: the sampled token and the `num_top` most likely, best first."""
    content = []
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=True):
        top = [_chat_entry(candidate) for candidate in most_likely(candidates, num_top)]
        content.append(_chat_entry(candidates[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any]:
    """Log-probabilities of a completion's choice: up to `num_top` + 1 candidates per token, the sampled one included."""
    sampled, top = [], []
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=True):
        sampled.append(candidates[token_id])
        top.append(named_candidates(token_id, candidates, num_top))
    return {
        "tokens": [candidate.decoded_token for candidate in sampled],
        "token_logprobs": [finite(candidate.logprob) for candidate in sampled],
        "top_logprobs": top,
        "text_offset": output.text_offsets or [],
    }


def named_candidates(token_id: int, candidates: dict[int, Logprob], num_top: int) -> dict[str, float]:
    """Text -> log-probability, of the sampled token and the most likely ones."""
    named: dict[str, float] = {}
    for candidate in (candidates[token_id], *most_likely(candidates, num_top)):
        # incomplete characters have the same text; the most likely one is kept
        named.setdefault(candidate.decoded_token, finite(candidate.logprob))
    return named


def named_by_ids(candidates: dict[int, Logprob]) -> dict[int, Logprob]:
    """Candidates of one position with `token_id:N` in place of their texts, by which tokens with equal texts differ."""
    return {
        token_id: msgspec.structs.replace(candidate, decoded_token=f"token_id:{token_id}")
        for token_id, candidate in candidates.items()
    }


def prompt_logprobs(output: CompletionOutput, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token its candidates by token id, None for the first."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for place, (token_id, candidate) in enumerate(candidates.items())
            if place == 0 or candidate.rank <= num_top
        }
        for candidates in output.prompt_logprobs or ()
    ]


def most_likely(candidates: dict[int, Logprob], num_top: int) -> list[Logprob]:
    """Best first; the sampled token only if it is one of them."""
    return sorted((c for c in candidates.values() if c.rank <= num_top), key=lambda candidate: candidate.rank)


def _chat_entry(candidate: Logprob) -> dict[str, Any]:
    return {
        "token": candidate.decoded_token,
        "logprob": finite(candidate.logprob),
        "bytes": list(candidate.decoded_bytes),
    }


def finite(logprob: float) -> float:
    """The value, or the lowest one that JSON output uses."""
    return max(logprob, LEAST_LOGPROB)
