"""Steps through all layers in one C++ call: the bits of calls layer by layer, in the result and in the cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import BlockedLinear, PackedLinear
from pdserve.kernels.native import native_fused_layers
from pdserve.kernels.native.build_library import BuildError, build
from pdserve.kernels.native.native_attention import NativeAttentionBackend
from pdserve.kernels.native.native_layer_ops import NativeLayerOps
from pdserve.kernels.native.native_library import NativeLibrary
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.loading import load_decoder
from tests.support.kernels.attention_batches import model_inputs, packed_batch
from tests.support.models.family_checkpoints import make_family
from tests.support.run.torch_threads import num_threads

BLOCK_SIZE, NUM_BLOCKS = 16, 80
LENGTHS = (1, 17, 300, 40, 16, 33, 5, 90, 60)
SHAPE = {
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


Step = tuple[Sequence[tuple[int, int, int]], Sequence[int] | None]
"""Arguments of `Run.mixed`."""


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    try:
        return NativeLibrary(str(build()))
    except BuildError as error:
        pytest.skip(str(error))


class Run:
    """Sequences of `LENGTHS` tokens in a cache of random bytes."""

    def __init__(self, decoder: Decoder, library: NativeLibrary, ops: TorchLayerOps, level: str | None = None) -> None:
        self.decoder, self.ops = decoder, ops
        self.cache = make_kv_cache(decoder.config.kv_layout(BLOCK_SIZE, "test").shapes[0], NUM_BLOCKS)
        self.cache.copy_(torch.randn(self.cache.shape, generator=torch.Generator().manual_seed(0)))
        self.attention = NativeAttentionBackend(self.cache, library, level)
        numbers = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
        self.tables = [[next(numbers) for _ in range(-(-(length + 4) // BLOCK_SIZE))] for length in LENGTHS]
        self.layers = 0

    def count(self) -> None:
        self.layers += 1

    def step(self, rows: Sequence[int], length_of: Sequence[int], *, is_by_layer: bool) -> Tensor:
        """A decode step of these sequences at these lengths."""
        return self.mixed([(row, length_of[row], 1) for row in rows], None, is_by_layer=is_by_layer)

    def mixed(
        self, rows: Sequence[tuple[int, int, int]], output_rows: Sequence[int] | None, *, is_by_layer: bool
    ) -> Tensor:
        """rows: a sequence, its length behind the step, and its tokens in the step; those of one token come first."""
        places = [(row, place) for row, length, count in rows for place in range(length - count, length)]
        slots = [self.tables[row][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for row, place in places]
        batch = packed_batch(
            [place for _, place in places],
            slots,
            [count for _, _, count in rows],
            [length for _, length, _ in rows],
            [self.tables[row] for row, _, _ in rows],
        )
        tokens = [(7 * row + place) % 300 for row, place in places]
        inputs = model_inputs(self.decoder, self.attention, batch, tokens, self.count)
        chosen = None if output_rows is None else torch.tensor(output_rows, dtype=torch.int64)
        with torch.inference_mode():
            return self.decoder.forward(replace(inputs, ops=self.ops, is_by_layer=is_by_layer, output_rows=chosen))


def _decoder(folder: Path, family: str, fields: dict[str, Any]) -> Decoder:
    make_family(folder, family, {**SHAPE, **fields}, "bfloat16")
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    return decoder


def linears(decoder: Decoder) -> Iterator[PackedLinear | BlockedLinear]:
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, Mlp)
        assert isinstance(layer.attention, SelfAttention)
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(linear, PackedLinear | BlockedLinear)
            yield linear


def use_level(decoder: Decoder, library: NativeLibrary, level: str) -> None:
    """Multiply any number of rows by this instruction set layer by layer, too."""
    for linear in linears(decoder):
        linear.native_rows = sys.maxsize
        assert linear.native is not None
        linear.native._level = library.levels.index(level)


FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    # gates and ups in whole blocks of channels, which are multiplied with each other as they are computed
    ("llama", {"mlp_bias": True, "intermediate_size": 192}),
    ("qwen2", {"intermediate_size": 1024}),
    ("mistral", {"sliding_window": 19}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 17}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
]


def assert_same_bits(library: NativeLibrary, decoder: Decoder, steps: Sequence[Step]) -> None:
    """One call and calls by layer have equal results and caches, at every instruction set; the first is indeed one call."""
    for level in library.levels:
        use_level(decoder, library, level)
        ops = NativeLayerOps(library, level)
        one, other = Run(decoder, library, ops, level), Run(decoder, library, ops, level)
        for number, (rows, outputs) in enumerate(steps):
            with num_threads(1 + number % 3):
                found = one.mixed(rows, outputs, is_by_layer=False)
            expected = other.mixed(rows, outputs, is_by_layer=True)
            assert len(found) == (sum(count for _, _, count in rows) if outputs is None else len(outputs))
            assert found.isfinite().all()
            assert torch.equal(found, expected), (level, number)
            assert torch.equal(one.cache.view(torch.int16), other.cache.view(torch.int16)), (level, number)
        assert decoder._fused is not None
        assert decoder._fused[1] is not None
        assert (one.layers, other.layers) == (len(steps), len(steps) * len(decoder.layers))


DECODES = ([2], [0, 1], [3, 2, 7], range(len(LENGTHS)), [5], range(1, len(LENGTHS)))
"""Sequences of decode steps."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_one_call_has_the_bits_of_calls_by_layer(
    library: NativeLibrary, tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    steps: list[Step] = [
        ([(row, LENGTHS[row] + number % 4, 1) for row in rows], None) for number, rows in enumerate(DECODES)
    ]
    assert_same_bits(library, _decoder(tmp_path, family, fields), steps)


