"""Memory in which a model of `transformers` is loaded: its weights once, and those of a layer beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.any_family import make_any_family

pytestmark = pytest.mark.slow

MOST = 1.2
"""Peak over the weights, of memory that the process itself fills: pages of the files are the kernel's to drop."""
SIZES = {"hidden_size": 512, "num_hidden_layers": 12, "vocab_size": 4000, "num_attention_heads": 8, "head_dim": 64}
MODELS = {
    "starcoder2": {"intermediate_size": 3072},
    "qwen3_moe": {"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 256},
}
"""Weights as the modules have them; experts that the library joins."""
PROGRAM = """
import json, re, sys, threading, time
from pathlib import Path
from pdserve.models.model_impl import load_model_decoder, read_model_config

tiny, folder = Path(sys.argv[1]), Path(sys.argv[2])
status = Path("/proc/self/status")


def own_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read_text())[1]) * 1024


def watch():
    while not ended.is_set():
        peak[0] = max(peak[0], own_bytes())
        time.sleep(0.001)


def load(path, **options):
    return load_model_decoder(path, dtype="bfloat16", model_impl="transformers", **options)


load(tiny)  # imports
read_model_config(folder, "bfloat16", "transformers")
ended, peak, began = threading.Event(), [0], own_bytes()
thread = threading.Thread(target=watch)
thread.start()
loaded = []
decoder = load(folder, progress=loaded.append)
ended.set()
thread.join()
print(json.dumps([loaded[-1].total_bytes, peak[0] - began, own_bytes() - began]))
"""


@pytest.mark.parametrize("family", MODELS)
def test_the_weights_are_in_memory_once(family: str, tmp_path: Path) -> None:
    tiny, folder = tmp_path / "tiny", tmp_path / "folder"
    make_any_family(tiny, family, "bfloat16")
    make_any_family(folder, family, "bfloat16", **SIZES, **MODELS[family])
    command = [sys.executable, "-c", PROGRAM, str(tiny), str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    weights, peak, kept = json.loads(found.stdout.splitlines()[-1])
    print(f"{family}: {weights / 1e6:.0f} MB, peak {peak / weights:.2f}, kept {kept / weights:.2f}")
    assert weights > 80e6
    assert peak < MOST * weights
