"""The checked interpreter leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.kernels.triton_interpreter import interpreted


@triton.jit
def mean(x, size, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < size, other=0.0), 0) / size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not used")
def test_a_kernel_compiles_in_a_process_that_interpreted_it(tmp_path: Path) -> None:
    """`tl.sum` is a jit function itself, which Triton's own interpreter would leave changed."""
    x, out = torch.arange(10.0), torch.zeros(1)
    with interpreted():
        mean[(1,)](x, 10, out, BLOCK=16)
    assert out == 4.5
    assert "TRITON_INTERPRET" not in os.environ
    with triton.knobs.runtime.scope(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        signature = {"x": "*fp32", "size": "i32", "out": "*fp32", "BLOCK": "constexpr"}
        compiled = triton.compile(
            ASTSource(mean, signature, {(3,): 16}), target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
        )
    assert len(compiled.asm["cubin"]) > 0
