"""`LLM` that drafts with the model's own head: every text is the one without drafts, and what does not go together is refused by
name."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.llm import LLM, LoRARequest, RequestOutput, SamplingParams, StreamingInput, StructuredOutputsParams
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.model_impl import read_model_config
from tests.llm.test_streaming_sessions import answers_of, expected_of, inputs_of
from tests.support.engine.copied_blocks import CopiedBlocks
from tests.support.engine.llm_requests import core_of, greedy
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.draft_heads import DraftHeadModel, add_mtp_head
from tests.support.models.image_checkpoints import ImageShape, chat_of, make_image_checkpoint, picture
from tests.support.models.lora_adapters import make_adapter
from tests.support.models.offline_texts import PROMPTS
from tests.support.run.waiting import HANG_S

FAMILIES = ("deepseek_v3", "glm4_moe")
FIELDS: dict[str, Any] = {"max_num_batched_tokens": 40, "max_model_len": 160}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9},
    "log-probabilities": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
    "n": {"temperature": 1.0, "seed": 5, "n": 3},
    "form": {"temperature": 0.8, "seed": 12, "structured_outputs": StructuredOutputsParams(regex="([ab]{2} ){2,8}c")},
}


def head(num_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    setting = {"method": "mtp", "num_speculative_tokens": num_tokens, "disable_by_batch_size": None}
    return {"speculative_config": setting | fields}


def num_accepted(llm: LLM) -> int:
    stats = core_of(llm).scheduler.drafts.stats
    assert stats is not None
    return stats.num_accepted_tokens


def said(answer: RequestOutput) -> list[list[int]]:
    """The tokens of each text."""
    return [list(output.token_ids) for output in answer.outputs]


def logprobs_of(answer: RequestOutput) -> dict[tuple[int, int], float]:
    """(place, token) -> log-probability, of the prompt and the first text."""
    entries = [*(answer.prompt_logprobs or []), *(answer.outputs[0].logprobs or [])]
    return {
        (place, token): found.logprob for place, entry in enumerate(entries) for token, found in (entry or {}).items()
    }


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: DraftHeadModel(tmp_path_factory.mktemp(family), family).folder for family in FAMILIES}


@pytest.fixture(params=[FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_i5_every_text_is_the_one_without_drafts(make_llm: Callable[..., LLM], num_tokens: int) -> None:
    plain, drafting = make_llm(**FIELDS), make_llm(**FIELDS, **head(num_tokens))
    for name, fields in REQUESTS.items():
        params = SamplingParams(max_tokens=24, **fields)
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
        before = num_accepted(drafting)
        for _ in range(2):  # the second time prompts are in the prefix cache
            for known, answer in zip(expected, drafting.generate(PROMPTS, params, use_tqdm=False), strict=True):
                assert said(answer) == said(known), name
                assert logprobs_of(answer) == pytest.approx(logprobs_of(known), abs=1e-4)
                assert bool(logprobs_of(known)) == ("logprobs" in fields)
        # the head knows no form
        assert num_accepted(drafting) > before or name == "form", name


def test_preemption_and_the_setting_that_keeps_all_blocks(make_llm: Callable[..., LLM]) -> None:
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    expected = [said(answer) for answer in make_llm(**FIELDS).generate(PROMPTS, params, use_tqdm=False)]
    for fields in ({"num_blocks": 42, "max_num_seqs": 4}, {"disable_hybrid_kv_cache_manager": True}):
        llm = make_llm(**FIELDS, **head(), **fields)
        assert [said(answer) for answer in llm.generate(PROMPTS, params, use_tqdm=False)] == expected
        assert num_accepted(llm) > 0
        assert (core_of(llm).scheduler.num_preemptions > 0) == ("num_blocks" in fields)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_entries_of_the_head_come_back_from_host_memory(make_llm: Callable[..., LLM], num_ranks: int) -> None:
    """So what the head drafts the second time is what it drafted the first time."""
    prompts = [prompt_of(65 + 3 * seed, seed) for seed in range(5)]
    params = greedy(max_tokens=20, ignore_eos=True)
    expected = [said(answer) for answer in make_llm(**FIELDS).generate(prompts, params, use_tqdm=False)]
    llm = make_llm(**FIELDS, **head(), num_blocks=42, kv_host_mib=4, tensor_parallel_size=num_ranks)
    copied = CopiedBlocks(core_of(llm))
    accepted = list[int]()
    for _ in range(3):
        before = num_accepted(llm)
        answers = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        assert [said(answer) for answer in answers] == expected
        accepted.append(num_accepted(llm) - before)
    assert answers[-1].num_cached_tokens == 76
    assert accepted[0] > 0
    assert accepted == accepted[:1] * 3
    assert len(copied.loaded) == 2
    assert min(copied.loaded) > 0, f"loaded by shape: {copied.loaded}"
    core_of(llm).scheduler.check(idle=True)


async def test_turns_of_a_session(running: Callable[..., Any], make_llm: Callable[..., LLM]) -> None:
    prompts = [prompt_of(9, 1), prompt_of(4, 2), prompt_of(21, 3)]
    form = StructuredOutputsParams(regex="([ab]{2} ){2,8}c")
    params = [
        greedy(max_tokens=17, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.8, seed=4, structured_outputs=form),
        greedy(max_tokens=12, repetition_penalty=1.1, ignore_eos=True),
    ]
    expected = expected_of(make_llm(), prompts, params)
    turns = [StreamingInput(*each) for each in zip(prompts, params, strict=True)]
    async with running(**head()) as streams, asyncio.timeout(HANG_S):
        answers = await answers_of(streams, inputs_of(*turns))
        await streams.idle()
        stats = core_of(streams).scheduler.drafts.stats
    assert [answer.outputs[0].token_ids for answer in answers] == [each.outputs[0].token_ids for each in expected]
    assert stats is not None
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_rounded(make_llm: Callable[..., LLM], quantization: str) -> None:
    """The head's, too."""
    texts = []
    for fields in ({}, head()):
        llm = make_llm(**FIELDS, **fields, quantization=quantization)
        answers = llm.generate(PROMPTS, greedy(max_tokens=20, ignore_eos=True), use_tqdm=False)
        texts.append([said(answer) for answer in answers])
        assert not fields or num_accepted(llm) > 0
    assert texts[0] == texts[1]


