"""Self-attention with rotary positions: projections, optional norms of queries and keys, and the attention plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.cpu.matrices import Matrix, with_rows
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.rms_norm import HeadNorm, ProjectionNorm, RmsNorm
from pdserve.kernels.layers.rotary import HeadOrder, rotate_heads
from pdserve.models.layers.parallel_projection_norm import ParallelProjectionNorm
from pdserve.models.weights.rank_shard import Part, RankShard
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(slots=True, eq=False)
class SharedKeys:
    """Keys and values of one step, `[T, Hkv, D]` each, of the layer that has them in its cache, for later layers."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def current(self) -> tuple[Tensor, Tensor]:
        """Raises: RuntimeError before the layer that has them."""
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer attends to keys that no layer has made")
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """One layer's attention."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: AttentionSpec
    order: HeadOrder
    """Order of a head's numbers in the checkpoint; here pairs are neighbours."""
    qkv: Linear
    """Queries, keys and values side by side."""
    qk_norm: HeadNorm | None
    """Normalises each head of queries and keys before the rotation; None: no norm."""
    output: Linear
    projection_norm: ProjectionNorm | ParallelProjectionNorm | None = None
    """Normalises all queries and all keys of a token before the rotation; None: no norm."""
    sinks: Tensor | None = None
    """`[Hq]`, of a spec that has them."""
    value_dim: int | None = None
    """Numbers of a value where they are fewer than those of a key; the others are zeros in the cache. None: as many."""
    value_scale: float = 1.0
    """Factor of all values, which is that of the result."""
    gate: Linear | None = None
    """Hidden state -> numbers whose sigmoids are factors of the result; None: no gate."""
    input_multiplier: float = 1.0
    """Factor of the hidden state."""
    scales_queries: bool = False
    """True: the phases are factors of the queries, and nothing is rotated."""
    value_norm: RmsNorm | None = None
    """Normalises each head of values; None: no norm."""
    shared: SharedKeys | None = None
    """Where later layers find this layer's keys and values, or where it finds those of an earlier one; None: nobody shares them."""
    has_keys: bool = True
    """False: `qkv` gives only queries, which attend to keys and values of `shared`."""

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        order: HeadOrder,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None = None,
        qk_norm_offset: float = 0.0,
        norms_projection: bool = False,
        is_fused: bool = False,
        value_dim: int | None = None,
        value_scale: float = 1.0,
        sinks: str = "sinks",
        norm_names: tuple[str, str] | None = ("q_norm", "k_norm"),
        output: str = "o_proj",
        is_gated: bool = False,
        scales_queries: bool = False,
        norms_values: bool = False,
        values_are_keys: bool = False,
        shared: SharedKeys | None = None,
        has_keys: bool = True,
        input_size: int | None = None,
    ) -> SelfAttention:
        """Read `{prefix}.q_proj`, `k_proj`, `v_proj`, `o_proj` and, with `qk_norm_eps`, `q_norm` and `k_norm`.

        spec: with the heads of all ranks; the layer has those of this rank. order: of the numbers of queries and keys.
        qk_norm_offset: added to the weights of the norms. norms_projection: the norms are over all heads. is_fused: read `qkv_proj`
        in place of the three. sinks, norm_names, output: names of weights, where a spec has sinks, and a layer norms;
        norm_names None: the norms have no weights. is_gated: in `q_proj`, the rows of each head are followed by those of its gate.
        norms_values: each head of values is normalised, too, without weights. values_are_keys: values are what `k_proj` gives.
        shared, has_keys: see the fields. input_size: default: hidden_size.
        Raises: ConfigError.
        """
        shard = weights.shard
        own = replace(
            spec,
            num_heads=len(shard.heads(spec.num_heads)),
            num_kv_heads=len(shard.heads(spec.num_kv_heads)),
        )
        qk_norm = projection_norm = None
        if qk_norm_eps is not None and norms_projection:
            projection_norm = _load_projection_norm(weights, prefix, spec, order, qk_norm_eps)
        elif qk_norm_eps is not None:
            qk_norm = _load_qk_norm(weights, prefix, norm_names, own, order, qk_norm_eps, qk_norm_offset, has_keys)
        qkv, gate = _load_qkv(
            weights, prefix, spec, order, input_size or hidden_size, qkv_bias, is_fused, value_dim, is_gated, values_are_keys,
            "qkv" if has_keys else "q",
        )  # fmt: skip
        return cls(
            index=index,
            spec=own,
            order=order,
            qkv=qkv,
            gate=gate,
            qk_norm=qk_norm,
            output=weights.row_parallel(
                f"{prefix}.{output}", hidden_size, spec.num_heads * (value_dim or spec.head_dim), bias=output_bias
            ),
            projection_norm=projection_norm,
            sinks=_load_sinks(weights, f"{prefix}.{sinks}", spec.num_heads) if spec.sinks else None,
            value_dim=value_dim,
            value_scale=value_scale,
            scales_queries=scales_queries,
            value_norm=RmsNorm(weights.ones(spec.head_dim), qk_norm_eps or 0.0) if norms_values else None,
            shared=shared,
            has_keys=has_keys,
        )

    def attend(self, x: Tensor, phases: Tensor, plan: AttentionPlan, ops: LayerOps) -> Tensor:
        """x `[T, H]`, phases `[T, 1, D / 2]` -> `[T, Hq * Dv]`, the input of `output`. Writes keys and values into the cache."""
        q, k, v = self.store(x, phases, plan, ops)
        found = plan.attend(self.index, q, k, v) if self.sinks is None else plan.attend(self.index, q, k, v, self.sinks)
        if self.gate is not None:
            found = found * self.gate(x).sigmoid()
        if self.value_dim is None:
            return found
        values = found.view(len(x), self.spec.num_heads, -1)[..., : self.value_dim]
        return (values * self.value_scale).flatten(1)

    def store(self, x: Tensor, phases: Tensor, plan: AttentionPlan, ops: LayerOps) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values into the cache. Arguments of `attend` -> q `[T, Hq, D]`, k and v `[T, Hkv, D]`."""
        if self.input_multiplier != 1.0:
            x = x * self.input_multiplier
        qkv = self.qkv(x).view(x.shape[0], -1, self.spec.head_dim)
        if not self.has_keys and self.shared is not None:
            if self.qk_norm is not None:
                self.qk_norm(qkv)
            rotate_heads(qkv, phases)
            return qkv, *self.shared.current()
        q, k, v = self._stored(qkv, phases, plan, ops)
        if self.shared is not None:
            self.shared.keys, self.shared.values = k, v
        return q, k, v

    def _stored(self, qkv: Tensor, phases: Tensor, plan: AttentionPlan, ops: LayerOps) -> tuple[Tensor, Tensor, Tensor]:
        """qkv `[T, Hq + 2 * Hkv, D]`, overwritten; others as of `store`."""
        if self.projection_norm is not None:
            self.projection_norm(qkv)
        if self.value_norm is not None:
            values = qkv[:, self.spec.num_heads + self.spec.num_kv_heads :]
            values.copy_(self.value_norm(values))
        if self.scales_queries:
            heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
            q, k, v = qkv.split(heads, 1)  # type: ignore[no-untyped-call]
            plan.store(self.index, k, v)
            return (q * phases.real[..., :1]).to(q.dtype), k, v
        return ops.rotate_and_store(qkv, self.spec, self.qk_norm, phases, plan, self.index)


def _load_qk_norm(
    weights: WeightLoader,
    prefix: str,
    names: tuple[str, str] | None,
    spec: AttentionSpec,
    order: HeadOrder,
    eps: float,
    offset: float,
    has_keys: bool,
) -> HeadNorm:
    """spec: with the heads of this rank. names: None: the norms have no weights. has_keys: False: only of queries."""
    num_heads = (spec.num_heads, spec.num_kv_heads)[: 1 + has_keys]
    if names is None:
        return HeadNorm(weights.ones(sum(num_heads), spec.head_dim), eps)
    of_heads = [
        order.paired(weights.norm(f"{prefix}.{name}.weight", spec.head_dim, eps, offset).weight).expand(count, -1)
        for name, count in zip(names, num_heads, strict=False)
    ]
    return HeadNorm(torch.cat(of_heads), eps)


def _load_sinks(weights: WeightLoader, name: str, num_heads: int) -> Tensor:
    return weights.tensor(name, num_heads, part=weights.shard.part(0, num_heads))


def _load_projection_norm(
    weights: WeightLoader, prefix: str, spec: AttentionSpec, order: HeadOrder, eps: float
) -> ProjectionNorm | ParallelProjectionNorm:
    """spec: with the heads of all ranks."""
    shard, size = weights.shard, spec.head_dim
    q_weight, k_weight = (
        order.paired(weights.tensor(f"{prefix}.{name}.weight", heads * size, part=_own_rows(shard, heads, size)))
        for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
    )
    if shard.group is None:
        return ProjectionNorm(q_weight, k_weight, eps)
    return ParallelProjectionNorm(
        q_weight, k_weight, eps, shard.group,
        head_dim=size, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
    )  # fmt: skip


def _own_rows(shard: RankShard, num_heads: int, head_dim: int) -> Part | None:
    """The rows of a rank's heads; None: all."""
    own = shard.heads(num_heads)
    return None if len(own) == num_heads else Part(0, own.start * head_dim, own.stop * head_dim)


