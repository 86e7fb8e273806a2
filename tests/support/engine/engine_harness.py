"""Engines for tests: made by a factory, stepped by the test, with pool checks after every step and every test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    StreamingUpdate,
)
from pdserve.common.request.multimodal import hashed_spans
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import ModelImpl
from pdserve.engine.config import EngineConfig
from pdserve.engine.executor.executor import SingleDeviceExecutor
from pdserve.engine.executor.tensor_parallel_executor import OtherRanks, TensorParallelExecutor
from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.ranks.rank_messages import DiskOptions, MooncakeOptions, StoreOptions
from pdserve.engine.runner.drafts.model_drafter import DraftModel
from pdserve.engine.runner.pool.block_store import BlockStore, SealedStore
from pdserve.engine.runner.pool.tier_memory import make_host_caches
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.engine.scheduler.kv_messages import OutOfEngine
from pdserve.engine.sequence_blocks import max_sequence_tokens
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.models.kv_cache import (
    ChunkedLocalAttentionSpec,
    DraftHeadSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
    pools_of,
)
from pdserve.models.weights.weight_loader import Quantization
from tests.support.engine.hash_model import (
    HEAD,
    STATE,
    VOCAB_SIZE,
    Chunk,
    HashModel,
    Window,
    make_backends,
    make_hash_cache,
    windows_of,
)
from tests.support.engine.held_loads import HeldLoads
from tests.support.engine.shared_store import SharedBlocks

KEY = DeploymentKey(b"a key for tests, 16 or more")


def specs_of(sliding_window: Window, shapes: Sequence[int] = ()) -> tuple[KVCacheSpec, ...]:
    """One per KV cache group. shapes: of the groups' blocks; empty: all blocks have one shape."""
    windows = windows_of(sliding_window)
    return tuple(_spec_of(*group) for group in zip(windows, shapes or [0] * len(windows), strict=True))


def _spec_of(window: int | None, shape: int) -> KVCacheSpec:
    if window == STATE:
        return StateSpec(shape)
    if window == HEAD:
        return DraftHeadSpec(shape)
    if isinstance(window, Chunk):
        return ChunkedLocalAttentionSpec(int(window), shape)
    return FullAttentionSpec(shape) if window is None else SlidingWindowSpec(window, shape)


class Outbox:
    """A `KvOutbox` that keeps what the engine sent."""

    def __init__(self) -> None:
        self.messages: list[OutOfEngine] = []

    def send(self, message: OutOfEngine) -> None:
        self.messages.append(message)

    def take(self) -> list[OutOfEngine]:
        messages, self.messages = self.messages, []
        return messages


PIECES = [(b"a", b"b", b"ab", b"ba", b"c", b" a", b"bc")[token % 7] for token in range(VOCAB_SIZE)]
"""Texts of a `HashModel`'s tokens: many tokens have one, and many texts have several spellings."""
TEXTS = TokenTexts(PIECES)


