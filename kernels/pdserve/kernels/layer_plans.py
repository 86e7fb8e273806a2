"""Specs, plans and back ends of layers that have a cache: attention over keys and values, or a state per sequence."""

from __future__ import annotations

from pdserve.kernels.attention.attention_backend import AttentionBackend, AttentionPlan
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.state.state_backend import StateBackend, StatePlan
from pdserve.kernels.state.state_spec import StateSpec

LayerSpec = AttentionSpec | StateSpec
LayerPlan = AttentionPlan | StatePlan
LayerBackend = AttentionBackend | StateBackend
"""Of the layers of one KV cache group; a spec's plan comes from the back end of its kind."""


def plan_of(backend: LayerBackend, batch: AttentionBatch, spec: LayerSpec) -> LayerPlan:
    """The plan of a step for one spec. Raises: ValueError as `AttentionBackend.plan`, and for a back end of another kind."""
    if isinstance(spec, StateSpec) and isinstance(backend, StateBackend):
        return backend.plan(batch, spec)
    if isinstance(spec, AttentionSpec) and not isinstance(backend, StateBackend):
        return backend.plan(batch, spec)
    raise ValueError(f"{type(backend).__name__} has no plan for {spec}")


def attention_plan(plan: LayerPlan) -> AttentionPlan:
    """The plan, of a layer that attends. Raises: TypeError."""
    if isinstance(plan, StatePlan):
        raise TypeError("a layer that attends has the plan of one with a state")
    return plan
