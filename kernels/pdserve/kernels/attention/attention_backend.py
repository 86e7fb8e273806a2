"""`AttentionBackend` and `AttentionPlan`: the interface between models and attention over the paged KV cache.

A back end is made once per KV cache. In each step it makes one plan per `AttentionSpec`, with everything that is the same in
all layers of that spec; each layer then calls `store` and `attend` of its plan. `tests/kernels/attention_contract.py` is the
contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch, StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec


class AttentionPlan(Protocol):
    """One step's batch laid over the cache, for all layers of one spec. Valid until the next step's `plan`.

    A kernel that writes keys and values itself (`LayerOps.rotate_and_store`) reads `kv_cache` and `slot_mapping` instead of calling
    `store`. A plan over latent rows may also have the method `attend_latent`: `latent_heads.attend_latent` then calls it instead
    of `attend`.
    """

    @property
    def kv_cache(self) -> Tensor:
        """`[num_blocks, Hkv, L, 2, bs, D]`, or with one row per token `[num_blocks, Hkv, L, 1, bs, D]`; contiguous."""

    @property
    def slot_mapping(self) -> Tensor:
        """`[T]` int64, the batch's."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write this step's keys and values to their slots. Called once per layer, before `attend`.

        k and v `[T, Hkv, D]`, keys rotated; both may be views with strides. With one row per token v is the first numbers of k.
        """

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of all T query tokens; reads pages, writes none.

        q `[T, Hq, D]`, rotated; k and v are the arguments of `store`, and may be used instead of the pages; sinks: `[Hq]`
        of a spec that has them; distance_bias: `[Hq, n]` of a spec that has it: column j for the key j tokens before the query, the
        last column for those further back -> `[T, Hq * D]`, or `[T, Hq * value_dim]`.
        """


class AttentionBackend(Protocol):
    """Attention over one KV cache. One thread calls it."""

    @property
    def is_capturable(self) -> bool:
        """True if steps of decode rows only, and those of chunks only with `AttentionBatch.most_chunks`, can be captured in graphs:
        the calls of two plans with as many rows, or tokens, launch the same kernels over the same memory, where `plan` has written
        what differs, and padding with slots -1 and length 0 writes nothing. Plans of the largest steps come first, so that
        no memory moves later."""

    def plan_arrays(self, lengths: StepLengths, specs: Sequence[AttentionSpec]) -> Mapping[str, NDArray[Any]]:
        """Arrays that plans of a step with these lengths read on the device, by names of the back end's own.

        The caller copies them to the device in one copy with its own, and passes them in `AttentionBatch.plan_arrays`; `plan`
        then copies nothing from the host. `plan` also takes batches without them, and then copies what it needs itself. A back end
        of another package may lack the method.
        """

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> AttentionPlan:
        """Prepare a step. Called once per step and spec, before the first `store` of the step.

        May overwrite stale bytes after a sequence's last token, in its last block. Raises: ValueError for an inconsistent batch,
        or a spec that does not fit the cache or the back end.
        """
