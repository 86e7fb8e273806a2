"""`LoadedModel`: a decoder, a KV pool, and their limits, from a worker's settings and its model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.common.security.fingerprint import model_fingerprint, tokenizer_fingerprint
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.config import EncoderConfig, EngineConfig
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.engine.lora.lora_runner import LoraRunner, ModelLoraRunner
from pdserve.engine.ranks.rank_processes import RankProcesses
from pdserve.engine.runner.device.cuda_devices import rank_devices, verify_device
from pdserve.engine.runner.drafts.load_draft_model import DraftModelFolder
from pdserve.engine.runner.drafts.model_drafter import DraftModel
from pdserve.engine.runner.encoders.encoder_decoder_settings import encoder_decoder_prompts, verify_encoder_decoder
from pdserve.engine.runner.encoders.image_encoder import encoder_bytes, image_encoder
from pdserve.engine.runner.pool.memory_fit import allocating
from pdserve.engine.runner.pool.memory_needs import adapter_bytes
from pdserve.engine.runner.pool.pool_budget import CudaMemory, DeviceMemory, LargestSteps, PoolBudget
from pdserve.engine.runner.pool.pool_size import host_slots, pool_setting, pool_size, with_kv_cache_groups
from pdserve.engine.runner.pool.tier_memory import make_host_caches
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from pdserve.kernels.attention.make_attention import AttentionBackendError, make_attention
from pdserve.kernels.cpu.huge_pages import request_huge_pages
from pdserve.kernels.make_layer_ops import LayerOpsError, make_layer_ops
from pdserve.kernels.rank_group import RankGroup
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.decoder import Decoder
from pdserve.models.kv_cache import KVCacheConfig, KVCacheGroupSpec, make_kv_caches, pools_of, shapes_of
from pdserve.models.lora.lora_targets import with_lora_targets
from pdserve.models.model_folder import BUNDLED, model_folder
from pdserve.models.model_impl import AnyDecoder, load_model_decoder, read_model_config
from pdserve.models.weights.rank_shard import RankShard
from pdserve.models.weights.weight_loader import LoadProgress

log = logging.getLogger(__name__)

__all__ = ["LoadProgress", "LoadedModel", "load_model", "model_folder"]

Progress = Callable[[LoadProgress], None]

_BUNDLED_STRING_CHARS = 64


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its pool, for one engine."""

    decoder: AnyDecoder
    kv_cache_config: KVCacheConfig
    kv_caches: tuple[Tensor, ...]
    """`[num_blocks, Hkv, L, 2, bs, D]`: per KV cache group the pool, which is the same tensor for groups of one shape."""
    max_model_len: int
    tokenizer_fingerprint: str
    folder: Path
    adapters: AdapterStore | None = None
    """None without `enable_lora`."""
    host_caches: tuple[Tensor, ...] = ()
    """Slots of the host-memory tier, a tensor per shape of blocks; empty without `kv_host_mib`."""
    ranks: RankProcesses | None = None
    """The other ranks, which end with `close`; None without any, and on ranks above 0."""
    group: RankGroup | None = None
    """The ranks that share the model; None for one."""
    draft_model: DraftModel | None = None
    """The draft model of `speculative_config`; None if it names none, on prefill workers and on ranks above 0."""
    encoder: EncoderConfig | None = None
    """None for a model without images."""
    encoder_decoder: EncoderDecoderPrompts | None = None
    """None for a model without an encoder."""
    token_texts: TokenTexts | None = None
    """None without a tokenizer, and on ranks above 0."""

    @property
    def lora_runner(self) -> LoraRunner | None:
        """Loads adapters for the engine's steps; None without `enable_lora`."""
        return None if self.adapters is None else ModelLoraRunner(self.adapters, self.group)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """Per shape of blocks its pool."""
        return pools_of(self.kv_caches)

    @property
    def num_blocks(self) -> int:
        """Of all KV cache groups."""
        if len(self.layout.shapes) == 1:
            return self.kv_cache_config.num_blocks[0]
        return self.layout.num_places(self.kv_cache_config.num_blocks) * self.layout.num_groups

    @property
    def layout(self) -> KvLayout:
        return self.kv_cache_config.layout

    def grammar_compiler(self, settings: WorkerSettings) -> GrammarCompiler | None:
        """The compiler for structured outputs, which reads no file yet; None without a tokenizer."""
        if not self._tokenizer_file.is_file():
            return None
        limits = GrammarLimits(
            compile_s=settings.limits.grammar_timeout_s,
            token_s=settings.limits.grammar_token_s,
            kill_s=5 * settings.limits.grammar_token_s,
            request_s=settings.limits.grammar_request_s,
            memory_mib=settings.limits.grammar_memory_mib,
            whitespace_chars=settings.limits.grammar_whitespace_chars,
            string_chars=string_chars(settings, self.folder),
        )
        vocab_size = self.decoder.config.vocab_size
        return GrammarCompiler(self.folder, vocab_size, limits, max_processes=settings.max_num_seqs)

    def _drafts(self, settings: WorkerSettings) -> bool:
        """False where nothing is decoded, and where no draft model is loaded. Nothing is drafted for prompts whose blocks go
        elsewhere, so that a prefill worker has a drafter only for the time in which it is a decode worker."""
        return not self.num_labels and not (settings.section == "prefill" and settings.drafts_with_model)

    @property
    def _tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    def engine_info(self, settings: WorkerSettings) -> EngineInfo:
        return EngineInfo(
            model_fingerprint=self.layout.model_fingerprint,
            vocab_size=self.decoder.config.vocab_size,
            hidden_size=self.decoder.hidden_size,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            layout=self.layout,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            has_grammars=self._tokenizer_file.is_file(),
            num_labels=self.num_labels,
            images=None if self.encoder is None else ImageProcessorConfig.read(self.folder),
            encoder=self.encoder,
            encoder_decoder=self.encoder_decoder,
        )

    @property
    def num_labels(self) -> int:
        """Labels of the classification head; 0: the model generates."""
        classifier = self.decoder.config.classifier
        return 0 if classifier is None else classifier.num_labels

    def close(self) -> None:
        """End the other ranks. No engine computes any more. May be called again."""
        if self.ranks is not None:
            self.ranks.close()

    def engine_config(self, settings: WorkerSettings) -> EngineConfig:
        """The engine's settings, limited by model and pool."""
        max_model_len, step_tokens = self.max_model_len, settings.step_tokens
        if self.encoder_decoder is not None:
            max_model_len = self.encoder_decoder.max_sequence_len(settings.block_size)
            # the longest prompt or sound is encoded in one step, with a token of each running sequence
            step_tokens = max(step_tokens, max_model_len - self.max_model_len + settings.max_num_seqs)
        return EngineConfig(
            block_size=settings.block_size,
            num_blocks=self.kv_cache_config.num_blocks[0],
            num_other_blocks=self.kv_cache_config.num_blocks[1:],
            num_host_blocks=tuple(map(len, self.host_caches)),
            has_block_store=settings.has_block_store,
            shares_block_store=settings.kv_store is not None,
            max_model_len=max_model_len,
            num_labels=self.num_labels,
            enable_prompt_embeds=settings.enable_prompt_embeds,
            kv_cache_specs=self.kv_cache_config.specs,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_sequences=settings.limits.max_n_sequences,
            enable_prefix_caching=settings.enable_prefix_caching,
            scheduling_policy=settings.scheduling_policy,
            long_prefill_token_threshold=settings.limits.long_prefill_token_threshold,
            max_local_prefill_tokens=settings.limits.max_local_prefill_tokens,
            run_ahead_share=settings.limits.run_ahead_share,
            attention_backend=settings.attention_backend,
            kernels=settings.kernels,
            max_loras=settings.limits.max_loras if self.adapters is not None else 0,
            grammar_timeout_s=settings.limits.grammar_timeout_s,
            enforce_eager=settings.enforce_eager,
            async_scheduling=settings.runs_ahead,
            collect_layer_times=settings.collect_layer_times,
            profile_interval_s=settings.profile_interval_s,
            profile_steps=settings.profile_steps,
            speculative_config=settings.speculative_config if self._drafts(settings) else None,
            encoder=self.encoder,
            encoder_decoder=self.encoder_decoder,
        )


