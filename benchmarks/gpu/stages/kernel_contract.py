"""The contract suites of attention and layer operations, and the tests of devices, with compiled kernels on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from gpu.bench import Bench
from gpu.carried import ROOT

FILES = (
    "tests/kernels/triton/test_triton_attention.py", "tests/kernels/triton/test_triton_layer_ops.py",
    "tests/kernels/triton/test_sample_tokens.py", "tests/kernels/triton/test_engine_with_kernels.py",
    "tests/kernels/triton/test_engine_with_triton.py", "tests/kernels/test_make_attention.py",
    "tests/kernels/test_make_layer_ops.py", "tests/models/test_devices.py", "tests/models/test_device_setting.py",
)  # fmt: skip
PROCESSES = 6
"""Each has a CUDA context, and compiles kernels."""


def run(bench: Bench) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.pytest_rows", "-W", "default"]
    if bench.dry:
        command += ["tests/kernels/triton/test_triton_layer_ops.py", "-k", "swiglu or padded_row"]
    else:
        # cases that `make test` leaves out for lack of time run here, but no second engine
        command += [*FILES, "-n", str(PROCESSES), "--dist", "load", "-m", "not faults and not soak", "--timeout", "60"]
    environment = dict(os.environ) | {"GPU_ROWS": str(bench.rows.path), "GPU_DRY": "1" if bench.dry else "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=max(1.0, bench.seconds_left))
    if done.returncode not in (0, 1):
        bench.rows.fail("pytest", f"exit status {done.returncode}: see the log")
