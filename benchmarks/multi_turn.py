"""Conversations of ten turns on two workers of each role, with and without moves of cached blocks.

Clusters run side by side, one per value of `block_moves`, and get the same conversations in alternating rounds; while one is asked,
the others are idle. With --vllm-python there are two prefill and two decode servers of vLLM, too, which are stopped (SIGSTOP) while
pdserve is asked, since their idle workers spin. A round has several conversations at once, each with a pause between an answer and
the next turn, as agents have. A turn's prompt is everything that was said before, and new input. An infinite cache would compute
those of its tokens that were in no full block of the conversation before; what is computed beyond them counts as recomputed. In
float32 all clusters say the same; in bfloat16 keys and values of decoded tokens are rounded otherwise than those of prefilled ones.

Usage: python benchmarks/multi_turn.py [--model demo] [--rounds 6] [--conversations 4] [--think 0.2]
           [--vllm-python ENVIRONMENT/bin/python] [--set name=value]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import process_trees
from cluster_of_processes import serving
from completions import completion_body, stream_completion
from conditions import print_conditions
from load import ASK_PREFILL
from metric_values import metrics
from vllm_peer import MODEL_NAME, servers

from pdserve.models.model_folder import model_folder

SETTINGS = ("never", "auto", "always")
BIDIRECTIONAL = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
"""Of vLLM's connector. By default it computes again what is less than 64 tokens, so nearly each of these answers."""
TTFT, PARTS = "vllm:time_to_first_token_seconds", ("_sum", "_count")
NUM_TURNS, FIRST_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 10, 400, 60, 60
BLOCK_SIZE = 16
SEED = 11


@dataclass
class Served:
    """Results of one target."""

    ttft_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(NUM_TURNS)])
    """By turn."""
    computed: int = 0
    """Prompt tokens of turns after the first."""
    necessary: int = 0
    """Those that an infinite cache would compute."""
    texts: list[list[int]] = field(default_factory=list)

    @property
    def later_s(self) -> list[float]:
        """Times to the first token of turns after the first."""
        return [seconds for of_turn in self.ttft_s[1:] for seconds in of_turn]


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, seconds to its first token, and tokens of its prompt that were not computed."""

    token_ids: list[int]
    ttft_s: float
    num_cached_tokens: int


class Target(Protocol):
    """Something that answers the turns of conversations."""

    async def ask(self, http: httpx.AsyncClient, conversation: int, prompt: list[int]) -> Turn: ...

    def running(self) -> AbstractContextManager[None]:
        """Its processes run in this block; outside it they may be stopped."""


class PdServe:
    """A cluster of pdserve."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ask(self, http: httpx.AsyncClient, conversation: int, prompt: list[int]) -> Turn:
        body = completion_body(prompt, OUTPUT_TOKENS)
        answer = await stream_completion(http, f"{self.url}/v1/completions", body)
        return Turn(answer.token_ids, answer.ttft_s, answer.num_cached_tokens)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()


