"""`LoraTargets`: the linear layers of a decoder that take adapters, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.kernels.linear import Linear
from pdserve.kernels.lora import LoraLinear, LoraMatrices, LoraOps, LoraStack
from pdserve.kernels.make_layer_ops import LayerOpsError
from pdserve.kernels.make_lora_ops import make_lora_ops
from pdserve.kernels.rotary import HeadOrder
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.gated_mlp import GatedMlp

LoraWeights = Mapping[str, LoraMatrices]
"""Module name -> an adapter's matrices."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Adjacent rows of a product's weight in checkpoints."""

    count: int
    order: HeadOrder | None = None
    """Order of the rows in checkpoints, which here become neighbours; None: they are as stored."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One product that takes adapters: a module of the checkpoint, fused or not."""

    linear: LoraLinear
    index: int
    """Place among the products of `linear`."""
    in_size: int
    rows: tuple[LoraRows, ...]
    """All rows of its weight; several of a fused one."""

    @property
    def out_size(self) -> int:
        return sum(rows.count for rows in self.rows)

    def ordered(self, weight: Tensor) -> Tensor:
        """Rows `[out, ...]` of a checkpoint in the order that they have here."""
        if all(rows.order is None for rows in self.rows):
            return weight
        parts = weight.split([rows.count for rows in self.rows])
        return torch.cat(
            [
                part if rows.order is None else rows.order.paired(part)
                for part, rows in zip(parts, self.rows, strict=True)
            ]
        )


_Wrap = Callable[[Linear, int, Mapping[str, Sequence[LoraRows]]], LoraLinear]


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """A decoder's products with adapters, and their slots."""

    by_name: Mapping[str, LoraTarget]
    ops: LoraOps
    max_loras: int
    """Slots."""
    max_rank: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all layers."""
        return sum(linear.stack.nbytes for linear in self._linears().values())

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Replace the adapter in a slot; on a device after the steps that were queued before."""
        products: dict[int, dict[int, LoraMatrices]] = {}
        for name, matrices in weights.items():
            target = self.by_name[name]
            products.setdefault(id(target.linear), {})[target.index] = matrices
        for key, linear in self._linears().items():
            linear.stack.put(slot, products.get(key, {}))

    def _linears(self) -> dict[int, LoraLinear]:
        """Each layer once, by its `id`."""
        return {id(target.linear): target.linear for target in self.by_name.values()}


def with_lora_targets(
    decoder: Decoder, *, max_loras: int, max_rank: int, kernels: str = "auto", max_tokens: int = 1 << 16
) -> tuple[Decoder, LoraTargets]:
    """The decoder with slots for adapters beside the projections of attention and of its gated MLPs.

    Experts, embedding and output head take none. kernels: the setting. max_tokens: of one step.
    Raises: UnsupportedModel for one rank's part of a model; ConfigError for kernels that the device or installation does not support.
    """
    config, dtype = decoder.config, TORCH_DTYPES[decoder.config.dtype]
    if any(layer.attention.spec.num_heads != config.num_heads for layer in decoder.layers):
        raise UnsupportedModel(
            "enable_lora is true, and adapters are not served by a model that is split over several ranks"
        )
    try:
        ops = make_lora_ops(kernels, dtype, decoder.device, max_loras=max_loras, max_tokens=max_tokens)
    except LayerOpsError as error:
        raise ConfigError(str(error)) from error
    by_name: dict[str, LoraTarget] = {}

    def wrap(linear: Linear, in_size: int, products: Mapping[str, Sequence[LoraRows]]) -> LoraLinear:
        """products: name -> rows, side by side in the output of `linear`."""
        sizes = [sum(rows.count for rows in parts) for parts in products.values()]
        stack = LoraStack(
            in_size, sizes, max_loras=max_loras, max_rank=max_rank, dtype=dtype, device=decoder.device
        )
        wrapped = LoraLinear(linear, ops, stack)
        for index, (name, parts) in enumerate(products.items()):
            by_name[name] = LoraTarget(wrapped, index, in_size, tuple(parts))
        return wrapped

    def wrapped_layers() -> Iterator[DecoderLayer]:
        for index, layer in enumerate(decoder.layers):
            yield _wrapped(layer, f"model.layers.{index}", config, wrap)

    wrapped = decoder.with_layers(list(wrapped_layers()))
    return wrapped, LoraTargets(by_name, ops, max_loras, max_rank, dtype)


def _wrapped(layer: DecoderLayer, prefix: str, config: ModelConfig, wrap: _Wrap) -> DecoderLayer:
    attention, mlp, hidden, head_dim = layer.attention, layer.mlp, config.hidden_size, config.head_dim
    q, kv = (LoraRows(heads * head_dim, attention.order) for heads in (config.num_heads, config.num_kv_heads))
    v = LoraRows(kv.count)
    names = f"{prefix}.self_attn", f"{prefix}.mlp"
    family = config.family
    projections = _products(
        names[0], {"q_proj": q, "k_proj": kv, "v_proj": v}, "qkv_proj" if family.has_fused_qkv else None
    )
    qkv = wrap(attention.qkv, hidden, projections)
    output = wrap(attention.output, q.count, {f"{names[0]}.o_proj": [LoraRows(hidden)]})
    if isinstance(mlp, GatedMlp):
        inner = LoraRows(config.intermediate_size)
        halves = _products(
            names[1], {"gate_proj": inner, "up_proj": inner}, "gate_up_proj" if family.has_fused_mlp else None
        )
        mlp = replace(
            mlp,
            gate_up=wrap(mlp.gate_up, hidden, halves),
            down=wrap(mlp.down, inner.count, {f"{names[1]}.down_proj": [LoraRows(hidden)]}),
        )
    return replace(layer, attention=replace(attention, qkv=qkv, output=output), mlp=mlp)


def _products(prefix: str, parts: Mapping[str, LoraRows], fused: str | None) -> dict[str, Sequence[LoraRows]]:
    """Module -> its rows. parts: name -> rows. fused: the one module that has the rows of all; None: each has its own."""
    if fused is not None:
        return {f"{prefix}.{fused}": list(parts.values())}
    return {f"{prefix}.{name}": [rows] for name, rows in parts.items()}