@dataclass
class Answer:
    """Output of one request, in order and without a gap (I4)."""

    first_position: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error_code: str = ""
    error_message: str = ""
    uncached_tokens: int = 0
    num_cached_tokens: int = 0
    cached_tokens: CachedTokens | None = None
    transfer_unwanted: bool = False
    num_outputs: int = 0
    logprobs: LogprobsLists | None = None
    pooling_output: list[float] | None = None
    prompt_logprobs: LogprobsLists | None = None

    def add(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id} said something after its end"
        if self.num_outputs == 0:
            self.first_position = output.first_position
        assert output.first_position == self.first_position + len(self.token_ids), "a position was lost or repeated"
        self.num_outputs += 1
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            known = self.logprobs
            self.logprobs = output.new_logprobs if known is None else known.followed_by(output.new_logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error_code, self.error_message = output.error_code, output.error_message
        self.uncached_tokens = output.uncached_tokens
        self.num_cached_tokens = output.num_cached_tokens
        if output.cached_tokens is not None:
            assert self.cached_tokens is None, "the cached tokens came twice"
            self.cached_tokens = output.cached_tokens
        self.transfer_unwanted = output.transfer_unwanted
        self.pooling_output = output.pooling_output
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's log-probabilities came twice"
            self.prompt_logprobs = output.prompt_logprobs


class Harness:
    """One engine and all of its outputs."""

    def __init__(
        self,
        config: EngineConfig,
        model: Any,
        kv_cache: Any,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        processors: Any = None,
        lora: Any = None,
        ranks: OtherRanks | None = None,
        draft_model: DraftModel | None = None,
        has_transfers: bool = True,
        store: StoreOptions | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.kv_caches = kv_cache if isinstance(kv_cache, tuple) else (kv_cache,) * len(config.kv_cache_specs)
        """Per KV cache group."""
        self.kv_cache = self.kv_caches[0]
        self.pools = pools_of(self.kv_caches)
        """Per shape of blocks."""
        self.hasher = BlockHasher(KEY, config.block_size)
        self.root = self.hasher.root("fingerprint")
        self.outbox = Outbox()
        attention = make_backends(self.kv_caches, model.window) if isinstance(model, HashModel) else None
        self.host_caches = make_host_caches(self.pools, config.num_host_blocks) if config.num_host_blocks else ()
        """Slots of the host-memory tier, per shape; empty without one."""
        self.core = make_engine_core(
            config,
            model,
            self.kv_caches,
            self.hasher,
            vocab_size,
            self.outbox if has_transfers else None,
            grammars,
            processors,
            attention,
            lora,
            ranks=ranks,
            host_caches=self.host_caches,
            draft_model=draft_model,
            token_texts=TEXTS if isinstance(model, HashModel) else None,
            store=store,
        )
        self.scheduler = self.core.scheduler
        executor = self.core.executor
        assert isinstance(executor, SingleDeviceExecutor | TensorParallelExecutor)
        self.runner = executor.runner
        self.answers: dict[str, Answer] = {}
        """Answers by request; by `request/index` where it has several sequences."""
        self.wide: set[str] = set()
        """Requests with several sequences."""
        self.turns: dict[str, list[Answer]] = {}
        """Turns of sessions that have ended."""
        self.holds: list[PinnedBlocks] = []
        """Holds of blocks that were published and not given back."""
        self.must_be_idle = True
        self.grammar_wait_s = 0.05
        """How long a step that has nothing else to do waits for other threads' grammars."""
        self._num_requests = 0

    def request(
        self,
        prompt: Sequence[int],
        request_id: str | None = None,
        *,
        salt: str | None = None,
        eos: tuple[int, ...] = (),
        params: dict[str, Any] | None = None,
        output: Sequence[int] = (),
        **fields: Any,
    ) -> EngineCoreRequest:
        """A verified request; greedy, 4 tokens, unless `params` says otherwise. output: of earlier attempts."""
        self._num_requests += 1
        root = self.root if salt is None else self.hasher.root("fingerprint", salt)
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4} | (params or {})
        hashes = self.hasher.extend(root, [*prompt, *output], hashed_spans(fields.get("mm_features", ())))
        fields |= {"prompt_token_ids": list(prompt), "block_hashes": hashes}
        if (prompts := self.config.encoder_decoder) is not None:
            fields |= prompts.hashed(prompt, output, root, self.hasher, fields.get("mm_features", ()))
        request = EngineCoreRequest(
            request_id=request_id or f"r{self._num_requests}",
            sampling_params=SamplingParams(**given),
            eos_token_ids=eos,
            output_token_ids=list(output),
            hash_root=root,
            **fields,
        )
        self.core.verify(request)
        return request

    def add(self, prompt: Sequence[int], request_id: str | None = None, **fields: Any) -> str:
        return self.submit(self.request(prompt, request_id, **fields))

    def submit(self, request: EngineCoreRequest) -> str:
        if request.n > 1:
            self.wide.add(request.request_id)
        self.core.add_request(request)
        return request.request_id

    def resume(
        self, request_id: str, prompt: Sequence[int], *, num_kept_output_tokens: int | None = None, **params: Any
    ) -> None:
        """A session's next turn; greedy, 4 tokens, unless `params` says otherwise."""
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4} | params
        update = StreamingUpdate(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**given),
            num_kept_output_tokens=num_kept_output_tokens,
        )
        self.core.verify_update(update)
        self.core.resume_request(update)

    def step(self) -> None:
        """One step, its outputs booked, then the pool check (I2)."""
        self.core.wait_for_grammar(self.grammar_wait_s)
        self._book(self.core.step().outputs)
        self.scheduler.check()

    def _book(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self.answers.setdefault(self.key(output.request_id, output.index), Answer()).add(output)
            if output.awaits_input:
                self.turns.setdefault(output.request_id, []).append(self.answers.pop(output.request_id))

    def key(self, request_id: str, index: int) -> str:
        """Key in `answers`."""
        return f"{request_id}/{index}" if request_id in self.wide else request_id

    def run(self, max_steps: int = 2000) -> dict[str, Answer]:
        """Step until there is nothing to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.collect()
            self.step()
            if not self.scheduler.requests:
                time.sleep(0.001)  # only writes to a store go on
        raise AssertionError(f"still at work after {max_steps} steps")

    def collect(self) -> dict[str, Answer]:
        """Collect all outputs so far, including those of aborts and events."""
        self._book(self.scheduler.outputs.take())
        return self.answers

    def ask(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """One request, to its end."""
        request_id = self.add(prompt, **fields)
        return self.run()[request_id]

    def ask_many(self, prompt: Sequence[int], n: int, **fields: Any) -> list[Answer]:
        """One request with n sequences, to its end."""
        request_id = self.add(prompt, n=n, **fields)
        answers = self.run()
        return [answers[self.key(request_id, index)] for index in range(n)]

    def use_store(self, store: BlockStore) -> None:
        """From now on, the store below host memory. To be called before the first request."""
        host_blocks = self.core.executor._host_blocks  # type: ignore[attr-defined]
        host_blocks._store = SealedStore(store, host_blocks._store.digest)

    def hold_loads(self) -> HeldLoads:
        """From now on, loads from the host-memory tier end when the test releases them."""
        held = HeldLoads(self.core.executor, self.pools, self.host_caches)
        self.core.executor = held
        return held

    @property
    def has_draft_head(self) -> bool:
        return isinstance(self.config.kv_cache_specs[-1], DraftHeadSpec)

    def running(self) -> list[str]:
        return list(self.scheduler.running)


MakeEngine = Callable[..., Harness]


@pytest.fixture(autouse=True)
def harnesses() -> Iterator[list[Harness]]:
    """After every test the pool of every engine is checked (I2), and idle unless the test says that it is not."""
    made: list[Harness] = []
    yield made
    for harness in made:
        harness.collect()
        harness.scheduler.check(idle=harness.must_be_idle)
        harness.core.executor.close()


@pytest.fixture
def make_engine(harnesses: list[Harness], tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    """`make_engine(num_blocks=..., ...)`: an engine over the hash model; all of `EngineConfig` may be given. sliding_window: of the
    model and of its KV cache groups, one each. window: the model's, if the engine keeps every block. shapes: of the groups' blocks,
    if there are several; `num_other_blocks` has as many blocks as `num_blocks` of each further one, if it is not given. store:
    below host memory; a number: the bytes of a disk store in a folder of its own."""

    def make(
        processors: Any = None,
        grammars: GrammarCompiler | None = None,
        model: HashModel | None = None,
        window: Window = None,
        sliding_window: Window = None,
        has_transfers: bool = True,
        shapes: Sequence[int] = (),
        store: StoreOptions | SharedBlocks | int | None = None,
        **fields: Any,
    ) -> Harness:
        fields = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 16} | fields
        fields.setdefault("num_other_blocks", (fields["num_blocks"],) * max(shapes, default=0))
        specs = specs_of(sliding_window, shapes)
        step_tokens = fields.get("long_prefill_token_threshold") or fields["max_num_batched_tokens"]
        longest = max_sequence_tokens(
            specs, (fields["num_blocks"], *fields["num_other_blocks"]), fields["block_size"], step_tokens
        )
        fields.setdefault("max_model_len", min(256, longest))
        shared, store = (store, 0) if isinstance(store, SharedBlocks) else (None, store)
        if isinstance(store, int):
            store = DiskOptions(str(tmp_path_factory.mktemp("store")), store, bytes(32))
        config = EngineConfig(
            **fields,
            kv_cache_specs=specs,
            has_block_store=store is not None,
            shares_block_store=is_shared(shared, store),
        )
        pools = [make_hash_cache(count, config.block_size) for count in config.num_blocks_by_shape]
        caches = tuple(pools[spec.shape] for spec in specs)
        model = model or HashModel(window or sliding_window, config.block_size)
        harness = Harness(
            config, model, caches, VOCAB_SIZE, grammars, processors, has_transfers=has_transfers, store=store
        )
        if shared is not None:
            harness.use_store(shared)
        harnesses.append(harness)
        return harness

    return make


def is_shared(shared: SharedBlocks | None, store: StoreOptions | None) -> bool:
    """True if other engines may write into a harness's store."""
    return shared is not None or isinstance(store, MooncakeOptions)


@pytest.fixture
def make_real_engine(harnesses: list[Harness]) -> Callable[..., Harness]:
    """`make_real_engine(folder, ...)`: an engine over a checkpoint, in float32. adapters: folders that requests may name."""
    return real_engines(harnesses)


def real_engines(harnesses: list[Harness]) -> Callable[..., Harness]:
    """The function of `make_real_engine`. harnesses: gets every engine; the caller checks and closes them."""
    from pdserve.engine.lora.adapter_store import AdapterStore
    from pdserve.engine.lora.lora_runner import ModelLoraRunner
    from pdserve.models.config.draft_head_config import DraftHeadConfig
    from pdserve.models.eagle_head import read_eagle_config
    from pdserve.models.kv_cache import make_kv_caches, shapes_of
    from pdserve.models.lora.lora_targets import with_lora_targets
    from pdserve.models.model_impl import load_model_decoder
    from pdserve.models.read_config import read_config

    def make(
        folder: Path,
        device: str = "cpu",
        grammars: GrammarCompiler | None = None,
        processors: Any = None,
        draft_model: DraftModel | None = None,
        adapters: Sequence[Path] = (),
        quantization: Quantization = None,
        cache_dtype: str | None = None,
        model_impl: ModelImpl = "native",
        hybrid_kv_cache: bool = False,
        eagle_head: Path | None = None,
        has_draft_head: bool = False,
        **fields: Any,
    ) -> Harness:
        head_config = DraftHeadConfig() if has_draft_head else None
        if eagle_head is not None:
            head_config = read_eagle_config(eagle_head, read_config(folder, "float32"))
        decoder: Any = load_model_decoder(
            folder,
            dtype="float32",
            model_impl=model_impl,
            device=device,
            quantization=quantization,
            hybrid_kv_cache=hybrid_kv_cache,
            draft_head=head_config,
        )
        lora = None
        head = decoder.config.classifier
        fields = {"block_size": 16, "num_blocks": 32, "max_model_len": 256} | fields
        fields.setdefault("enable_prompt_embeds", True)
        fields["num_labels"] = 0 if head is None else head.num_labels
        groups = decoder.config.kv_cache_groups(fields["block_size"], "fingerprint", cache_dtype=cache_dtype)
        shapes = shapes_of(groups)
        fields["num_other_blocks"] = (fields["num_blocks"],) * (len(shapes) - 1)
        config = EngineConfig(**fields, kv_cache_specs=tuple(group.spec for group in groups))
        if adapters:
            decoder, targets = with_lora_targets(
                decoder, max_loras=config.max_loras, max_rank=8, kernels=config.kernels
            )
            lora = ModelLoraRunner(AdapterStore(targets, len(adapters)))
            for adapter in adapters:
                lora.store.add(adapter)
        kv_caches = make_kv_caches(groups, config.num_blocks_by_shape, device)
        vocab_size = decoder.config.vocab_size
        harness = Harness(config, decoder, kv_caches, vocab_size, grammars, processors, lora, draft_model=draft_model)
        harnesses.append(harness)
        return harness

    return make
