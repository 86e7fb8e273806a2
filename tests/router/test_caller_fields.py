"""Lengths of the fields that describe the caller, on every path that takes them."""

from __future__ import annotations

from typing import Any

import pytest

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
LONG = {
    "user": ("user", "u" * 65, "user has 65 characters, at most 64 are allowed"),
    "prompt_cache_key": ("prompt_cache_key", "é" * 65, "prompt_cache_key has 65 characters, at most 64 are allowed"),
    "safety_identifier": ("safety_identifier", "s" * 10_000, "safety_identifier has 10000 characters, at most 64"),
    "metadata key": ("metadata", {"a": "b", "k" * 65: "v"}, "metadata has a key of 65 characters, at most 64"),
    "metadata value": ("metadata", {"k": "v" * 513}, "metadata.k has 513 characters, at most 512 are allowed"),
}
LONGEST = {
    "user": "é" * 64,
    "prompt_cache_key": "p" * 64,
    "safety_identifier": "s" * 64,
    "metadata": {"k" * 64: "v" * 512},
}


async def test_the_longest_are_accepted_and_longer_ones_refused(cluster: Any) -> None:
    await cluster.start(prefill=0, decode=1)
    for path, body in BODIES.items():
        answer = await cluster.http.post(path, json=body | LONGEST)
        assert answer.status_code == 200, answer.text
        for field, value, told in LONG.values():
            answer = await cluster.http.post(path, json=body | {field: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), (path, field)
            assert error["message"].startswith(told)
            assert len(error["message"]) < 300


@pytest.mark.parametrize("length", [64, 65])
async def test_of_embeddings(cluster: Any, length: int) -> None:
    await cluster.start(prefill=1, decode=1)
    answer = await cluster.http.post("/v1/embeddings", json={"input": "hi", "user": "u" * length})
    assert (answer.json().get("error") or {"param": None})["param"] == ("user" if length == 65 else None)