def test_weights_that_are_drawn(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**FIELDS, **head(), load_format="dummy")
    answers = llm.generate(PROMPTS, greedy(max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [9] * len(PROMPTS)
    stats = core_of(llm).scheduler.drafts.stats
    assert stats is not None
    assert stats.num_draft_tokens > 0


def test_a_request_without_drafts(make_llm: Callable[..., LLM], models: dict[str, Path]) -> None:
    llm = make_llm(**head())
    llm.generate(PROMPTS, greedy(max_tokens=9), use_tqdm=False, speculative_tokens=0)
    stats = core_of(llm).scheduler.drafts.stats
    assert stats is not None
    assert stats.num_draft_tokens == 0


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_adapters(make_llm: Callable[..., LLM], folder: Path, tmp_path: Path) -> None:
    """Latent attention takes none."""
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1, spread=0.3, targets=("q_proj", "v_proj", "o_proj"))
    _drop(adapter / "adapter_model.safetensors", ".layers.4.")
    requests = [LoRARequest("one", 1, str(adapter)), None] * 2
    texts = []
    for fields in ({}, head()):
        llm = make_llm(**FIELDS, **fields, enable_lora=True, max_lora_rank=8)
        params = greedy(max_tokens=20, ignore_eos=True)
        answers = llm.generate(PROMPTS, params, lora_request=requests, use_tqdm=False)
        texts.append([said(answer) for answer in answers])
        assert not fields or num_accepted(llm) > 0
    assert texts[0] == texts[1]


def _drop(file: Path, part: str) -> list[str]:
    """Leave out the tensors with this in their names, and return these."""
    tensors = load_file(file)
    left_out = [name for name in tensors if part in name]
    assert left_out
    save_file({name: tensors[name] for name in tensors if part not in name}, file, metadata={"format": "pt"})
    return left_out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (head(model="."), r"speculative_config.model is '.', which the method 'mtp' does not take"),
        (head(prompt_lookup_max=3), r"prompt_lookup_max is 3 and prompt_lookup_min None, which the method 'mtp'"),
        (head(prompt_lookup_min=2), r"prompt_lookup_max is None and prompt_lookup_min 2, which the method 'mtp'"),
        (
            {**head(), "model_impl": "transformers"},
            "speculative_config.method is 'mtp', and .* is computed by transformers",
        ),
    ],
    ids=["a model", "longest lookup", "shortest lookup", "transformers"],
)
def test_what_does_not_go_with_the_head_is_refused_by_name(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        LLM(folder, num_blocks=16, **fields)


def test_a_model_without_a_head_is_refused_by_name(tiny_checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="method is 'mtp', and no draft head is read of LlamaForCausalLM"):
        LLM(tiny_checkpoints("llama"), num_blocks=16, **head())


def test_a_checkpoint_without_the_heads_weights_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """Without drafts it is served. A published one may have left them out."""
    for number, part in enumerate(("eh_proj", "layers.4.input_layernorm", ".layers.4.")):
        model = Path(shutil.copytree(folder, tmp_path / str(number)))
        missing = _drop(model / "model.safetensors", part)
        with pytest.raises(ConfigError, match=rf"{model}.*: weight model\.layers\.4\.") as refused:
            LLM(model, num_blocks=16, **head())
        assert any(f"weight {name} is in none" in refused.value.message for name in missing)
    with LLM(model, num_blocks=64) as llm:
        llm.generate(PROMPTS[2], greedy(max_tokens=2), use_tqdm=False)


def test_a_layout_without_the_heads_group_is_that_of_a_worker_without_a_head(
    folder: Path, tiny_checkpoints: Callable[..., Path]
) -> None:
    """Also where all layers have windows: then no group frees blocks, since only the head's would have them all."""
    windowed = tiny_checkpoints("mistral", sliding_window=9)
    for model, hybrid in ((folder, True), (folder, False), (windowed, True), (windowed, False)):
        config = replace(read_model_config(model, "float32", "auto"), hybrid_kv_cache=hybrid)
        plain, layout = (
            replace(config, draft_head=draft_head).kv_layout(16, "") for draft_head in (None, DraftHeadConfig())
        )
        assert layout.without_draft_head() == plain
        assert layout.group_windows == (*plain.group_windows, 0) == (0, 0)
        assert (layout.draft_head, plain.draft_head) == ("mtp", "")


def test_a_head_of_a_model_with_a_vision_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Qwen3.5 is published: the weights of the text have a prefix, and those of its head have none."""
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    shape = ImageShape(text={"num_hidden_layers": 4, "layer_types": kinds})
    make_image_checkpoint(tmp_path, "qwen3_5", shape=shape)
    add_mtp_head(tmp_path, "model.language_model.layers", 3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chats = [chat_of(picture(1), "what?"), chat_of("a", picture(2), "b", picture(3), "what?"), chat_of("hello")]
    texts = []
    for options in ({}, head()):
        llm = LLM(
            str(tmp_path), dtype="float32", engine_process=False, kv_cache_mib=16, max_num_batched_tokens=32, **options
        )
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        texts.append([said(answer) for answer in llm.chat(chats, params, use_tqdm=False)])
        core_of(llm).scheduler.check(idle=True)
    assert texts[0] == texts[1]
    stats = core_of(llm).scheduler.drafts.stats
    assert stats is not None
    assert stats.num_draft_tokens > 0
    assert "without a known meaning" not in caplog.text
