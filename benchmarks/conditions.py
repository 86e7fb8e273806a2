"""`conditions`, `print_conditions`: machine, versions and load, which are printed beside results."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pdserve.engine.runner.device.cuda_devices import device_name


def conditions() -> dict[str, str]:
    """Name -> value, as text. autogroups: `kernel.sched_autogroup_enabled`."""
    autogroups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": device_name("cpu"),
        "kernel": platform.release(),
        "autogroups": autogroups.read_text().strip() if autogroups.exists() else "unknown",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
    }


def print_conditions() -> None:
    """One line per condition."""
    for name, value in conditions().items():
        print(f"{name:<12} {value}")
