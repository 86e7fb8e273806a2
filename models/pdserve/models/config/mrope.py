"""M-RoPE: rotary positions with three axes (time, height, width), each for a part of a head's pairs of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.models.json_object import JsonObject

_FIELDS = ("rope_scaling", "rope_parameters")
_NUM_AXES = 3


@dataclass(frozen=True)
class Mrope:
    """The axis of each pair of a head's numbers."""

    section: tuple[int, int, int]
    """Pairs of each axis; together those that are rotated."""
    is_interleaved: bool = False
    """True: the axes take turns as long as height and width have pairs left, and time has the rest; False: one after the other."""

    def axes(self, num_pairs: int) -> Tensor:
        """`[num_pairs]` int64: 0, 1 or 2; pairs after those of the axes are not rotated."""
        axes = torch.zeros(num_pairs, dtype=torch.int64)
        if not self.is_interleaved:
            rotated = torch.repeat_interleave(torch.arange(_NUM_AXES), torch.tensor(self.section))
            axes[: len(rotated)] = rotated
            return axes
        for axis in (1, 2):
            axes[axis : self.section[axis] * _NUM_AXES : _NUM_AXES] = axis
        return axes


def without_mrope(config: JsonObject) -> JsonObject:
    """config.json as one of a text model. Raises: ConfigError."""
    values: dict[str, Any] = {name: config.get(name) for name in config.names}
    for field in _FIELDS:
        rope = config.child(field)
        if rope is None:
            continue
        plain = {name: rope.get(name) for name in rope.names if name not in ("mrope_section", "mrope_interleaved")}
        for name in ("type", "rope_type"):
            if plain.get(name) == "mrope":
                plain[name] = "default"
        values[field] = plain
    return JsonObject(values, config.where)


def read_mrope(config: JsonObject, num_pairs: int, default_section: Sequence[int], *, is_interleaved: bool) -> Mrope:
    """The axes of the rotary parameters. Raises: ConfigError.

    num_pairs: of a head, which are rotated. default_section: used where config.json has none. is_interleaved: of the family, which
    must agree with the field.
    """
    section: Any = list(default_section)
    for field in _FIELDS:
        rope = config.child(field)
        if rope is None:
            continue
        section = rope.get("mrope_section") or section
        if rope.boolean("mrope_interleaved", is_interleaved) is not is_interleaved:
            raise rope.error("mrope_interleaved", str(is_interleaved).lower())
    is_valid = isinstance(section, list) and len(section) == _NUM_AXES
    if not is_valid or any(type(part) is not int or part < 0 for part in section) or sum(section) != num_pairs:
        rope = config.child(_FIELDS[0]) or config.child(_FIELDS[1]) or config
        raise rope.error("mrope_section", f"{_NUM_AXES} integers that are {num_pairs} together")
    time, height, width = section
    return Mrope((time, height, width), is_interleaved)
