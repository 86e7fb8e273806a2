"""`LatentShape`: sizes of multi-head latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.json_object import JsonObject

LATENT_FIELDS = words(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave"
)
_MAX_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Numbers of a head's query, of its value, and of a row in the cache."""

    q_lora_rank: int
    """0: queries are projected at once."""
    kv_lora_rank: int
    nope_dim: int
    """Numbers of a query that positions do not rotate."""
    rope_dim: int
    value_dim: int
    """0, of defaults only: as many as a head's part of the hidden state."""
    rotates_neighbours: bool
    """True: the checkpoint's numbers 2j and 2j + 1 are rotated together; False: j and j + half."""
    query_factor: float = 1.0
    """Factor of the normed `q_lora_rank` numbers."""
    row_factor: float = 1.0
    """Factor of the normed `kv_lora_rank` numbers."""

    @property
    def row_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def scale(self, rope: RopeParameters) -> float:
        """Factor of scores: larger where yarn has extended the context and says so, as in transformers."""
        scale = 1 / math.sqrt(self.query_dim)
        if not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
        return scale * magnitude * magnitude

    def _read_query_rank(self, config: JsonObject) -> int:
        if config.has("q_lora_rank"):
            return config.integer("q_lora_rank", maximum=_MAX_SIZE)
        return 0 if config.is_null("q_lora_rank") else self.q_lora_rank

    def read(self, config: JsonObject) -> LatentShape:
        """The sizes in config.json, with these as defaults. Raises: ConfigError."""

        def size(name: str, default: int, minimum: int = 1) -> int:
            return config.integer(name, default, minimum=minimum, maximum=_MAX_SIZE)

        rope_dim = size("qk_rope_head_dim", self.rope_dim, minimum=2)
        if rope_dim % 2:
            raise config.error("qk_rope_head_dim", "even")
        value_dim = self.value_dim or config.integer("hidden_size") // config.integer("num_attention_heads")
        return LatentShape(
            q_lora_rank=self._read_query_rank(config),
            kv_lora_rank=size("kv_lora_rank", self.kv_lora_rank),
            nope_dim=size("qk_nope_head_dim", self.nope_dim),
            rope_dim=rope_dim,
            value_dim=size("v_head_dim", value_dim),
            rotates_neighbours=config.boolean("rope_interleave", self.rotates_neighbours),
        )
