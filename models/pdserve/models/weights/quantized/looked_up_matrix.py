"""`LookedUpMatrix`: four bits per weight, by which a table has its value, as bitsandbytes stores them (NF4 and FP4)."""

from __future__ import annotations

import json
from collections.abc import Collection

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.stored_matrix import CheckpointMatrix
from pdserve.models.weights.rank_shard import Part

STATE = "quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16


class LookedUpMatrix(CheckpointMatrix):
    """`table[values] * absmax`: a largest magnitude for each block of numbers, which may be stored in eight bits itself."""

    def __init__(self, checkpoint: Checkpoint, weight: str, state: str, tensors: Collection[str]) -> None:
        """weight: name of the numbers. state: name of a tensor with JSON. Raises: ConfigError, UnsupportedModel."""
        described = _state(checkpoint, state)
        shape = described.items("shape") or []
        if len(shape) != 2 or not all(isinstance(size, int) and size > 0 for size in shape):
            raise described.error("shape", "two positive numbers")
        super().__init__(checkpoint, (int(str(shape[0])), int(str(shape[1]))), tensors)
        self._weight = weight
        self._block = described.integer("blocksize")
        rows, columns = self.shape
        if columns % 2:
            raise UnsupportedModel(f"{described.where}: shape is {list(self.shape)}, rows of an even length are read")
        self._table = self.read(f"{weight}.quant_map", ("F32",), 16)
        blocks = -(-rows * columns // self._block)
        absmax = f"{weight}.absmax"
        if described.has("nested_blocksize"):
            nested = described.integer("nested_blocksize")
            table = self.read(f"{weight}.nested_quant_map", ("F32",), 256)
            largest = self.read(f"{weight}.nested_absmax", ("F32",), -(-blocks // nested))
            stored = self.read(absmax, ("U8",), blocks)
            offset = described.get("nested_offset")
            if not isinstance(offset, int | float):
                raise described.error("nested_offset", "a number")
            self._absmax = table[stored.int()] * largest.repeat_interleave(nested)[:blocks] + offset
        else:
            self._absmax = self.read(absmax, ("F32",), blocks)

    def rows(self, start: int, stop: int) -> Tensor:
        rows, columns = self.shape
        part = Part(0, start * columns // 2, stop * columns // 2)
        pairs = self.read(self._weight, ("U8",), rows * columns // 2, 1, part=part).flatten()
        # the first of a pair is in the high bits
        values = self._table[torch.stack((pairs >> 4, pairs & 15), -1).int()].flatten()
        # a block may go on in the next row
        first = start * columns // self._block
        largest = self._absmax[first : -(-stop * columns // self._block)].repeat_interleave(self._block)
        skipped = start * columns - first * self._block
        return values.mul_(largest[skipped : skipped + len(values)]).view(stop - start, columns)


def _state(checkpoint: Checkpoint, name: str) -> JsonObject:
    (length,) = checkpoint.shape(name)
    if length > _MAX_STATE_BYTES:
        raise ConfigError(f"{checkpoint.where(name)} has {length} bytes, at most {_MAX_STATE_BYTES} are read")
    stored = checkpoint.read(name, (length,), ("U8",))
    try:
        found = json.loads(bytes(stored.tolist()))
    except ValueError as error:
        raise ConfigError(f"{checkpoint.where(name)} is no JSON object") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{checkpoint.where(name)} is no JSON object")
    return JsonObject(found, checkpoint.where(name))
