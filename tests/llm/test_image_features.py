"""Adapters and drafts in `LLM` with images: the texts of `transformers` on checkpoints into which the adapters were merged."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.common.errors import ConfigError
from pdserve.engine.ranks import rank_processes
from pdserve.llm import LLM, LoRARequest, RequestOutput, StructuredOutputsParams
from tests.support.engine.forked_engine import start_rank
from tests.support.engine.llm_requests import core_of, greedy, sampled
from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.models.image_checkpoints import (
    FAMILIES,
    IMAGE_TOKENS,
    PICTURE,
    ImageOracle,
    make_image_checkpoint,
    picture,
)
from tests.support.models.lora_adapters import ALL_LINEARS, make_adapter, merged_checkpoint

NUM_TOKENS = 32
"""Enough that an n-gram draft of each random model is right once."""
TINY: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_blocks": 256, "max_model_len": 256, "max_num_batched_tokens": 24,
}  # fmt: skip
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
DRAFTS: dict[str, Any] = {
    "speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": None}
}
PROMPTS: Sequence[tuple[str, list[Image.Image]]] = (
    (f"The river {PICTURE} had another colour, {PICTURE} and the river sang.", [picture(1), picture(2, 64, 48)]),
    ("No picture here, no picture there.", []),
    (f"One more: {PICTURE}", [picture(3, 16, 64)]),
)


class World:
    """Two adapters of one checkpoint, with an oracle for each and one for the base model."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = family
        self.base = make_image_checkpoint(folder / "base", family)
        self.requests: dict[str, LoRARequest | None] = {"": None}
        self.oracles = {"": ImageOracle(self.base, family)}
        for number, name in enumerate(("first", "second"), 1):
            adapter = make_adapter(folder / name, self.base, seed=number, spread=0.3)
            self.requests[name] = LoRARequest(name, number, str(adapter))
            self.oracles[name] = ImageOracle(merged_checkpoint(folder / f"merged-{name}", self.base, adapter), family)
        self._expected: dict[tuple[str, int], list[int]] = {}

    def check(self, llm: LLM, place: int, name: str, answer: RequestOutput) -> None:
        """Compare with the text of `PROMPTS[place]` under an adapter."""
        text, images = PROMPTS[place]
        if (name, place) not in self._expected:
            token_ids = llm.get_tokenizer().encode(text)
            self._expected[name, place] = self.oracles[name].greedy(token_ids, images, NUM_TOKENS)
        assert answer.outputs[0].token_ids == self._expected[name, place], (name, text)


