"""What an engine is told once, at start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Roles are compositions of these settings; the engine has no mode."""

    block_size: int = 16
    num_blocks: int = 256
    max_model_len: int = 4096
    """Tokens of one sequence; never more than the pool holds."""
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 64
    reserve_whole_prompt: bool = True
    """Admit a sequence only with blocks for its whole prompt, so that prefill never stops half-way for room."""
    max_local_prefill_tokens: int | None = None
    """A sequence with more uncached tokens than this is handed back (`NeedsPrefill`, `Evicted`)."""
    run_ahead_share: float = 0.5
    """Part of the pool that transfers nobody wants yet may fill."""
    look_ahead: int = 8
    """How many sequences that do not fit are passed over in one step in favour of those behind them."""

    def __post_init__(self) -> None:
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the pool of {self.num_blocks} blocks of {self.block_size} tokens"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
