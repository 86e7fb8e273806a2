"""`WeightLoader`: reads weights by their names in the checkpoint, in the served dtype, and counts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.kernels.cpu.int8_linear import Int8Matrix, Matrix, stack_rows
from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layers.parallel_linear import RowParallelLinear
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.weights.checkpoint import FLOATS, WeightSource
from pdserve.models.weights.rank_shard import WHOLE, Part, RankShard
from pdserve.models.weights.stored_quantization import StoredQuantization

Quantization = Literal["int8"] | None
_DTYPE_OF = {"int8": "I8", "float8": "F8_E4M3"}
"""Quantized values -> their dtype in a header."""
_NUM_NAMED = 8


@dataclass(frozen=True)
class LoadProgress:
    """Bytes of loaded weights in the served dtype, unless said otherwise, and the name of the last one.

    A weight of which this rank reads a part counts as a whole.
    """

    loaded_bytes: int
    total_bytes: int
    name: str
    kept_bytes: int
    """Bytes of the loaded weights in memory, which are fewer where weights are quantized or shared by ranks."""


class WeightLoader:
    """Reads the weights of one source, each once."""

    def __init__(
        self,
        checkpoint: WeightSource,
        dtype: torch.dtype,
        device: str,
        *,
        ignored: Collection[str] = (),
        quantization: Quantization = None,
        stored: StoredQuantization | None = None,
        shard: RankShard = WHOLE,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        """ignored: names that may remain unread. quantization: of `matrix`. stored: the checkpoint's own. shard: this rank's.
        progress: called after each weight."""
        self._checkpoint = checkpoint
        self.dtype = dtype
        """The served dtype."""
        self._device = device
        self._quantization = quantization
        self._stored = stored
        self._names = frozenset(checkpoint.names)
        self.shard = shard
        self._progress = progress
        self._loaded_bytes = self._kept_bytes = 0
        self._unread = {
            name for name in checkpoint.names if name not in ignored and not name.endswith("rotary_emb.inv_freq")
        }
        self._total_bytes = sum(torch.Size(checkpoint.shape(name)).numel() for name in self._unread) * dtype.itemsize

    def tensor(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy on the device.

        shape: of the whole weight. part: only this is read. dtype: None: the served one.
        Raises: ConfigError for a weight that is missing, has another shape or type, or has NaN or infinity.
        """
        tensor = self._read(name, shape, part, dtype)
        self._count(name, self._whole_bytes(shape), tensor.nbytes)
        return tensor

    def borrowed(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As `tensor`, but a view of the file if it has the dtype and the device: the caller makes another tensor of it at once."""
        source = self._checkpoint.read(name, shape, FLOATS)
        tensor = source.to(self._device, dtype or self.dtype)
        verify_finite(tensor, source, self._checkpoint.where(name))
        self._count(name, self._whole_bytes(shape), tensor.nbytes)
        return tensor

    def skip(self, name: str) -> None:
        """Count a weight as read that has the numbers of another."""
        self._count(name, self._whole_bytes(self._checkpoint.shape(name)), 0)

    def packed(self, name: str, *shape: int) -> Tensor:
        """A copy on the device of bytes that the caller unpacks. Raises: ConfigError, as `tensor`."""
        source = self._checkpoint.read(name, shape, ("U8",))
        tensor = source.to(self._device, copy=True)
        self._checkpoint.release(source)
        self._count(name, self._whole_bytes(shape), tensor.nbytes)
        return tensor

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> Matrix:
        """`{name}.weight`, quantized where the checkpoint stores it so, or the loader's quantization says so.

        rows, columns: of the whole weight. part: only this is read. Columns of a rank that are quantized here have scales of their
        own.
        Raises: ConfigError, as `tensor`; UnsupportedModel.
        """
        weight = f"{name}.weight"
        if self._stored is not None and f"{weight}_scale" in self._names:
            return self._stored_matrix(self._stored, weight, (rows, columns), part)
        tensor = self._read(weight, (rows, columns), part)
        matrix = Int8Matrix.quantized(tensor) if self._quantization == "int8" else tensor
        self._count(weight, self._whole_bytes((rows, columns)), matrix.nbytes)
        return matrix

    def stack(self, matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
        """One matrix of several with the same input. names: for messages. Raises: ConfigError if only some are quantized."""
        if len({type(matrix) for matrix in matrices}) > 1:
            raise ConfigError(f"{self._checkpoint.folder}: some of {', '.join(names)} are quantized and some are not")
        return stack_rows(matrices)

    def _stored_matrix(
        self, stored: StoredQuantization, weight: str, shape: tuple[int, int], part: Part | None
    ) -> Matrix:
        if stored.rounds_inputs and torch.device(self._device).type not in ("cpu", "meta"):
            raise UnsupportedModel(
                f"{self._checkpoint.folder}: int8 weights with rounded inputs are served on a CPU only, not on {self._device}"
            )
        source = self._checkpoint.read(weight, shape, (_DTYPE_OF[stored.values],), part)
        values, scales = source.to(self._device, copy=True), self._scales(weight, shape[0])
        self._checkpoint.release(source)
        if part is not None and part.dim == 0:
            scales = scales[part.start : part.stop].contiguous()
        if stored.rounds_inputs:
            matrix: Matrix = Int8Matrix(values, scales)
        else:
            matrix = (values.float() * scales[:, None]).to(self.dtype)
            verify_finite(matrix, matrix, self._checkpoint.where(weight))
        self._count(weight, self._whole_bytes(shape), matrix.nbytes)
        return matrix

    def _scales(self, weight: str, rows: int) -> Tensor:
        """float32 `[rows]`, from one scale per row or one in all; counts what belongs to the scales as read."""
        name = f"{weight}_scale"
        shape = self._checkpoint.shape(name)
        if shape not in ((rows, 1), (1,), ()):
            raise ConfigError(
                f"{self._checkpoint.where(name)} has shape {list(shape)}; [{rows}, 1], [1] and [] are possible"
            )
        source = self._checkpoint.read(name, shape)
        scales = source.to(self._device, torch.float32, copy=True).flatten()
        verify_finite(scales, source, self._checkpoint.where(name))
        if not scales.is_meta and not bool((scales > 0).all()):
            raise ConfigError(f"{self._checkpoint.where(name)} has a scale of 0 or less")
        self._count(name, source.numel() * self.dtype.itemsize, 0)
        # a scale for inputs that are not rounded here
        inputs = f"{weight.removesuffix('weight')}input_scale"
        if inputs in self._names:
            self._count(inputs, self.dtype.itemsize, 0)
        return scales.expand(rows).contiguous()

    def _whole_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _read(self, name: str, shape: tuple[int, ...], part: Part | None, dtype: torch.dtype | None = None) -> Tensor:
        source = self._checkpoint.read(name, shape, FLOATS, part)
        tensor = source.to(self._device, dtype or self.dtype, copy=True)
        verify_finite(tensor, source, self._checkpoint.where(name))
        self._checkpoint.release(source)
        return tensor

    def _count(self, name: str, loaded: int, kept: int) -> None:
        if name in self._unread:
            self._loaded_bytes += loaded
            self._unread.discard(name)
        self._kept_bytes += kept
        if self._progress is not None:
            self._progress(LoadProgress(self._loaded_bytes, self._total_bytes, name, self._kept_bytes))

    def column_parallel(self, names: Sequence[str], rows: int, columns: int, *, bias: bool) -> Linear:
        """One layer whose output is the concatenated outputs of `names`, each `rows` wide, of which each rank has a part."""
        part = self.shard.part(0, rows)
        weight = self.stack([self.matrix(name, rows, columns, part) for name in names], names)
        biases = [self.tensor(f"{name}.bias", rows, part=part) for name in names] if bias else []
        return make_linear(weight, torch.cat(biases) if biases else None)

    def fused_column_parallel(self, name: str, num_parts: int, rows: int, columns: int) -> Linear:
        """The layer `name`, whose output is `num_parts` outputs side by side, each `rows` wide, of which each rank has a part."""
        own = self.shard.part(0, rows) or Part(0, 0, rows)
        parts = [Part(0, first + own.start, first + own.stop) for first in range(0, num_parts * rows, rows)]
        return make_linear(self.stack([self.matrix(name, num_parts * rows, columns, part) for part in parts], [name]))

    def row_parallel(self, name: str, rows: int, columns: int, *, bias: bool) -> Linear:
        """The layer `name`, whose `columns` inputs are divided among the ranks; each rank has the whole result."""
        weight = self.matrix(name, rows, columns, self.shard.part(1, columns))
        added = self.tensor(f"{name}.bias", rows) if bias else None
        if (group := self.shard.group) is None:
            return make_linear(weight, added)
        return RowParallelLinear(make_linear(weight), added, group)

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RmsNorm:
        """offset: added to the weights, in float32."""
        weight = self.tensor(name, size)
        return RmsNorm(weight.float() + offset if offset else weight, eps)

    def check_all_read(self) -> None:
        """Raises: ConfigError for weights that were not read: the checkpoint does not match its config.json."""
        if self._unread:
            raise ConfigError(
                f"{self._checkpoint.folder}: {len(self._unread)} weights have no place: {few(sorted(self._unread))}"
            )


def few(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(name[:80] for name in names[:_NUM_NAMED]) + rest


def verify_finite(tensor: Tensor, source: Tensor, where: str) -> None:
    """Check a weight, in one pass at memory speed: 0.06 s for 783 MB in bfloat16, of 1 s for loading.

    tensor: in the served dtype. source: in the file's dtype. where: file and name, for the message.
    Raises: ConfigError for NaN, infinity, or a number that exceeds the served dtype.
    """
    if _is_finite(tensor):
        return
    if _is_finite(source):
        raise ConfigError(
            f"{where} has numbers beyond {tensor.dtype}, whose largest is {torch.finfo(tensor.dtype).max:g}; "
            f"serve it in {source.dtype} (setting dtype)"
        )
    values = source.flatten()
    place = int((~values.isfinite()).nonzero()[0])
    count = int((~values.isfinite()).sum())
    raise ConfigError(
        f"{where} has {count} values that are NaN or infinite; the first is number {place} of {len(values)}"
    )


def _is_finite(tensor: Tensor) -> bool:
    """Minimum and maximum propagate NaN, and take a tenth of the time of a test of each number."""
    if tensor.is_meta or not tensor.numel():
        return True
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite() & largest.isfinite())
