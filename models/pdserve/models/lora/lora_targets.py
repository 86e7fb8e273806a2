"""`LoraTargets`: the linear layers of a decoder that take adapters, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.linear import Linear
from pdserve.kernels.lora import LoraLinear, LoraMatrices, LoraStep
from pdserve.kernels.rotary import HeadOrder
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.gated_mlp import GatedMlp

LoraWeights = Mapping[str, LoraMatrices]
"""Module name -> an adapter's matrices."""
_Wrap = Callable[[Linear, int, Sequence[tuple[str, int, HeadOrder | None]]], LoraLinear]


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One product that takes adapters."""

    linear: LoraLinear
    index: int
    """Place among the products of `linear`."""
    in_size: int
    out_size: int
    order: HeadOrder | None
    """Order of the rows of its weight in checkpoints, which here become neighbours; None: they are as stored."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """A decoder's products with adapters, and their slots."""

    by_name: Mapping[str, LoraTarget]
    step: LoraStep
    max_loras: int
    """Slots."""
    max_rank: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all layers."""
        return sum(linear.nbytes for linear in self._linears().values())

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Replace the adapter in a slot; on a device after the steps that were queued before."""
        products: dict[int, dict[int, LoraMatrices]] = {}
        for name, matrices in weights.items():
            target = self.by_name[name]
            products.setdefault(id(target.linear), {})[target.index] = matrices
        for key, linear in self._linears().items():
            linear.put(slot, products.get(key, {}))

    def _linears(self) -> dict[int, LoraLinear]:
        """Each layer once, by its `id`."""
        return {id(target.linear): target.linear for target in self.by_name.values()}


def with_lora_targets(decoder: Decoder, *, max_loras: int, max_rank: int) -> tuple[Decoder, LoraTargets]:
    """The decoder with slots for adapters beside the projections of attention and of its gated MLPs.

    Experts, embedding and output head take none. Raises: UnsupportedModel for one rank's part of a model.
    """
    step, config = LoraStep(), decoder.config
    if any(layer.attention.spec.num_heads != config.num_heads for layer in decoder.layers):
        raise UnsupportedModel(
            "enable_lora is true, and adapters are not served by a model that is split over several ranks"
        )
    if config.family.has_fused_qkv or config.family.has_fused_mlp:
        raise UnsupportedModel(
            f"enable_lora is true, and adapters of {config.architecture} are for fused projections, which is not served"
        )
    by_name: dict[str, LoraTarget] = {}

    def wrap(linear: Linear, in_size: int, products: Sequence[tuple[str, int, HeadOrder | None]]) -> LoraLinear:
        """products: name, output size, and `order` of each."""
        sizes = [size for _, size, _ in products]
        wrapped = LoraLinear(
            linear, step, in_size, sizes,
            max_loras=max_loras, max_rank=max_rank, dtype=TORCH_DTYPES[config.dtype], device=decoder.device,
        )  # fmt: skip
        for index, (name, size, order) in enumerate(products):
            by_name[name] = LoraTarget(wrapped, index, in_size, size, order)
        return wrapped

    def wrapped_layers() -> Iterator[DecoderLayer]:
        for index, layer in enumerate(decoder.layers):
            yield _wrapped(layer, f"model.layers.{index}", config, wrap)

    wrapped = decoder.with_layers(list(wrapped_layers()))
    return wrapped, LoraTargets(by_name, step, max_loras, max_rank, TORCH_DTYPES[config.dtype])


def _wrapped(layer: DecoderLayer, prefix: str, config: ModelConfig, wrap: _Wrap) -> DecoderLayer:
    attention, mlp, hidden, head_dim = layer.attention, layer.mlp, config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention_name, mlp_name = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = wrap(
        attention.qkv,
        hidden,
        [
            (f"{attention_name}.q_proj", q_size, attention.order),
            (f"{attention_name}.k_proj", kv_size, attention.order),
            (f"{attention_name}.v_proj", kv_size, None),
        ],
    )
    output = wrap(attention.output, q_size, [(f"{attention_name}.o_proj", hidden, None)])
    if isinstance(mlp, GatedMlp):
        inner = config.intermediate_size
        halves = [(f"{mlp_name}.{half}_proj", inner, None) for half in ("gate", "up")]
        mlp = GatedMlp(
            gate_up=wrap(mlp.gate_up, hidden, halves),
            down=wrap(mlp.down, inner, [(f"{mlp_name}.down_proj", hidden, None)]),
        )
    return replace(layer, attention=replace(attention, qkv=qkv, output=output), mlp=mlp)
