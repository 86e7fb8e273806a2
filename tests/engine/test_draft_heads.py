"""The model's own draft head as the drafter: what it drafts, with a cache of its own, and the texts that it must not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdserve.engine.runner.drafts.head_drafter import HeadDrafter
from pdserve.engine.speculation.drafter import DraftRows
from tests.support.engine.engine_harness import Harness
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.draft_heads import DraftHeadModel, EagleModel, HeadModel, head_setting

SHARED = prompt_of(50, 7)
PROMPTS = [[*SHARED, *prompt_of(5, 1)], [*SHARED, *prompt_of(40, 2)], prompt_of(9, 3), SHARED[:48], prompt_of(1, 4)]
ROOM = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "rules": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}, "logprobs": 2},
}
MakeReal = Callable[..., Harness]
Drafted = list[tuple[list[int], list[int]]]


_MORE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "eagle3_normed")
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in _MORE]


@pytest.fixture(scope="module", params=["deepseek_v3", "eagle3", *_SLOW])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    folder = tmp_path_factory.mktemp("heads")
    if request.param.startswith("eagle3"):
        return EagleModel(folder / "model", folder / "head", norms_residual=request.param == "eagle3_normed")
    return DraftHeadModel(folder, request.param)


def drafting(model: HeadModel, num_tokens: int) -> dict[str, Any]:
    head = {"has_draft_head": True} if isinstance(model, DraftHeadModel) else {"eagle_head": model.head}
    return {**head, "speculative_config": head_setting(model, num_tokens)}


def answers_of(
    engine: Harness, params: dict[str, Any], prompts: Sequence[list[int]] = PROMPTS, n: int = 1
) -> list[Any]:
    more = {"n": n} if n > 1 else {}
    names = [engine.add(prompt, params={"max_tokens": 30} | params | more, n=n) for prompt in prompts]
    answers = engine.run()
    return [answers[engine.key(name, index)].token_ids for name in names for index in range(n)]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """(known tokens, drafts after them) of each sequence and step."""
    found: Drafted = []
    propose = HeadDrafter.propose

    def noted(self: HeadDrafter, wanted: DraftRows) -> Sequence[Sequence[int]]:
        drafts = propose(self, wanted)
        for row, of_row in zip(wanted.rows.tolist(), drafts, strict=True):
            found.append((wanted.token_ids[row, : wanted.num_tokens[row]].tolist(), list(of_row)))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    return found


@pytest.mark.parametrize(
    ("num_tokens", "room"), [(1, ROOM), (3, ROOM | {"max_num_batched_tokens": 17, "block_size": 4})], ids=["", "chunks"]
)
def test_drafts_are_those_of_the_head(
    model: HeadModel,
    make_real_engine: MakeReal,
    drafted: Drafted,
    num_tokens: int,
    room: dict[str, Any],
) -> None:
    engine = make_real_engine(model.folder, **drafting(model, num_tokens), **room)
    answers_of(engine, SAMPLING["greedy"])
    assert len(drafted) > 50
    short = 0
    for known, drafts in drafted:
        # entries of drafts have room in the sequence's blocks
        room_left = -(len(known) - 1) % engine.config.block_size
        assert len(drafts) >= min(num_tokens, 1 + room_left)
        short += len(drafts) < num_tokens
        assert drafts == model.drafts(known, len(drafts))
    if engine.config.block_size == 16:
        assert short < len(drafted) // 2
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert 0.1 < stats.num_accepted_tokens_per_pos[0] / stats.num_drafts < 0.95


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_text_is_the_one_without_drafts(
    model: HeadModel, make_real_engine: MakeReal, sampling: str, num_tokens: int
) -> None:
    params = SAMPLING[sampling]
    expected = answers_of(make_real_engine(model.folder, **ROOM), params)
    engine = make_real_engine(model.folder, **drafting(model, num_tokens), **ROOM)
    for _ in range(2):  # the second time prompts are in the prefix cache
        assert answers_of(engine, params) == expected
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert stats.num_accepted_tokens > 0


def test_forks_and_preemption(model: HeadModel, make_real_engine: MakeReal) -> None:
    params = SAMPLING["seeded"]
    expected = answers_of(make_real_engine(model.folder, **ROOM), params, n=3)
    # a model whose only layer with keys has the head's shape has one pool for both
    num_blocks = 24 if model.shares_pool else 14
    tight = {"num_blocks": num_blocks, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    for room in (ROOM, tight):
        engine = make_real_engine(model.folder, **drafting(model, 3), **room)
        assert answers_of(engine, params, n=3) == expected
        assert (engine.scheduler.num_preemptions > 0) == (room is tight)


def test_cached_entries_are_those_that_are_computed(
    model: HeadModel, make_real_engine: MakeReal, drafted: Drafted
) -> None:
    """A conversation: the next prompt is the last one with its answer, whose blocks are in the prefix cache."""
    engine = make_real_engine(model.folder, **drafting(model, 2), **ROOM)
    prompt = prompt_of(20, 9)
    for turn in range(3):
        [answer] = answers_of(engine, SAMPLING["greedy"], [prompt])
        prompt = [*prompt, *answer, *prompt_of(3, turn)]
    assert engine.scheduler.kv.num_hit_tokens > 60
    for known, drafts in drafted:
        assert drafts == model.drafts(known, len(drafts))
