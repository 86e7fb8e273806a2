"""`RankShard`: one rank's part of a tensor-parallel model's weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.common.errors import ConfigError
from pdserve.kernels.rank_group import RankGroup


class Part(NamedTuple):
    """A range of one dimension of a weight."""

    dim: int
    start: int
    stop: int

    def slices(self, num_dims: int) -> tuple[slice, ...]:
        """The part as an index of the whole weight."""
        whole = slice(None)
        return tuple(slice(self.start, self.stop) if dim == self.dim else whole for dim in range(num_dims))

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a weight of this shape."""
        return tuple(self.stop - self.start if dim == self.dim else length for dim, length in enumerate(shape))


@dataclass(frozen=True, slots=True)
class RankShard:
    """Divides dimensions evenly among the ranks; `verify_sharding` has checked them."""

    rank: int = 0
    size: int = 1
    """R, number of ranks."""
    group: RankGroup | None = None
    """None for one rank, and where only sizes are read."""

    def part(self, dim: int, length: int) -> Part | None:
        """This rank's part of dimension `dim`, which has `length` numbers; None: all of it. length: a multiple of R."""
        if self.size == 1:
            return None
        own = length // self.size
        return Part(dim, self.rank * own, (self.rank + 1) * own)

    def heads(self, num_heads: int) -> range:
        """This rank's heads of `num_heads`: an equal part, or with fewer heads than ranks one head, which several ranks have."""
        if num_heads < self.size:
            first = self.rank * num_heads // self.size
            return range(first, first + 1)
        own = num_heads // self.size
        return range(self.rank * own, (self.rank + 1) * own)


WHOLE = RankShard()


def verify_sharding(size: int, dimensions: dict[str, int], num_kv_heads: Collection[int], where: str) -> None:
    """Check that `size` ranks can share a model.

    dimensions: field of config.json -> length of a dimension that is divided evenly. num_kv_heads: different numbers of the layers.
    where: for the message. Raises: ConfigError naming the field.
    """
    for name, length in dimensions.items():
        if length % size:
            raise ConfigError(f"tensor_parallel_size is {size}, which does not divide {name} ({length}) of {where}")
    for number in num_kv_heads:
        if number % size and size % number:
            raise ConfigError(
                f"tensor_parallel_size is {size}, which neither divides num_key_value_heads ({number}) of {where}, nor is a "
                "multiple of it"
            )