CHUNKS: list[Step] = [
    ([(3, 40, 40)], [39]),
    ([(2, 290, 50)], []),  # in the middle of a prompt
    ([(0, 1, 1), (1, 17, 1), (5, 33, 20), (7, 90, 7)], [0, 1, 21, 28]),
    ([(4, 16, 2), (6, 5, 5)], None),
    ([(2, 300, 64)], [0, 5, 63]),
    ([(0, 1, 1), (1, 17, 1), (2, 300, 300), (7, 90, 41)], [0, 1, 301, 342]),
    ([(2, 300, 290)], None),
    ([(1, 18, 1), (4, 17, 1)], [1]),
]
"""Steps of chunks of prompts, some behind decode rows, and their output rows."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_chunks_of_prompts_and_output_rows(
    library: NativeLibrary, tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    assert_same_bits(library, _decoder(tmp_path, family, fields), CHUNKS)


@pytest.mark.slow
def test_products_of_many_rows_in_parts(library: NativeLibrary, tmp_path: Path) -> None:
    """With AMX: of 343 rows and, in two pieces, of 562, whose inner size does not fill whole tiles."""
    fields = {"intermediate_size": 3000, "mlp_bias": True, "num_hidden_layers": 2}
    whole: Step = ([(row, length, length) for row, length in enumerate(LENGTHS)], None)
    assert_same_bits(library, _decoder(tmp_path, "llama", fields), [whole, CHUNKS[5]])


def test_a_step_of_many_rows_is_several_calls(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is visible between them; the bits are those of one."""
    decoder = _decoder(tmp_path, "llama", {"num_hidden_layers": 5})
    for linear in linears(decoder):
        linear.native_rows = 128
    steps: list[Step] = [([(2, 300, 60)], [0, 59]), ([(2, 300, 35)], None), ([(1, 17, 1), (7, 90, 70)], [])]
    for (rows, outputs), num_calls in zip(steps, (3, 2, 5), strict=True):
        one, several = Run(decoder, library, NativeLayerOps(library)), Run(decoder, library, NativeLayerOps(library))
        expected = one.mixed(rows, outputs, is_by_layer=False)
        with monkeypatch.context() as patch:
            patch.setattr(native_fused_layers, "_LAYER_ROWS", 128)
            found = several.mixed(rows, outputs, is_by_layer=False)
        assert (one.layers, several.layers) == (1, num_calls)
        assert torch.equal(found, expected)
        assert torch.equal(one.cache.view(torch.int16), several.cache.view(torch.int16))


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
    for linear in linears(decoder):
        linear.native_rows = 64
    run = Run(decoder, library, NativeLayerOps(library))
    run.step([0] * 64, LENGTHS, is_by_layer=False)
    assert run.layers == 1
    run.step([0] * 65, LENGTHS, is_by_layer=False)
    assert run.layers == 1 + len(decoder.layers)


def test_a_slot_outside_the_cache_is_refused(library: NativeLibrary, tmp_path: Path) -> None:
    run = Run(_decoder(tmp_path, "llama", {}), library, NativeLayerOps(library))
    before = run.cache.clone()
    batch = packed_batch([0], [NUM_BLOCKS * BLOCK_SIZE], [1], [1], [[0]])
    inputs = model_inputs(run.decoder, run.attention, batch, [1])
    with torch.inference_mode(), pytest.raises(ValueError, match="outside the cache"):
        run.decoder.forward(replace(inputs, ops=run.ops))
    assert torch.equal(run.cache.view(torch.int16), before.view(torch.int16))
