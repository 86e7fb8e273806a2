"""Conversations with vLLM's servers, which are in memory here, and figures of skewed rounds."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from load import ASK_PREFILL
from metric_values import metrics
from multi_turn import NUM_TURNS, OUTPUT_TOKENS, Served, Vllm, converse
from rebalance import Figures


class Servers:
    """Two of each role. Decode names its blocks at the end of each answer, as vLLM does with `bidirectional_kv_xfer`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/metrics":
            page = '# HELP\nvllm:time_to_first_token_seconds_sum{a="b"} 1.5\nvllm:time_to_first_token_seconds_count{a="b"} 3\n'
            return httpx.Response(200, text=page)
        body = json.loads(request.content)
        self.asked.append((host, body))
        usage = {"prompt_tokens_details": {"cached_tokens": 32}}
        known = {"remote_request_id": f"{host} {len(self.asked)}"}
        choice = {"text": "a", "token_ids": [7] * body["max_tokens"]}
        return httpx.Response(200, json={"choices": [choice], "usage": usage, "kv_transfer_params": known})


def target(both_ways: bool) -> Vllm:
    return Vllm(["http://p0", "http://p1"], ["http://d0", "http://d1"], [], both_ways=both_ways)


@pytest.mark.parametrize("both_ways", [False, True])
async def test_a_turn_names_the_blocks_that_decode_has(both_ways: bool) -> None:
    servers, served = Servers(), Served()
    async with httpx.AsyncClient(transport=httpx.MockTransport(servers)) as http:
        await converse(http, target(both_ways), 1, 1000, 0.0, served)
    assert [host for host, _ in servers.asked] == ["p1", "d1"] * NUM_TURNS
    prefill, decode = servers.asked[::2], servers.asked[1::2]
    assert {body["max_tokens"] for _, body in prefill} == {1}
    assert {body["max_tokens"] for _, body in decode} == {OUTPUT_TOKENS}
    given = [body["kv_transfer_params"] for _, body in prefill]
    assert given[0] == ASK_PREFILL
    later = [{"remote_request_id": f"d1 {2 * turn}"} for turn in range(1, NUM_TURNS)]
    assert given[1:] == (later if both_ways else [ASK_PREFILL] * (NUM_TURNS - 1))
    assert [body["kv_transfer_params"] for _, body in decode] == [
        {"remote_request_id": f"p1 {2 * turn + 1}"} for turn in range(NUM_TURNS)
    ]
    assert served.computed == sum(len(body["prompt"]) - 32 for _, body in prefill[1:])


async def test_what_decode_measured_is_read_from_all_of_its_servers() -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(Servers())) as http:
        assert await target(True).decode_ttft_s(http) == (3.0, 6.0)
        assert (await metrics(http, "http://d0/metrics"))['vllm:time_to_first_token_seconds_count{a="b"}'] == 3.0


def test_quantiles_of_skewed_rounds_are_medians_of_rounds() -> None:
    rounds = [[n / 1e3 for n in range(101)], [2 * n / 1e3 for n in range(101)], [3 * n / 1e3 for n in range(101)]]
    text = str(Figures(rounds, [1.0, 2.0, 4.0]))
    for part in ("p50 100.00 ms", "p99 198.00 [99.00, 297.00]", "longest  300.0", "after 2.00 s"):
        assert part in text
