"""A smaller model as the drafter: any model drafts any text without changing it, and one that agrees saves steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.engine.runner.drafts.draft_blocks import DraftBlocks
from pdserve.engine.runner.drafts.load_draft_model import DraftModelFolder
from pdserve.engine.runner.drafts.model_drafter import DraftModel, ModelDrafter
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from tests.support.engine.engine_harness import Harness
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.checkpoints import VOCAB_SIZE

PROMPTS = [prompt_of(length, 20 + length) for length in (3, 17, 40, 33)]
ROOM = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "rules": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}, "logprobs": 2},
}
MakeReal = Callable[..., Harness]


def draft_model(folder: Path, max_model_len: int = 256, num_blocks: int = 128, block_size: int = 16) -> DraftModel:
    decoder = load_decoder(folder, dtype="float32", device="cpu")
    cache = make_kv_cache(decoder.config.kv_layout(block_size, "").shapes[0], num_blocks, "cpu")
    return DraftModel(decoder, (cache,), max_model_len)


def speculation(folder: Path, num_tokens: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(model=str(folder), num_speculative_tokens=num_tokens, disable_by_batch_size=None)


def answers_of(
    engine: Harness, params: dict[str, Any], prompts: Sequence[list[int]] = PROMPTS, n: int = 1
) -> list[Any]:
    more = {"n": n} if n > 1 else {}
    names = [engine.add(prompt, params={"max_tokens": 30} | params | more, n=n) for prompt in prompts]
    answers = engine.run()
    return [answers[engine.key(name, index)].token_ids for name in names for index in range(n)]


def accepted_and_drafted(engine: Harness) -> tuple[int, int]:
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    return stats.num_accepted_tokens, stats.num_draft_tokens


def drafter_of(engine: Harness) -> ModelDrafter:
    drafting = engine.runner.drafting
    assert drafting is not None
    assert isinstance(drafting._drafter, ModelDrafter)
    return drafting._drafter


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("qwen3")


@pytest.fixture(scope="module")
def other(tiny_checkpoints: Callable[..., Path]) -> Path:
    """A model of the same vocabulary that says other tokens."""
    return tiny_checkpoints("llama")


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_i1_i5_a_model_that_agrees_saves_steps_and_one_that_does_not_changes_nothing(
    make_real_engine: MakeReal, folder: Path, other: Path, sampling: str
) -> None:
    params = SAMPLING[sampling]
    plain = make_real_engine(folder, **ROOM)
    expected = answers_of(plain, params)
    for drafts, is_right in ((folder, True), (other, False)):
        engine = make_real_engine(
            folder, **ROOM, speculative_config=speculation(drafts), draft_model=draft_model(drafts)
        )
        assert answers_of(engine, params) == expected
        accepted, drafted = accepted_and_drafted(engine)
        if is_right:
            # rules are not drafted by
            assert accepted > (0.3 if sampling == "rules" else 0.95) * drafted > 0
        else:
            assert drafted > 100
            assert accepted < 0.5 * drafted
        drafter_of(engine)._blocks.check()


@pytest.mark.slow
def test_sequences_of_one_prompt_are_drafted_with_their_own_noise(make_real_engine: MakeReal, folder: Path) -> None:
    expected = answers_of(make_real_engine(folder, **ROOM), SAMPLING["seeded"], n=2)
    engine = make_real_engine(folder, **ROOM, speculative_config=speculation(folder), draft_model=draft_model(folder))
    assert answers_of(engine, SAMPLING["seeded"], n=2) == expected
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted > 0.95 * drafted > 0


@pytest.mark.slow
def test_a_preempted_sequence_is_caught_up_with(make_real_engine: MakeReal, folder: Path) -> None:
    few = {"num_blocks": 10, "max_model_len": 96, "max_num_seqs": 4}
    params, prompts = SAMPLING["seeded"] | {"max_tokens": 60}, [prompt_of(17, seed) for seed in range(4)]
    expected = answers_of(make_real_engine(folder, **ROOM), params, prompts)
    engine = make_real_engine(
        folder, **few, speculative_config=speculation(folder), draft_model=draft_model(folder, 96)
    )
    assert answers_of(engine, params, prompts) == expected
    assert engine.scheduler.num_preemptions > 0
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted > 0.95 * drafted > 0


@pytest.mark.slow
def test_a_resumed_sequence_is_caught_up_with_in_pieces(make_real_engine: MakeReal, folder: Path) -> None:
    prompt = prompt_of(150, 3)
    [expected] = answers_of(make_real_engine(folder, **ROOM), SAMPLING["seeded"], [prompt])
    engine = make_real_engine(
        folder,
        **(ROOM | {"max_num_batched_tokens": 32}),
        speculative_config=speculation(folder),
        draft_model=draft_model(folder),
    )
    drafter, most = drafter_of(engine), []
    forward = drafter._forward

    def watched(rows: Any, counts: Any, token_ids: Any) -> Any:
        most.append(int(counts.sum()))
        return forward(rows, counts, token_ids)

    drafter._forward = watched  # type: ignore[method-assign]
    name = engine.add(prompt, params={"max_tokens": 30} | SAMPLING["seeded"], output=expected[:9])
    assert engine.run()[name].token_ids == expected[9:]
    assert max(most) == 32
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted > 0.9 * drafted > 0


@pytest.mark.slow
def test_a_small_cache_changes_no_text(make_real_engine: MakeReal, folder: Path) -> None:
    """Rows take each other's blocks, or have no drafts."""
    expected = answers_of(make_real_engine(folder, **ROOM), SAMPLING["greedy"])
    for num_blocks in (1, 4, 8):
        engine = make_real_engine(
            folder,
            **ROOM,
            speculative_config=speculation(folder),
            draft_model=draft_model(folder, num_blocks=num_blocks),
        )
        assert answers_of(engine, SAMPLING["greedy"]) == expected
        # a row alone has all of them
        [alone] = answers_of(engine, SAMPLING["greedy"], [PROMPTS[0][::-1]])
        assert len(alone) == 30
        drafter_of(engine)._blocks.check()


