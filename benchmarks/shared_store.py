"""Milliseconds to the first token of a prompt whose blocks lie in a Mooncake Store: read from there or computed, in turns.

Usage: python benchmarks/shared_store.py [--model FOLDER] [--load-format dummy] [--lengths 64 256 1024 2048] [--rounds 7]
                                         [--threads 1]

The blocks lie in the memory of another process on this machine, from which they come over TCP. `read`: pool, host memory and books
of the engine have forgotten the prompt. `computed`: the same prompt with another salt, so that nothing of it is found. `without`:
the same in an engine without a store. Both engines use one pool, so their texts mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from conditions import conditions
from host_tier import Asker, make_core

from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import local_hasher
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.ranks.rank_messages import MooncakeOptions
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool.mooncake_store import MooncakeStore
from pdserve.models.model_folder import model_folder


@contextlib.contextmanager
def master() -> Iterator[str]:
    """A master with memory in another process; its URL without a segment."""
    with socket.socket() as first, socket.socket() as second:
        for drawn in (first, second):
            drawn.bind(("127.0.0.1", 0))
        port, metrics_port = first.getsockname()[1], second.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "mooncake_master"),
        f"--rpc_port={port}",
        f"--metrics_port={metrics_port}",
    ]
    command += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"mooncake://127.0.0.1:{port}?segment_mib="
    try:
        memory = MooncakeStore(MooncakeUrl.parse(f"{url}1024"), "memory", 0)
        while memory.write(b"ready", memoryview(b"ready"), 0):
            time.sleep(0.1)
        yield f"{url}0"
        memory.close()
    finally:
        process.kill()
        process.wait()


def first_token_ms(asker: Asker, seed: int, num_tokens: int, salt: str = "") -> float:
    """Serve a prompt; blocks may still be written afterwards, for which nobody waits."""
    started = time.perf_counter()
    name = asker.add(seed, num_tokens, salt)
    while name in asker.core.scheduler.requests:
        asker.core.step()
    ended = time.perf_counter()
    while asker.core.has_work:
        asker.core.step()
    return (ended - started) * 1e3


def measure(args: argparse.Namespace, folder: Path, length: int, url: str) -> None:
    num_blocks = length // 16 + 40
    settings = WorkerSettings(
        load_format=args.load_format,
        num_threads=args.threads,
        num_blocks=num_blocks,
        kv_host_mib=1024,
        kv_store=url,
        max_model_len=num_blocks * 16,
        max_num_batched_tokens=512,
        max_num_seqs=16,
    )
    loaded = load_model(folder, settings)
    options = MooncakeOptions(MooncakeUrl.parse(url), f"benchmark {length}", bytes(32))
    vocab_size = loaded.decoder.config.vocab_size
    core = make_engine_core(
        loaded.engine_config(settings),
        loaded.decoder,
        loaded.kv_caches,
        local_hasher(settings.block_size),
        vocab_size,
        host_caches=loaded.host_caches,
        store=options,
    )
    asker = Asker(core, vocab_size)
    plain = WorkerSettings(
        **{name: getattr(settings, name) for name in settings.__struct_fields__} | {"kv_store": None}
    )
    without = Asker(make_core(replace(loaded, host_caches=()), plain), vocab_size)
    store = core.scheduler.pool.store
    assert store is not None

    def forget() -> None:
        core.scheduler.pool.forget_cached(keeps_store=True)
        store._names.clear()
        without.core.scheduler.pool.forget_cached()

    first_token_ms(asker, 1, length)
    first_token_ms(
        asker, 2, 16 * num_blocks - 1
    )  # takes the pool, so that the blocks get into host memory and the store
    assert store.num_written >= (length - 1) // 16
    times: dict[str, list[float]] = {"read": [], "computed": [], "without": []}
    for turn in range(args.rounds + 1):
        forget()
        before = store.num_read
        times["read"].append(first_token_ms(asker, 1, length))
        assert store.num_read - before == (length - 1) // 16, "it was not read"
        forget()
        before = store.num_read
        times["computed"].append(first_token_ms(asker, 1, length, f"turn {turn}"))
        assert store.num_read == before
        forget()
        times["without"].append(first_token_ms(without, 1, length))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    num_bytes = (length - 1) // 16 * loaded.layout.place_bytes
    print(
        f"{length:6} | {num_bytes / 2**20:7.1f} | {medians['read']:8.2f} | {medians['computed']:8.2f} | "
        f"{medians['without']:8.2f} | {medians['without'] / medians['read']:6.1f} | "
        f"{medians['computed'] / medians['without']:.3f}",
        flush=True,
    )
    for one in (asker, without):
        one.core.scheduler.check(idle=True)
        one.core.executor.close()
    loaded.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    folder = model_folder(args.model) if args.model == "demo" else Path(args.model)
    for name, value in conditions().items():
        print(f"{name}: {value}")
    print(args)
    print("tokens | MiB | read, ms | computed, ms | without a store, ms | ratio | computed / without")
    with master() as url:
        for length in args.lengths:
            measure(args, folder, length, url)


if __name__ == "__main__":
    main()