def load_model(
    folder: Path, settings: WorkerSettings, progress: Progress | None = None, transfer_program: str | None = None
) -> LoadedModel:
    """Read weights and make the pool, with several ranks in a process each: this one has rank 0.

    progress: called after each weight. transfer_program: as of `RankProcesses`. Raises: ConfigError, UnsupportedModel; WorkerLost
    when a rank ended meanwhile.
    """
    request_huge_pages()
    verify_worker(folder, settings)
    size = settings.tensor_parallel_size
    if size == 1:
        return _load(folder, settings, None, progress)
    ranks = RankProcesses(folder, settings, torch.device(rank_devices(settings)[0]), transfer_program)
    try:
        loaded = ranks.attempt(lambda: _load(folder, settings, ranks.group, progress))
        ranks.loaded()
    except BaseException:
        ranks.close()
        raise
    return replace(loaded, ranks=ranks)


def load_outline(folder: Path, settings: WorkerSettings) -> LoadedModel:
    """The model and its pool without their bytes, which computes nothing: only shapes, limits and layouts are there.

    The folder needs a config.json and no weights; the pool has the size that the settings name. Of several ranks it is the part of
    rank 0.
    Raises: ConfigError, UnsupportedModel.
    """
    verify_model(folder, settings)
    if settings.num_blocks is None and settings.pool_mib is None:
        raise ConfigError("num_blocks or kv_cache_mib is needed: there is no memory that a pool could be measured by")
    settings = msgspec.structs.replace(settings, load_format="dummy")
    return _load(folder, settings, None, None, device="meta")


