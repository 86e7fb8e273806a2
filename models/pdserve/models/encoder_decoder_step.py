"""`EncoderDecoderStep`: one step's tokens of a model with an encoder, in two parts.

The blocks of a sequence hold its encoder's tokens first, then from a block of its own on its decoder's. In an encoder's block the
place of decoder layer l has the keys and values that this layer's cross attention reads; in a decoder's block those of its self
attention. So both kinds need one block table, and a block of either kind has one size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan


@dataclass(frozen=True, slots=True)
class EncoderTokens:
    """Whole prompts that a step encodes, packed one after the other. Te tokens in Ts slots."""

    rows: Tensor
    """`[Te]` int64: rows of the step."""
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    places: Tensor
    """`[Te]` int64: places of the tokens among the slots, which fill the last block of each prompt."""
    num_slots: int
    """Ts"""
    plan: AttentionPlan
    """Stores Ts keys and values. Only `store` is called."""
    sounds: tuple[bytes, ...] = ()
    """Float32 samples of each prompt, of a model whose encoder reads sound."""


@dataclass(frozen=True, slots=True)
class DecoderTokens:
    """Td tokens of the decoder, sequences with one token first."""

    rows: Tensor | None
    """`[Td]` int64: rows of the step; None: all, in this order."""
    positions: Tensor
    """`[Td]` int64, of the decoder: from 0 on in each sequence."""
    self_plan: AttentionPlan
    """Over the decoder's blocks."""
    cross_plan: AttentionPlan
    """Over the encoder's blocks. Only `attend` is called; it reads only pages."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderStep:
    """The two parts: prompts are encoded before tokens are decoded, which may be of the same sequences."""

    encoded: EncoderTokens | None
    decoded: DecoderTokens | None
