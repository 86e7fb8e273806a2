"""Recorded traces on a cluster: prompt tokens that it computes, compared with what one infinite cache would compute.

Traces are files of WEKA's agentic sessions (.json: think times, sub-agents, each request sent when the one before has ended) and of
Mooncake (.jsonl: arrival times). Lengths are divided by --scale, times by --speed; a
session ends before the first request that is too long for the model.

Each cluster gets the same sessions. Its name is a value of `block_moves`, or `together`: as many workers, and each
prefills and decodes. Further settings of one cluster follow after commas: `auto,kv-host-mib=256`.

    necessary    prompt tokens of a request that are in no full block of 16 tokens of an earlier request or of its answer
    in time      the same, but only blocks count that were computed when the request was sent
    computed     tokens that the workers' engines scheduled, without those of answers (`pdserve_scheduled_tokens_total`)
    uncached     prompt tokens that answers do not report as cached (`usage`)

An answer's last token is never computed, and a prompt's last one always is. A round has a fresh cluster, and begins with a few
requests of other sessions that are not counted.

Usage: python benchmarks/trace_replay.py FILE ... [--model smollm2] [--clusters never auto always] [--scale 16] [--speed 20]
           [--num 20] [--copies 1] [--rounds 2] [--set name=value] [--out results/trace_replay.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import httpx
from cluster_of_processes import free_port, serving
from completions import completion_body, stream_completion
from conditions import conditions
from infinite_cache import InfiniteCache
from metric_values import metrics

from pdserve.cli.bench.endpoints import Chunk, Endpoint, OpenAIEndpoint, Prompt
from pdserve.cli.bench.run_load import LoadPlan, LoadRun
from pdserve.cli.bench.traces.read_trace import read_trace
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import TraceTexts
from pdserve.models.model_folder import model_folder

WORKERS = 4
TOGETHER = "together"
WARM_UP_TOKENS = (600, 20)
"""Of a prompt and of an answer."""
WARM_UP_REQUESTS = 6
TIMEOUT_S = 600.0


@dataclass(slots=True)
class Sent:
    """One request as its client saw it."""

    name: str
    prompt_tokens: int
    output_tokens: int
    necessary: int
    in_time: int
    uncached: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0


@dataclass(slots=True)
class Replayed:
    """One round of one cluster."""

    cluster: str
    sent: list[Sent] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two messages of an answer, of all answers."""
    computed: int = 0
    moves: dict[str, int] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def necessary(self) -> int:
        return sum(each.necessary for each in self.sent)

    @property
    def excess(self) -> float:
        """Computed beyond the necessary, as a part of it."""
        return self.computed / self.necessary - 1


