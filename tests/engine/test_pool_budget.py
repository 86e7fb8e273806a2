"""The size of a GPU's KV pool: what a step at the largest shapes leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.device.step_graphs import graph_shapes
from pdserve.engine.runner.pool.pool_budget import GRAPH_BYTES, LargestSteps, PoolBudget
from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from pdserve.models.model_inputs import ModelInputs
from tests.support.engine.pretend_device import DEVICE, pretended_device
from tests.support.engine.settings_with import settings_with

MIB = 1 << 20


@dataclass
class FakeMemory:
    """Each work has a peak of its own."""

    peaks: list[int]
    num_works: int = 0

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 700 * MIB, 1000 * MIB

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        self.num_works += 1
        return self.peaks[self.num_works - 1]


@dataclass
class Watched:
    """A model whose shapes are seen."""

    model: Any
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Tokens, sequences and the longest sequence of each."""
    logits: list[int] = field(default_factory=list)

    @property
    def hidden_size(self) -> int:
        return int(self.model.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def classifier(self) -> Any:
        return self.model.classifier

    @property
    def attention_specs(self) -> Any:
        return self.model.attention_specs

    def forward(self, inputs: ModelInputs) -> Tensor:
        self.steps.append((len(inputs.positions), len(inputs.batch.seq_lens_cpu), inputs.batch.max_seq_len))
        return self.model.forward(inputs)

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_input_ids(token_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logits.append(len(hidden))
        logits: Tensor = self.model.compute_logits(hidden)
        return logits


@pytest.mark.parametrize("num_tokens", [40, 100])
def test_the_largest_steps_are_run(tiny_checkpoints: Callable[..., Path], num_tokens: int) -> None:
    """A chunk at the end of the longest prompts, all rows sampled, and all rows decoding at the longest context."""
    settings = settings_with(
        DecodeSettings, max_num_seqs=6, max_num_batched_tokens=num_tokens, device="cuda", kv_ring_mib=32
    )
    with pretended_device():
        decoder = load_decoder(tiny_checkpoints("llama"), dtype="float32", device=str(DEVICE))
        kv_cache = make_kv_cache(decoder.config.kv_layout(16, "").shapes[0], 1, DEVICE)
        model = Watched(decoder)
        steps = LargestSteps(
            model, [TorchAttentionBackend(kv_cache)], TorchLayerOps(), torch.device(DEVICE), 16, num_tokens, 6, 64
        )
        budget = PoolBudget.measured(settings, steps, FakeMemory([90 * MIB, 50 * MIB]))
    assert model.steps == [(num_tokens, 1 + num_tokens // 64, 64), (6, 6, 64)]
    assert model.logits == [6]
    shapes = graph_shapes(6, num_tokens, 64)
    graphs = max(50 * MIB, 90 * MIB * shapes[-1].num_tokens // num_tokens) + len(shapes) * GRAPH_BYTES
    assert budget == PoolBudget(1000 * MIB, 300 * MIB, 90 * MIB + 6 * 4 * 8, graphs, 32 * MIB)


def test_what_is_left_and_what_is_missing() -> None:
    budget = PoolBudget(1000 * MIB, 300 * MIB, 90 * MIB, 60 * MIB, 32 * MIB)
    assert budget.pool_bytes(DecodeSettings(device="cuda"), MIB) == (900 - 300 - 90 - 60 - 32) * MIB
    assert budget.pool_bytes(DecodeSettings(device="cuda", gpu_memory_utilization=0.484), MIB) == 2 * MIB
    with pytest.raises(ConfigError) as refused:
        budget.pool_bytes(DecodeSettings(device="cuda", gpu_memory_utilization=0.483), MIB)
    for part in (
        "gpu_memory_utilization is 0.483",
        "483 of the GPU's 1000 MiB",
        "300 MiB",
        "90 MiB",
        "60 MiB",
        "1 MiB are left",
    ):
        assert part in str(refused.value)


def test_without_graphs_nothing_is_kept_for_them(tiny_checkpoints: Callable[..., Path]) -> None:
    settings = DecodeSettings(max_num_seqs=2, max_num_batched_tokens=8, device="cuda", enforce_eager=True)
    decoder = load_decoder(tiny_checkpoints("llama"), dtype="float32", device="cpu")
    kv_cache = make_kv_cache(decoder.config.kv_layout(16, "").shapes[0], 1, "cpu")
    steps = LargestSteps(decoder, [TorchAttentionBackend(kv_cache)], TorchLayerOps(), torch.device("cpu"), 16, 8, 2, 32)
    assert PoolBudget.measured(settings, steps, FakeMemory([1, 2])).graphs == 0


def test_defaults_of_processor_and_gpu() -> None:
    assert DecodeSettings().pool_mib == 256
    assert DecodeSettings(device="cuda").pool_mib is None
    assert DecodeSettings(device="cuda", kv_cache_mib=7).pool_mib == 7
    for value in (0.0, 1.01, -1.0):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            DecodeSettings(gpu_memory_utilization=value).verify()
