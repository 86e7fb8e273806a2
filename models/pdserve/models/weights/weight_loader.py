"""`WeightLoader`: reads weights by their names in the checkpoint, in the served dtype, and counts them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.kernels.cpu.int8_linear import Int8Matrix
from pdserve.kernels.cpu.linear import Linear, make_linear, multiplies_float8, multiplies_groups
from pdserve.kernels.cpu.matrices import Matrix, stack_rows
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix, can_group
from pdserve.kernels.layers.parallel_linear import RowParallelLinear
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.weights.quantized.scaled_matrix import ScaledMatrix
from pdserve.models.weights.quantized.stored_matrix import GroupCut, GroupForm, StoredMatrix
from pdserve.models.weights.rank_shard import WHOLE, Part, RankShard
from pdserve.models.weights.weight_source import FLOATS, WeightSource

Quantization = Literal["stored", "int8", "int4", "fp8", "stored_fp8"] | None
"""What matrices are in memory: `stored` as in the checkpoint where there is a product for that, else numbers of the dtype, as with
None; `int8` and `int4` rounded to integers; `fp8` to float8, and `stored_fp8` as they are stored in float8, in both multiplied by
inputs in float8."""
_GROUP = 32
"""Inputs with one scale in matrices that are rounded to four bits."""
_FLOAT8_GROUP = 128
"""Inputs with one scale in matrices that are rounded to float8, as in those of DeepSeek V3. Other numbers of inputs have one scale
per row."""
log = logging.getLogger(__name__)
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
        shard: RankShard = WHOLE,
        progress: Callable[[LoadProgress], None] | None = None,
        served_on: str | None = None,
    ) -> None:
        """ignored: names that may remain unread. quantization: of `matrix`. shard: this rank's.
        progress: called after each weight. served_on: the device for which `meta` has the sizes; default: a CPU.
        Raises: UnsupportedModel for a quantization that the device does not multiply."""
        self._checkpoint = checkpoint
        self.dtype = dtype
        """The served dtype."""
        self._device = device
        self._is_meta = torch.device(device).type == "meta"
        self._quantization = quantization
        self._served_on = torch.device(served_on or ("cpu" if self._is_meta else device))
        if quantization in ("fp8", "stored_fp8") and not multiplies_float8(self._served_on):
            raise UnsupportedModel(
                f"quantization is 'fp8': its products need triton and a GPU of NVIDIA from sm_89 on, not {self._served_on}"
            )
        self._num_kept = self._num_widened = self._num_float8 = 0
        self._names = frozenset(checkpoint.names)
        self.shard = shard
        self._progress = progress
        self._loaded_bytes = self._kept_bytes = 0
        self._unread = {
            name for name in checkpoint.names if name not in ignored and not name.endswith("rotary_emb.inv_freq")
        }
        self._total_bytes = sum(torch.Size(checkpoint.shape(name)).numel() for name in self._unread) * dtype.itemsize

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a weight as it is stored; None: it is missing."""
        return self._checkpoint.shape(name) if name in self._names else None

    def tensor(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy on the device.

        shape: of the whole weight. part: only this is read. dtype: None: the served one.
        Raises: ConfigError for a weight that is missing, has another shape or type, or has NaN or infinity.
        """
        tensor = self._read(name, shape, part, dtype)
        self._count(name, self._whole_bytes(shape), tensor.nbytes)
        return tensor

    def ones(self, *shape: int) -> Tensor:
        """On the device, in the served dtype: weights that no checkpoint has."""
        return torch.ones(shape, dtype=self.dtype, device=self._device)

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

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> Matrix:
        """`{name}.weight`, quantized where the checkpoint stores it so, or the loader's quantization says so.

        rows, columns: of the whole weight. part: only this is read. Columns of a rank that are quantized here have scales of their
        own.
        Raises: ConfigError, as `tensor`; UnsupportedModel.
        """
        weight = f"{name}.weight"
        stored = self._checkpoint.stored(weight)
        if isinstance(stored, ScaledMatrix) and stored.rounds_inputs:
            return self._int8(stored, weight, (rows, columns), part)
        if stored is not None and (grouped := self._grouped(stored, weight, (rows, columns), part)) is not None:
            return grouped
        tensor = self._read(weight, (rows, columns), part)
        matrix: Matrix = tensor
        if self._quantization == "int8":
            matrix = Int8Matrix.quantized(tensor)
        elif self._quantization == "int4" and can_group(tensor.shape[1], _GROUP, 4):
            matrix = GroupedMatrix.quantized(tensor, 4, _GROUP)
        elif self._quantization == "fp8":
            group = _FLOAT8_GROUP if tensor.shape[1] % _FLOAT8_GROUP == 0 else tensor.shape[1]
            matrix = GroupedMatrix.in_float8(tensor, group)
        self._count(weight, self._whole_bytes((rows, columns)), matrix.nbytes)
        return matrix

    def stack(self, matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
        """One matrix of several with the same input. names: for messages. Raises: ConfigError if only some have rounded inputs."""
        grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
        if grouped and (len(grouped) < len(matrices) or not GroupedMatrix.can_stack(grouped)):
            # a product has one form for all of its outputs
            matrices = [each.widened().to(self.dtype) if isinstance(each, GroupedMatrix) else each for each in matrices]
        if len({type(matrix) for matrix in matrices}) > 1:
            raise ConfigError(f"{self._checkpoint.folder}: some of {', '.join(names)} are quantized and some are not")
        return stack_rows(matrices)

    def _grouped(
        self, stored: StoredMatrix, weight: str, shape: tuple[int, int], part: Part | None
    ) -> GroupedMatrix | None:
        """The matrix as integers in groups; None where they are not kept, and for another shape, which reading reports."""
        if self._quantization not in ("stored", "stored_fp8") or stored.shape != shape:
            return None
        form = stored.group_form
        cut = None if form is None else form.cut(shape, part)
        if form is None or cut is None or not self._multiplies(form, cut):
            self._num_widened += not stored.is_plain
            return None
        start, stop = cut.rows.start, cut.rows.stop
        matrix = form.on_meta(stop - start, shape[1]) if self._is_meta else stored.grouped(start, stop)
        if cut.columns != slice(0, shape[1]):
            matrix = matrix.columns(cut.columns, cut.groups)
        matrix = matrix.to(self._device)
        if form.is_float and self._quantization == "stored_fp8":
            matrix = replace(matrix, rounds_inputs=True)
            self._num_float8 += 1
        self._num_kept += 1
        self._count(weight, self._whole_bytes(shape), matrix.nbytes)
        return matrix

    def _multiplies(self, form: GroupForm, cut: GroupCut) -> bool:
        num_inputs = cut.columns.stop - cut.columns.start
        group_size = num_inputs if cut.groups == slice(0, 1) else form.group_size
        return multiplies_groups(self._served_on, self.dtype, num_inputs, group_size, is_float=form.is_float)

    def _int8(self, stored: ScaledMatrix, weight: str, shape: tuple[int, int], part: Part | None) -> Matrix:
        if torch.device(self._device).type not in ("cpu", "meta"):
            raise UnsupportedModel(
                f"{self._checkpoint.folder}: int8 weights with rounded inputs are served on a CPU only, not on {self._device}"
            )
        if stored.shape != shape:
            raise ConfigError(
                f"{self._checkpoint.where(weight)} has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        matrix = Int8Matrix(*(tensor.to(self._device) for tensor in stored.integers(part)))
        self._count(weight, self._whole_bytes(shape), matrix.nbytes)
        return matrix

    def _whole_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _read(self, name: str, shape: tuple[int, ...], part: Part | None, dtype: torch.dtype | None = None) -> Tensor:
        size = shape if part is None else part.size(shape)
        stored = self._checkpoint.stored(name)
        if stored is not None and stored.shape == shape and self._is_meta:
            return torch.empty(size, dtype=dtype or self.dtype, device="meta")
        whole, first = None, 0
        for source in self._checkpoint.pieces(name, shape, FLOATS, part):
            if source.shape == size:
                whole = piece = source.to(self._device, dtype or self.dtype, copy=True)
            else:
                if whole is None:
                    whole = torch.empty(size, dtype=dtype or self.dtype, device=self._device)
                piece = whole[first : first + len(source)].copy_(source)
                first += len(source)
            verify_finite(piece, source, self._checkpoint.where(name))
            self._checkpoint.release(source)
        if whole is None:
            raise ConfigError(f"{self._checkpoint.where(name)} has shape {list(shape)}, without any number")
        return whole

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
        if self._num_widened and not self._is_meta:
            log.info(
                "%s: %d of %d quantized matrices are widened to %s: there is no product for their form",
                self._checkpoint.folder, self._num_widened, self._num_widened + self._num_kept, self.dtype,
            )  # fmt: skip
        if self._quantization == "stored_fp8" and not self._num_float8:
            raise ConfigError(
                f"quantization is 'fp8', but {self._checkpoint.folder} is stored quantized, and no matrix in float8 "
                "with scales that a product takes"
            )
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