@pytest.fixture(scope="module", params=[FAMILIES[1], pytest.param(FAMILIES[0], marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture
def make_image_llm(world: World) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(world.base, **(TINY | options)))
        return made[-1]

    yield make
    for llm in made:
        core_of(llm).scheduler.check(idle=True)
        llm.shutdown()


def given(place: int) -> Any:
    text, images = PROMPTS[place]
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else text


def drafted_and_accepted(llm: LLM) -> tuple[int, int]:
    stats = core_of(llm).scheduler.drafts.stats
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


def ask_all(llm: LLM, world: World, **params: Any) -> None:
    """Each prompt under each adapter and none, all at once; checked."""
    cases = [(place, name) for place in range(len(PROMPTS)) for name in world.requests]
    answers = llm.generate(
        [given(place) for place, _ in cases],
        greedy(max_tokens=NUM_TOKENS, **params),
        lora_request=[world.requests[name] for _, name in cases],
        use_tqdm=False,
    )
    for (place, name), answer in zip(cases, answers, strict=True):
        world.check(llm, place, name, answer)
    texts = {(place, tuple(answer.outputs[0].token_ids)) for (place, _), answer in zip(cases, answers, strict=True)}
    assert len(texts) == len(cases), "adapters without effect would prove nothing"


def test_i1_adapters_and_none_in_one_batch_with_drafts(make_image_llm: Callable[..., LLM], world: World) -> None:
    """Chunks end within images, and few blocks preempt sequences."""
    llm = make_image_llm(**LORA, **DRAFTS, num_blocks=40, max_model_len=160, max_num_seqs=6)
    ask_all(llm, world)
    _, accepted = drafted_and_accepted(llm)
    assert accepted > 0
    assert core_of(llm).scheduler.num_preemptions > 0


@pytest.mark.slow
def test_one_image_under_two_adapters_is_encoded_once_and_shares_no_block(
    make_image_llm: Callable[..., LLM], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_image_llm(**LORA | {"max_loras": 3})
    tower: Any = core_of(llm).executor.runner._model.vision_tower  # type: ignore[attr-defined]
    encode, encoded = tower.encode, list[bytes]()

    def counted(data: bytes, grid_thw: tuple[int, int, int]) -> torch.Tensor:
        encoded.append(data)
        found: torch.Tensor = encode(data, grid_thw)
        return found

    monkeypatch.setattr(tower, "encode", counted)

    def cached(name: str) -> int | None:
        [answer] = llm.generate(
            given(2), greedy(max_tokens=NUM_TOKENS), lora_request=world.requests[name], use_tqdm=False
        )
        world.check(llm, 2, name, answer)
        return answer.num_cached_tokens

    assert [cached(name) for name in world.requests] == [0, 0, 0]
    again = [cached(name) for name in world.requests]
    assert again[0] is not None
    assert again[0] >= 8
    assert again == [again[0]] * 3
    assert len(encoded) == 1


@pytest.mark.slow
def test_a_draft_model_drafts_texts_without_images(
    make_image_llm: Callable[..., LLM], world: World, tmp_path: Path
) -> None:
    draft = text_model(tmp_path / "draft", world.base)
    llm = make_image_llm(speculative_config={"model": str(draft), "num_speculative_tokens": 3})
    for place in (0, 2):
        [answer] = llm.generate(given(place), greedy(max_tokens=NUM_TOKENS), use_tqdm=False)
        world.check(llm, place, "", answer)
    assert drafted_and_accepted(llm) == (0, 0)
    [answer] = llm.generate(given(1), greedy(max_tokens=NUM_TOKENS), use_tqdm=False)
    world.check(llm, 1, "", answer)
    assert drafted_and_accepted(llm)[0] > 0


def test_a_draft_model_with_images_is_refused_by_name(world: World) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.model .* takes images, and a model that drafts sees"):
        LLM(world.base, **TINY, speculative_config={"model": str(world.base), "num_speculative_tokens": 3})


def text_model(folder: Path, base: Path) -> Path:
    """A random text model with the tokens of `base`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE + len(IMAGE_TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "first"])
def test_drafts_change_no_answer(make_image_llm: Callable[..., LLM], world: World, name: str) -> None:
    """`n`, seeds, log-probabilities, penalties and structured outputs, with an adapter and without."""
    form = StructuredOutputsParams(regex="[A-C]{2}-[0-9]{3}(x|yz)")
    params = [
        greedy(n=2, logprobs=2, max_tokens=NUM_TOKENS),
        sampled(n=2, seed=5, temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS),
        greedy(repetition_penalty=1.3, presence_penalty=0.5, max_tokens=NUM_TOKENS),
        sampled(seed=3, temperature=0.8, ignore_eos=False, max_tokens=24, structured_outputs=form),
    ]
    found = []
    for drafts in ({}, DRAFTS):
        llm = make_image_llm(**LORA, **drafts)
        answers = [
            llm.generate([given(place) for place in range(3)], each, lora_request=world.requests[name], use_tqdm=False)
            for each in params
        ]
        found.append([[output.token_ids for one in of_each for output in one.outputs] for of_each in answers])
        for one in answers[0]:
            assert all(output.logprobs is not None and len(output.logprobs) == NUM_TOKENS for output in one.outputs)
    assert found[0] == found[1]
    assert drafted_and_accepted(llm)[1] > 0


@pytest.mark.slow
def test_i1_two_ranks_with_adapters_and_drafts(
    make_image_llm: Callable[..., LLM], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    llm = make_image_llm(**LORA, **DRAFTS, tensor_parallel_size=2, num_blocks=48, max_model_len=160)
    for _ in range(2):
        ask_all(llm, world)
    assert drafted_and_accepted(llm)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("use_rslora", [False, True])
def test_i1_the_text_is_pefts(
    make_image_llm: Callable[..., LLM], world: World, tmp_path: Path, use_rslora: bool
) -> None:
    """An adapter that PEFT made for the language model and applies, with its own names of modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = pytest.importorskip("peft")
        torch.manual_seed(7)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=list(ALL_LINEARS), exclude_modules=r".*visual.*",
            use_rslora=use_rslora, init_lora_weights=False,
        )  # fmt: skip
        oracle = ImageOracle(world.base, world.family)
        oracle.model = peft.get_peft_model(oracle.model, config).eval()
        oracle.model.save_pretrained(tmp_path)
    llm = make_image_llm(**LORA)
    request = LoRARequest("peft", 1, str(tmp_path))
    for place, (text, images) in enumerate(PROMPTS):
        [plain] = llm.generate(given(place), greedy(max_tokens=NUM_TOKENS), use_tqdm=False)
        [answer] = llm.generate(given(place), greedy(max_tokens=NUM_TOKENS), lora_request=request, use_tqdm=False)
        expected = oracle.greedy(llm.get_tokenizer().encode(text), images, NUM_TOKENS)
        assert answer.outputs[0].token_ids == expected
        assert plain.outputs[0].token_ids != expected, "an adapter without effect would prove nothing"
