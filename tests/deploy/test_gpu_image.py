"""The image for GPUs compiles kernels as compose starts it: without root, on a read-only disk, into a volume.

Runs where there is a Docker engine with the image: `docker build --target gpu -t pdserve:gpu .`, or `PDSERVE_GPU_IMAGE=name`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

IMAGE = os.environ.get("PDSERVE_GPU_IMAGE", "pdserve:gpu")
SCRIPT = Path(__file__).parents[1] / "support/kernels/compile_in_container.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def docker(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(["docker", *arguments], input=text, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def volume() -> Iterator[str]:
    """A new volume, as docker-compose makes it."""
    inspect = ["docker", "image", "inspect", IMAGE]
    if shutil.which("docker") is None or subprocess.run(inspect, capture_output=True, check=False).returncode:
        pytest.skip(f"no Docker engine, or none with the image {IMAGE}")
    name = f"pdserve-test-{uuid.uuid4().hex[:8]}"
    docker("volume", "create", name)
    yield name
    docker("volume", "rm", name)


def compile_there(*mounts: str) -> dict[str, Any]:
    """Output of the script in a container with the restrictions of docker-compose.yml."""
    out = docker(
        "run", "--rm", "--interactive", "--network", "none", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges:true", "--pids-limit", "512", *mounts, "--entrypoint", "python", IMAGE, "-",
        text=SCRIPT.read_text(),
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def test_a_kernel_and_its_launcher_are_compiled_once_for_all_containers(volume: str) -> None:
    mounts = ("--tmpfs", "/tmp", "--volume", f"{volume}:/var/cache/pdserve")
    first = compile_there(*mounts)
    assert first["uid"] == 10001
    assert first["machine_code_bytes"] > 1000
    assert first["answer"] == 42
    assert first["module"].startswith("/var/cache/pdserve/triton/")
    assert any(name.endswith(".cubin") for name in first["files"])
    assert compile_there(*mounts)["files"] == first["files"], "the next container found them"


def test_a_temporary_file_system_would_not_do(volume: str) -> None:
    """Docker mounts it without the right to execute, so the cache is no part of /tmp."""
    mounts = ("--tmpfs", "/tmp", "--env", "TRITON_CACHE_DIR=/tmp/triton")
    with pytest.raises(AssertionError, match="failed to map segment"):
        compile_there(*mounts)
