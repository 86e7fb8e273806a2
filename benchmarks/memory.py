"""Memory of each service: loading, a worker that serves, a router with its index, and both over many requests.

Goals: the peak of loading below 1.2 times the weights; a worker weights, pool and 600 MB; a router 300 MB with 200,000 blocks in
its index; no growth over requests. Memory is what the kernel counts as in RAM (VmRSS, VmHWM), and over requests also the part of it
that is no file's (RssAnon); each part runs in processes of its own. The model is the bundled one's configuration with larger layers
and random weights, in bfloat16, or with --model another one: `demo` is the bundled one, with which 100,000 requests take minutes.
A request that fails is counted and sent again, so the run may be stopped (SIGSTOP) and continued.

Usage: python benchmarks/memory.py [--layers 16] [--requests 3000] [--parts load worker router requests]
       python benchmarks/memory.py --parts requests --model demo --requests 100000 --reports 20 --at-once 64 --output 2
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil
import torch
from cluster_of_processes import free_port, serving
from conditions import print_conditions
from probe import Prober, prompt_of
from safetensors.torch import save_file

from pdserve.common.block_hash import BLOCK_HASH_BYTES
from pdserve.common.settings.worker_settings import ModelImpl
from pdserve.models.model_folder import model_folder
from pdserve.models.model_impl import load_model_decoder
from pdserve.router.placement.prefix_index import PrefixIndex

MB = 1e6
POOL_MIB = 256
NUM_BLOCKS, NUM_WORKERS = 200_000, 8
WARM_UP = 200
AGAIN_S = 1.0
"""After a request that failed."""


@dataclass(frozen=True)
class Load:
    """Requests of 32 random tokens each, no two of which are equal."""

    num_requests: int
    num_reports: int
    at_once: int
    output: int
    """Tokens."""


def status(name: str, pid: int | str = "self") -> float:
    """A size of /proc/PID/status, MB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / MB if found else 0.0


def make_model(folder: Path, layers: int) -> Path:
    """The bundled model's files with larger layers and random weights; about 25 MB per layer."""
    source = model_folder("demo")
    model = folder / "model"
    shutil.copytree(source, model)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers, "max_window_layers": layers,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], 1024),
        "model.norm.weight": (1024,),
    }
    kv = config["num_key_value_heads"] * config["head_dim"]
    for number in range(layers):
        layer = f"model.layers.{number}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (1024, 1024), f"{layer}self_attn.o_proj.weight": (1024, 1024),
            f"{layer}self_attn.k_proj.weight": (kv, 1024), f"{layer}self_attn.v_proj.weight": (kv, 1024),
            f"{layer}self_attn.q_norm.weight": (config["head_dim"],), f"{layer}self_attn.k_norm.weight": (config["head_dim"],),
            f"{layer}mlp.gate_proj.weight": (2816, 1024), f"{layer}mlp.up_proj.weight": (2816, 1024),
            f"{layer}mlp.down_proj.weight": (1024, 2816),
            f"{layer}input_layernorm.weight": (1024,), f"{layer}post_attention_layernorm.weight": (1024,),
        }  # fmt: skip
    save_file(
        {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}, model / "model.safetensors"
    )
    return model


def size_of(model: Path) -> float:
    """Bytes of the weights, MB."""
    return (model / "model.safetensors").stat().st_size / MB


def load_in_this_process(model: Path, impl: ModelImpl) -> None:
    """Print the peak and the remainder of loading, beyond what the process had before."""
    # the libraries that a first load imports are no part of the weights
    load_model_decoder(model_folder("demo"), model_impl=impl)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    decoder = load_model_decoder(model, model_impl=impl)
    print(json.dumps({"peak": status("VmHWM") - before, "after": status("VmRSS") - before}))
    del decoder