@pytest.mark.slow
def test_a_shorter_model_drafts_as_far_as_it_goes(make_real_engine: MakeReal, folder: Path) -> None:
    expected = answers_of(make_real_engine(folder, **ROOM), SAMPLING["greedy"])
    engine = make_real_engine(
        folder, **ROOM, speculative_config=speculation(folder), draft_model=draft_model(folder, 45)
    )
    assert answers_of(engine, SAMPLING["greedy"]) == expected
    accepted, drafted = accepted_and_drafted(engine)
    assert 20 < accepted <= drafted < 80


def test_rows_keep_their_blocks_and_lose_them_to_later_ones() -> None:
    blocks = DraftBlocks(num_rows=4, max_tokens=64, num_blocks=6, block_size=16)
    nobody = np.zeros(0, np.int64)
    assert blocks.reserve(0, 33, nobody)
    assert blocks.reserve(1, 32, nobody)
    assert blocks.reserve(0, 48, nobody), "it has them already"
    assert not blocks.reserve(2, 64, np.array([0, 1]))
    assert [blocks.num_tokens(row) for row in range(3)] == [48, 32, 0]
    assert blocks.reserve(2, 30, np.array([0])), "one is free, and row 1 was drafted longest ago"
    assert [blocks.num_tokens(row) for row in range(3)] == [48, 0, 32]
    assert blocks.reserve(3, 64, np.array([3]))
    assert [blocks.num_tokens(row) for row in range(4)] == [0, 0, 32, 64]
    blocks.check()


# ---- loading


def settings(model: Path | str, kind: type = DecodeSettings, **fields: Any) -> Any:
    made = kind(
        dtype="float32",
        num_blocks=fields.pop("num_blocks", 64),
        max_model_len=fields.pop("max_model_len", 128),
        max_num_seqs=4,
        speculative_config=SpeculativeConfig(model=str(model), num_speculative_tokens=2, disable_by_batch_size=2),
        **fields,
    )
    made.verify()
    return made


def test_a_draft_model_is_loaded_with_a_cache_for_the_sequences_that_it_drafts(folder: Path, other: Path) -> None:
    loaded = load_model(folder, settings(other))
    assert loaded.draft_model is not None
    assert loaded.draft_model.kv_caches[0].shape[0] == 2 * 128 // 16
    assert loaded.draft_model.max_model_len == 128
    assert load_model(folder, settings(other, num_blocks=9)).draft_model.kv_caches[0].shape[0] == 9  # type: ignore[union-attr]
    assert load_model(folder, settings(other, PrefillSettings)).draft_model is None, "it drafts nothing"


def test_memory_needs_count_a_draft_model(folder: Path, other: Path) -> None:
    needs = memory_needs(folder, settings(other))
    draft = DraftModelFolder.of(settings(other), folder, read_config(folder, "float32"))
    assert draft is not None
    plain = memory_needs(folder, DecodeSettings(dtype="float32", num_blocks=64, max_model_len=128, max_num_seqs=4))
    weights = sum(path.stat().st_size for path in other.glob("*.safetensors"))
    assert needs.draft_model == pytest.approx(weights + 16 * draft.block_bytes, rel=0.05)
    assert needs.host > plain.host + needs.draft_model, "and rows of logits"
    assert plain.draft_model == 0


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], None], name: str = "tokenizer.json") -> Path:
    shutil.copytree(folder, to)
    content = json.loads((to / name).read_text())
    change(content)
    (to / name).write_text(json.dumps(content))
    return to


def test_a_model_of_another_vocabulary_is_refused_by_name(folder: Path, other: Path, tmp_path: Path) -> None:
    def refused(model: Path | str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_model(folder, settings(model))
        return caught.value.message

    assert "speculative_config.model" in refused(tmp_path / "nowhere")
    assert "no such folder" in refused(tmp_path / "nowhere")
    smaller = changed(
        other, tmp_path / "smaller", lambda config: config.update(vocab_size=VOCAB_SIZE - 8), "config.json"
    )
    assert f"{VOCAB_SIZE - 8} tokens" in refused(smaller)

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        one, another = list(vocabulary)[20:22]
        vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]

    message = refused(changed(other, tmp_path / "swapped", swap))
    assert "its tokenizer is not that of" in message
    assert "2 tokens differ" in message
    bare = shutil.copytree(other, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(bare)
    # what does not change a token's meaning is no difference
    same = changed(other, tmp_path / "same", lambda content: content.update(truncation=None, padding=None))
    assert load_model(folder, settings(same)).draft_model is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "draft_model"}, "speculative_config.model: a folder or a name"),
        ({"method": "ngram", "model": "demo"}, "the method 'ngram' does not take"),
        ({"model": "demo", "prompt_lookup_max": 3}, "the method 'draft_model' does not take"),
    ],
)
def test_fields_of_the_other_method_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(num_speculative_tokens=2, **fields).verify()
