"""Makes pdserve importable on a machine where nothing of it is installed: wheels from a folder, and paths to this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = (
    "proto", "common", "text", "kernels", "models", "engine", "kv_transfer", "worker", "prefill_service",
    "decode_service", "router", "llm", "cli", "tools",
)  # fmt: skip


def install_wheels(folder: Path, target: Path) -> None:
    """Unpack every wheel of `folder` into `target` with pip, which asks no index. Raises: RuntimeError with pip's words."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(target), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip installs nothing of {folder}: {done.stderr.strip()[-600:]}")


def describe_project(folder: Path) -> None:
    """Write pdserve's metadata into `folder`: its code is read from this checkout, and asks for its version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = folder / f"pdserve-{version}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: pdserve\nVersion: {version}\n")


def environment(site: Path) -> dict[str, str]:
    """Variables of a stage's process. site: folder of `install_wheels`, whose packages come before those that are installed."""
    paths = [
        str(site),
        str(ROOT / "benchmarks"),
        str(ROOT),
        *(str(ROOT / name) for name in PORTIONS),
    ]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    variables = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    variables.pop("PYTHONSAFEPATH", None)
    # memory of expandable segments cannot be shared with another process, except through the host
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        variables.pop(name, None)
    return variables
