"""`StepBench`: runs steps of chosen shapes in the product's own engine, turn by turn as a worker's engine thread, and times them.

What comes before a measured step is not computed: its sequences arrive with their keys and values, as a decode worker's do, from a
transfer that is over at once and brings nothing. All blocks are zeros, whose attention takes as long as that of any others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pdserve.cli.profile.step_grid import GROWTH
from pdserve.common.errors import InternalError
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.loaded_engine import LoadedEngine, local_hasher
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.runner.loading.loaded_model import LoadedModel
from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, Offered, OutOfEngine, ReceiveInto, SourceFinished
from pdserve.simulator.whole_steps import StepShape

REPEATS = 7
FEWEST_REPEATS = 3
WARM_UP_STEPS = 2
"""Before those of decoding sequences that are timed: the first admits them, and with `async_scheduling` one is ahead."""
LONG_S = 2.0
"""Time of a shape after which it is repeated only `FEWEST_REPEATS` times."""
MAX_TURNS = 1000
"""In which a step comes, or blocks are asked for."""
FIRST_TOKEN = 1
_SOURCE = BlockSource("profile", 1, "127.0.0.1:1", 60.0)


class Turns(EngineThread):
    """The turns of an engine thread, in the thread that calls it."""

    def __init__(self, engine: LoadedEngine, settings: WorkerSettings) -> None:
        self.last = EngineCoreOutputs()
        core = engine.make_core(settings)
        super().__init__(core, lambda call: call(), self._keep, self._failed, settings.num_threads, settings.cpu_core)
        self._take_core()

    def _keep(self, outputs: EngineCoreOutputs) -> None:
        self.last = outputs

    def _failed(self, error: Exception) -> None:
        raise error

    def turn_s(self) -> float:
        """Run one turn; returns its seconds."""
        began = time.perf_counter()
        num_commands = self._run_commands(None)
        self._turn(num_commands or 0)
        return time.perf_counter() - began


class InstantTransfers:
    """A `KvOutbox` whose blocks arrive when `arrive` is called."""

    def __init__(self) -> None:
        self.asked: list[ReceiveInto] = []

    def send(self, message: OutOfEngine) -> None:
        if isinstance(message, ReceiveInto):
            self.asked.append(message)


class StepBench:
    """One model's. All calls in one thread; `close` at the end."""

    def __init__(self, model: LoadedModel, settings: WorkerSettings, seed: int = 0) -> None:
        self._settings = settings
        self._transfers = InstantTransfers()
        self._engine = LoadedEngine(model, settings, outbox=self._transfers)
        self._draw = random.Random(seed)
        self._hasher = local_hasher(settings.block_size)
        self._num_requests = 0
        self._chunk = 0
        self._turns = Turns(self._engine, settings)
        self.config = self._turns.core.config
        self._turns.core.warm_up()

    def measure(self, shape: StepShape) -> list[float]:
        """Seconds of repetitions of such a step. Raises: InternalError if the engine does not compute it."""
        self._use_chunk(shape.chunk)
        try:
            if not shape.chunk:
                return self._decoding(shape)
            singles = self._landed(shape.sequences, max(1, shape.context - 3 * REPEATS)) if shape.sequences else []
            if singles:
                self._until(shape.sequences, shape.sequences)
            return self._repeated(lambda: self._chunks(shape, singles))
        finally:
            self._end(list(self._turns.core.scheduler.requests))
            while self._turns.core.has_work:
                self._turns.turn_s()

    @property
    def num_hit_tokens(self) -> int:
        """Tokens that the engine has found in its cache."""
        return self._turns.core.scheduler.kv.num_hit_tokens

    def check(self) -> None:
        """Raises: RuntimeError, PoolCorrupt if a block is in use."""
        self._turns.core.scheduler.check(idle=True)

    def close(self) -> None:
        """End the engine and its model."""
        self._engine.close()

    def _use_chunk(self, tokens: int) -> None:
        """Let the engine compute chunks of so many tokens. 0: as its settings say."""
        if tokens == self._chunk:
            return
        self.check()
        settings = self._settings
        if tokens:
            limits = msgspec.structs.replace(settings.limits, long_prefill_token_threshold=tokens)
            # graphs are of steps without chunks
            settings = msgspec.structs.replace(settings, limits=limits, enforce_eager=True)
        self._turns, self._chunk = Turns(self._engine, settings), tokens
        if not tokens:
            self._turns.core.warm_up()

    def _repeated(self, once: Callable[[], float]) -> list[float]:
        once()
        seconds: list[float] = []
        while len(seconds) < FEWEST_REPEATS or (len(seconds) < REPEATS and sum(seconds) < LONG_S):
            seconds.append(once())
        return seconds

    def _decoding(self, shape: StepShape) -> list[float]:
        num = shape.sequences
        self._landed(num, max(1, shape.context - WARM_UP_STEPS - REPEATS // 2))
        for _ in range(WARM_UP_STEPS - 1):
            self._until(num, num)
        return self._repeated(lambda: self._until(num, num))

    def _chunks(self, shape: StepShape, singles: Sequence[str]) -> float:
        """One step with chunks of new prompts, next to sequences that decode."""
        length = shape.before + shape.chunk + (0 if shape.are_last else 1)
        requests = [
            self._request(length, 2, block_source=_SOURCE if shape.before else None) for _ in range(shape.num_chunks)
        ]
        self._add(requests)
        if shape.before:
            for request in requests:
                offered = Offered(request.request_id, shape.before // self.config.block_size)
                self._turns.post(partial(EngineCore.apply, event=offered))
            self._arrive(len(requests), shape.before)
        seconds = self._until(shape.num_chunks + len(singles), shape.num_tokens)
        request_ids = [request.request_id for request in requests]
        self._verify(request_ids, shape.before + shape.chunk)
        self._end(request_ids)
        return seconds

    def _landed(self, count: int, num_tokens: int) -> list[str]:
        """Sequences whose prompts of so many tokens have arrived; the next step is the first that computes them."""
        requests = [self._request(num_tokens, GROWTH - 1, remote_prefill=True) for _ in range(count)]
        self._add(requests)
        self._arrive(count, num_tokens, (FIRST_TOKEN,))
        return [request.request_id for request in requests]

    def _request(self, num_tokens: int, max_tokens: int, **fields: object) -> EngineCoreRequest:
        """No two prompts begin alike."""
        self._num_requests += 1
        vocab_size = self._turns.core.vocab_size
        prompt = self._draw.choices(range(vocab_size), k=num_tokens)
        root = self._hasher.root("profile", cache_salt=str(self._num_requests))
        return EngineCoreRequest(
            request_id=f"profile-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            block_hashes=self._hasher.extend(root, prompt),
            prefill_here=True,
            **fields,  # type: ignore[arg-type]
        )

    def _add(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._turns.post(partial(EngineCore.add_request, request=request))

    def _arrive(self, num_requests: int, num_tokens: int, first_tokens: tuple[int, ...] = ()) -> None:
        """Take turns until the engine has asked for the blocks of so many requests, which then arrive at once.

        num_tokens: of each that its source has computed. first_tokens: those of each that its source has sampled.
        Raises: InternalError if it asks for none.
        """
        for _ in range(MAX_TURNS):
            self._turns.turn_s()
            if len(self._transfers.asked) == num_requests:
                break
        asked, self._transfers.asked = self._transfers.asked, []
        if len(asked) != num_requests:
            raise InternalError(f"the engine has asked for the blocks of {len(asked)} sequences, not of {num_requests}")
        for message in asked:
            self._turns.core.apply(Landed(message.request_id, len(message.hold)))
            self._turns.core.apply(SourceFinished(message.request_id, num_tokens, first_tokens))
            self._turns.core.apply(HoldReturned(message.request_id, message.hold))

    def _until(self, num_sequences: int, num_tokens: int) -> float:
        """Take turns until one ends a step of so many sequences and tokens; returns its seconds."""
        for _ in range(MAX_TURNS):
            seconds = self._turns.turn_s()
            stats = self._turns.last.model_runner_stats
            if stats is not None and (stats.num_reqs, stats.num_tokens) == (num_sequences, num_tokens):
                return seconds
        raise InternalError(f"the engine computes no step of {num_sequences} sequences and {num_tokens} tokens")

    def _verify(self, request_ids: Sequence[str], num_computed: int) -> None:
        """Each of these has so many tokens with KV, or one more if its next step is ahead. Raises: InternalError."""
        for request_id in request_ids:
            found = self._turns.core.scheduler.requests[request_id].num_computed_tokens
            if not num_computed <= found <= num_computed + 1:
                raise InternalError(f"the engine has computed {found} tokens of a sequence, {num_computed} were to be")

    def _end(self, request_ids: Sequence[str]) -> None:
        core = self._turns.core
        for request_id in request_ids:
            core.abort_request(request_id)