class Vllm:
    """vLLM's prefill and decode servers. A conversation has one of each, which are called in turn as by vLLM's proxies.

    With `both_ways` the prefill call of a turn names the blocks that decode has of the last one (`bidirectional_kv_xfer`). Decode
    names them at the end of an answer that is not streamed, so answers are not: the time to the first token is that of the prefill
    call, and the mean that decode itself measures.
    """

    def __init__(self, prefill: list[str], decode: list[str], pids: list[int], *, both_ways: bool) -> None:
        self._prefill, self._decode, self._pids = prefill, decode, pids
        self._both_ways = both_ways
        self._held: dict[int, dict[str, Any]] = {}
        """Conversation -> what decode says of its blocks."""

    async def ask(self, http: httpx.AsyncClient, conversation: int, prompt: list[int]) -> Turn:
        body = completion_body(prompt, OUTPUT_TOKENS) | {"model": MODEL_NAME, "stream": False}
        del body["stream_options"]
        held = self._held.get(conversation) if self._both_ways else None
        number, started = conversation % len(self._prefill), time.perf_counter()
        first = await self._post(
            http, self._prefill[number], body | {"max_tokens": 1, "kv_transfer_params": held or ASK_PREFILL}
        )
        ttft_s = time.perf_counter() - started
        last = await self._post(http, self._decode[number], body | {"kv_transfer_params": first["kv_transfer_params"]})
        if (known := last.get("kv_transfer_params")) is not None:
            self._held[conversation] = known
        cached = (first["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(last["choices"][0]["token_ids"], ttft_s, cached)

    async def _post(self, http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = await http.post(f"{url}/v1/completions", json=body)
        answer: dict[str, Any] = reply.raise_for_status().json()
        return answer

    async def decode_ttft_s(self, http: httpx.AsyncClient) -> tuple[float, float]:
        """Sum and number of the times to the first token that decode has measured."""
        found = [await metrics(http, f"{url}/metrics") for url in self._decode]
        sums = [
            sum(value for name, value in one.items() if name.startswith(TTFT + part)) for one in found for part in PARTS
        ]
        return sum(sums[::2]), sum(sums[1::2])

    def running(self) -> AbstractContextManager[None]:
        return process_trees.running(self._pids)


async def converse(
    http: httpx.AsyncClient, target: Target, seed: int, vocabulary: int, think_s: float, into: Served
) -> None:
    draw = random.Random(seed)
    text = [draw.randrange(10, vocabulary) for _ in range(FIRST_TOKENS)]
    known = 0
    for turn in range(NUM_TURNS):
        answer = await target.ask(http, seed, text)
        into.ttft_s[turn].append(answer.ttft_s)
        if turn:
            into.computed += len(text) - answer.num_cached_tokens
            into.necessary += len(text) - known
        text = [*text, *answer.token_ids]
        # the last token of an answer is never computed
        known = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
        text += [draw.randrange(10, vocabulary) for _ in range(INPUT_TOKENS)]
        await asyncio.sleep(think_s)
    into.texts.append(text)


async def measure(targets: Mapping[str, Target], options: argparse.Namespace, vocabulary: int) -> dict[str, Served]:
    results = {name: Served() for name in targets}
    async with httpx.AsyncClient(timeout=600) as http:
        for number in range(options.rounds + 1):
            for name in list(targets) if number % 2 else list(targets)[::-1]:
                target, into = targets[name], results[name] if number else Served()  # the first round warms up
                seeds = [SEED + 1000 * number + place for place in range(options.conversations)]
                with target.running():
                    before = await target.decode_ttft_s(http) if isinstance(target, Vllm) else (0.0, 0.0)
                    await asyncio.gather(
                        *(converse(http, target, seed, vocabulary, options.think, into) for seed in seeds)
                    )
                    if isinstance(target, Vllm):
                        after = await target.decode_ttft_s(http)
                        decode_s = (after[0] - before[0]) / (after[1] - before[1])
                        for of_turn in into.ttft_s:
                            of_turn[-len(seeds) :] = [seconds + decode_s for seconds in of_turn[-len(seeds) :]]
    return results


async def moves_of(target: Target) -> dict[str, float]:
    if not isinstance(target, PdServe):
        return {}
    async with httpx.AsyncClient() as http:
        found = await metrics(http, f"{target.url}/metrics")
    return {name.split('"')[1]: value for name, value in found.items() if name.startswith("pdserve_block_moves_total{")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--think", type=float, default=0.2, help="seconds between an answer and the next turn")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--vllm-python", type=Path, help="of an environment as `vllm_peer.py` says")
    parser.add_argument("--set", action="append", default=[], help="a setting of all clusters, name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    flags = ["--prefill", "2", "--decode", "2", *(f"--{setting}" for setting in options.set)]
    print_conditions()
    print(
        f"{options.model}, {options.rounds} rounds of {options.conversations} conversations, {NUM_TURNS} turns, "
        f"{FIRST_TOKENS} tokens first, then {INPUT_TOKENS} each, answers of {OUTPUT_TOKENS}; pause {options.think:g} s; "
        f"{' '.join(options.set)}"
    )
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        if options.vllm_python is not None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            prefill, decode, pids = stack.enter_context(servers(options.vllm_python, folder, scratch, 2, BIDIRECTIONAL))
            stack.enter_context(process_trees.stopped(pids))
            for name, both_ways in (("vLLM", False), ("vLLM both ways", True)):
                targets[name] = Vllm(prefill, decode, pids, both_ways=both_ways)
        ours = {
            setting: PdServe(stack.enter_context(serving(folder, [*flags, "--block-moves", setting])))
            for setting in options.settings
        }
        targets = ours | targets
        results = asyncio.run(measure(targets, options, vocabulary))
        moves = {name: asyncio.run(moves_of(target)) for name, target in targets.items()}
    base = results[options.settings[0]]
    for setting, served in results.items():
        same = sum(text in base.texts for text in served.texts)
        later = served.later_s
        print(
            f"{setting:<14} TTFT of turns 2 to {NUM_TURNS}: mean {statistics.fmean(later) * 1e3:6.1f} ms "
            f"({statistics.fmean(later) / statistics.fmean(base.later_s):.2f}), p50 {statistics.median(later) * 1e3:6.1f}, "
            f"p90 {statistics.quantiles(later, n=10)[-1] * 1e3:6.1f}; recomputed {served.computed - served.necessary:6d} of "
            f"{served.necessary} necessary ({served.computed / served.necessary - 1:.1%}); moves {moves[setting]}; "
            f"{same} of {len(served.texts)} texts as with {options.settings[0]}"
        )


if __name__ == "__main__":
    main()
