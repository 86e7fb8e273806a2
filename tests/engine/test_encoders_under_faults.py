"""Prompts with images, with sound, and prompts of models with an encoder, while engines die, sources give up and clients leave.

What continues elsewhere goes through an encoder again, at prefill or, without a prefill engine, at decode. After each life both
pools and both encoder caches are whole, with nothing referenced (I2).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_encoder_cache import Prompt, encoder, prompt_of
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.whisper_engines import features_of
from tests.support.models.encoder_decoder_checkpoints import GreedyAnswers
from tests.support.models.hash_images import HashImageModel, image_answer
from tests.support.models.whisper_checkpoints import EOS, PROMPT_IDS, Transcripts, sound
from tests.support.processes.dying_pair import DyingPair

COUNT = 14
PHASES = ("queued", "within", "moving", "landed", "first", "streaming")
"""Before anything is computed; within the prompt; some blocks have landed; all have; one token of decode is out; six are."""


def has_come_to(pair: DyingPair, name: str, phase: str) -> bool:
    """True if the request is in a phase."""
    attempt = pair.attempt(name)
    transfer = pair.pair.transfers[attempt]
    at_p, at_d = pair.pair.p.scheduler.requests.get(attempt), pair.pair.d.scheduler.requests.get(attempt)
    num_said = len(pair.tokens(name))
    match phase:
        case "queued":
            return at_p is not None and not at_p.num_computed_tokens
        case "within":
            return at_p is not None and 0 < at_p.num_computed_tokens < at_p.num_prompt_tokens
        case "moving":
            return transfer.room is not None and 0 < len(transfer.landed) < len(transfer.room.hold)
        case "landed":
            return at_d is not None and transfer.said_finished and transfer.room is None and num_said <= 1
    return num_said == (2 if phase == "first" else 7)


def come_to(pair: DyingPair, phase: str) -> str:
    """Let the pair run until some request is in a phase; returns its name."""
    while pair.unfinished:
        for name in pair.unfinished:
            if has_come_to(pair, name, phase):
                return name
        pair.round()
    raise AssertionError(f"no request was {phase} at the end of a round")


def image_prompts(count: int) -> dict[str, Prompt]:
    """Some with the same images, and one without."""
    asked = {
        f"r{number}": prompt_of(3 + number, (number % 3, 2, 4), 2, (7, 1 + number % 3, 3), 1 + number % 4)
        for number in range(count - 1)
    }
    return asked | {"text": prompt_of(11)}


IN_EVERY_RUN = (("within", "prefill"), ("moving", "prefill"), ("streaming", "decode"))
CELLS = [
    pytest.param(phase, victim, marks=() if (phase, victim) in IN_EVERY_RUN else pytest.mark.slow)
    for phase in PHASES
    for victim in ("prefill", "decode")
]


@pytest.mark.parametrize(("phase", "victim"), CELLS)
def test_i4_a_death_in_a_phase_of_a_prompt_with_images(make_engine: MakeEngine, phase: str, victim: str) -> None:
    models: list[HashImageModel] = []

    def engine(**fields: Any) -> Harness:
        models.append(HashImageModel())
        return make_engine(model=models[-1], encoder=encoder(9, 12), max_model_len=80, **fields)

    pair = DyingPair(lambda: engine(max_num_batched_tokens=5), lambda: engine(num_blocks=48), seed=PHASES.index(phase))
    asked = image_prompts(4)
    for request_id, (tokens, features) in asked.items():
        pair.ask(request_id, tokens, COUNT, mm_features=features)
    name = come_to(pair, phase)
    num_encoded = sum(model.num_encoded for model in models)
    (pair.kill_prefill if victim == "prefill" else pair.kill_decode)()
    pair.run()
    for request_id, prompt in asked.items():
        assert pair.asked[request_id].said == image_answer(*prompt, COUNT), request_id
    if victim == "decode":
        assert len(pair.pair.attempts[name]) > 1
    elif phase in ("queued", "within"):
        assert sum(model.num_encoded for model in models) > num_encoded


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 200))])
def test_i2_i4_random_deaths_with_images(make_engine: MakeEngine, seed: int) -> None:
    draw = random.Random(seed)
    cache = draw.choice([12, 16, 40])
    common: dict[str, Any] = {
        "max_model_len": 80, "encoder": encoder(draw.choice([12, cache]), cache), "async_scheduling": bool(seed % 2),
    }  # fmt: skip
    if seed % 3 == 0:
        common["num_host_blocks"] = (draw.choice([4, 40]),)
    of_p = {"max_num_batched_tokens": draw.choice([5, 16]), "num_blocks": draw.choice([24, 40])}
    of_d = {"max_num_batched_tokens": draw.choice([5, 64]), "num_blocks": draw.choice([26, 40])}
    pair = DyingPair(
        lambda: make_engine(model=HashImageModel(), **common, **of_p),
        lambda: make_engine(model=HashImageModel(), **common, **of_d),
        seed,
    )
    asked = image_prompts(8)
    for name, (tokens, features) in asked.items():
        pair.ask(name, tokens, COUNT, mm_features=features)
        for _ in range(draw.randint(0, 9)):
            pair.round()
        disturb(pair, draw)
    pair.run()
    for name, prompt in asked.items():
        expected, said = image_answer(*prompt, COUNT), pair.asked[name].said
        assert said == (expected[: len(said)] if pair.asked[name].is_aborted else expected), name
    for engine in (pair.pair.p, pair.pair.d):
        engine.scheduler.check(idle=True)
        cached = engine.scheduler.running.encoder.cache
        assert engine.runner.encoder.encoder_cache.keys() - set(cached._freed) <= cached.cached.keys()


def disturb(pair: DyingPair, draw: random.Random) -> None:
    """A death, an end or a broken transfer, in three rounds of five."""
    name = draw.choice(list(pair.asked))
    match draw.randrange(10):
        case 0 | 1:
            pair.kill_prefill()
        case 2 | 3:
            pair.kill_decode()
        case 4:
            pair.abort(name)
        case 5 if not pair.asked[name].has_ended:
            pair.pair.break_source(name)


def texts(count: int) -> dict[str, list[int]]:
    draw = random.Random(count)
    return {f"r{number}": [draw.randrange(3, 300) for _ in range(7 + 13 * number)] for number in range(count)}


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        pytest.param(phase, victim, marks=() if (phase, victim) == ("moving", "prefill") else pytest.mark.slow)
        for phase in PHASES
        for victim in ("prefill", "decode")
        if phase != "within"  # such a prompt is encoded in one step
    ],
)
def test_i4_a_death_in_a_phase_of_a_prompt_that_is_encoded(
    make_bart: Callable[..., Harness], bart: tuple[Path, GreedyAnswers], phase: str, victim: str
) -> None:
    pair = DyingPair(make_bart, make_bart, seed=PHASES.index(phase))
    asked = texts(3)
    for name, prompt in asked.items():
        pair.ask(name, prompt, COUNT)
    come_to(pair, phase)
    (pair.kill_prefill if victim == "prefill" else pair.kill_decode)()
    pair.run()
    for name, prompt in asked.items():
        assert pair.asked[name].said == bart[1].answer(prompt, COUNT), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_i2_i4_random_deaths_of_a_model_with_an_encoder(
    make_bart: Callable[..., Harness], bart: tuple[Path, GreedyAnswers], seed: int
) -> None:
    draw = random.Random(seed)
    fields: dict[str, Any] = {"num_host_blocks": (40,)} if seed % 3 == 0 else {}
    pair = DyingPair(make_bart, lambda: make_bart(num_blocks=draw.choice([26, 40]), **fields), seed)
    asked = texts(6)
    for name, prompt in asked.items():
        pair.ask(name, prompt, COUNT)
        for _ in range(draw.randint(0, 9)):
            pair.round()
        disturb(pair, draw)
    pair.run()
    for name, prompt in asked.items():
        expected, said = bart[1].answer(prompt, COUNT), pair.asked[name].said
        assert said == (expected[: len(said)] if pair.asked[name].is_aborted else expected), name


def sounds(
    count: int, folder: Path, transcripts: Transcripts, alone: Harness
) -> dict[str, tuple[dict[str, Any], list[int]]]:
    """Request -> its sound, and what an undisturbed engine writes, which begins as the transcript of `transformers`. Two sounds
    are those of others."""
    asked = {}
    for number in range(count):
        fields: dict[str, Any] = {"mm_features": features_of(folder, number % max(1, count - 2))}
        expected = alone.ask(PROMPT_IDS, params={"max_tokens": COUNT}, **fields).token_ids
        theirs = transcripts.answer(sound(number % max(1, count - 2)), COUNT)
        assert theirs == (expected[: expected.index(EOS)] if EOS in expected else expected)
        asked[f"r{number}"] = (fields, expected)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        pytest.param(phase, victim, marks=() if (phase, victim) == ("streaming", "decode") else pytest.mark.slow)
        for phase in PHASES
        for victim in ("prefill", "decode")
        if phase != "within"  # sound is encoded in one step
    ],
)
def test_i4_a_death_in_a_phase_of_a_sound(
    make_whisper_engine: Callable[..., Harness], whisper: tuple[Path, Transcripts], phase: str, victim: str
) -> None:
    asked = sounds(4, *whisper, make_whisper_engine())
    pair = DyingPair(make_whisper_engine, make_whisper_engine, seed=PHASES.index(phase))
    for name, (fields, _) in asked.items():
        pair.ask(name, PROMPT_IDS, COUNT, **fields)
    come_to(pair, phase)
    (pair.kill_prefill if victim == "prefill" else pair.kill_decode)()
    pair.run()
    for name, (_, expected) in asked.items():
        assert pair.asked[name].said == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_i2_i4_random_deaths_with_sound(
    make_whisper_engine: Callable[..., Harness], whisper: tuple[Path, Transcripts], seed: int
) -> None:
    draw = random.Random(seed)
    tier: dict[str, Any] = {"num_host_blocks": (draw.choice([8, 40]),)} if seed % 3 == 0 else {}
    asked = sounds(7, *whisper, make_whisper_engine())
    pair = DyingPair(
        lambda: make_whisper_engine(num_blocks=draw.choice([20, 40]), **tier),
        lambda: make_whisper_engine(num_blocks=draw.choice([22, 40]), **tier),
        seed,
    )
    for name, (fields, _) in asked.items():
        pair.ask(name, PROMPT_IDS, COUNT, **fields)
        for _ in range(draw.randint(0, 9)):
            pair.round()
        disturb(pair, draw)
    pair.run()
    for name, (_, expected) in asked.items():
        said = pair.asked[name].said
        assert said == (expected[: len(said)] if pair.asked[name].is_aborted else expected), name


@pytest.mark.slow
def test_blocks_of_a_sound_come_from_the_tier(
    make_whisper_engine: Callable[..., Harness], whisper: tuple[Path, Transcripts]
) -> None:
    engine = make_whisper_engine(num_blocks=20, num_host_blocks=(64,))
    asked = sounds(6, *whisper, make_whisper_engine())
    for fields, expected in [*asked.values(), *asked.values()]:
        assert engine.ask(PROMPT_IDS, params={"max_tokens": COUNT}, **fields).token_ids == expected
    assert engine.core.stats().external_prefix_cache_hits > 0
