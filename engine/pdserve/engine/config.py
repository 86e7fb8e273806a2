"""`EngineConfig`: the settings of an engine, fixed at its start."""

from __future__ import annotations

from dataclasses import dataclass
from operator import gt

from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.common.request.sampling_params import MAX_SEQUENCES
from pdserve.common.settings.service_settings import SchedulingPolicy
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.engine.sequence_blocks import BlockCounts, max_sequence_blocks
from pdserve.models.kv_cache import FullAttentionSpec, KVCacheSpec


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The encoder of a model with images, by vLLM's names."""

    image_token_id: int
    """Stands once per token of an image."""
    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """Patches of a side that become one token."""
    max_num_encoder_input_tokens: int
    """Tokens of images that a step encodes, at most; no image has more."""
    encoder_cache_size: int
    """Tokens of images whose encoder outputs are kept; no image has more."""

    @property
    def max_image_tokens(self) -> int:
        """Tokens of one image, at most."""
        return min(self.max_num_encoder_input_tokens, self.encoder_cache_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. An engine has no prefill or decode mode: roles differ only in these values."""

    block_size: int = 16
    num_blocks: int = 256
    """Blocks of the pool, each with the keys and values of one KV cache group's layers; of the first shape."""
    num_other_blocks: tuple[int, ...] = ()
    """Blocks of the other shapes."""
    max_model_len: int = 4096
    """Largest number of tokens of one sequence; at most what the pool holds. With an encoder: of both parts and the padding."""
    num_labels: int = 0
    """Labels of the model's classification head; 0: it has none, and generates."""
    enable_prompt_embeds: bool = False
    """Prompts may be embeddings."""
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 64
    max_sequences: int = MAX_SEQUENCES
    """Sequences of one request, at most; workers exchange messages about no more."""
    kv_cache_specs: tuple[KVCacheSpec, ...] = (FullAttentionSpec(),)
    """The type of each KV cache group."""
    enable_prefix_caching: bool = True
    num_host_blocks: BlockCounts = ()
    """Blocks of the host-memory tier, which keeps cached blocks that the pool reuses, by shape; empty: there is none."""
    has_block_store: bool = False
    """True if there is a `BlockStore` below it."""
    shares_block_store: bool = False
    """True if other workers write into it, too."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`priority`: a lower `EngineCoreRequest.priority` runs first; `fcfs`: only by order of arrival."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt computed in a step, at most; 0: no limit but the step's."""
    reserve_whole_prompt: bool = True
    """Admit a sequence only with blocks for its whole prompt, so that prefill never stops half-way for lack of blocks."""
    max_local_prefill_tokens: int | None = None
    """A sequence with more uncached tokens ends with `NeedsPrefill` or `Evicted`; None: no limit."""
    run_ahead_share: float = 0.5
    """Part of the pool that transfer sources without `Want` may fill."""
    attention_backend: str = "auto"
    """Name of the attention back end, see `pdserve.kernels.attention.make_attention`."""
    kernels: str = "auto"
    """Implementation of `LayerOps`, see `pdserve.kernels.make_layer_ops`."""
    enforce_eager: bool = False
    """Capture no graphs of decode steps."""
    async_scheduling: bool = False
    """Launch the next step of decoding sequences before the tokens of the last one are read."""
    max_loras: int = 0
    """Different LoRA adapters in one step, at most; 0: none."""
    collect_layer_times: bool = False
    """Time each layer of a step, for `ModelRunnerStats.layer_s`."""
    profile_interval_s: float = 0.0
    profile_steps: int = 0
    """With the field before: when `StepProfile` writes lines of the log."""
    speculative_config: SpeculativeConfig | None = None
    """How tokens are drafted; None: not at all."""
    encoder: EncoderConfig | None = None
    """None for a model without images."""
    encoder_decoder: EncoderDecoderPrompts | None = None
    """None for a model without an encoder."""
    grammar_timeout_s: float = 10.0
    """Seconds for compiling a grammar; then its request fails."""
    look_ahead: int = 8
    """Largest number of sequences that do not fit and are passed over in one step."""
    max_overtakes: int = 64
    """Number of later arrivals that may pass the first request of a queue; then nothing passes it."""

    def __post_init__(self) -> None:
        specs, size = self.kv_cache_specs, self.block_size
        needed = max_sequence_blocks(specs, self.max_model_len, size, self.largest_chunk)
        if any(map(gt, needed, self.num_blocks_by_shape)):
            shown = " and ".join(map(str, self.num_blocks_by_shape))
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the pool of {shown} blocks of {size} tokens, "
                f"with {len(specs)} KV cache groups"
            )
        if self.encoder_decoder is not None and self.max_model_len - self.encoder_decoder.max_len > self.largest_chunk:
            raise ValueError(
                f"a step computes at most {self.largest_chunk} tokens of a prompt, the encoder reads {self.encoder_decoder.max_len}"
            )
        if self.num_host_blocks and not self.enable_prefix_caching:
            raise ValueError(f"num_host_blocks is {self.num_host_blocks}, which needs enable_prefix_caching")
        if self.shares_block_store and not self.has_block_store:
            raise ValueError("shares_block_store is True, which needs has_block_store")
        if self.has_block_store and not self.num_host_blocks:
            raise ValueError("has_block_store is True, which needs num_host_blocks")

    @property
    def num_blocks_by_shape(self) -> tuple[int, ...]:
        return self.num_blocks, *self.num_other_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def largest_chunk(self) -> int:
        """Tokens of one sequence computed in a step, at most."""
        limit = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(limit, self.max_num_batched_tokens)

    def chunk(self, num_tokens: int, budget: int) -> int:
        """Number of a sequence's `num_tokens` uncomputed tokens that one step computes. budget: tokens left in the step."""
        limit = self.long_prefill_token_threshold or num_tokens
        return min(num_tokens, budget, limit)
