"""`ModelInputs`: the arguments of a model's forward pass in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan, LayerSpec
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.encoder_decoder_step import EncoderDecoderStep

_TORCH_OPS: LayerOps = TorchLayerOps()


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One step's tokens, given as ids or as embeddings."""

    batch: AttentionBatch
    """The first KV cache group's batch; positions and lengths are those of all groups."""
    plans: Mapping[LayerSpec, LayerPlan]
    """A plan for each of the model's `attention_specs`, over its group's cache."""
    token_ids: Tensor | None = None
    """`[T]` int64."""
    inputs_embeds: Tensor | None = None
    """`[T, H]`, in the dtype of the weights; may be overwritten."""
    before_layer: Callable[[], None] | None = None
    """Called before each layer, or before each call that computes several: a caller can distinguish a long step from one that
    hangs."""
    is_by_layer: bool = False
    """True: all layers are not one call, even where they could be, since `before_layer` measures each."""
    ops: LayerOps = _TORCH_OPS
    """Computes what lies between matrix products and attention."""
    deepstack: Sequence[Tensor] = ()
    """`[I, H]` each: added to the rows `deepstack_rows` of the residual stream after the first layers."""
    deepstack_rows: Tensor | None = None
    """`[I]` int64."""
    output_rows: Tensor | None = None
    """`[N]` int64: the tokens whose hidden states are read; None: all. The last layer leaves out what the others need of it."""
    layer_inputs: list[Tensor] | None = None
    """Gets the inputs `[T, H]` of `DraftHead.tapped_layers`; None: they are not needed."""
    encoder_decoder: EncoderDecoderStep | None = None
    """The step's two parts, of a model with an encoder; None for a model that is only a decoder."""

    def read_rows(self, hidden: Tensor) -> Tensor:
        """`[T, H]` -> `[N, H]`"""
        return hidden if self.output_rows is None else hidden.index_select(0, self.output_rows)

    @property
    def positions(self) -> Tensor:
        """`[T]` or `[3, T]` int64."""
        return self.batch.positions

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """`[T, H]`: `inputs_embeds`, or `embed(token_ids)`. Raises: ValueError if both are set, or neither."""
        match self.token_ids, self.inputs_embeds:
            case Tensor() as token_ids, None:
                return embed(token_ids)
            case None, Tensor() as inputs_embeds:
                return inputs_embeds
        raise ValueError("exactly one of token_ids and inputs_embeds must be given")