def index_in_this_process() -> None:
    """Print the memory of an index with `NUM_BLOCKS` blocks of `NUM_WORKERS` workers, a third of them at two."""
    draw, index = random.Random(1), PrefixIndex()
    before = status("VmRSS")
    for number in range(NUM_BLOCKS // 100):
        hashes = [draw.randbytes(BLOCK_HASH_BYTES) for _ in range(100)]
        for holder in draw.sample(range(NUM_WORKERS), 1 + (number % 3 == 0)):
            index.stored((f"worker-{holder}", holder), hashes)
    print(json.dumps({"index": status("VmRSS") - before, "blocks": len(index)}))


def in_a_process(*arguments: str) -> dict[str, float]:
    """Run this script with these arguments; returns the object that it prints."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def processes(port: int) -> dict[str, psutil.Process]:
    """Role -> process of the cluster whose router listens on this port."""
    router = next(
        c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"
    )
    found = {"router": psutil.Process(router)}
    for child in found["router"].children():
        found |= {role: child for role in ("prefill", "decode") if role in child.cmdline()}
    return found


async def send(prober: Prober, seeds: Iterator[int], vocabulary: int, load: Load, failed: Counter[str]) -> None:
    """A request per seed. failed: counts requests that failed, by status; each is sent again."""

    async def client() -> None:
        for seed in seeds:
            prompt = prompt_of(32, seed, vocabulary)
            while True:
                try:
                    await prober.ask(prompt, load.output)
                    break
                except grpc.aio.AioRpcError as error:
                    failed[error.code().name] += 1
                    await asyncio.sleep(AGAIN_S)

    await asyncio.gather(*(client() for _ in range(load.at_once)))


def report(done: int, seconds: float, found: dict[str, psutil.Process]) -> None:
    """One line: requests, and of each process VmRSS and RssAnon in MB."""
    sizes = "  ".join(
        f"{status('VmRSS', each.pid):8.1f} ({status('RssAnon', each.pid):6.1f})" for each in found.values()
    )
    print(f"{done:9d}  {sizes}  {seconds:6.0f} s", flush=True)


async def send_and_report(address: str, found: dict[str, psutil.Process], vocabulary: int, load: Load) -> None:
    """All requests, over one connection, with a report at the start and after each part of them."""
    prober, failed, began = Prober(address), Counter[str](), time.monotonic()
    print(f"{'requests':>9}  " + "  ".join(f"{role:>17}" for role in found))
    done = 0
    report(done, 0.0, found)
    for number in range(1, load.num_reports + 1):
        first, done = done, load.num_requests * number // load.num_reports
        await send(prober, iter(range(WARM_UP + first, WARM_UP + done)), vocabulary, load, failed)
        report(done, time.monotonic() - began, found)
    print(f"failed and sent again: {dict(failed) or 0}")
    await prober.close()


async def warm_up(address: str, vocabulary: int, load: Load) -> None:
    """`WARM_UP` requests."""
    prober = Prober(address)
    await send(prober, iter(range(WARM_UP)), vocabulary, load, Counter())
    await prober.close()


def measure_services(model: Path, parts: set[str], load: Load) -> None:
    """A cluster's processes when they are ready, and over requests."""
    port = free_port()
    weights, pool = size_of(model), POOL_MIB * (1 << 20) / MB
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with serving(model, [f"--kv-cache-mib={POOL_MIB}"], grpc_port=port) as url:
        found = processes(int(url.rpartition(":")[2]))
        address = f"127.0.0.1:{port}"
        asyncio.run(warm_up(address, vocabulary, load))
        if "worker" in parts:
            for role in ("prefill", "decode"):
                rss = status("VmRSS", found[role].pid)
                print(
                    f"{role:<8} {rss:7.0f} MB   without weights ({weights:.0f} MB) and pool ({pool:.0f} MB): "
                    f"{rss - weights - pool:6.0f} MB"
                )
        if "router" in parts:
            rss, index = status("VmRSS", found["router"].pid), in_a_process("index")["index"]
            print(
                f"router   {rss:7.0f} MB   with an index of {NUM_BLOCKS:,} blocks ({index:.0f} MB): {rss + index:6.0f} MB"
            )
        if "requests" in parts:
            asyncio.run(send_and_report(address, found, vocabulary, load))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--model", help="folder or name of a model; default: one with --layers layers is made")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--reports", type=int, default=10, help="number of reports over the requests")
    parser.add_argument("--at-once", type=int, default=16, help="requests under way")
    parser.add_argument("--output", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--parts", nargs="+", default=["load", "worker", "router", "requests"])
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        name, *arguments = options.child
        if name == "index":
            index_in_this_process()
        else:
            load_in_this_process(Path(arguments[0]), "native" if arguments[1] == "native" else "transformers")
        return
    print_conditions()
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(options.model) if options.model else make_model(Path(folder), options.layers)
        if "load" in options.parts:
            for impl in ("native", "transformers"):
                values, weights = in_a_process("load", str(model), impl), size_of(model)
                print(
                    f"load, {impl:<13} weights {weights:.0f} MB   peak {values['peak']:.0f} MB, "
                    f"{values['peak'] / weights:.2f} times   after {values['after'] / weights:.2f} times",
                    flush=True,
                )
        if set(options.parts) - {"load"}:
            load = Load(options.requests, options.reports, options.at_once, options.output)
            measure_services(model, set(options.parts), load)


if __name__ == "__main__":
    main()
