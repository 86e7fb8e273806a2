"""Mixture of experts: a router chooses `top_k` of the MLPs for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import Experts, make_experts
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.rank_group import RankGroup
from pdserve.models.layers.experts_with_identity import ExpertsWithIdentity
from pdserve.models.layers.mlp import GATES, Mlp
from pdserve.models.layers.routing import Router
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Sum over a token's experts of routing weight times `down(act(gate x) * up x)`, and of what all tokens have.

    Experts may be as in `Mlp` without a gate, and may take and give fewer numbers than a hidden state has.
    """

    router: Router
    experts: Experts
    group: RankGroup | None = None
    """The ranks that share the inner size of each expert."""
    shared: Mlp | None = None
    """The experts that every token has, side by side in one MLP."""
    shared_gate: Linear | None = None
    """`[T, H]` -> `[T, 1]`, whose sigmoid is their weight; None: the weight is 1."""
    input_norm: RmsNorm | None = None
    """Normalises the input of the router's experts, and not that of the router; None: no norm."""
    narrow: Linear | None = None
    """Hidden state -> what the experts of the router take; None: they take the hidden state."""
    widen: Linear | None = None
    """What these experts give -> hidden state."""

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        hidden_size: int,
        inner_size: int,
        *,
        num_experts: int,
        router: Router,
        shared: Mlp | None = None,
        num_identity: int = 0,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        activation: str = "silu",
    ) -> SparseMlp:
        """Read gate, up and down of each `{prefix}.experts.*`, by their names in `projections`; without a gate up and down.

        hidden_size: what an expert takes and gives. inner_size: size I of an expert. num_identity: experts after the others that
        have no weights. activation: a name in `GATES`. Raises: ConfigError.
        """
        shard = weights.shard
        rows, columns = shard.part(0, inner_size), shard.part(1, inner_size)

        def expert(index: int) -> ExpertWeights:
            name = f"{prefix}.experts.{index}"
            halves = [f"{name}.{half}" for half in projections[:-1]]
            gate_up = weights.stack([weights.matrix(half, inner_size, hidden_size, rows) for half in halves], halves)
            return ExpertWeights(gate_up, weights.matrix(f"{name}.{projections[-1]}", hidden_size, inner_size, columns))

        # one at a time: each is packed before the next is read, so at most one is in memory twice
        try:
            experts = make_experts((expert(index) for index in range(num_experts)), GATES[activation])
        except TypeError as error:
            raise ConfigError(f"{prefix}.experts: {error}") from error
        if num_identity:
            experts = ExpertsWithIdentity(experts, num_experts, is_first_rank=shard.rank == 0)
        return cls(router, experts, shard.group, shared)

    def __call__(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        routing_weights, chosen = self.router(x)
        inputs = x if self.input_norm is None else self.input_norm(x)
        inputs = inputs if self.narrow is None else self.narrow(inputs)
        added = self.experts(inputs, routing_weights, chosen, ops)
        # before the addition, every rank has the same residual and so the same experts per token
        added = added if self.group is None else self.group.all_reduce(added)
        added = added if self.widen is None else self.widen(added)
        if self.shared is None:
            return added
        shared = self.shared(x, ops)
        return added.add_(shared if self.shared_gate is None else shared.mul_(self.shared_gate(x).sigmoid()))

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`s = residual + experts(x)` -> s and `norm(s)`; all `[T, H]`. The residual may be overwritten."""
        return ops.add_norm(residual, self(x, ops), None, norm)