class Counted:
    """An end point that counts what was necessary for each prompt, and what its server computed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sent_cache, self._computed_cache = InfiniteCache(), InfiniteCache()
        self.result = Replayed("")

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        token_ids = prompt.token_ids
        if token_ids is None:
            raise RuntimeError(f"{prompt.name} has a prompt that is a text")
        sent = Sent(
            prompt.name, len(token_ids), output_tokens,
            len(token_ids) - self._sent_cache.num_cached(token_ids),
            len(token_ids) - self._computed_cache.num_cached(token_ids),
        )  # fmt: skip
        self._sent_cache.add(token_ids)
        self.result.sent.append(sent)
        answer: list[int] = []
        sent_s, chunk_s = time.perf_counter(), list[float]()
        async for chunk in self._endpoint.stream(prompt, output_tokens):
            if chunk.has_output:
                if not chunk_s:
                    self._computed_cache.add(token_ids)
                chunk_s.append(time.perf_counter())
                answer += chunk.token_ids
            if chunk.prompt_tokens is not None:
                sent.uncached = chunk.prompt_tokens - (chunk.cached_tokens or 0)
            yield chunk
        if len(answer) != output_tokens:
            raise RuntimeError(f"{prompt.name} has {len(answer)} tokens of {output_tokens}")
        for cache in (self._sent_cache, self._computed_cache):
            cache.add([*token_ids, *answer[:-1]])
        sent.ttft_s, sent.e2e_s = chunk_s[0] - sent_s, chunk_s[-1] - sent_s
        self.result.gaps_s += [after - before for before, after in pairwise(chunk_s)]

    async def close(self) -> None:
        await self._endpoint.close()


async def replayed(endpoint: Endpoint, sessions: Sequence[TraceSession], vocabulary: int, seed: str) -> Replayed:
    """Send sessions. Raises: RuntimeError for a request that failed."""
    texts = TraceTexts(seed, lambda draw, num: draw.choices(range(10, vocabulary), k=num))
    texts.prepare(sessions)
    counted = Counted(endpoint)
    run = LoadRun(counted, texts, str, as_text=False, timeout_s=TIMEOUT_S, on_end=lambda record: None)
    started = time.perf_counter()
    await run.run(sessions, LoadPlan(follows_trace=True))
    counted.result.duration_s = time.perf_counter() - started
    for record in run.records:
        if record.error is not None:
            raise RuntimeError(f"{record.name} failed: {record.error}: {record.error_message}")
    return counted.result


def read_sessions(
    files: Sequence[Path], scale: int, num: int | None, copies: int, max_tokens: int
) -> list[TraceSession]:
    """Sessions of all files by their start. num: requests of each file, at most. max_tokens: of a prompt with its answer."""
    sessions: list[TraceSession] = []
    for file in files:
        found = read_trace(file, num or sys.maxsize)
        for number in range(copies):
            name = f"#{number}"
            sessions += [_cut(_renamed(each, name).scaled(scale), num, max_tokens) for each in found]
    return sorted((each for each in sessions if each.steps), key=lambda each: each.start_s)


def _renamed(session: TraceSession, copy: str) -> TraceSession:
    """A copy with a text of its own."""
    steps = tuple(_renamed(step, copy) if isinstance(step, TraceSession) else step for step in session.steps)
    return replace(session, name=session.name + copy, scope=session.scope + copy, steps=steps)


def _cut(session: TraceSession, num: int | None, max_tokens: int) -> TraceSession:
    """The steps before the first one that is too long, and `num` at most."""

    def fitting() -> Iterator[TraceRequest | TraceSession]:
        for step in session.steps:
            inner = [step] if isinstance(step, TraceRequest) else list(step.requests)
            if any(each.input_tokens + each.output_tokens > max_tokens for each in inner):
                return
            yield step

    return replace(session, steps=tuple(islice(fitting(), num)))


async def _counts(http: httpx.AsyncClient, metrics_port: int) -> tuple[int, dict[str, int]]:
    """Tokens that all engines have scheduled, and moves by outcome."""
    scheduled = 0.0
    for worker in range(WORKERS):
        found = await metrics(http, f"http://127.0.0.1:{metrics_port + 1 + worker}/metrics")
        scheduled += found["pdserve_scheduled_tokens_total"]
    router = await metrics(http, f"http://127.0.0.1:{metrics_port}/metrics")
    moves = {
        name.split('"')[1]: int(value) for name, value in router.items() if name.startswith("pdserve_block_moves_total")
    }
    return int(scheduled), moves


async def _warm_up(http: httpx.AsyncClient, url: str, vocabulary: int) -> None:
    draw = random.Random(0)

    async def one() -> None:
        prompt = [draw.randrange(10, vocabulary) for _ in range(WARM_UP_TOKENS[0])]
        for _ in range(2):
            body = completion_body(prompt, WARM_UP_TOKENS[1])
            prompt += (await stream_completion(http, f"{url}/v1/completions", body)).token_ids

    await asyncio.gather(*(one() for _ in range(WARM_UP_REQUESTS)))


async def replay(
    url: str,
    metrics_port: int,
    sessions: Sequence[TraceSession],
    vocabulary: int,
    seed: str,
    options: argparse.Namespace,
) -> Replayed:
    """One round of one cluster."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http:
        await _warm_up(http, url, vocabulary)
        await asyncio.sleep(1)
        scheduled, moves = await _counts(http, metrics_port)
        body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        endpoint = OpenAIEndpoint(
            url, model_folder(options.model).name, chat=False, api_key=None, extra_body=body, tls=None
        )
        try:
            result = await replayed(endpoint, sessions, vocabulary, seed)
        finally:
            await endpoint.close()
        await asyncio.sleep(1)
        scheduled_after, moves_after = await _counts(http, metrics_port)
    # the first token of an answer is sampled with the prompt, and its last one is not computed
    result.computed = scheduled_after - scheduled - sum(each.output_tokens - 1 for each in result.sent)
    result.moves = {name: moves_after[name] - moves[name] for name in moves}
    return result


