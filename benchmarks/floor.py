"""Least time of a model's arithmetic on a CPU: its packed matrices alone, and its KV bytes read once.

Nothing of an engine is in it: no norms, attention, sampling or Python between layers. The matrices have the model's shapes and
random numbers in bfloat16, packed as oneDNN wants them and on huge pages, so that what a floor leaves out is what an engine adds.
Where oneDNN multiplies no bfloat16 they are float32.
"""

from __future__ import annotations

import json
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
        from pdserve.kernels.cpu.huge_pages import request_huge_pages

        request_huge_pages()
        config = json.loads((model / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        kv_heads, inner = config["num_key_value_heads"], config["intermediate_size"]
        self._num_layers = config["num_hidden_layers"]
        self._kv_token_bytes = 2 * 2 * kv_heads * head * self._num_layers
        shapes = [((heads + 2 * kv_heads) * head, hidden), (hidden, heads * head), (2 * inner, hidden), (hidden, inner)]
        self._layers = [[_packed(*shape) for shape in shapes] for _ in range(self._num_layers)]
        self._head = _packed(config["vocab_size"], hidden)

    def linears_s(self, num_rows: int, num_logits: int) -> float:
        """All layers' matrices at this number of rows, and the output matrix at that of logits; the least of 3 runs."""
        least = float("inf")
        rows = {layer.size: torch.randn(num_rows, layer.size, dtype=DTYPE) for layer in self._layers[0]}
        last = torch.randn(num_logits, self._head.size, dtype=DTYPE)
        for _ in range(REPEATS):
            began = time.perf_counter()
            for matrices in self._layers:
                for matrix in matrices:
                    matrix(rows[matrix.size])
            if num_logits:
                self._head(last)
            least = min(least, time.perf_counter() - began)
        return least

    def kv_s(self, num_tokens: int) -> float:
        """Reads the KV bytes of so many tokens once, one behind the other; the least of 3 runs."""
        numbers = torch.ones(max(1, num_tokens * self._kv_token_bytes // 8), dtype=torch.int64)
        least = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            numbers.sum()
            least = min(least, time.perf_counter() - began)
        return least

    def seconds(self, workload: Workload) -> float:
        """All prompts in chunks of 512 tokens, then steps of all sequences, each with the KV bytes of its context."""
        full, rest = divmod(workload.prompt_tokens * workload.num_requests, CHUNK_TOKENS)
        taken = full * self.linears_s(CHUNK_TOKENS, 1) + (self.linears_s(rest, workload.num_requests) if rest else 0.0)
        num_steps = workload.output_tokens - 1
        context = workload.num_requests * (workload.prompt_tokens + workload.output_tokens // 2)
        return taken + num_steps * (self.linears_s(workload.num_requests, workload.num_requests) + self.kv_s(context))


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
