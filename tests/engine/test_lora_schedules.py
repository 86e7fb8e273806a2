"""Random lives of an engine with fewer slots than adapters: each text is its own adapter's, and no step has too many adapters.

The model hashes its context; an adapter shifts what is stored of each token, so a wrong slot, a block shared with another adapter
or a row that was moved changes the text. Every other life has drafts too, mostly right ones, or a host-memory tier, or both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.errors import InternalError
from pdserve.engine.config import EngineConfig
from pdserve.engine.scheduler_output import LoraLoad, RequestFailure
from pdserve.models.model_inputs import ModelInputs
from tests.support.engine import hash_model
from tests.support.engine.drafters import ScriptedDrafter, speculation, use_drafter
from tests.support.engine.engine_harness import Harness
from tests.support.engine.hash_model import VOCAB_SIZE, HashModel, make_hash_cache

ADAPTERS = ["", *(f"{number:032x}" for number in range(1, 6))]
BROKEN = f"{99:032x}"
"""The fingerprint of an adapter that cannot be loaded."""


def shift(fingerprint: str) -> int:
    return 64 * int(fingerprint or "0", 16)


class ShiftedModel(HashModel):
    """A hash model with adapters; also the `LoraRunner` and the `Adapters` of its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self
        self.held: dict[int, str] = {}
        self.shifts = np.zeros(0, np.int64)
        self.most_adapters = 0

    def add(self, folder: Path) -> str:
        return folder.name

    def has(self, fingerprint: str) -> bool:
        return fingerprint in (*ADAPTERS, BROKEN)

    def load(self, loads: Sequence[LoraLoad]) -> dict[str, RequestFailure]:
        self.held |= {load.slot: load.fingerprint for load in loads if load.fingerprint != BROKEN}
        failure = RequestFailure.of(InternalError("broken"))
        return {BROKEN: failure} if any(load.fingerprint == BROKEN for load in loads) else {}

    def set_rows(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        self.most_adapters = max(self.most_adapters, len({slot for slot in slots.tolist() if slot >= 0}))
        shifts = [shift(self.held.get(slot, "")) for slot in slots.tolist()]
        self.shifts = np.repeat(np.array(shifts, np.int64), counts)
        return bool((slots >= 0).any())

    def set_any_rows(self) -> bool:
        return False

    def with_folders(self, loads: Sequence[LoraLoad]) -> list[LoraLoad]:
        return [*loads]

    def forward(self, inputs: ModelInputs) -> Tensor:
        assert inputs.token_ids is not None
        shifted = inputs.token_ids + torch.from_numpy(self.shifts)
        return super().forward(replace(inputs, token_ids=shifted))


def expected(prompt: Sequence[int], count: int, fingerprint: str) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        ids = np.array(tokens) + shift(fingerprint)
        stored = hash_model._stored(ids, np.arange(len(ids)))
        tokens.append(int(hash_model._logits(hash_model._hashes(stored)[-1:])[0].argmax()))
    return tokens[len(prompt) :]


def drafter_of(asked: dict[str, tuple[list[int], int, str]], engine: Harness) -> ScriptedDrafter:
    """Continues as the sequence's own adapter does, with another token now and then."""

    def follows(tokens: list[int], number: int) -> list[int]:
        running = {tuple(request.token_ids): name for name, request in engine.scheduler.running.items()}
        # a step's tokens are drafted behind before the scheduler has them
        for known, name in running.items():
            if tuple(tokens[: len(known)]) == known:
                prompt, count, fingerprint = asked[name]
                text = prompt + expected(prompt, count, fingerprint)
                if text[: len(tokens)] == tokens:
                    return text[len(tokens) :][:number]
        return []

    return ScriptedDrafter(follows, 0.8)


@dataclass
class Life:
    """Counts of one engine."""

    num_accepted: int = 0
    num_loaded: int = 0


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(4))
def test_every_text_is_that_of_its_adapter(part: int) -> None:
    lives = [live(seed) for seed in range(part * 10, part * 10 + 10)]
    assert sum(life.num_accepted for life in lives) > 20, "too few drafts to show anything"
    assert sum(life.num_loaded for life in lives) > 0, "too few blocks came back to show anything"


def live(seed: int) -> Life:
    draw = random.Random(seed)
    max_loras = draw.randint(1, 3)
    config = EngineConfig(
        block_size=4, num_blocks=draw.choice([16, 24, 64]), max_model_len=64, max_loras=max_loras,
        max_num_batched_tokens=draw.choice([3, 7, 16, 64]), max_num_seqs=draw.choice([2, 4, 16]),
        max_overtakes=draw.choice([1, 3, 64]), look_ahead=draw.choice([0, 1, 8]), async_scheduling=seed % 2 == 1,
        speculative_config=speculation(1 + seed % 4) if seed % 4 in (1, 2) else None,
        num_host_blocks=((), (), (60,), (9,))[seed % 4],
    )  # fmt: skip
    model = ShiftedModel()
    engine = Harness(config, model, make_hash_cache(config.num_blocks, 4), VOCAB_SIZE, lora=model)
    stems = [[draw.randrange(60) for _ in range(16)] for _ in range(2)]
    asked: dict[str, tuple[list[int], int, str]] = {}
    aborted = set()
    if config.speculative_config is not None:
        use_drafter(engine, drafter_of(asked, engine))
    for number in range(20):
        fingerprint = draw.choice([*ADAPTERS, BROKEN])
        prompt = [*draw.choice(stems)[: draw.randrange(17)], draw.randrange(60)]
        count, request_id = draw.randint(1, 12), f"r{number}"
        fields: dict[str, Any] = {"lora_name": "x", "lora_fingerprint": fingerprint} if fingerprint else {}
        request = engine.request(prompt, request_id, params={"max_tokens": count, "ignore_eos": True}, **fields)
        request.hash_root = engine.hasher.root("fingerprint", lora=fingerprint)
        request.block_hashes = engine.hasher.extend(request.hash_root, prompt)
        engine.submit(request)
        asked[request_id] = (prompt, count, fingerprint)
        for _ in range(draw.randint(0, 4)):
            engine.step()
        if draw.random() < 0.2:
            aborted.add(victim := draw.choice(list(asked)))
            engine.core.abort_request(victim)
    answers = engine.run()
    for request_id, (prompt, count, fingerprint) in asked.items():
        answer = answers[request_id]
        if fingerprint == BROKEN:
            assert answer.error_message == "broken" or request_id in aborted
            assert answer.token_ids == []
            continue
        whole = expected(prompt, count, fingerprint)
        assert answer.token_ids == (whole[: len(answer.token_ids)] if request_id in aborted else whole)
    assert model.most_adapters <= max_loras
    engine.scheduler.check(idle=True)
    stats, tier = engine.scheduler.drafts.stats, engine.scheduler.pool.tier
    engine.core.executor.close()
    return Life(0 if stats is None else stats.num_accepted_tokens, 0 if tier is None else tier.num_loaded)
