"""`LoraTargets`: the linear layers of a decoder that take adapters, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layers.parallel_linear import RowParallelLinear
from pdserve.kernels.layers.rotary import HeadOrder
from pdserve.kernels.lora.lora_linear import LoraLinear, LoraMatrices, LoraOps, LoraStack
from pdserve.kernels.lora.make_lora_ops import make_lora_ops
from pdserve.kernels.make_layer_ops import LayerOpsError
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.weights.rank_shard import WHOLE, Part, RankShard

LoraWeights = Mapping[str, LoraMatrices]
"""Module name -> an adapter's matrices."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Adjacent rows of a product's weight in checkpoints."""

    count: int
    """Rows of all ranks together."""
    order: HeadOrder | None = None
    """Order of the rows in checkpoints, which here become neighbours; None: they are as stored."""
    own: Part | None = None
    """The part of this rank; None: all."""

    @property
    def own_count(self) -> int:
        return self.count if self.own is None else self.own.stop - self.own.start

    def taken(self, rows: Tensor) -> Tensor:
        """This rank's rows `[own_count, ...]` of `[count, ...]`, in the order that they have here."""
        if self.order is not None:
            rows = self.order.paired(rows)
        return rows if self.own is None else rows[self.own.start : self.own.stop]


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One product that takes adapters: a module of the checkpoint, fused or not."""

    linear: LoraLinear
    index: int
    """Place among the products of `linear`."""
    in_size: int
    """Inputs of all ranks together."""
    rows: tuple[LoraRows, ...]
    """All rows of its weight; several of a fused one."""
    inputs: Part | None = None
    """This rank's columns of its weight; None: all."""

    @property
    def out_size(self) -> int:
        """Outputs of all ranks together."""
        return sum(rows.count for rows in self.rows)

    def matrices(self, a: Tensor, b: Tensor) -> LoraMatrices:
        """This rank's part of an adapter's matrices: a `[r, in]`, b `[out, r]` with its scale."""
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop].contiguous()
        parts = b.split_with_sizes([rows.count for rows in self.rows])
        own = [rows.taken(part) for rows, part in zip(self.rows, parts, strict=True)]
        return LoraMatrices(a, torch.cat(own).t().contiguous())


_Products = Mapping[str, Sequence[LoraRows]]
"""Module -> its rows."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """A decoder's products with adapters, and their slots."""

    by_name: Mapping[str, LoraTarget]
    ops: LoraOps
    max_loras: int
    """Slots."""
    max_rank: int
    dtype: torch.dtype
    has_images: bool = False
    """True: the model has a vision encoder, which takes no adapters."""

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
    decoder: Decoder,
    *,
    max_loras: int,
    max_rank: int,
    kernels: str = "auto",
    max_tokens: int = 1 << 16,
    shard: RankShard = WHOLE,
) -> tuple[Decoder, LoraTargets]:
    """The decoder with slots for adapters of the projections of attention and of its gated MLPs.

    Experts, embedding, output head and vision encoder take none. kernels: the setting. max_tokens: of one step. shard: of the
    decoder; each rank has its part of B, or of A where the inputs are divided.
    Raises: ConfigError for kernels that the device or installation does not support; UnsupportedModel for latent attention.
    """
    config, dtype = decoder.config, TORCH_DTYPES[decoder.config.dtype]
    try:
        ops = make_lora_ops(kernels, dtype, decoder.device, max_loras=max_loras, max_tokens=max_tokens)
    except LayerOpsError as error:
        raise ConfigError(str(error)) from error
    by_name: dict[str, LoraTarget] = {}

    def wrap(linear: Linear, in_size: int, products: _Products, inputs: Part | None = None) -> LoraLinear:
        """products: side by side in the output of `linear`. inputs: of this rank."""
        stack = LoraStack(
            in_size if inputs is None else inputs.stop - inputs.start,
            [sum(rows.own_count for rows in parts) for parts in products.values()],
            max_loras=max_loras, max_rank=max_rank, dtype=dtype, device=decoder.device,
        )  # fmt: skip
        wrapped = LoraLinear(linear, ops, stack)
        for index, (name, parts) in enumerate(products.items()):
            by_name[name] = LoraTarget(wrapped, index, in_size, tuple(parts), inputs)
        return wrapped

    def wrap_row_parallel(linear: Linear, name: str, in_size: int, out_size: int) -> Linear:
        """The layer `name`, whose inputs are divided among the ranks: their sum has the products, too."""
        products, inputs = {name: [LoraRows(out_size)]}, shard.part(1, in_size)
        if isinstance(linear, RowParallelLinear):
            return linear.with_part(lambda part: wrap(part, in_size, products, inputs))
        return wrap(linear, in_size, products, inputs)

    def wrapped_layers() -> Iterator[DecoderLayer]:
        for index, layer in enumerate(decoder.layers):
            attention, prefix = layer.attention, f"model.layers.{index}"
            hidden, inner, name = config.hidden_size, config.intermediate_size, f"{prefix}.self_attn"
            if (
                not isinstance(layer, DecoderLayer)
                or not isinstance(attention, SelfAttention)
                or attention.gate is not None
                or attention.value_dim is not None
                or not config.family.takes_adapters
            ):
                raise UnsupportedModel(
                    f"enable_lora is true, and the attention of {config.architecture} takes no adapters"
                )
            q_size = config.num_heads * config.head_dim
            attention = replace(
                attention,
                qkv=wrap(attention.qkv, hidden, _projections(name, config, attention.order, shard)),
                output=wrap_row_parallel(attention.output, f"{name}.o_proj", q_size, hidden),
            )
            mlp = layer.mlp
            if isinstance(mlp, Mlp):
                mlp = replace(
                    mlp,
                    gate_up=wrap(mlp.gate_up, hidden, _gate_and_up(f"{prefix}.mlp", config, shard)),
                    down=wrap_row_parallel(mlp.down, f"{prefix}.mlp.down_proj", inner, hidden),
                )
            yield replace(layer, attention=attention, mlp=mlp)

    wrapped = decoder.with_layers(list(wrapped_layers()))
    return wrapped, LoraTargets(by_name, ops, max_loras, max_rank, dtype, has_images=config.vision is not None)


def _projections(prefix: str, config: ModelConfig, order: HeadOrder, shard: RankShard) -> _Products:
    """Queries, keys and values."""
    rows = []
    for num_heads, its_order in ((config.num_heads, order), (config.num_kv_heads, order), (config.num_kv_heads, None)):
        own, size = shard.heads(num_heads), config.head_dim
        part = None if len(own) == num_heads else Part(0, own.start * size, own.stop * size)
        rows.append(LoraRows(num_heads * size, its_order, part))
    if config.family.has_fused_qkv:
        return {f"{prefix}.qkv_proj": rows}
    return {f"{prefix}.{name}_proj": [its_rows] for name, its_rows in zip("qkv", rows, strict=True)}


def _gate_and_up(prefix: str, config: ModelConfig, shard: RankShard) -> _Products:
    size = config.intermediate_size
    rows = LoraRows(size, own=shard.part(0, size))
    if config.family.has_fused_mlp:
        return {f"{prefix}.gate_up_proj": [rows, rows]}
    return {f"{prefix}.gate_proj": [rows], f"{prefix}.up_proj": [rows]}
