"""The replay of traces against a server in memory, and the cache that it is compared with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import completion_body, stream_completion
from infinite_cache import InfiniteCache
from trace_replay import Replayed, Sent, flags_of, read_sessions, replayed, summary

from pdserve.cli.bench.endpoints import Chunk, Prompt

WEKA = {
    "id": "t",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 640, "out": 50, "hash_ids": list(range(10)), "api_time": 1.0, "think_time": 0.0},
        {"t": 2.0, "type": "subagent", "agent_id": "a", "duration_ms": 4000, "requests": [
            {"t": 0.0, "in": 320, "out": 40, "hash_ids": [*range(4), 100], "api_time": 1.0},
        ]},
        {"t": 7.0, "in": 900, "out": 70, "hash_ids": list(range(14)), "api_time": 1.0, "think_time": 5.0},
        {"t": 9.0, "in": 1000, "out": 10, "hash_ids": list(range(15)), "api_time": 1.0, "think_time": 1.0},
    ],
}  # fmt: skip


# ---- the cache


def test_what_was_computed_need_not_be_computed_again() -> None:
    cache, text = InfiniteCache(16), list(range(100))
    assert cache.num_cached(text) == 0
    cache.add(text[:47])
    assert cache.num_cached(text) == 32, "the third block was not full"
    cache.add(text)
    assert cache.num_cached(text) == 96
    assert cache.num_cached(text[:96]) == 80, "the last token is computed, and its block with it"
    assert cache.num_cached(text[:97]) == 96
    assert cache.num_cached([1, *text[1:]]) == 0
    assert cache.num_cached([*text[:20], 0, *text[21:]]) == 16


# ---- answers


def events(*parts: object) -> bytes:
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


async def ask(content: bytes, status: int = 200) -> Any:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
    async with httpx.AsyncClient(transport=transport) as http:
        return await stream_completion(http, "http://server/v1/completions", completion_body([1, 2], 3))


async def test_an_answer_has_its_tokens_times_and_usage() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    answer = await ask(
        events(
            {"choices": [{"text": "a", "token_ids": [5]}]},
            {"choices": [{"text": "b", "token_ids": [6, 7]}]},
            {"choices": [], "usage": usage},
        )
    )
    assert answer.token_ids == [5, 6, 7]
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (20, 16)
    assert len(answer.message_s) == 2
    assert answer.ttft_s >= 0
    assert answer.gaps_s == [answer.message_s[1] - answer.message_s[0]]


async def test_no_answer_is_an_error_and_so_is_a_part_of_one() -> None:
    with pytest.raises(RuntimeError, match="no answer"):
        await ask(events())
    with pytest.raises(RuntimeError, match="worker lost"):
        await ask(events({"choices": [{"text": "a"}]}, {"error": {"message": "worker lost"}}))
    with pytest.raises(httpx.HTTPStatusError):
        await ask(b"{}", 503)


# ---- sessions


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_sessions_are_scaled_cut_and_copied(tmp_path: Path) -> None:
    file = write(tmp_path, "t.json", json.dumps(WEKA))
    [session] = read_sessions([file], 4, None, 1, max_tokens=260)
    assert [(each.input_tokens, each.output_tokens) for each in session.requests] == [
        (160, 12), (80, 10), (225, 18), (250, 2),
    ]  # fmt: skip
    [shorter] = read_sessions([file], 4, None, 1, max_tokens=250)
    assert len(list(shorter.requests)) == 3
    assert not read_sessions([file], 4, None, 1, max_tokens=171)
    [first, second] = read_sessions([file], 4, 1, 2, max_tokens=260)
    assert first.scope != second.scope
    assert [len(list(each.requests)) for each in (first, second)] == [1, 1]


def test_traces_of_both_kinds_are_sent_by_their_start(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 600, "output_length": 8, "hash_ids": [1, at]} for at in (500, 700, 900)]
    mooncake = write(tmp_path, "m.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    weka = write(tmp_path, "t.json", json.dumps(WEKA))
    sessions = read_sessions([mooncake, weka], 4, 2, 1, max_tokens=1000)
    assert [session.start_s for session in sessions] == [0.0, 0.0, pytest.approx(0.2)]


# ---- replay


class Server:
    """Answers as a server with an infinite cache does, or with one that loses what `forgets` says."""

    def __init__(self, forgets: int = 0) -> None:
        self.cache = InfiniteCache()
        self.forgets = forgets
        self.prompts: list[list[int]] = []
        self.num_open = self.most_open = 0

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        assert prompt.token_ids is not None
        token_ids = prompt.token_ids
        cached = max(0, self.cache.num_cached(token_ids) - self.forgets)
        self.cache.add(token_ids)
        self.prompts.append(token_ids)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        answer = [5 + len(self.prompts)] * output_tokens
        for token in answer:
            await asyncio.sleep(0)
            yield Chunk("a", has_output=True, token_ids=(token,))
        self.num_open -= 1
        self.cache.add([*token_ids, *answer[:-1]])
        yield Chunk(prompt_tokens=len(token_ids), output_tokens=output_tokens, cached_tokens=cached)

    async def close(self) -> None: ...


async def sent_to(server: Server, file: Path, copies: int = 2) -> Replayed:
    sessions = [session.timed(1000.0, 60.0) for session in read_sessions([file], 4, None, copies, 300)]
    return await replayed(server, sessions, 1000, "seed")


async def test_an_infinite_cache_computes_what_is_necessary(tmp_path: Path) -> None:
    server = Server()
    result = await sent_to(server, write(tmp_path, "t.json", json.dumps(WEKA)))
    assert len(result.sent) == 8
    assert server.num_open == 0
    assert server.most_open > 1, "sessions run at the same time"
    assert all(each.uncached == each.necessary == each.in_time for each in result.sent)
    first = [each.necessary for each in result.sent if each.name == "t 0"]
    assert first == [160, 160], "copies have texts of their own"
    # 160 tokens of the prompt and 11 of the answer are computed: ten full blocks
    assert [each.necessary for each in result.sent if each.name == "t 2"] == [225 - 160] * 2
    # blocks of the trace have 16 tokens, too: the sub-agent shares the first four, of a prompt of five
    assert [each.necessary for each in result.sent if each.name == "t 1 a 0"] == [80 - 64] * 2


async def test_what_is_computed_again_is_seen(tmp_path: Path) -> None:
    server = Server(forgets=16)
    result = await sent_to(server, write(tmp_path, "t.json", json.dumps(WEKA)))
    later = [each for each in result.sent if each.name != "t 0"]
    assert [each.uncached - each.necessary for each in later] == [16] * 6


async def test_answers_are_in_the_prompts_that_follow(tmp_path: Path) -> None:
    server = Server()
    await sent_to(server, write(tmp_path, "t.json", json.dumps(WEKA)), copies=1)
    first, agent, second, third = server.prompts
    assert [len(prompt) for prompt in server.prompts] == [160, 80, 225, 250]
    assert second[:160] == first
    assert second[160:172] == [6] * 12
    assert min(second[172:]) >= 10
    assert third[:225] == second
    assert third[225:243] == [8] * 18
    assert agent[:64] == first[:64]


# ---- reports


def test_a_cluster_is_named_by_its_flags() -> None:
    assert flags_of("auto,kv-host-mib=256") == [
        "--prefill", "2", "--decode", "2", "--block-moves", "auto", "--kv-host-mib=256",
    ]  # fmt: skip
    assert flags_of("together") == ["--prefill", "0", "--decode", "4", "--local-prefill", "always"]


def test_a_summary_compares_with_the_infinite_cache_and_the_first_cluster() -> None:
    def one(cluster: str, seconds: float, computed: int) -> Replayed:
        sent = [Sent(f"r {number}", 50, 4, 30, 40, 35, seconds, 2 * seconds) for number in range(4)]
        return Replayed(cluster, sent, [0.001, 0.002], computed, {"faster": 3, "failed": 0}, 9.0)

    base, other = [one("never", 0.2, 180), one("never", 0.4, 180)], [one("auto", 0.1, 123), one("auto", 0.2, 123)]
    line = summary(other, base)
    assert line.startswith("auto ")
    for part in ("computed 246, necessary 240 (+2.50%)", "in time 320", "'faster': 6", "(0.50)", "9.0 s"):
        assert part in line
