"""Attention and masks under the name `pdserve` in the interfaces of `transformers`: both call the current `AttentionStep`.

A model's code asks for a mask and gets a `MaskPattern`, a description of constant size. Each of its layers then calls the attention
with queries, keys and values of the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface

IMPLEMENTATION = "pdserve"
"""The name of attention, masks and experts in the interfaces."""
VisibleKeys = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Sequence, head, position of a query and of a key, all broadcast -> True where the query sees the key."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """The argument `attention_mask` of a layer."""

    window: int | None
    """Number of tokens that a token attends to, itself included; None: all before it."""


class AttentionCall(NamedTuple):
    """One layer's call. B is 1: the row has the tokens of all sequences of the step."""

    query: Tensor
    """`[B, Hq, T, D]`"""
    key: Tensor
    """`[B, Hkv, T, D]`"""
    value: Tensor
    """`[B, Hkv, T, Dv]`"""
    mask: object
    scale: float | None
    """None: `D ** -0.5`."""
    softcap: float | None
    sinks: Tensor | None
    """`[Hq]`"""
    module: nn.Module
    others: Mapping[str, Any]
    """Other arguments."""


class AttentionStep(Protocol):
    """One forward pass of a model."""

    def mask(self, visible: VisibleKeys, window: int | None) -> MaskPattern:
        """The mask that the model's code describes. window: the size that it names, of a window or a chunk."""

    def attend(self, call: AttentionCall) -> Tensor:
        """`[B, T, Hq, Dv]`"""


class OtherState(Exception):
    """The model keeps something else than keys and values."""


class StepCache(Cache):  # type: ignore[misc]
    """The argument `past_key_values`: keys and values of a step pass through it unchanged. Every other state raises OtherState."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._is_made = True

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_is_made", False):
            raise OtherState(f"it keeps {name} in its cache")
        super().__setattr__(name, value)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are explicit; models that need the cache length are refused."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise OtherState("it keeps a state of convolutions, recurrences or an index in its cache")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse
    update_indexer = has_previous_state = _refuse


_current: ContextVar[AttentionStep] = ContextVar("attention_step")


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """The step that models call in this thread meanwhile."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def _mask(*, mask_function: VisibleKeys, local_size: int | None = None, **kwargs: object) -> MaskPattern:
    return _current.get().mask(mask_function, local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    return _current.get().attend(
        AttentionCall(query, key, value, attention_mask, scaling, softcap, s_aux, module, kwargs)
    ), None


def _experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden `[T, H]`, chosen and weights `[T, k]` -> `[T, H]`."""
    if hidden.is_meta:  # the number of tokens per expert is unknown
        return torch.empty_like(hidden)
    computed: Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
    return computed


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