def flags_of(cluster: str) -> list[str]:
    """Flags of `pdserve up` for a cluster's name."""
    base, *settings = cluster.split(",")
    if base == TOGETHER:
        flags = ["--prefill", "0", "--decode", str(WORKERS), "--local-prefill", "always"]
    else:
        flags = ["--prefill", str(WORKERS // 2), "--decode", str(WORKERS // 2), "--block-moves", base]
    return [*flags, *(f"--{setting}" for setting in settings)]


def summary(rounds: Sequence[Replayed], base: Sequence[Replayed]) -> str:
    """One line for a cluster. base: rounds of the first one."""
    ttft = [statistics.fmean(each.ttft_s for each in one.sent) for one in rounds]
    ratio = statistics.median(
        statistics.fmean(each.ttft_s for each in one.sent) / statistics.fmean(each.ttft_s for each in other.sent)
        for one, other in zip(rounds, base, strict=True)
    )
    e2e = statistics.median(
        statistics.fmean(each.e2e_s for each in one.sent) / statistics.fmean(each.e2e_s for each in other.sent)
        for one, other in zip(rounds, base, strict=True)
    )
    every = [each.ttft_s for one in rounds for each in one.sent]
    gaps = sorted(gap for one in rounds for gap in one.gaps_s)
    computed, necessary = sum(one.computed for one in rounds), sum(one.necessary for one in rounds)
    in_time = sum(each.in_time for one in rounds for each in one.sent)
    uncached = sum(each.uncached for one in rounds for each in one.sent)
    moves = {name: sum(one.moves[name] for one in rounds) for name in rounds[0].moves}
    return (
        f"{rounds[0].cluster:<24} computed {computed}, necessary {necessary} ({computed / necessary - 1:+.2%}), "
        f"in time {in_time}, uncached {uncached}; moves {moves}; TTFT mean {statistics.median(ttft) * 1e3:.1f} ms ({ratio:.2f}), "
        f"p90 {statistics.quantiles(every, n=10)[-1] * 1e3:.1f}; e2e ({e2e:.2f}); "
        f"gap p99 {gaps[int(0.99 * (len(gaps) - 1))] * 1e3:.1f} ms; {statistics.median(one.duration_s for one in rounds):.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clusters", nargs="+", default=["never", "auto", "always"])
    parser.add_argument("--scale", type=int, default=16, help="lengths are divided by it")
    parser.add_argument("--speed", type=float, default=20.0, help="times are divided by it")
    parser.add_argument("--max-think", type=float, default=60.0, help="seconds of the trace, at most")
    parser.add_argument("--num", type=int, help="steps of each session, or lines of a trace of arrivals, at most")
    parser.add_argument("--copies", type=int, default=1, help="of each session, with texts of their own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="a setting of all clusters, name=value")
    parser.add_argument("--show", type=int, default=0, help="requests with the most uncached tokens to list")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = model_folder(options.model)
    config = json.loads((folder / "config.json").read_text())
    max_tokens = config["max_position_embeddings"]
    sessions = read_sessions(options.files, options.scale, options.num, options.copies, max_tokens)
    sessions = [session.timed(options.speed, options.max_think) for session in sessions]
    described = conditions() | {
        "model": options.model,
        "traces": " ".join(file.name for file in options.files),
        "shape": f"lengths over {options.scale}, times over {options.speed:g}, thinks of at most {options.max_think:g} s; "
        f"{len(sessions)} sessions, {sum(len(list(each.requests)) for each in sessions)} requests",
        "settings": " ".join(options.set),
    }
    for name, value in described.items():
        print(f"{name:<12} {value}", flush=True)
    rounds: dict[str, list[Replayed]] = {cluster: [] for cluster in options.clusters}
    for number in range(options.rounds):
        for cluster in options.clusters if number % 2 == 0 else reversed(options.clusters):
            metrics_port = free_port()
            flags = [*flags_of(cluster), *(f"--{setting}" for setting in options.set), f"--metrics-port={metrics_port}"]
            with serving(folder, flags) as url:
                result = asyncio.run(
                    replay(url, metrics_port, sessions, config["vocab_size"], f"round {number}", options)
                )
            result.cluster = cluster
            rounds[cluster].append(result)
            print(f"round {number + 1}: {summary([result], [result])}", flush=True)
            for each in sorted(result.sent, key=lambda each: each.necessary - each.uncached)[: options.show]:
                print(f"    {each}", flush=True)
    for found in rounds.values():
        print(summary(found, rounds[options.clusters[0]]))
    if options.out:
        runs = {cluster: [asdict(one) for one in found] for cluster, found in rounds.items()}
        options.out.write_text(json.dumps({"conditions": described, "rounds": runs}) + "\n")


if __name__ == "__main__":
    main()
