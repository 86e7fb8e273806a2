"""CPU time per output token of each process of a cluster: its computing thread, and all other threads.

The other threads do the streaming: making messages of outputs, sending, detokenizing, the client's stream. Their time limits the
tokens per second of one router, and of one worker's asyncio thread.

Usage: python benchmarks/token_cost.py [--model demo|DIR] [--streams 4 16 64] [--seconds 10] [--front grpc http]
                                        [--set name=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
from cluster_of_processes import free_port, serving
from conditions import print_conditions
from probe import Prober, prompt_of

from pdserve.models.model_folder import model_folder

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 200
ROLES = ("router", "prefill", "decode")

Ask = Callable[[list[int]], Awaitable[None]]


def role_of(process: psutil.Process) -> str | None:
    """Role of a process under `pdserve up`; None for one that serves nothing."""
    words = process.cmdline()
    return next((role for role in ("prefill", "decode") if role in words), "router" if "up" in words else None)


def processor_s(processes: list[psutil.Process]) -> Counter[tuple[str, str]]:
    """(role, part) -> CPU seconds so far. The main thread is asyncio's; the engine's is the busiest other one."""
    spent: Counter[tuple[str, str]] = Counter()
    for process in processes:
        if (role := role_of(process)) is None:
            continue
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            part = "asyncio" if int(path.parent.name) == process.pid else "other threads"
            spent[role, part] += int(path.read_text().split()[0]) / 1e9  # type: ignore[assignment]
    return spent


async def stream(ask: Ask, num_streams: int, seconds: float, vocabulary: int) -> int:
    """Keep `num_streams` streams open for `seconds`; returns the number of output tokens."""
    ends_at = time.monotonic() + seconds
    num_tokens = 0

    async def one(number: int) -> None:
        nonlocal num_tokens
        turn = 0
        while time.monotonic() < ends_at:
            await ask(prompt_of(PROMPT_TOKENS, 10_000 * number + turn, vocabulary))
            num_tokens += OUTPUT_TOKENS
            turn += 1

    await asyncio.gather(*(one(number + 1) for number in range(num_streams)))
    return num_tokens


async def measure(url: str, grpc_port: int, folder: Path, options: argparse.Namespace) -> None:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    prober = Prober(f"127.0.0.1:{grpc_port}")
    limits = httpx.Limits(max_connections=max(options.streams) + 4)
    processes = psutil.Process().children(recursive=True)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def over_grpc(prompt: list[int]) -> None:
            await prober.ask(prompt, OUTPUT_TOKENS)

        async def over_http(prompt: list[int]) -> None:
            body = {
                "model": folder.name,
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            async with client.stream("POST", f"{url}/v1/completions", json=body | {"temperature": 0}) as reply:
                reply.raise_for_status()
                async for _ in reply.aiter_raw():
                    pass

        asks: dict[str, Ask] = {"grpc": over_grpc, "http": over_http}
        header = "  ".join(f"{role + ' ' + part:>21}" for role in ROLES for part in ("asyncio", "other threads"))
        print(f"{'front':<6}{'streams':>8}{'tokens/s':>10}  {header}   (microseconds a token)")
        for front in options.front:
            await stream(asks[front], 2, 1.0, vocabulary)
            for num_streams in options.streams:
                before, began = processor_s(processes), time.monotonic()
                num_tokens = await stream(asks[front], num_streams, options.seconds, vocabulary)
                spent, wall_s = processor_s(processes), time.monotonic() - began
                spent.subtract(before)
                cells = "  ".join(
                    f"{spent[role, part] / num_tokens * 1e6:>21.0f}"
                    for role in ROLES
                    for part in ("asyncio", "other threads")
                )
                print(f"{front:<6}{num_streams:>8}{num_tokens / wall_s:>10.0f}  {cells}")
    await prober.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--front", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--set", action="append", default=[], help="a setting of the services, as name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    print_conditions()
    print(f"settings     {' '.join(options.set) or 'defaults'}")
    print(f"{PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens a request, greedy, no two alike\n")
    port = free_port()
    settings = [f"max_num_seqs={max(options.streams)}", *options.set]
    flags = [f"--{assignment}" for assignment in settings]
    with serving(folder, flags, grpc_port=port) as url:
        asyncio.run(measure(url, port, folder, options))
    print(f"\nload after   {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
