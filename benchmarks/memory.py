"""Memory of each service: loading, a worker that serves, a router with its index, and both over many requests.

Goals: the peak of loading below 1.2 times the weights; a worker weights, pool and 600 MB; a router 300 MB with 200,000 blocks in
its index; no growth over requests. Memory is what the kernel counts as in RAM (VmRSS, VmHWM); each part runs in processes of its
own. The model is the bundled one's configuration with larger layers and random weights, in bfloat16.

Usage: python benchmarks/memory.py [--layers 16] [--requests 3000] [--parts load worker router requests]
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
from pathlib import Path

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
AT_ONCE = 16
WARM_UP = 200
REPORTS = 10


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


async def load(address: str, num: int, vocabulary: int, seed: int) -> None:
    """Requests of 32 tokens with 8 of output, `AT_ONCE` at a time."""
    prober, numbers = Prober(address), iter(range(num))

    async def client() -> None:
        for number in numbers:
            await prober.ask(prompt_of(32, seed + number, vocabulary), 8)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    await prober.close()


def measure_services(model: Path, num_requests: int, parts: set[str]) -> None:
    """A cluster's processes when they are ready, and over requests."""
    port = free_port()
    weights, pool = size_of(model), POOL_MIB * (1 << 20) / MB
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with serving(model, ["--set", f"kv_cache_mib={POOL_MIB}"], grpc_port=port) as url:
        found = processes(int(url.rpartition(":")[2]))
        address = f"127.0.0.1:{port}"
        asyncio.run(load(address, WARM_UP, vocabulary, 0))
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
            print(f"{'requests':>9}  " + "  ".join(f"{role:>8}" for role in found))
            for report in range(REPORTS + 1):
                sizes = "  ".join(f"{status('VmRSS', each.pid):8.1f}" for each in found.values())
                print(f"{report * num_requests // REPORTS:9d}  {sizes}", flush=True)
                if report < REPORTS:
                    asyncio.run(load(address, num_requests // REPORTS, vocabulary, 10_000 * (report + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3000)
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
        model = make_model(Path(folder), options.layers)
        if "load" in options.parts:
            for impl in ("native", "transformers"):
                values, weights = in_a_process("load", str(model), impl), size_of(model)
                print(
                    f"load, {impl:<13} weights {weights:.0f} MB   peak {values['peak']:.0f} MB, "
                    f"{values['peak'] / weights:.2f} times   after {values['after'] / weights:.2f} times",
                    flush=True,
                )
        if set(options.parts) - {"load"}:
            measure_services(model, options.requests, set(options.parts))


if __name__ == "__main__":
    main()
