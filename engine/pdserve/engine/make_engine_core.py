"""`make_engine_core`: composes an `EngineCore` and the executor for its device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.common.block_hash import BlockHasher
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.executor.executor import Executor, SingleDeviceExecutor
from pdserve.engine.executor.tensor_parallel_executor import OtherRanks, TensorParallelExecutor
from pdserve.engine.heartbeat import Heartbeat
from pdserve.engine.lora.lora_runner import LoraRunner
from pdserve.engine.ranks.rank_messages import StoreOptions
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.drafts.model_drafter import DraftModel
from pdserve.engine.runner.loading.make_model_runner import make_model_runner
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.runner.pool.open_store import open_store
from pdserve.engine.runner.pool.tier_memory import TensorMemory, make_host_caches
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.engine.scheduler.kv_messages import KvOutbox
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.kernels.layer_plans import LayerBackend
from pdserve.models.kv_cache import pools_of


def make_engine_core(
    config: EngineConfig,
    model: DecoderModel,
    kv_caches: Sequence[Tensor],
    hasher: BlockHasher,
    vocab_size: int,
    outbox: KvOutbox | None = None,
    grammars: GrammarCompiler | None = None,
    logits_processors: LogitsProcessors | None = None,
    attention: Sequence[LayerBackend] | None = None,
    lora: LoraRunner | None = None,
    ranks: OtherRanks | None = None,
    host_caches: Sequence[Tensor] | None = None,
    draft_model: DraftModel | None = None,
    token_texts: TokenTexts | None = None,
    store: StoreOptions | None = None,
) -> EngineCore:
    """An engine over one model.

    kv_caches: by KV cache group, `[num_blocks, Hkv, L, 2, bs, D]` each. outbox: receives the engine's messages to transfers; None
    without transfers. grammars: None without a tokenizer; requests for structured outputs are refused then. logits_processors:
    plug-ins that requests may name; default: none. attention: a back end over each of `kv_caches`; default:
    `config.attention_backend`. lora: None without adapters. ranks: the other ranks that share the model; None without any.
    host_caches: the host-memory tier's slots, as `make_host_caches` makes them; default: made here, if `config.num_host_blocks` has
    some. draft_model: that of `config.speculative_config`, if it names one. token_texts: of the vocabulary; without them
    `bad_words` has no effect, and only `bad_words_token_ids` has. store: below host memory, with `config.has_block_store`.
    Raises: ConfigError if there is no such back end, no such `config.kernels`, or not what the store needs; OSError if the store
    cannot be opened.
    """
    heartbeat, processors = Heartbeat(), logits_processors or LogitsProcessors()
    group = None if ranks is None else ranks.group
    runner = make_model_runner(
        config, model, kv_caches, vocab_size, heartbeat.beat, processors, attention,
        lora=lora, group=group, draft_model=draft_model, token_texts=token_texts,
    )  # fmt: skip
    sealed = None if store is None else open_store(store, rank=0)
    host_blocks = None
    if config.num_host_blocks:
        slots = host_caches or make_host_caches(pools_of(kv_caches), config.num_host_blocks)
        host_blocks = HostBlocks(TensorMemory(kv_caches, slots), sealed)
    executor: Executor = SingleDeviceExecutor(runner, host_blocks)
    if ranks is not None:
        executor = TensorParallelExecutor(runner, ranks, host_blocks, store)
    adapters = None if lora is None else lora.store
    stored = () if sealed is None else sealed.store.names()
    return EngineCore(config, executor, heartbeat, hasher, vocab_size, outbox, grammars, processors, adapters, stored)
