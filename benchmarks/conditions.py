"""`conditions`, `print_conditions`: machine, versions and load, which are printed beside results."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def conditions() -> dict[str, str]:
    """Name -> value, as text. autogroups: `kernel.sched_autogroup_enabled`."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    autogroups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": f"{model}, {os.cpu_count()} cores",
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
