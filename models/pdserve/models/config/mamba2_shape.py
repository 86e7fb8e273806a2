"""`Mamba2Shape`: sizes of a Mamba 2 layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

MAMBA_FIELDS = words(
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias "
    "mamba_proj_bias time_step_limit"
)
"""As Granite and Bamba name them."""
Mamba2Norm = Literal["before_gate", "after_gate"]
_MAX_SIZE = 1 << 14
_LEAST_RUNS = 8
_INFINITY = (float("inf"), "Infinity", {"__float__": "Infinity"})
"""As `json` reads it, and as transformers writes it."""


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    num_heads: int
    head_dim: int
    state_size: int
    """N"""
    num_groups: int
    """Heads of one group have the same b and c."""
    conv_length: int
    conv_bias: bool
    projection_bias: bool
    output_bias: bool
    norm: Mamba2Norm | None = "after_gate"
    """Of the result, before or after its gate is applied; None: there is no norm."""

    @classmethod
    def read(cls, config: JsonObject) -> Mamba2Shape:
        """Without `mamba_d_ssm` the inner size is `mamba_expand` times `hidden_size`. Raises: ConfigError, UnsupportedModel."""
        num_heads = config.integer("mamba_n_heads", 128, maximum=_MAX_SIZE)
        num_groups = config.integer("mamba_n_groups", 1, maximum=_MAX_SIZE)
        inner_size = config.integer("mamba_expand", 2, maximum=_MAX_SIZE) * config.integer("hidden_size")
        inner_name = f"mamba_expand times hidden_size ({inner_size})"
        if config.has("mamba_d_ssm"):
            inner_size = config.integer("mamba_d_ssm", maximum=_MAX_SIZE * _MAX_SIZE)
            inner_name = f"mamba_d_ssm ({inner_size})"
        if num_heads % num_groups:
            raise config.error("mamba_n_heads", f"a multiple of mamba_n_groups ({num_groups})")
        if inner_size % num_heads:
            raise config.error("mamba_n_heads", f"a divisor of {inner_name}")
        if config.get("mamba_d_head") not in (None, "auto", inner_size // num_heads):
            raise config.error("mamba_d_head", f'"auto" or {inner_size // num_heads}')
        check_time_steps(config)
        bias = config.boolean("mamba_proj_bias", False)
        return cls(
            num_heads=num_heads,
            head_dim=inner_size // num_heads,
            state_size=config.integer("mamba_d_state", 256, maximum=_MAX_SIZE),
            num_groups=num_groups,
            conv_length=config.integer("mamba_d_conv", 4, minimum=2, maximum=_MAX_SIZE),
            conv_bias=config.boolean("mamba_conv_bias", True),
            projection_bias=bias,
            output_bias=bias,
        )

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_runs(self) -> int:
        """Runs of heads of one group, which ranks share: at least 8 if there are as many heads, so that groups may be cut."""
        fitting = [
            runs for runs in range(self.num_groups, self.num_heads + 1, self.num_groups) if self.num_heads % runs == 0
        ]
        return next((runs for runs in fitting if runs >= _LEAST_RUNS), fitting[-1])

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Field of config.json -> the number that ranks share."""
        return {f"mamba_n_heads in runs of {self.heads_per_run}": self.num_runs}

    @property
    def heads_per_run(self) -> int:
        return self.num_heads // self.num_runs

    @property
    def run_size(self) -> int:
        """Numbers of a run's state: columns of its heads and of its b and c, and the heads' matrices."""
        columns = (self.heads_per_run * self.head_dim + 2 * self.state_size) * (self.conv_length - 1)
        return columns + self.heads_per_run * self.head_dim * self.state_size


def check_time_steps(config: JsonObject) -> None:
    """Raises: UnsupportedModel where steps have limits."""
    limits = config.items("time_step_limit")
    if limits is not None and (len(limits) != 2 or limits[0] != 0 or limits[1] not in _INFINITY):
        raise UnsupportedModel(f"{config.where}: time_step_limit other than 0 and infinity")
