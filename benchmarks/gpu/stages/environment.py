"""Versions of the machine and of its libraries, and the rates against which other stages are compared."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu.bench import Bench

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "grpcio",
    "protobuf",
    "msgspec",
    "xgrammar",
    "nixl",
    "nixl-cu13",
)


def run(bench: Bench) -> None:
    for package in PACKAGES:
        bench.rows.add(package, version=_version(package))
    bench.rows.add("python", version=platform.python_version())
    bench.rows.add("processor", version=f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}")
    if not bench.dry:
        _gpu(bench)
    copy = bench.copy_bytes_per_s
    bench.rows.add("copy within the device, read and written", rate_tb_s=copy / 1e12)
    n = 64 if bench.dry else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    product = bench.milliseconds(lambda: a @ b, for_ms=200.0)
    bench.rows.add(f"bfloat16 product {n} x {n} x {n}", rate_tflops=2 * n**3 / product / 1e9)
    size = 1 << 12 if bench.dry else 1 << 28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not bench.dry)
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    up = bench.milliseconds(lambda: there.copy_(host, non_blocking=True))
    down = bench.milliseconds(lambda: host.copy_(there, non_blocking=True))
    bench.rows.add("pinned host memory to the device", rate_tb_s=size / up / 1e9)
    bench.rows.add("device to pinned host memory", rate_tb_s=size / down / 1e9)
    tiny = torch.zeros(1, device=bench.device)
    bench.rows.add("launch of a small kernel", took_us=bench.milliseconds(lambda: tiny.add_(1)) * 1e3)


def _gpu(bench: Bench) -> None:
    found = torch.cuda.get_device_properties(0)
    text = f"{found.name}, {found.multi_processor_count} multiprocessors, {found.total_memory / 2**30:.1f} GiB, "
    bench.rows.add("gpu", version=f"{text}sm_{found.major}{found.minor}")
    bench.rows.add("cuda", version=str(torch.version.cuda))
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    bench.rows.add("cudnn", version=str(cudnn))
    command = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi does not answer: {type(error).__name__}"
    bench.rows.add("driver, clocks, power limit", version=said)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
