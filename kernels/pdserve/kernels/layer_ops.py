"""`LayerOps`: the operations between the matrix products and attention of a step.

There is one implementation in torch operations (`torch_layer_ops.py`: processors, and the reference) and one in Triton kernels
(`triton/layer_ops.py`). `make_layer_ops.py` chooses. `tests/kernels/layer_ops_contract.py` is the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layers.expert_stack import ExpertStack
from pdserve.kernels.layers.fused_layers import FusedLayers, LayerParts
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.sampled_rows import PackedRows

Block = tuple[int, int]
"""Numbers of a source block and of a target block."""
DIGESTED_UNIT, SHORTEST_DIGESTED = 8, 248
"""Bytes of blocks that `LayerOps.digests` takes: multiples of the first, at least the second."""


SampleTokens = Callable[[Tensor, PackedRows], Tensor]
"""logits `[N, V]` float32 and their rows' parameters -> `[2, N]` int64 on the logits' device: token ids, and the bits of each row's
highest logit (float32 in the low half). Does not wait for the device. A row whose highest logit is infinite gets its most likely
token; a row with NaN gets any token."""


class LayerOps(Protocol):
    """Keeps no state of a step. All tensors of a call lie on one device; results are in the device's stream order."""

    @property
    def sample(self) -> SampleTokens | None:
        """Draws by the rules of `engine/sampling/kept_tokens.py`, `token_draw.py` and `seeded_uniform.py`; None: the engine does
        it."""

    def add_norm(self, residual: Tensor, x: Tensor, linear: Linear | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """`s = residual + linear(x)`, or `residual + x` without a linear layer -> s and `norm(s)`.

        residual `[T, H]`, may be overwritten; x `[T, in]`, or `[T, H]` without a linear layer -> `[T, H]` twice.
        """

    def rotate_and_store(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        qk_norm: HeadNorm | None,
        phases: Tensor,
        plan: AttentionPlan,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate queries and keys, and write keys and values to their slots.

        qkv `[T, Hq + 2 * Hkv, D]`, overwritten; qk_norm: None for no norm; phases `[T, 1, D / 2]` complex64 -> q `[T, Hq, D]`, k
        and v `[T, Hkv, D]`, views of qkv. Writes the pages of the plan's slots and no other byte of the cache.
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[T, 2 * I]`, which may be overwritten -> `[T, I]`, maybe a view."""

    def grouped_experts(self, x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack) -> Tensor:
        """Sum over a token's k experts of weight times the expert's output, for experts of a device.

        x `[T, H]`, weights and experts `[T, k]` -> `[T, H]`. Reads nothing back from the device, and its launches depend only on
        the shapes. Each token's terms are added in the order of its `experts` row.
        """

    def fuse_layers(self, layers: Sequence[LayerParts]) -> FusedLayers | None:
        """Return a function for a step through all of these layers in one call; None: they are called one by one."""

    def move_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[Block]) -> None:
        """`target[b] = source[a]` for each pair (a, b). All sources are read before any target is written.

        source `[*, ...]` and target `[*, ...]`: pools, or a pool and a ring of blocks, contiguous, with equal blocks; they may be
        the same tensor. Raises: ValueError for a target that is listed twice, a number outside its tensor, or unequal blocks.
        """

    def digests(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        """xxh3_64 of the bytes of these blocks -> `[n]` int64, the bits of the unsigned numbers, on the pool's device.

        pool `[num_blocks, ...]`, contiguous; a block has a multiple of 8 bytes, and more than 240. Raises: ValueError for other
        sizes, and for a number outside the pool.
        """


def check_pairs(source: Tensor, target: Tensor, pairs: Sequence[Block]) -> None:
    """Check the arguments of `LayerOps.move_blocks`. Raises: ValueError."""
    if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
        raise ValueError(
            f"blocks {tuple(source.shape[1:])} {source.dtype} do not fit {tuple(target.shape[1:])} {target.dtype}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("blocks must be contiguous")
    if len({written for _, written in pairs}) < len(pairs):
        raise ValueError(f"a block is copied to twice: {list(pairs)}")
    check_numbers(source, [read for read, _ in pairs])
    check_numbers(target, [written for _, written in pairs])


def check_numbers(pool: Tensor, blocks: Sequence[int]) -> None:
    """Raises: ValueError for a block number that the pool does not have."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < len(pool):
        raise ValueError(f"blocks {min(blocks)} to {max(blocks)} of a pool of {len(pool)}")


def check_digested(pool: Tensor, blocks: Sequence[int]) -> int:
    """Check the arguments of `LayerOps.digests` and return a block's size in bytes. Raises: ValueError."""
    size = pool[:1].numel() * pool.element_size()
    if size % DIGESTED_UNIT or size < SHORTEST_DIGESTED or not pool.is_contiguous():
        raise ValueError(f"a contiguous pool whose blocks have a multiple of 8 bytes above 240 is needed, not {size}")
    check_numbers(pool, blocks)
    return size
