"""Reads over NIXL from the device memory of one process into that of another on the same GPU, against a copy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gpu.bench import NOT_MEASURED, Bench, Skipped
from gpu.nixl_source import FACTOR, NAME, numbers, region
from pdserve.kv_transfer.nixl.nixl_agent import ReadStatus, UcxAgent, prepare_device_memory, why_no_nixl

ROUNDS = 5
PIECE_BYTES = 2 << 20
"""A block of 16 tokens of Llama 3.1 8B."""


def run(bench: Bench) -> None:
    if (reason := why_no_nixl()) is not None:
        raise Skipped(reason)
    num_bytes, piece = (1 << 20, 1 << 16) if bench.dry else (1 << 31, PIECE_BYTES)
    counts = (1, 16) if bench.dry else (1, 8, 64, 1024)
    with source(bench, num_bytes, piece) as remote:
        memory = numbers(num_bytes, 0, str(bench.device))
        bench.wait()
        if memory.is_cuda:
            prepare_device_memory()
        agent = UcxAgent("gpu-reader")
        own = region(memory, piece)
        agent.register(own)
        agent.load(NAME, bytes.fromhex(remote["metadata"]))
        pair = agent.pair(own, replace(own, address=remote["address"]))
        try:
            for count in counts:
                name = f"{count} blocks of {piece >> 10} KiB"
                if bench.is_late(name):
                    return
                with bench.case(name):
                    measure(bench, name, agent, pair, memory, count, piece)
        finally:
            agent.destroy()


def measure(bench: Bench, name: str, agent: UcxAgent, pair: int, memory: torch.Tensor, count: int, piece: int) -> None:
    best = NOT_MEASURED
    blocks = list(range(count))
    for _ in range(ROUNDS):
        began = time.perf_counter()
        read = agent.read(pair, blocks, blocks)
        while (status := read.status()) is ReadStatus.UNDER_WAY:
            if bench.seconds_left < 0:
                raise TimeoutError("a read did not end in the stage's time")
        took = time.perf_counter() - began
        if status is not ReadStatus.DONE:
            raise RuntimeError("a read failed")
        read.release()
        best = NOT_MEASURED if bench.dry else min(took, best if best == best else took)
    read_bytes = count * piece
    found = memory[: read_bytes // 8]
    ok = bool(torch.equal(found, numbers(read_bytes, FACTOR, str(bench.device))))
    memory.zero_()
    bench.wait()
    # a copy reads and writes each byte, as a read over NIXL does
    rate = 2 * read_bytes / best
    fields: dict[str, Any] = {"mib": read_bytes / 2**20, "time_ms": best * 1e3, "rate_tb_s": rate / 1e12, "ok": ok}
    if read_bytes >= 64 << 20 or bench.dry:
        bench.rows.judge(name, "nixl", rate / bench.copy_bytes_per_s, **fields)
    else:
        bench.rows.add(name, **fields, ratio=rate / bench.copy_bytes_per_s, goal=None, met=None)


@contextmanager
def source(bench: Bench, num_bytes: int, piece: int) -> Iterator[dict[str, Any]]:
    """The other process, and what it printed."""
    command = [sys.executable, "-m", "gpu.nixl_source", str(num_bytes), str(piece), str(bench.device)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # libraries may print before
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
                return
        raise Skipped(f"the process with the source ended with status {process.wait(20)}: see the log")
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
