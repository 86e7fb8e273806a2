"""Tile sizes and warps of each kernel by GPU architecture: a table instead of autotuning.

A captured CUDA graph cannot contain measurements, and a worker that tunes itself starts slowly and not reproducibly. No value has
been compared with others on a GPU: they give each thread 16 bytes per load and compile without spills (`tests/kernels/compiled/`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfigs:
    """One architecture's table."""

    add_in_product: bool = True
    """True: `add_norm` adds in the matrix product (beta = 1) and then normalises; False: one kernel adds and normalises."""
    norm_numbers_per_warp: int = 512
    rotate_numbers: int = 1024
    """Numbers of heads per program of `rotate_and_store`."""
    rotate_warps: int = 4
    swiglu_block: int = 1024
    swiglu_warps: int = 4
    move_words: int = 2048
    """Words per program of `move_blocks`."""
    move_warps: int = 8
    digest_kibibytes: int = 16
    """Kibibytes per program of `digests`."""
    digest_warps: int = 4
    digest_unroll: int = 16
    """Steps of the chain whose sums are loaded ahead."""
    sample_tile: int = 1024
    """Tokens that a program of `sample` holds at once, a multiple of 16."""
    sample_warps: int = 4
    sample_programs: int = 1024
    """Programs per launch of `sample`, about: a row is divided into `sample_programs / N` parts."""
    sample_pivot_tile: int = 512
    """Tokens that a program holds at once while it weighs those above pivots, each of which takes registers; a divisor of
    `sample_tile`."""
    sample_hits: int = 4096
    """Quads of tokens per row that are listed because one may win; where more may, noise is computed for the whole row."""
    sample_list: int = 2048
    """Tokens per row that are listed between two pivots, a power of two; a border among more is searched in the whole row."""
    sample_draws: int = 512
    """Listed quads of which one token each is weighed at once."""
    sample_draw_warps: int = 8
    lora_rows: int = 64
    """Rows of A, or ranks of B, that a program of LoRA products takes at once; at least 16."""
    lora_inputs: int = 128
    """Inputs of a layer that it takes at once."""
    lora_columns: int = 128
    """Outputs of a layer per program."""
    lora_splits: int = 4
    """Programs that share the inputs of a layer."""
    lora_warps: int = 4
    expert_rows: int = 64
    """Rows of an expert that a program takes at once where experts have many, else 16."""
    expert_inputs: int = 64
    """Bytes / 2 of a matrix's row that a program takes at once."""
    expert_columns: int = 64
    """Columns of an expert's matrix per program."""
    expert_warps: int = 4
    expert_stages: int = 3
    """Loads of inputs that are in flight during the product."""
    grouped_rows: int = 64
    """Rows up to which packed numbers are multiplied."""
    grouped_columns: int = 64
    """Outputs of a matrix in groups per program."""
    grouped_programs: int = 528
    """Programs per 16 rows, about: the inputs of a matrix with few outputs are divided."""
    grouped_warps: int = 4
    grouped_stages: int = 4
    float8_rows: int = 128
    """Rows per program where more than `grouped_rows` are multiplied in float8, and its outputs."""
    float8_columns: int = 128
    float8_warps: int = 8
    sum_columns: int = 1024
    """Outputs per program that sums parts."""
    sum_warps: int = 4
    conv_channels: int = 128
    """Channels per program of convolutions with states."""
    conv_tokens: int = 16
    """Tokens of a chunk per program of these."""
    conv_warps: int = 4
    state_numbers: int = 4096
    """Numbers of a state's matrix per program."""
    state_warps: int = 4
    chunk_numbers: int = 4096
    """Numbers of a state's matrix that a program takes through a chunk, about."""
    chunk_tokens: int = 16
    """Tokens that it takes at once; at least 16."""
    chunk_warps: int = 8
    max_registers: int | None = 255
    """See `register_limit`."""

    def norm_warps(self, block: int) -> int:
        """Warps for rows of `block` numbers, a power of two up to 16."""
        return min(16, max(1, block // self.norm_numbers_per_warp))


_HOPPER = LaunchConfigs()
TABLE = {
    "sm_80": replace(_HOPPER, sample_programs=864),
    "sm_86": replace(_HOPPER, sample_programs=1136),
    "sm_90": _HOPPER,
    "sm_100": replace(_HOPPER, sample_programs=1184),
    "sm_120": replace(_HOPPER, sample_programs=1360),
    # a warp of AMD's data-centre GPUs has 64 threads
    "gfx942": replace(
        _HOPPER,
        norm_numbers_per_warp=1024,
        rotate_warps=2,
        swiglu_warps=2,
        move_warps=4,
        digest_warps=2,
        sample_warps=2,
        sample_draw_warps=4,
        sample_programs=2432,
        lora_warps=2,
        expert_stages=2,
        grouped_stages=2,
        sum_warps=2,
        conv_warps=2,
        state_warps=2,
        chunk_warps=4,
        max_registers=None,
    ),
    # tiles so small that tests with few numbers need several
    INTERPRETER: LaunchConfigs(
        rotate_numbers=128,
        swiglu_block=64,
        move_words=64,
        digest_kibibytes=2,
        digest_unroll=2,
        sample_tile=256,
        sample_programs=8,
        sample_pivot_tile=128,
        sample_hits=64,
        sample_list=128,
        sample_draws=64,
        lora_rows=16,
        lora_inputs=32,
        lora_columns=16,
        lora_splits=2,
        expert_inputs=32,
        expert_columns=16,
        grouped_rows=32,
        grouped_columns=16,
        grouped_programs=8,
        float8_rows=64,
        float8_columns=32,
        sum_columns=32,
        conv_channels=64,
        state_numbers=256,
        chunk_numbers=256,
        chunk_tokens=4,
        max_registers=None,
    ),
}


def architecture(device: torch.device) -> str:
    """A key of `TABLE`: the device's own, or the nearest older one of its maker, such as sm_86 for 8.9."""
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    of_nvidia = [name for name in TABLE if name.startswith("sm_")]
    return max((name for name in of_nvidia if _number(name) <= 10 * major + minor), key=_number, default="sm_80")


def _number(name: str) -> int:
    return int(name.removeprefix("sm_"))


def launch_configs(device: torch.device) -> LaunchConfigs:
    """The table of this device."""
    return TABLE[architecture(device)]


def register_limit(max_registers: int | None) -> dict[str, int]:
    """Options of a launch with this limit of registers per thread; None: the compiler has no such option.

    Where none is given, NVIDIA's assembler chooses one at which one more program fits into a multiprocessor, and keeps what exceeds
    it in memory. That is no gain for kernels whose programs are as many as the multiprocessors can hold at any limit.
    """
    return {} if max_registers is None else {"maxnreg": max_registers}
