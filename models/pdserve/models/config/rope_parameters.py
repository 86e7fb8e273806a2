"""Rotary frequencies and their scalings to longer contexts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.config.mrope import Mrope
from pdserve.models.json_object import MAX_INTEGER, JsonObject

log = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
DEFAULT_THETA = 10000.0
_FIELDS = words(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor beta_fast
    beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor short_factor long_factor finetuned
    """
)
"""Known fields of rope parameters; `finetuned` has no effect."""


@dataclass(frozen=True)
class RopeParameters:
    """A model's rotary embedding; fields that a type does not use keep their defaults."""

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    """Positions that the model was trained on before its context was extended."""
    attention_factor: float = 1.0
    """Factor of rotated queries and keys (yarn, longrope)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    """Divisor of each pair's frequency (longrope), in models that serve the original length."""
    long_factor: tuple[float, ...] = ()
    """The same in models that serve more."""
    uses_long_factor: bool = False
    """See `for_length`."""
    unrotated_dim: int = 0
    """Numbers at the end of a head that no position rotates; even."""
    rotated_part: float = 1.0
    """Part of the pairs that are rotated, of all numbers of a head (proportional): the last pairs have the frequency 0."""
    mscale_all_dim: float = 0.0
    """Of scalings by `factor`, by which latent attention scales its scores; 0: it does not."""
    mrope: Mrope | None = None
    """Axes of positions; None: a position is one number."""

    @classmethod
    def from_config(
        cls,
        config: JsonObject,
        head_dim: int,
        max_positions: int,
        *,
        default_theta: float = DEFAULT_THETA,
        default_rotary_factor: float = 1.0,
        may_be_partial: bool = False,
        default_original: int | None = None,
    ) -> RopeParameters:
        """Read `rope_scaling`, or `rope_parameters` if that is absent; `rope_theta` may also be a field next to either.

        As in transformers, `rope_scaling` replaces the whole of `rope_parameters`, its `rope_theta` included.
        may_be_partial: the family rotates only a part of a head where `partial_rotary_factor` says so. default_original: length
        before the context was extended, where no field next to the rope parameters has it; None: theirs.
        Raises: UnsupportedModel, ConfigError.
        """
        rope = _rope_fields(config, default_theta)
        if rope.text("rope_type", rope.text("type", "default")) == "proportional":
            part = rope.number("partial_rotary_factor", 1.0)
            if part > 1:
                raise rope.error("partial_rotary_factor", "at most 1")
            theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
            return cls("proportional", theta, rope.number("factor", 1.0), rotated_part=part)
        factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", default_rotary_factor))
        if factor != 1.0 and not may_be_partial:
            raise UnsupportedModel(f"{rope.where}: partial_rotary_factor other than 1")
        rotary_dim = int(head_dim * factor)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise rope.error("partial_rotary_factor", f"such that an even number of a head's {head_dim} is rotated")
        found = cls._from_fields(config, rope, rotary_dim, max_positions, default_theta, default_original)
        all_dim = rope.number("mscale_all_dim") if rope.get("mscale_all_dim") and found.rope_type != "default" else 0.0
        return replace(found, unrotated_dim=head_dim - rotary_dim, mscale_all_dim=all_dim)

    @classmethod
    def _from_fields(
        cls,
        config: JsonObject,
        rope: JsonObject,
        head_dim: int,
        max_positions: int,
        default_theta: float,
        default_original: int | None,
    ) -> RopeParameters:
        """head_dim: numbers of a head that are rotated."""
        rope_type = rope.text("rope_type", rope.text("type", "default"))
        theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
        if not theta > 1:
            raise rope.error("rope_theta", "above 1")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"{rope.where}: rope type {rope_type!r:.80}; supported: {', '.join(ROPE_TYPES)}")
        if rope_type in ("default", "dynamic"):
            # Dynamic scaling starts at max_position_embeddings, and no sequence here is longer than that.
            return cls(rope_type, theta, rope.number("factor", 1.0))
        if rope_type == "linear":
            return cls(rope_type, theta, rope.number("factor"))
        is_beside = config.has("original_max_position_embeddings") or default_original is not None
        # log(1) is 0, which cannot divide
        original = (config if is_beside else rope).integer(
            "original_max_position_embeddings", default_original or max_positions, minimum=2
        )
        return cls._from_original(rope, rope_type, theta, head_dim, max_positions, original)

    @classmethod
    def _from_original(
        cls, rope: JsonObject, rope_type: str, theta: float, head_dim: int, max_positions: int, original: int
    ) -> RopeParameters:
        """Rope types that extend a context of `original` tokens."""
        if rope_type == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if not high >= low:
                raise rope.error("high_freq_factor", f"at least low_freq_factor ({low:g})")
            return cls(rope_type, theta, rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
        factor = rope.number("factor", max_positions / original)
        if rope_type == "yarn":
            return cls(
                rope_type,
                theta,
                factor,
                original,
                rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
                rope.number("beta_fast", 32.0),
                rope.number("beta_slow", 1.0),
                # null is false in transformers
                not rope.is_null("truncate") and rope.boolean("truncate", True),
            )
        stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return cls(
            rope_type,
            theta,
            factor,
            original,
            rope.number("attention_factor", stretched),
            short_factor=rope.numbers("short_factor", head_dim // 2),
            long_factor=rope.numbers("long_factor", head_dim // 2),
        )

    def for_length(self, max_model_len: int | None) -> RopeParameters:
        """The rotary embedding of a model that serves `max_model_len` tokens; None: `max_positions`.

        transformers rotates all keys of a sequence with `long_factor` as soon as it is longer than the original length. Keys in a
        cache cannot be rotated again, so the factors are those of the longest sequence, for all sequences.
        """
        is_long = self.rope_type == "longrope" and (max_model_len or 0) > self.original_max_positions
        return replace(self, uses_long_factor=is_long)

    def max_positions(self, configured: int) -> int:
        """Positions that are served where no setting says more: with longrope the original length, whose texts are as in
        transformers at every length.
        """
        return min(configured, self.original_max_positions) if self.rope_type == "longrope" else configured

    def derived_max_positions(self, configured: int) -> int:
        """Positions that the scaling was made for; at least `max_positions`.

        configured: `max_position_embeddings`, which is often left unchanged when a scaling is added by hand. Yarn reaches its
        original length times its factor, and linear scaling the configured length times its factor. Dynamic scaling rotates keys
        again as a sequence grows, which is impossible for keys in a shared cache; the factors of llama3 and longrope do not extend
        the configured length.
        """
        derived = configured
        if self.rope_type == "yarn":
            derived = max(derived, int(self.original_max_positions * self.factor))
        elif self.rope_type == "linear":
            derived = max(derived, int(configured * self.factor))
        return min(derived, MAX_INTEGER)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """`[D / 2]` float32: radians per position, for each pair of a head's numbers; 0 for pairs that are not rotated."""
        rotated = self._rotated_frequencies(head_dim - self.unrotated_dim)
        return torch.cat((rotated, torch.zeros(self.unrotated_dim // 2)))

    def magnitudes(self, head_dim: int) -> Tensor:
        """`[D / 2]` float32: factor of each pair."""
        magnitudes = torch.ones(head_dim // 2)
        magnitudes[: (head_dim - self.unrotated_dim) // 2] = self.attention_factor
        return magnitudes

    def _rotated_frequencies(self, head_dim: int) -> Tensor:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.rope_type == "linear":
            return inverse / self.factor
        if self.rope_type == "proportional":
            num_rotated = int(self.rotated_part * head_dim // 2)
            inverse[num_rotated:] = 0
            return inverse / self.factor
        if self.rope_type == "longrope":
            factors = self.long_factor if self.uses_long_factor else self.short_factor
            return 1.0 / (torch.tensor(factors) * self.theta**exponents)
        if self.rope_type == "llama3":
            return self._llama3(inverse)
        if self.rope_type == "yarn":
            return self._yarn(self.theta**exponents, head_dim)
        return inverse

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Divide low frequencies by `factor`, keep high ones, and interpolate between."""
        turns = self.original_max_positions / (2 * math.pi / inverse)
        if self.high_freq_factor == self.low_freq_factor:
            return torch.where(turns < self.low_freq_factor, inverse / self.factor, inverse)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * inverse / self.factor + kept * inverse

    def _yarn(self, periods: Tensor, head_dim: int) -> Tensor:
        """As llama3, but interpolated linearly in the pair's index instead of in its number of turns.

        periods: positions per radian, of each pair. The order of operations is that of transformers: near the end of a long context
        a difference in a frequency's last bit is seen in the angle.
        """

        def index_of(turns: float) -> float:
            return head_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _rope_fields(config: JsonObject, default_theta: float) -> JsonObject:
    """`rope_scaling` or `rope_parameters`. Raises: UnsupportedModel for an unknown field in it."""
    rope, scaling = config.child("rope_parameters"), config.child("rope_scaling")
    if scaling is not None and scaling.names:
        if rope is not None and rope.has("rope_theta"):
            theta = scaling.get("rope_theta") or config.get("rope_theta") or default_theta
            if rope.get("rope_theta") != theta:
                log.warning(
                    "%s: rope_scaling takes the place of rope_parameters, as in transformers: rope_theta is %s, not %s",
                    config.where,
                    theta,
                    rope.shown("rope_theta"),
                )
        rope = scaling
    rope = rope or JsonObject({}, config.where)
    if rope.has_objects():
        raise UnsupportedModel(f"{rope.where}: rope parameters that differ between layers")
    for name in rope.names:
        if name not in _FIELDS and rope.get(name) not in (None, False):
            raise UnsupportedModel(
                f"{rope.where}: {name[:80]} is {rope.shown(name)}; known are {', '.join(sorted(_FIELDS))}"
            )
    return rope


def _yarn_attention_factor(rope: JsonObject, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return magnitude(1.0)
