"""Least time of a model's arithmetic on a CPU: its packed matrices by themselves, and what a step reads of its cache, read once.

Nothing of an engine is in it: no norms, attention, rules of states, sampling or Python between layers. The matrices have the
model's shapes and random numbers in bfloat16, packed as oneDNN wants them and on huge pages, so that what a floor leaves out is
what an engine adds. Where oneDNN multiplies no bfloat16 they are float32. Of a stack of experts those that the rows choose at
random are multiplied, each with its rows. A state is read and written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
REPEATS = 3
CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Workload:
    """Equal requests that are all sent at once."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int


class Floor:
    """Times of one model's matrices on this machine. num_threads: of torch, set by the caller before."""

    def __init__(self, model: Path) -> None:
        # imported here: the other side's environment imports this module, too
        from transformers import AutoConfig, AutoModelForCausalLM

        from pdserve.kernels.cpu.huge_pages import request_huge_pages

        request_huge_pages()
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config)
        head = shapes.get_output_embeddings()
        self._matrices = [
            _packed(*module.weight.shape)
            for name, module in shapes.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]
        self._head = _packed(*head.weight.shape)
        text = config.get_text_config()
        names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        self._chosen = next((getattr(text, name) for name in names if getattr(text, name, None)), 0)
        self._stacks = [
            [_packed(*weight.shape[1:]) for _ in range(len(weight))]
            for name, weight in shapes.named_parameters()
            if weight.dim() == 3 and "experts" in name and self._chosen
        ]
        self._cache = _cached(model)

    def linears_s(self, num_rows: int, num_logits: int) -> float:
        """All layers' matrices at this number of rows, and the output matrix at that of logits; the least of 3 runs."""
        least = float("inf")
        sizes = {matrix.size for stack in (self._matrices, *self._stacks) for matrix in stack}
        rows = {size: torch.randn(num_rows * max(1, self._chosen), size, dtype=DTYPE) for size in sizes}
        last = torch.randn(num_logits, self._head.size, dtype=DTYPE)
        draw = torch.Generator().manual_seed(num_rows)
        counts = [
            torch.rand(num_rows, len(stack), generator=draw).topk(self._chosen).indices.flatten().bincount().tolist()
            for stack in self._stacks
        ]
        for _ in range(REPEATS):
            began = time.perf_counter()
            for matrix in self._matrices:
                matrix(rows[matrix.size][:num_rows])
            for stack, chosen in zip(self._stacks, counts, strict=True):
                for matrix, count in zip(stack, chosen, strict=False):
                    if count:
                        matrix(rows[matrix.size][:count])
            if num_logits:
                self._head(last)
            least = min(least, time.perf_counter() - began)
        return least

    def cache_s(self, num_sequences: int, context: int) -> float:
        """Reads the keys and values, or rows, of so many sequences of one length once, one after the other, and adds to each
        number of their states; the least of 3 runs."""
        read = sum(bytes_ * min(context, window or context) for bytes_, window in self._cache.tokens)
        numbers = torch.ones(max(1, num_sequences * read // 8), dtype=torch.int64)
        states = torch.ones(max(1, num_sequences * self._cache.state // 4))
        least = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            numbers.sum()
            states += 1
            least = min(least, time.perf_counter() - began)
        return least

    def seconds(self, workload: Workload) -> float:
        """All prompts in chunks of 512 tokens, then steps of all sequences, each with the KV bytes of its context."""
        full, rest = divmod(workload.prompt_tokens * workload.num_requests, CHUNK_TOKENS)
        taken = full * self.linears_s(CHUNK_TOKENS, 1) + (self.linears_s(rest, workload.num_requests) if rest else 0.0)
        num_steps = workload.output_tokens - 1
        context = workload.prompt_tokens + workload.output_tokens // 2
        cache_s = self.cache_s(workload.num_requests, context)
        return taken + num_steps * (self.linears_s(workload.num_requests, workload.num_requests) + cache_s)


@dataclass(frozen=True)
class _Cached:
    """What a decode step of one sequence finds in the cache."""

    tokens: list[tuple[int, int]]
    """Per group with tokens: bytes of a token in its layers, and the tokens that its layers see at most, 0 for all."""
    state: int
    """Bytes of the state of all layers."""


def _cached(model: Path) -> _Cached:
    from pdserve.common.settings.worker_settings import WorkerSettings
    from pdserve.engine.runner.pool.pool_size import with_kv_cache_groups
    from pdserve.models.kv_cache import StateSpec
    from pdserve.models.model_impl import read_model_config

    settings = WorkerSettings()
    config = with_kv_cache_groups(read_model_config(model, settings.dtype, settings.model_impl), settings)
    tokens, state = [], 0
    for group in config.kv_cache_groups(settings.block_size, "", cache_dtype=settings.cache_dtype):
        of_layers = group.shape.block_bytes * len(group.layers) // group.shape.num_layers
        if isinstance(group.spec, StateSpec):
            state += of_layers
        else:
            tokens.append((of_layers // settings.block_size, getattr(group.spec, "reach", 0)))
    return _Cached(tokens, state)


@dataclass(frozen=True)
class _Matrix:
    packed: torch.Tensor
    size: int
    """Length of an input row."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")
        return result


def _packed(out_size: int, in_size: int) -> _Matrix:
    weight = torch.randn(out_size, in_size, dtype=DTYPE)
    return _Matrix(torch.ops.mkldnn._reorder_linear_weight(weight, 1), in_size)
