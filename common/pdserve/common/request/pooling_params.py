"""`PoolingParams`: a client's parameters of an embedding, by vLLM's name."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pdserve.common.errors import InvalidRequest

PoolingType = Literal["last", "mean"]
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)


class PoolingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """How the last hidden states of a prompt become one vector: pooled, cut to `dimensions`, then normalised.

    None, given for any field, is its default.
    """

    pooling_type: PoolingType = "last"
    """`last` takes the last token's hidden state, `mean` the mean over all tokens."""
    normalize: bool = True
    """True if the vector is scaled to length 1."""
    dimensions: int | None = None
    """Keep only this number of leading values, for models trained for that; None is all."""

    def __post_init__(self) -> None:
        for name, default in (("pooling_type", "last"), ("normalize", True)):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    @property
    def reads_prefix_cache(self) -> bool:
        """True if a cached prefix helps: a mean needs the hidden state of every token, and a cache has none."""
        return self.pooling_type != "mean"

    def verify(self, hidden_size: int | None = None) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit.

        hidden_size: when known, `dimensions` is held against it.
        """
        if self.pooling_type not in POOLING_TYPES:
            known = " or ".join(map(repr, POOLING_TYPES))
            raise InvalidRequest(f"pooling_type must be {known}, not {self.pooling_type!r:.60}", "pooling_type")
        if self.dimensions is None:
            return
        if self.dimensions < 1 or (hidden_size is not None and self.dimensions > hidden_size):
            limit = "at least 1" if hidden_size is None else f"from 1 to {hidden_size}, the model's hidden size"
            raise InvalidRequest(f"dimensions must be {limit}, not {self.dimensions}", "dimensions")

    def num_dimensions(self, hidden_size: int) -> int:
        """Numbers in the vector."""
        return hidden_size if self.dimensions is None else self.dimensions
