"""Compares remote prefill with prefill at decode: time to first token, and the delay of other streams at decode.

Two clusters of the same shape run side by side, one that always prefills remotely and one that never does, and get requests in
turn. Cells: prompt length, its cached part and the place of that, streams at decode. The estimates of the router of a third
cluster, which may choose, are printed beside the measurements.

Usage: python benchmarks/crossover.py [--model demo|DIR] [--num 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from cluster_of_processes import free_port, serving
from conditions import conditions
from probe import Prober, prompt_of

from pdserve.models.model_folder import model_folder

LENGTHS = (64, 256, 1000)
CACHED = ("nothing", "90 % at prefill", "90 % at both")
STREAMS = (0, 8)
WAYS = {"remote": "never", "local": "always"}
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Cell:
    """One kind of request under one load."""

    prompt_tokens: int
    cached: str
    streams: int


class Side:
    """One cluster."""

    def __init__(self, way: str, url: str, address: str, vocabulary: int) -> None:
        self.way = way
        self.url = url
        self.prober = Prober(address)
        self._vocabulary = vocabulary
        self._over = asyncio.Event()
        self._streams: list[asyncio.Task[None]] = []
        self.tpots: list[float] = []

    def load(self, num_streams: int) -> None:
        self._over.clear()
        self.tpots = []
        self._streams = [asyncio.create_task(self._stream()) for _ in range(num_streams)]

    async def unload(self) -> None:
        self._over.set()
        await asyncio.gather(*self._streams)

    async def _stream(self) -> None:
        while not self._over.is_set():
            self.tpots.append((await self.prober.ask(prompt_of(32, next(_seeds), self._vocabulary), 60)).tpot_s)

    async def ttft_s(self, cell: Cell) -> float:
        """TTFT of one request, with the cache contents of the cell."""
        prompt = prompt_of(cell.prompt_tokens, next(_seeds), self._vocabulary)
        shared = prompt[: int(0.9 * cell.prompt_tokens)]
        if cell.cached != "nothing":
            # a request of one token has no decode call: with remote prefill, only the prefill worker caches the prefix
            await self.prober.ask(shared, 1 if cell.cached == "90 % at prefill" else 2)
        return (await self.prober.ask(prompt, 2)).ttft_s


async def run(sides: list[Side], chooser: Side, cells: list[Cell], num: int) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        ttfts: dict[str, list[float]] = {side.way: [] for side in sides}
        tpots: dict[str, float | None] = {}
        for _ in range(num):
            for side in sides:
                side.load(cell.streams)
                await asyncio.sleep(0.3 if cell.streams else 0)
                ttfts[side.way].append(await side.ttft_s(cell))
                await side.unload()
                if side.tpots:
                    tpots[side.way] = statistics.median(side.tpots)
        chooser.load(cell.streams)
        await asyncio.sleep(0.5 if cell.streams else 0)
        for _ in range(3):  # the estimates need rates
            await chooser.ttft_s(cell)
        async with httpx.AsyncClient() as client:
            last = (await client.get(f"{chooser.url}/debug/routing")).json()["placements"]
        await chooser.unload()
        of_cell = next(p for p in last if p["prompt_tokens"] == cell.prompt_tokens)
        medians = {way: statistics.median(values) for way, values in ttfts.items()}
        results.append(
            asdict(cell)
            | {
                "ttft_s": ttfts,
                "ttft_p50_s": medians,
                "others_tpot_s": tpots,
                "router": {"chose": of_cell["kind"], "estimates": of_cell["estimates"]},
            }
        )
        print(_line(cell, medians, tpots, of_cell), flush=True)
    return results


def _line(cell: Cell, ttft: dict[str, float], tpot: dict[str, float | None], chosen: dict[str, Any]) -> str:
    sooner = min(ttft, key=lambda way: ttft[way])
    others = (
        f"{remote * 1e3:6.2f} {local * 1e3:6.2f}"
        if (remote := tpot.get("remote")) and (local := tpot.get("local"))
        else f"{'':13}"
    )
    return (
        f"{cell.prompt_tokens:6d}  {cell.cached:<16} {cell.streams:7d}   "
        f"{ttft['remote'] * 1e3:7.1f} {ttft['local'] * 1e3:7.1f}   {others}   {sooner:<7} {chosen['kind']:<7}"
        f" {_ms(chosen['estimates']['remote_s'])} {_ms(chosen['estimates']['local_s'])}"
    )


def _ms(seconds: float | None) -> str:
    return f"{'':7}" if seconds is None else f"{seconds * 1e3:7.1f}"


async def compare(addresses: dict[str, tuple[str, str]], vocabulary: int, num: int) -> list[dict[str, Any]]:
    sides = {way: Side(way, url, address, vocabulary) for way, (url, address) in addresses.items()}
    cells = [Cell(*values) for values in itertools.product(LENGTHS, CACHED, STREAMS)]
    print(f"{'':33}   {'TTFT p50, ms':^15}   {'others TPOT':^13}   {'':7} the router, estimates in ms")
    print(
        f"{'tokens':>6}  {'cached':<16} {'streams':>7}   {'remote':>7} {'local':>7}   {'remote':>6} {'local':>6}"
        f"   {'sooner':<7} {'chose':<7} {'remote':>7} {'local':>7}"
    )
    results = await run([sides["remote"], sides["local"]], sides["auto"], cells, num)
    for side in sides.values():
        await side.prober.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num", type=int, default=9, help="requests of each kind")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    options = parser.parse_args()
    folder: Path = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    facts = conditions()
    for name, value in facts.items():
        print(f"{name:<12} {value}")
    ports = {way: free_port() for way in (*WAYS, "auto")}

    def flags(way: str) -> list[str]:
        return ["--local-prefill", WAYS.get(way, "auto"), "--connector", "tcp"]

    with (
        serving(folder, flags("remote"), grpc_port=ports["remote"]) as remote,
        serving(folder, flags("local"), grpc_port=ports["local"]) as local,
        serving(folder, flags("auto"), grpc_port=ports["auto"]) as auto,
    ):
        urls = {"remote": remote, "local": local, "auto": auto}
        addresses = {way: (urls[way], f"127.0.0.1:{port}") for way, port in ports.items()}
        results = asyncio.run(compare(addresses, vocabulary, options.num))
    if options.json is not None:
        options.json.write_text(json.dumps({"conditions": facts, "cells": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
