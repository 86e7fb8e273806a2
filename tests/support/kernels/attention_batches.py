"""Steps made by hand: an `AttentionBatch` from lists, and the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_plans import LayerBackend, plan_of
from pdserve.models.model_impl import AnyDecoder
from pdserve.models.model_inputs import ModelInputs


def packed_batch(
    positions: Sequence[int],
    slots: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    device: torch.device | None = None,
) -> AttentionBatch:
    """A batch on a device, by default the CPU; shorter block tables are padded with 0."""
    width = max(map(len, block_tables), default=0)
    return AttentionBatch.from_arrays(
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        query_lens=np.array(query_lens, np.int64),
        seq_lens=np.array(seq_lens, np.int64),
        block_tables=np.array([[*table, *[0] * (width - len(table))] for table in block_tables], np.int64),
        device=device or torch.device("cpu"),
    )


def model_inputs(
    decoder: AnyDecoder,
    attention: LayerBackend | Sequence[LayerBackend],
    batch: AttentionBatch,
    token_ids: Sequence[int] | None,
    before_layer: Callable[[], None] | None = None,
    inputs_embeds: Tensor | None = None,
) -> ModelInputs:
    """attention: of all KV cache groups, or of each, with the same block tables."""
    groups = len(decoder.attention_specs)
    backends = attention if isinstance(attention, Sequence) else [attention] * groups
    plans = {
        spec: plan_of(backend, batch, spec)
        for backend, specs in zip(backends, decoder.attention_specs, strict=True)
        for spec in specs
    }
    ids = None if token_ids is None else torch.tensor(token_ids, device=batch.positions.device)
    return ModelInputs(batch, plans, ids, inputs_embeds, before_layer)
