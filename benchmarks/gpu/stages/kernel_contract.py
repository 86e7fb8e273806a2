"""The contract suites of attention, states and layer operations, and the tests of devices, with compiled kernels on the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from gpu.bench import Bench
from gpu.carried import ROOT

FILES = (
    "tests/kernels/triton/test_triton_attention.py", "tests/kernels/triton/test_triton_layer_ops.py",
    "tests/kernels/triton/test_triton_lora.py", "tests/kernels/triton/test_two_part_prefill.py",
    "tests/kernels/triton/test_triton_states.py",
    "tests/kernels/triton/test_triton_experts.py", "tests/kernels/triton/test_sample_tokens.py",
    "tests/kernels/triton/test_engine_with_kernels.py", "tests/kernels/triton/test_engine_with_triton.py",
    "tests/kernels/test_make_attention.py", "tests/kernels/test_make_layer_ops.py", "tests/models/test_devices.py",
    "tests/models/test_device_setting.py", "tests/models/test_output_heads.py",
)  # fmt: skip
PROCESSES = 6
"""Each has a CUDA context, and compiles kernels."""


END_S = 10.0
"""For an interrupted run to write its rows."""


def run(bench: Bench) -> None:
    if bench.dry:
        test(bench, "not slow", "tests/kernels/triton/test_triton_layer_ops.py", "-k", "swiglu or padded_row")
        return
    # cases that `make test` leaves out for lack of time come second
    for marks in ("not faults and not soak and not slow", "slow and not faults and not soak"):
        if not test(bench, marks, *FILES, "-n", str(PROCESSES), "--dist", "load", "--timeout", "60"):
            return


def test(bench: Bench, marks: str, *arguments: str) -> bool:
    """Run pytest, which writes rows per file (`pytest_rows.py`); False if it was interrupted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.pytest_rows", "-W", "default"]
    environment = dict(os.environ) | {"GPU_ROWS": str(bench.rows.path), "GPU_DRY": "1" if bench.dry else "0"}
    process = subprocess.Popen([*command, "-m", marks, *arguments], cwd=ROOT, env=environment)
    try:
        status = process.wait(max(1.0, bench.seconds_left - END_S))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        bench.rows.skip(marks, "interrupted: the stage's time is over; rows count the cases until then")
        return False
    finally:
        end(process)
    if status not in (0, 1):
        bench.rows.fail(marks, f"pytest ended with status {status}: see the log")
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
