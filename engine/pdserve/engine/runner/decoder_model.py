"""`DecoderModel`: the interface of a model for the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.layer_plans import LayerSpec
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.model_inputs import ModelInputs


class DecoderModel(Protocol):
    """The interface of a model for the runner."""

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states and queries."""

    @property
    def classifier(self) -> ClassificationHead | None:
        """None: the model generates."""

    @property
    def attention_specs(self) -> Sequence[Sequence[LayerSpec]]:
        """Different specs of the layers, per KV cache group; `ModelInputs.plans` has a plan for each."""

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Last hidden states `[N, H]` of `inputs.output_rows`; writes K and V of all T tokens into the cache."""

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, H]`, a copy."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32; never called with a classifier."""
