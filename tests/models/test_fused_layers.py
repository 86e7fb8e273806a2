"""Decode rows through all layers in one C++ call: the bits of calls layer by layer, in the result and in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.native.build_library import BuildError, build
from pdserve.kernels.native.native_attention import NativeAttentionBackend
from pdserve.kernels.native.native_layer_ops import NativeLayerOps
from pdserve.kernels.native.native_library import NativeLibrary
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.layers.gated_mlp import GatedMlp
from pdserve.models.loading import load_decoder
from tests.support.attention_batches import model_inputs, packed_batch
from tests.support.family_checkpoints import make_family
from tests.support.torch_threads import num_threads

BLOCK_SIZE, NUM_BLOCKS = 16, 80
LENGTHS = (1, 17, 300, 40, 16, 33, 5, 90)
SHAPE = {
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 here")
    try:
        return NativeLibrary(str(build()))
    except BuildError as error:
        pytest.skip(str(error))


class Run:
    """Sequences of `LENGTHS` tokens in a cache of random bytes."""

    def __init__(self, decoder: Decoder, library: NativeLibrary, ops: TorchLayerOps, level: str | None = None) -> None:
        self.decoder, self.ops = decoder, ops
        self.cache = make_kv_cache(decoder.config.kv_layout(BLOCK_SIZE, "test"), NUM_BLOCKS)
        self.cache.copy_(torch.randn(self.cache.shape, generator=torch.Generator().manual_seed(0)))
        self.attention = NativeAttentionBackend(self.cache, library, level)
        numbers = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
        self.tables = [[next(numbers) for _ in range(-(-(length + 4) // BLOCK_SIZE))] for length in LENGTHS]
        self.layers = 0

    def count(self) -> None:
        self.layers += 1

    def step(self, rows: Sequence[int], length_of: Sequence[int], *, is_by_layer: bool) -> Tensor:
        """A decode step of these sequences at these lengths."""
        lengths = [length_of[row] for row in rows]
        slots = [
            self.tables[row][(length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
            for row, length in zip(rows, lengths, strict=True)
        ]
        tables = [self.tables[row] for row in rows]
        batch = packed_batch([length - 1 for length in lengths], slots, [1] * len(rows), lengths, tables)
        tokens = [7 * row + length for row, length in zip(rows, lengths, strict=True)]
        inputs = model_inputs(self.decoder, self.attention, batch, tokens, self.count)
        with torch.inference_mode():
            return self.decoder.forward(replace(inputs, ops=self.ops, is_by_layer=is_by_layer))


def _decoder(folder: Path, family: str, fields: dict[str, Any]) -> Decoder:
    make_family(folder, family, {**SHAPE, **fields}, "bfloat16")
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    return decoder


FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 19}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 17}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
]


@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_one_call_has_the_bits_of_calls_by_layer(
    library: NativeLibrary, tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    decoder = _decoder(tmp_path, family, fields)
    for index, level in enumerate(library.levels):
        for layer in decoder.layers:
            assert isinstance(layer.mlp, GatedMlp)
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
                assert isinstance(linear, PackedLinear)
                assert linear.native is not None
                linear.native._level = index
        ops = NativeLayerOps(library, level)
        one, other = Run(decoder, library, ops, level), Run(decoder, library, ops, level)
        for number, rows in enumerate(([2], [0, 1], [3, 2, 7], range(len(LENGTHS)), [5], range(1, len(LENGTHS)))):
            lengths = [length + number % 4 for length in LENGTHS]
            with num_threads(1 + number % 3):
                found = one.step(list(rows), lengths, is_by_layer=False)
            expected = other.step(list(rows), lengths, is_by_layer=True)
            assert found.isfinite().all()
            assert torch.equal(found, expected), (level, number)
            assert torch.equal(one.cache.view(torch.int16), other.cache.view(torch.int16))
        # the first was indeed one call, and beats once
        assert decoder._fused is not None
        assert decoder._fused[1] is not None
        assert (one.layers, other.layers) == (6, 6 * len(decoder.layers))


def test_other_families_and_operations_compute_layer_by_layer(library: NativeLibrary, tmp_path: Path) -> None:
    decoder = _decoder(tmp_path / "llama", "llama", {})
    run = Run(decoder, library, TorchLayerOps())
    run.step([1, 2], LENGTHS, is_by_layer=False)
    assert run.layers == len(decoder.layers)
    decoder = _decoder(tmp_path / "gemma", "gemma3_text", {"sliding_window": 13, "query_pre_attn_scalar": 20})
    run = Run(decoder, library, NativeLayerOps(library))
    run.step([1, 2], LENGTHS, is_by_layer=False)
    assert run.layers == len(decoder.layers)


def test_more_rows_than_cpp_multiplies_compute_layer_by_layer(library: NativeLibrary, tmp_path: Path) -> None:
    decoder = _decoder(tmp_path, "llama", {})
    run = Run(decoder, library, NativeLayerOps(library))
    run.step([0] * 65, LENGTHS, is_by_layer=False)
    assert run.layers >= len(decoder.layers)


def test_a_slot_outside_the_cache_is_refused(library: NativeLibrary, tmp_path: Path) -> None:
    run = Run(_decoder(tmp_path, "llama", {}), library, NativeLayerOps(library))
    before = run.cache.clone()
    batch = packed_batch([0], [NUM_BLOCKS * BLOCK_SIZE], [1], [1], [[0]])
    inputs = model_inputs(run.decoder, run.attention, batch, [1])
    with torch.inference_mode(), pytest.raises(ValueError, match="outside the cache"):
        run.decoder.forward(replace(inputs, ops=run.ops))
    assert torch.equal(run.cache.view(torch.int16), before.view(torch.int16))
