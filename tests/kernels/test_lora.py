"""LoRA products on a CPU: the contract over torch and over C++, and what is C++'s own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pdserve.kernels.lora import make_lora_ops as choice
from pdserve.kernels.lora.lora_linear import LoraOps, LoraStack
from pdserve.kernels.lora.make_lora_ops import make_lora_ops
from pdserve.kernels.lora.torch_lora import TorchLoraOps
from pdserve.kernels.native.native_library import NativeLibrary, NativeLibraryError
from pdserve.kernels.native.native_lora import NativeLoraOps
from tests.kernels.lora_contract import Adapters, LoraContract, adapter
from tests.support.run.torch_threads import num_threads

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = (530, 40, 33)
LARGE: Adapters = {
    slot: adapter(slot, rank, products, 77, SIZES)
    for slot, rank, products in ((0, 16, (0, 1, 2)), (1, 5, (1, 2)), (2, 9, (0,)), (3, 16, (0, 1, 2)))
}


class TestTorchLora(LoraContract):
    def make_ops(self, dtype: torch.dtype) -> LoraOps:
        return TorchLoraOps(CPU)


class TestNativeLora(LoraContract):
    @pytest.fixture(autouse=True)
    def _built(self, built: NativeLibrary) -> None:
        self.native_library = built

    def make_ops(self, dtype: torch.dtype) -> NativeLoraOps:
        return NativeLoraOps(self.native_library)

    @DTYPES
    def test_every_instruction_set(self, dtype: torch.dtype) -> None:
        for level in self.native_library.levels:
            ops = NativeLoraOps(self.native_library, level)
            layer = self.layer(ops, LARGE, dtype, 77, SIZES, max_rank=16)
            slots, counts = [3, 0, 1, 2, 0, 0, 0, 0, -1], [1] * 6 + [2, 5, 3]
            x, of_tokens = layer.rows(sum(counts), 77, 0.1), np.repeat(slots, counts).tolist()
            ops.set_rows(np.array(slots), np.array(counts))
            atol = 0.1 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(layer.linear(x).double(), layer.expected(x, of_tokens), atol=atol, rtol=atol / 2)

    @DTYPES
    def test_a_token_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(self, dtype: torch.dtype) -> None:
        """The adapter's part alone, in every kind of batch."""
        ops, draw = self.make_ops(dtype), random.Random(7)
        layer = self.layer(ops, LARGE, dtype, 77, SIZES, max_rank=16)
        added = ops.layer(layer.linear.stack)
        x = layer.rows(40, 77)

        def products(places: list[int], slots: list[int], counts: list[int]) -> torch.Tensor:
            y = torch.zeros(len(places), sum(SIZES), dtype=dtype)
            if ops.set_rows(np.array(slots), np.array(counts)):
                added.add(y, x[places])
            return y

        alone = {(place, slot): products([place], [slot], [1])[0] for place in range(40) for slot in range(-1, 4)}
        for threads in (1, 2, 3):
            with num_threads(threads):
                for _ in range(10):
                    counts = [1] * draw.randint(0, 12) + [draw.randint(2, 9) for _ in range(draw.randint(1, 3))]
                    slots = [draw.randint(-1, 3) for _ in counts]
                    places = draw.sample(range(40), sum(counts))
                    found = products(places, slots, counts)
                    for row, place, slot in zip(found, places, np.repeat(slots, counts).tolist(), strict=True):
                        assert torch.equal(row, alone[place, slot])

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        ops = self.make_ops(torch.float32)
        stack = LoraStack(24, (8,), max_loras=1, max_rank=2, dtype=torch.float32, device=CPU)
        added = ops.layer(stack)
        ops.set_rows(np.array([0]), np.array([3]))
        y, x = torch.zeros(3, 8), torch.zeros(3, 24)
        for wrong_y, wrong_x in ((y, x[:2]), (y[:2], x), (y, torch.zeros(3, 48)[:, ::2]), (y, x.bfloat16())):
            with pytest.raises(ValueError, match="x"):
                added.add(wrong_y, wrong_x)
        half = LoraStack(24, (8,), max_loras=1, max_rank=2, dtype=torch.float16, device=CPU)
        with pytest.raises(ValueError, match="supports float32 and bfloat16; the model is served in float16"):
            ops.layer(half)


def test_the_choice(built: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choice, "load_library", lambda: built)

    def made(kernels: str, dtype: torch.dtype, device: str = "cpu") -> LoraOps:
        return make_lora_ops(kernels, dtype, torch.device(device), max_loras=1, max_tokens=8)

    assert isinstance(made("auto", torch.bfloat16), NativeLoraOps)
    assert isinstance(made("torch", torch.bfloat16), TorchLoraOps)
    assert isinstance(made("auto", torch.bfloat16, "meta"), TorchLoraOps)
    with caplog.at_level("INFO", "pdserve"):
        assert isinstance(made("auto", torch.float16), TorchLoraOps)

        def fail() -> NativeLibrary:
            raise NativeLibraryError("it is not built")

        monkeypatch.setattr(choice, "load_library", fail)
        assert isinstance(made("auto", torch.float32), TorchLoraOps)
    assert "served in float16" in caplog.text
    assert "it is not built" in caplog.text


def test_adapters_are_counted_in_bytes() -> None:
    stack = LoraStack(24, (8, 4), max_loras=3, max_rank=2, dtype=torch.bfloat16, device=CPU)
    assert stack.nbytes == 3 * 2 * (2 * 2 * 24 + 2 * 12)
    stack.put(1, adapter(0, 2, (1,), 24, (8, 4)))
    assert stack.ranks.tolist() == [[0, 0], [0, 2], [0, 0]]
