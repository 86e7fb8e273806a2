"""`Mamba2Shape`: sizes of a Mamba 2 layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

Mamba2Norm = Literal["before_gate", "after_gate"]
_MAX_SIZE = 1 << 14
_LEAST_RUNS = 8
_LARGEST_STEP = 3.4e38
"""Of float32: larger limits are none."""
_INFINITY = ("Infinity", {"__float__": "Infinity"})
"""As transformers writes it."""


class MambaFields(NamedTuple):
    """Names of fields in config.json."""

    num_heads: str
    head_dim: str
    num_groups: str
    state_size: str
    conv_length: str
    conv_bias: str
    projection_bias: str
    output_bias: str
    expand: str
    """Heads have `expand * hidden_size` numbers together in families whose head_dim may be "auto"."""
    others: str
    """Fields that change nothing, and `time_step_limit`."""
    inner_size: str = ""
    """In place of that product, where config.json has the field; empty: the family has no such field."""

    @property
    def names(self) -> frozenset[str]:
        return words(" ".join(self))


GRANITE_FIELDS = MambaFields(
    num_heads="mamba_n_heads", head_dim="mamba_d_head", num_groups="mamba_n_groups", state_size="mamba_d_state",
    conv_length="mamba_d_conv", conv_bias="mamba_conv_bias", projection_bias="mamba_proj_bias", output_bias="mamba_proj_bias",
    expand="mamba_expand", others="mamba_chunk_size time_step_limit",
)  # fmt: skip
"""Of Granite and Bamba."""
FALCON_FIELDS = GRANITE_FIELDS._replace(output_bias="projectors_bias", inner_size="mamba_d_ssm")
"""Of Falcon-H1."""
MAMBA_FIELDS = MambaFields(
    num_heads="num_heads", head_dim="head_dim", num_groups="n_groups", state_size="state_size", conv_length="conv_kernel",
    conv_bias="use_conv_bias", projection_bias="use_bias", output_bias="use_bias", expand="expand",
    others="chunk_size time_step_limit",
)  # fmt: skip
"""Of Mamba 2 only."""
NEMOTRON_FIELDS = MambaFields(
    num_heads="mamba_num_heads", head_dim="mamba_head_dim", num_groups="n_groups", state_size="ssm_state_size",
    conv_length="conv_kernel", conv_bias="use_conv_bias", projection_bias="use_bias", output_bias="use_bias", expand="expand",
    others="chunk_size time_step_limit time_step_min time_step_max time_step_floor time_step_rank mamba_proj_bias "
    "mamba_ssm_cache_dtype use_mamba_kernels",
)  # fmt: skip
"""Of Nemotron-H, which has a size of heads and does not read `expand`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    num_heads: int = 128
    head_dim: int = 0
    """0, of defaults only: `expand` says it."""
    state_size: int
    """N"""
    num_groups: int
    """Heads of a group have the same b and c."""
    conv_length: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    norm: Mamba2Norm | None = "after_gate"
    """Of the result, before or after its gate is applied; None: there is no norm."""

    def read(self, config: JsonObject, fields: MambaFields) -> Mamba2Shape:
        """The sizes in config.json, with these as defaults. Raises: ConfigError, UnsupportedModel."""
        num_heads = config.integer(fields.num_heads, self.num_heads, maximum=_MAX_SIZE)
        num_groups = config.integer(fields.num_groups, self.num_groups, maximum=_MAX_SIZE)
        if num_heads % num_groups:
            raise config.error(fields.num_heads, f"a multiple of {fields.num_groups} ({num_groups})")
        limits = config.items("time_step_limit")
        if limits is not None and (len(limits) != 2 or limits[0] != 0 or not _is_unlimited(limits[1])):
            shown = config.shown("time_step_limit")
            raise UnsupportedModel(
                f"{config.where}: time_step_limit is {shown}; steps are computed between 0 and infinity"
            )
        if self.head_dim:
            head_dim = config.integer(fields.head_dim, self.head_dim, maximum=_MAX_SIZE)
        else:
            head_dim = _part_of_all_heads(config, fields, num_heads)
        return replace(
            self,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=config.integer(fields.state_size, self.state_size, maximum=_MAX_SIZE),
            num_groups=num_groups,
            conv_length=config.integer(fields.conv_length, self.conv_length, minimum=2, maximum=_MAX_SIZE),
            conv_bias=config.boolean(fields.conv_bias, self.conv_bias),
            projection_bias=config.boolean(fields.projection_bias, self.projection_bias),
            output_bias=config.boolean(fields.output_bias, self.output_bias),
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
    def heads_per_run(self) -> int:
        return self.num_heads // self.num_runs

    @property
    def run_size(self) -> int:
        """Numbers of a run's state: columns of its heads and of its b and c, and the heads' matrices."""
        columns = (self.heads_per_run * self.head_dim + 2 * self.state_size) * (self.conv_length - 1)
        return columns + self.heads_per_run * self.head_dim * self.state_size

    def shared_sizes(self, field: str) -> dict[str, int]:
        """What ranks share, by the field of config.json that says how many heads there are."""
        return {f"{field} in runs of {self.heads_per_run}": self.num_runs}


def _part_of_all_heads(config: JsonObject, fields: MambaFields, num_heads: int) -> int:
    """A head's part of all heads' numbers. Raises: ConfigError."""
    if fields.inner_size and config.has(fields.inner_size):
        inner_size, name = config.integer(fields.inner_size, maximum=_MAX_SIZE * _MAX_SIZE), fields.inner_size
    else:
        inner_size = config.integer(fields.expand, 2, maximum=_MAX_SIZE) * config.integer("hidden_size")
        name = f"{fields.expand} times hidden_size"
    if inner_size % num_heads:
        raise config.error(fields.num_heads, f"a divisor of {name} ({inner_size})")
    if config.get(fields.head_dim) not in (None, "auto", inner_size // num_heads):
        raise config.error(fields.head_dim, f'"auto" or {inner_size // num_heads}')
    return inner_size // num_heads


def _is_unlimited(limit: object) -> bool:
    return limit in _INFINITY or (isinstance(limit, int | float) and limit > _LARGEST_STEP)