def _load_qkv(
    weights: WeightLoader,
    prefix: str,
    spec: AttentionSpec,
    order: HeadOrder,
    input_size: int,
    bias: bool,
    is_fused: bool,
    value_dim: int | None,
    is_gated: bool,
    values_are_keys: bool,
    kinds: str,
) -> tuple[Linear, Linear | None]:
    """The projections, and that of the gates. spec: with the heads of all ranks. value_dim: values with fewer numbers than keys are
    padded with zeros. kinds: `qkv`, or `q`."""
    matrices, biases = [], []
    keys: tuple[Matrix, Tensor | None] | None = None
    gate: Linear | None = None
    all_rows, first = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, 0
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        if name not in kinds:
            continue
        size = value_dim if name == "v" and value_dim is not None else spec.head_dim
        is_double = is_gated and name == "q"
        size *= 1 + is_double
        rows, part = heads * size, _own_rows(weights.shard, heads, size)
        if name == "v" and values_are_keys and keys is not None:
            matrices.append(keys[0])
            if keys[1] is not None:
                biases.append(keys[1])
            continue
        if is_fused:
            start, stop = (first, first + rows) if part is None else (first + part.start, first + part.stop)
            matrix = weights.matrix(f"{prefix}.qkv_proj", all_rows, input_size, Part(0, start, stop))
            first += rows
        else:
            matrix = weights.matrix(f"{prefix}.{name}_proj", rows, input_size, part)
        arranged = partial(_padded_heads, size=size, padded=spec.head_dim) if name == "v" else order.paired
        added = weights.tensor(f"{prefix}.{name}_proj.bias", rows, part=part) if bias else None
        if name == "k":
            keys = matrix, added
        if is_double:
            own = partial(_half_of_heads, size=size, half=1)
            gate = make_linear(with_rows(matrix, own), None if added is None else own(added))
            first_half = partial(_half_of_heads, size=size, half=0)
            matrix, added = with_rows(matrix, first_half), None if added is None else first_half(added)
        matrices.append(with_rows(matrix, arranged))
        if added is not None:
            biases.append(arranged(added))
    names = "qkk" if values_are_keys and len(kinds) > 1 else kinds
    weight = weights.stack(matrices, [f"{prefix}.{name}_proj" for name in names])
    return make_linear(weight, torch.cat(biases) if biases else None), gate


def _padded_heads(rows: Tensor, *, size: int, padded: int) -> Tensor:
    """Rows `[heads * size, ...]`, with zeros after those of each head."""
    if size == padded:
        return rows
    heads = rows.view(-1, size, *rows.shape[1:])
    made = heads.new_zeros((len(heads), padded, *rows.shape[1:]))
    made[:, :size] = heads
    return made.flatten(0, 1)


def _half_of_heads(rows: Tensor, *, size: int, half: int) -> Tensor:
    """The first (0) or the second (1) rows of each head of `size` rows `[heads * size, ...]`."""
    return rows.view(-1, 2, size // 2, *rows.shape[1:])[:, half].flatten(0, 1).contiguous()
