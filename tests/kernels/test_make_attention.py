"""Choosing an attention back end: by device, by name, and from entry points that are imported only when they are named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.config import EngineConfig
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.kernels.attention.make_attention import AttentionBackendError, make_attention
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from tests.support.engine.hash_model import VOCAB_SIZE, HashModel
from tests.support.engine.pretend_device import pretended_device

PLUGIN = "attention_plugin_of_a_test"


@pytest.fixture
def kv_cache() -> Tensor:
    return torch.zeros(4, 1, 2, 2, 4, 8)


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(PLUGIN, None)


def install(folder: Path, entry_points: str, name: str = "plugin-of-a-test") -> None:
    (folder / f"{PLUGIN}.py").write_text(
        "class Mine:\n    def __init__(self, kv_cache):\n        self.kv_cache = kv_cache\n\n"
        "def broken(kv_cache):\n    raise ValueError(f'no pages of {kv_cache.shape[4]} tokens')\n"
    )
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pdserve.attention_backends]\n{entry_points}\n")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_built_in_names_import_no_plug_in(name: str, kv_cache: Tensor, plugin_folder: Path) -> None:
    install(plugin_folder, f"{name} = {PLUGIN}:Mine\nmine = {PLUGIN}:Mine")
    assert isinstance(make_attention(name, kv_cache), TorchAttentionBackend)
    assert PLUGIN not in sys.modules


def test_every_device_has_a_back_end() -> None:
    with pretended_device() as device:
        assert isinstance(make_attention("auto", torch.zeros(4, 1, 2, 2, 4, 8, device=device)), TorchAttentionBackend)


@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_triton_needs_a_gpu(name: str, kv_cache: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AttentionBackendError, match=f"'{name}', which needs a GPU; the device is 'cpu'"):
        make_attention(name, kv_cache)
    monkeypatch.setattr("pdserve.kernels.attention.make_attention.find_spec", lambda name: None)
    with pytest.raises(AttentionBackendError, match=f"'{name}', but the package triton is not installed"):
        make_attention(name, kv_cache)


def test_fused_attention_reads_no_latent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels do: their name needs only a GPU, here the interpreter."""
    triton = pytest.importorskip("triton")
    rows = torch.zeros(4, 1, 2, 1, 4, 24)
    message = (
        "attention_backend is 'sdpa', which reads keys and values, and the cache has latent rows; triton reads them"
    )
    with pytest.raises(AttentionBackendError, match=message):
        make_attention("sdpa", rows)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AttentionBackendError, match="'triton', which needs a GPU"):
        make_attention("triton", rows)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        assert type(make_attention("triton", rows)).__name__ == "TritonAttentionBackend"
    assert isinstance(make_attention("auto", rows), TorchAttentionBackend)


def test_a_gpu_without_triton_has_the_torch_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    monkeypatch.setattr("pdserve.kernels.attention.make_attention.TorchAttentionBackend", lambda cache: "torch")
    monkeypatch.setattr("pdserve.kernels.attention.make_attention._make_triton", lambda name, cache: f"triton, {name}")
    for is_there, expected in ((True, "triton, auto"), (False, "torch")):
        spec = ModuleSpec("triton", None) if is_there else None
        monkeypatch.setattr("pdserve.kernels.attention.make_attention.find_spec", lambda name, spec=spec: spec)
        assert make_attention("auto", on_gpu) == expected  # type: ignore[arg-type]


def test_a_plug_in_is_made_over_the_cache(kv_cache: Tensor, plugin_folder: Path) -> None:
    install(plugin_folder, f"mine = {PLUGIN}:Mine\nother = no_such_module:Any")
    assert make_attention("mine", kv_cache).kv_cache is kv_cache  # type: ignore[attr-defined]


def test_an_unknown_name_lists_what_there_is(kv_cache: Tensor, plugin_folder: Path) -> None:
    install(plugin_folder, f"mine = {PLUGIN}:Mine")
    message = "attention_backend is 'yours', which is not installed; there are auto, torch, native, triton, sdpa, mine"
    with pytest.raises(AttentionBackendError, match=message):
        make_attention("yours", kv_cache)
    assert PLUGIN not in sys.modules
    install(plugin_folder, f"mine = {PLUGIN}:broken", "another-plugin")
    with pytest.raises(AttentionBackendError, match=f"'mine', which is installed 2 times: .*{PLUGIN}:"):
        make_attention("mine", kv_cache)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (f"{PLUGIN}:broken", "ValueError: no pages of 4 tokens"),
        (f"{PLUGIN}:Missing", "AttributeError"),
        ("no_such_module:Any", "ModuleNotFoundError"),
    ],
)
def test_one_that_cannot_be_made_is_named(target: str, error: str, kv_cache: Tensor, plugin_folder: Path) -> None:
    install(plugin_folder, f"mine = {target}")
    with pytest.raises(AttentionBackendError, match=f"attention_backend 'mine' .{target}. cannot be made: {error}"):
        make_attention("mine", kv_cache)


def test_an_engine_does_not_start_without_its_back_end(kv_cache: Tensor) -> None:
    config = EngineConfig(block_size=4, num_blocks=4, max_model_len=16, attention_backend="yours")
    hasher = BlockHasher(DEVELOPMENT_KEY, 4)
    with pytest.raises(
        ConfigError, match="attention_backend is 'yours', which is not installed; there are auto, torch"
    ):
        make_engine_core(config, HashModel(), [kv_cache], hasher, VOCAB_SIZE)


def test_the_setting_needs_a_name() -> None:
    PrefillSettings(attention_backend="mine").verify()
    with pytest.raises(ConfigError, match="attention_backend is ' ', a name is needed"):
        PrefillSettings(attention_backend=" ").verify()


@pytest.mark.slow
def test_serving_on_a_processor_imports_no_triton(tiny_checkpoints: Callable[..., Path]) -> None:
    program = f"""
import sys
from pdserve.llm import LLM, SamplingParams
with LLM({str(tiny_checkpoints("llama"))!r}, engine_process=False) as llm:
    assert llm.generate("the water", SamplingParams(max_tokens=3))
kernels = ("triton", "pdserve.kernels.triton")
print([name for name in kernels if name in sys.modules])
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=100)
    assert found.stdout.strip() == "[]"