def verify_worker(folder: Path, settings: WorkerSettings) -> None:
    """Check what needs no weights: the devices, config.json, and settings that the model may not have.

    Raises: ConfigError, UnsupportedModel.
    """
    for device in rank_devices(settings):
        verify_device(device)
    verify_model(folder, settings)


def verify_model(folder: Path, settings: WorkerSettings) -> ModelConfig:
    """The part of `verify_worker` that needs no device. Raises: as it."""
    config = _verified_config(folder, settings)
    if settings.tensor_parallel_size > 1:
        config.verify_sharding(settings.tensor_parallel_size, folder)
    return config


def load_rank(folder: Path, settings: WorkerSettings, group: RankGroup) -> LoadedModel:
    """A rank's part of the weights, and its pool. Raises: as `load_model`; RuntimeError when another rank ended."""
    return _load(folder, settings, group, None)


def _load(
    folder: Path,
    settings: WorkerSettings,
    group: RankGroup | None,
    progress: Progress | None,
    device: str | None = None,
) -> LoadedModel:
    """device: default: that of the settings."""
    config = _verified_config(folder, settings)
    draft_folder = DraftModelFolder.of(settings, folder, config)
    shard = RankShard(0, settings.tensor_parallel_size) if group is None else RankShard(group.rank, group.size, group)
    device = device or rank_devices(settings)[shard.rank]
    decoder = load_model_decoder(
        folder, dtype=settings.dtype, model_impl=settings.model_impl, max_model_len=settings.max_model_len, device=device,
        load_format=settings.load_format, quantization=settings.weight_form, shard=shard, progress=progress,
        hybrid_kv_cache=config.hybrid_kv_cache, draft_head=config.draft_head,
    )  # fmt: skip
    adapters = None
    if settings.enable_lora and isinstance(decoder, Decoder):
        with allocating(
            f"max_loras {settings.limits.max_loras} with max_lora_rank {settings.limits.max_lora_rank}",
            adapter_bytes(folder, settings, shard), device,
        ):  # fmt: skip
            decoder, targets = with_lora_targets(
                decoder, max_loras=settings.limits.max_loras, max_rank=settings.limits.max_lora_rank, kernels=settings.kernels,
                max_tokens=settings.step_tokens, shard=shard,
            )  # fmt: skip
        adapters = AdapterStore(targets, settings.cpu_loras)
    config = decoder.config
    cache_dtype = settings.cache_dtype
    fingerprint = _fingerprint(folder, settings, config)
    groups = config.kv_cache_groups(settings.block_size, fingerprint, shard, cache_dtype)
    layout = config.kv_layout(settings.block_size, fingerprint, shard, cache_dtype)
    # ranks above 0 do not load it, but count its cache: all pools have equally many blocks. An outline computes nothing
    loads_draft = draft_folder is not None and shard.rank == 0 and device != "meta"
    draft_decoder = draft_folder.load(settings) if draft_folder is not None and loads_draft else None
    left_bytes, more_bytes = None, 0
    if settings.num_blocks is None and settings.pool_mib is None:
        place = torch.device(device)
        models: list[tuple[AnyDecoder, Sequence[KVCacheGroupSpec]]] = [(decoder, groups)]
        if draft_folder is not None:
            # its cache has no more blocks than the pool has of all groups together
            more_bytes = -(-draft_folder.block_bytes // len(groups))
            if draft_decoder is not None:
                models.append((draft_decoder, draft_folder.groups))
        budget = _budget(settings, models, place, CudaMemory(place))
        least = max(shape.block_bytes for shape in layout.shapes) + more_bytes
        left_bytes = budget.pool_bytes(settings, least, encoder_bytes(folder, settings, config))
        if group is not None:
            left_bytes = group.minimum(left_bytes)
    num_blocks, max_model_len = pool_size(settings, groups, config, left_bytes, more_bytes)
    pool_bytes = layout.pool_bytes(num_blocks)
    if settings.max_model_len is None and max_model_len < config.max_position_embeddings and shard.rank == 0:
        log.warning(
            "sequences have at most %d tokens, not the model's %d: %s holds no more, about %d MiB would (kv_cache_mib)",
            max_model_len, config.max_position_embeddings, pool_setting(settings),
            -(-pool_bytes * config.max_position_embeddings // (max_model_len << 20)),
        )  # fmt: skip
    if group is not None:
        group.minimum(num_blocks[0])  # all have loaded
    with allocating(pool_setting(settings), pool_bytes, device):
        kv_caches = make_kv_caches(groups, num_blocks, device)
    host_caches: tuple[Tensor, ...] = ()
    host = "meta" if device == "meta" else "cpu"
    if slots := host_slots(settings, layout, num_blocks):
        with allocating(f"kv_host_mib {settings.kv_host_mib}", layout.pool_bytes(slots), host):
            host_caches = make_host_caches(pools_of(kv_caches), slots)
    draft_model = None
    if draft_folder is not None and draft_decoder is not None:
        draft_model = draft_folder.with_cache(draft_decoder, settings, min(num_blocks) // len(groups), max_model_len)
    return LoadedModel(
        decoder=decoder,
        kv_cache_config=KVCacheConfig(layout, groups, num_blocks),
        kv_caches=kv_caches,
        max_model_len=max_model_len,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        folder=folder,
        adapters=adapters,
        group=group,
        host_caches=host_caches,
        draft_model=draft_model,
        encoder=image_encoder(folder, settings, config, max_model_len),
        encoder_decoder=encoder_decoder_prompts(config, max_model_len),
        token_texts=TokenTexts.from_folder(folder, config.vocab_size) if shard.rank == 0 else None,
    )


def _verified_config(folder: Path, settings: WorkerSettings) -> ModelConfig:
    """Raises: ConfigError, UnsupportedModel."""
    config = with_kv_cache_groups(read_model_config(folder, settings.dtype, settings.model_impl), settings)
    verify_classifier(settings, folder, config)
    verify_encoder_decoder(settings, config)
    if config.family.reads_token_ids and settings.enable_prompt_embeds:
        raise ConfigError(
            f"enable_prompt_embeds is true, and layers of {config.architecture} read ids of tokens (hidden_size_per_layer_input)"
        )
    config.verify_options(settings.rounded_weights, settings.enable_lora)
    return config


def verify_classifier(settings: WorkerSettings, folder: Path, model: ModelConfig) -> None:
    """Raises: ConfigError for a model with a classification head where text is to be generated."""
    if model.classifier is None:
        return
    problem = f"{folder} has a classification head and generates no text"
    if settings.section == "decode":
        raise ConfigError(f"{problem}: prefill workers alone serve it")
    if settings.speculative_config is not None and settings.section != "prefill":
        raise ConfigError(f"speculative_config is set, and {problem}")


def _budget(
    settings: WorkerSettings,
    models: Sequence[tuple[AnyDecoder, Sequence[KVCacheGroupSpec]]],
    device: torch.device,
    memory: DeviceMemory,
) -> PoolBudget:
    """Run the largest steps over caches of one block. models: the model, and the one that drafts, if there is one.

    Raises: ConfigError for back ends that cannot be made.
    """
    steps: list[LargestSteps] = []
    for decoder, groups in models:
        caches = make_kv_caches(groups, [1] * len(shapes_of(groups)), device)
        try:
            attention = [make_attention(settings.attention_backend, cache, decoder.dtype) for cache in caches]
            ops = make_layer_ops(settings.kernels, device)
        except (AttentionBackendError, LayerOpsError) as error:
            raise ConfigError(str(error)) from error
        is_first, longest = not steps, decoder.config.max_position_embeddings
        max_model_len = settings.max_model_len or longest
        steps.append(
            LargestSteps(
                model=decoder,
                attention=attention,
                ops=ops,
                device=device,
                block_size=settings.block_size,
                num_tokens=settings.step_tokens,
                num_rows=settings.max_num_seqs,
                max_model_len=max_model_len if is_first else min(max_model_len, longest),
                num_drafts=settings.step_drafts if is_first else 0,
                num_logprobs=settings.limits.max_logprobs,
            )
        )
    return PoolBudget.measured(settings, steps[0], memory, *steps[1:])


def _fingerprint(folder: Path, settings: WorkerSettings, model: ModelConfig) -> str:
    kept = model.dtype if settings.rounded_weights is None else f"{model.dtype}/{settings.rounded_weights}"
    if settings.cache_dtype is not None:
        kept += f"/{settings.cache_dtype} cache"
    if model.uses_long_factor:
        kept += "/long_factor"
    if model.implementation:
        kept += f"/{model.implementation}"
    if settings.load_format == "auto":
        return model_fingerprint(folder, kept)
    drawn = f"drawn by torch {torch.__version__} on {torch.device(settings.device).type}"
    return model_fingerprint(folder, kept, drawn)


def string_chars(settings: WorkerSettings, folder: Path) -> int:
    """`grammar_string_chars`, or its default for the model in this folder."""
    if settings.limits.grammar_string_chars is not None:
        return settings.limits.grammar_string_chars
    # they were trained on sentences, and end no string by themselves
    return _BUNDLED_STRING_CHARS if folder in map(model_folder, BUNDLED) else 0
