"""Attention of one prompt chunk over its pages, against torch's cuDNN and flash attention over contiguous keys.

The goal is that of the back end that a worker chooses by itself, `auto`; times of the others show whether its choice is right.

The libraries get keys and values in one piece, which costs them nothing here: a back end that gathers pages for them pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.attention_inputs import PagedStep, Shape, paged_step
from gpu.bench import Bench
from pdserve.kernels.attention.make_attention import make_attention

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    new: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.new} tokens behind {self.context}"

    @property
    def pairs(self) -> int:
        """Query-key pairs under the causal mask."""
        return self.new * self.context + self.new * (self.new + 1) // 2


def chunks(dry: bool) -> list[Chunk]:
    """Full chunks of 2,048 tokens are what a worker computes (`GPU_STEP_TOKENS`)."""
    if dry:
        return [Chunk(20, 0), Chunk(16, 24)]
    pairs = ((2048, 0), (2048, 2048), (8192, 0), (2048, 30720), (512, 0), (512, 7680), (32768, 0), (2048, 129024))
    return [Chunk(new, context) for new, context in pairs]


def run(bench: Bench) -> None:
    for chunk in chunks(bench.dry):
        if bench.is_late(chunk.name):
            return
        with bench.case(chunk.name):
            measure(bench, chunk)


def measure(bench: Bench, chunk: Chunk) -> None:
    shape = Shape.of_llama_8b(bench.dry)
    total = chunk.new + chunk.context
    step = paged_step(shape, np.array([total]), np.array([chunk.new]), BLOCK_SIZE, 1, bench.device)
    names = (bench.triton, "sdpa") if bench.dry else ("auto", "triton", "sdpa")
    own = {name: of_backend(bench, step, shape, name) for name in names}
    ours, found = own[names[0]]
    keys, values = contiguous(step, total)
    times, errors = {}, {}
    for name, call in libraries(bench, step, keys, values, chunk).items():
        try:
            errors[name] = float((call().float() - found.float()).abs().max())
            times[name] = bench.milliseconds(call)
        except Exception as error:  # this build or this shape has no such kernel
            bench.rows.skip(f"{chunk.name}, {name}", str(error).strip().splitlines()[0][:120])
    flops = 4 * shape.num_heads * shape.head_dim * chunk.pairs
    best = min(times, key=lambda name: times[name]) if times else None
    fields = {
        **{f"{name}_ms": milliseconds for name, (milliseconds, _) in own.items()},
        "ours_tflops": flops / ours / 1e9,
        "best_library": "-" if bench.dry else best,
        "library_tflops": flops / times[best] / 1e9 if best else None,
        # bfloat16 of two orders of summation; null without a library to compare with
        "ok": min(errors.values()) < 0.1 if errors else None,
    }
    if best is None:
        bench.rows.add(chunk.name, **fields, ratio=None, goal=None, met=None)
    elif chunk.new >= 2048 or bench.dry:
        bench.rows.judge(chunk.name, "prefill_attention", times[best] / ours, **fields)
    else:
        bench.rows.add(chunk.name, **fields, ratio=times[best] / ours, goal=None, met=None)


def of_backend(bench: Bench, step: PagedStep, shape: Shape, name: str) -> tuple[float, Tensor]:
    """(milliseconds, `[T, Hq, D]`) of one of our back ends."""
    plan = make_attention(name, step.kv_cache).plan(step.batch, shape.spec)
    out = plan.attend(0, step.q, step.k, step.v).view(step.q.shape)
    return bench.milliseconds(lambda: plan.attend(0, step.q, step.k, step.v)), out


def contiguous(step: PagedStep, total: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[Hkv, total, D]` of the one sequence."""
    table = step.batch.block_tables[0]
    pages = step.kv_cache[table[: -(-total // BLOCK_SIZE)], :, 0]
    keys, values = (pages[:, :, kind].transpose(0, 1).flatten(1, 2)[:, :total].contiguous() for kind in (0, 1))
    return keys, values


def libraries(
    bench: Bench, step: PagedStep, keys: Tensor, values: Tensor, chunk: Chunk
) -> dict[str, Callable[[], Tensor]]:
    """Name -> attention of the chunk, `[T, Hq, D]`."""
    queries = step.q.transpose(0, 1)[None]

    def of(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(queries, keys[None], values[None], is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return call

    def flash_behind_context() -> Tensor:
        """Aligned to the last key, which torch's own function cannot say."""
        ends = [
            torch.tensor([0, n], dtype=torch.int32, device=bench.device) for n in (chunk.new, chunk.new + chunk.context)
        ]
        out = torch.ops.aten._flash_attention_forward(
            step.q, keys.transpose(0, 1), values.transpose(0, 1), ends[0], ends[1], chunk.new, chunk.new + chunk.context,
            0.0, True, False,
        )  # fmt: skip
        return out[0]  # type: ignore[no-any-return]

    def masked() -> Tensor:
        """A CPU's reference."""
        key = torch.arange(keys.shape[1])
        seen = key <= key[chunk.context :, None]
        out = F.scaled_dot_product_attention(queries, keys[None], values[None], attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1)

    if bench.dry:
        return {"masked": masked}
    if chunk.context:
        return {"flash": flash_behind_context}
    return {"cudnn": of(SDPBackend.CUDNN_ATTENTION), "flash": of(SDPBackend.FLASH_ATTENTION)}
