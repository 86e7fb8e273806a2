"""`LLM` with Whisper: the greedy transcripts of transformers, whatever the batch and the pool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.common.errors import ConfigError, InvalidRequest, PromptTooLong, UnsupportedModel
from pdserve.llm import LLM, StructuredOutputsParams
from pdserve.text.beam_search import BeamSearchParams
from tests.support.engine.llm_requests import core_of, greedy, sampled
from tests.support.models.checkpoints import edit_json
from tests.support.models.whisper_checkpoints import (
    BEGIN_SUPPRESSED,
    EOS,
    IDS,
    MAX_LEN,
    PROMPT,
    PROMPT_IDS,
    RATE,
    SUPPRESSED,
    Transcripts,
    make_whisper,
    sound,
)

MAX_TOKENS = 24
SECONDS = (0.8, 1.0, 0.3, 0.01)


def prompt_of(samples: Any, prompt: str = PROMPT) -> Any:
    return {"prompt": prompt, "multi_modal_data": {"audio": samples}}


def ask(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    answers = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]
    return [answer[:-1] if answer[-1:] == [EOS] else answer for answer in answers]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transcripts]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, make_whisper(folder)


@pytest.fixture(scope="module")
def llm(whisper: tuple[Path, Transcripts]) -> Iterator[LLM]:
    with LLM(str(whisper[0]), num_blocks=64) as llm:
        yield llm
        core_of(llm).scheduler.check(idle=True)


def test_i1_greedy_transcripts_are_those_of_transformers(llm: LLM, whisper: tuple[Path, Transcripts]) -> None:
    sounds = [sound(seed, seconds) for seed, seconds in enumerate(SECONDS)]
    answers = ask(llm, [prompt_of(samples) for samples in sounds], greedy(max_tokens=MAX_TOKENS))
    for samples, answer in zip(sounds, answers, strict=True):
        assert answer == whisper[1].answer(samples, MAX_TOKENS)
    assert len({tuple(answer) for answer in answers}) == len(sounds), "the transcripts do not depend on the sound"
    tokens = {token for answer in answers for token in answer}
    assert len(tokens) > 8, "the transcripts are degenerate and test nothing"
    assert not tokens & set(SUPPRESSED)
    assert all(answer[0] not in BEGIN_SUPPRESSED for answer in answers)


def test_the_prompt_is_the_decoders(llm: LLM, whisper: tuple[Path, Transcripts]) -> None:
    samples = sound(5)
    german = "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    [answer] = ask(llm, [prompt_of(samples, german)], greedy(max_tokens=MAX_TOKENS))
    assert answer == whisper[1].answer(samples, MAX_TOKENS, language="de", task="translate")
    ids: Any = {"prompt_token_ids": PROMPT_IDS, "multi_modal_data": {"audio": [(samples, RATE)]}}
    [of_ids] = llm.generate([ids], greedy(max_tokens=MAX_TOKENS), use_tqdm=False)
    assert of_ids.prompt_token_ids == PROMPT_IDS
    assert list(of_ids.outputs[0].token_ids) == ask(llm, [prompt_of(samples)], greedy(max_tokens=MAX_TOKENS))[0]


@pytest.mark.slow
def test_a_tiny_pool_preempts_and_changes_no_transcript(llm: LLM, whisper: tuple[Path, Transcripts]) -> None:
    sounds = [sound(seed) for seed in range(4)]
    params = greedy(max_tokens=50, ignore_eos=True)
    # the encoder's positions of one sound have 4 blocks, and those of two sequences with their outputs do not fit
    with LLM(str(whisper[0]), num_blocks=11, enable_prefix_caching=False) as small:
        answers = small.generate([prompt_of(samples) for samples in sounds], params, use_tqdm=False)
        assert core_of(small).scheduler.num_preemptions > 0
        core_of(small).scheduler.check(idle=True)
    expected = llm.generate([prompt_of(samples) for samples in sounds], params, use_tqdm=False)
    assert [a.outputs[0].token_ids for a in answers] == [e.outputs[0].token_ids for e in expected]


def test_several_sequences_and_logprobs(llm: LLM, whisper: tuple[Path, Transcripts]) -> None:
    samples = sound(9)
    params = sampled(seed=4, n=3, logprobs=2, max_tokens=9, ignore_eos=True)
    [answer] = llm.generate(prompt_of(samples), params, use_tqdm=False)
    assert len({tuple(sequence.token_ids) for sequence in answer.outputs}) == 3
    for sequence in answer.outputs:
        tokens = list(sequence.token_ids)
        assert not set(tokens) & set(SUPPRESSED)
        logits = whisper[1].logits(samples, [*PROMPT_IDS, *tokens])[len(PROMPT_IDS) - 1 :]
        assert sequence.logprobs is not None
        for token, entries, row in zip(tokens, sequence.logprobs, logits.log_softmax(-1), strict=False):
            assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_the_prefix_cache_has_equal_sounds_alone(llm: LLM, whisper: tuple[Path, Transcripts]) -> None:
    # long prompts, so that a block of the decoder's is cached too
    prompt = PROMPT + "one two three four five six seven"
    num = llm.generate(prompt_of(sound(20), prompt), greedy(max_tokens=5), use_tqdm=False)[0].num_cached_tokens
    again = llm.generate(prompt_of(sound(20), prompt), greedy(max_tokens=5), use_tqdm=False)[0].num_cached_tokens
    other = llm.generate(prompt_of(sound(21), prompt), greedy(max_tokens=5), use_tqdm=False)[0].num_cached_tokens
    assert (num, other) == (0, 0)
    assert again == 16


@pytest.mark.slow
def test_structured_outputs(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=("yes", "no"))
    [answer] = llm.generate(prompt_of(sound(3)), greedy(max_tokens=12, structured_outputs=form), use_tqdm=False)
    assert answer.outputs[0].text in ("yes", "no")


def test_beams_suppress_the_same_tokens(llm: LLM) -> None:
    [found] = llm.beam_search([prompt_of(sound(3))], BeamSearchParams(beam_width=2, max_tokens=5))
    output = found.sequences[0].tokens[len(PROMPT_IDS) :]
    assert output
    assert not set(output) & set(SUPPRESSED)


NO_NUMBER = np.array([0.1, np.nan], np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PROMPT, "multi_modal_data has 0 sounds under 'audio'; a prompt for this model has exactly one"),
        (prompt_of([sound(), sound()]), "multi_modal_data has 2 sounds"),
        (prompt_of(sound(seconds=1.1)), "multi_modal_data.audio has 1.10 seconds, at most 1 are read at once"),
        (prompt_of(np.zeros(0, np.float32)), "multi_modal_data.audio has no samples"),
        (prompt_of(NO_NUMBER), "multi_modal_data.audio: sample 1 is nan, numbers from -1e.06 to 1e.06 are read"),
        (prompt_of(np.zeros((2, 9))), r"multi_modal_data.audio is an array \[2, 9\], \[samples\] of one channel"),
        (
            prompt_of((sound(), 10**9)),
            "multi_modal_data.audio has 1000000000 samples per second, 4000 to 192000 are read",
        ),
        (prompt_of((sound(), 1)), "multi_modal_data.audio has 1 samples per second"),
        (prompt_of("boat.wav"), "multi_modal_data.audio is of type str; samples are needed"),
        (
            {"prompt": PROMPT, "multi_modal_data": {"image": np.zeros((9, 9, 3), np.uint8)}},
            "multi_modal_data has 0 sounds",
        ),
    ],
    ids=range(10),
)
def test_refused_sounds(llm: LLM, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(given, greedy(), use_tqdm=False)


def test_refused_requests(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=f"the model's length is {MAX_LEN} tokens"):
        llm.generate(prompt_of(sound(), PROMPT + "a b" * 99), greedy(), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 1, and an encoder gives its prompt no probabilities"):
        llm.generate(prompt_of(sound()), greedy(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="multi_modal_data is given, and the prompt of an embedding has no sound"):
        llm.embed(prompt_of(sound()), use_tqdm=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enable_lora": True}, "enable_lora is true, and WhisperForConditionalGeneration has an encoder"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is set, and Whisper"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config is set, and Wh"),
        pytest.param(
            {"tensor_parallel_size": 2},
            "tensor_parallel_size is 2, and Whisper.* has an encoder; such a model is not",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"long_prefill_token_threshold": 8},
            "long_prefill_token_threshold is set.*encoded in one step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"max_model_len": 65}, "max_model_len is 65, the model supports at most 64", marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_blocks": 4},
            "the 50 positions of the encoder of WhisperForConditionalGeneration alone need 4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refused_settings(option: dict[str, Any], message: str, whisper: tuple[Path, Transcripts]) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        LLM(str(whisper[0]), **{"num_blocks": 64} | option)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"num_mel_bins": 80}, "num_mel_bins must be 16, as preprocessor_config.json says, not 80"),
        ("config.json", {"max_source_positions": 1500}, "max_source_positions must be 50, as preprocessor_config.json"),
        ("preprocessor_config.json", {"chunk_length": 10**6}, "chunk_length must be an integer from 1 to 60"),
        ("preprocessor_config.json", {"feature_extractor_type": "Other"}, "feature_extractor_type is 'Other'"),
        ("generation_config.json", {"suppress_tokens": list(range(400))}, "suppress_tokens must be less than the"),
    ],
    ids=range(5),
)
def test_refused_folders(
    file: str, change: dict[str, Any], message: str, tmp_path: Path, whisper: tuple[Path, Transcripts]
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(whisper[0], folder)
    edit_json(folder / file, **change)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        LLM(str(folder), num_blocks=64)


def test_special_tokens_of_the_test(llm: LLM) -> None:
    assert [llm.get_tokenizer().encode(f"<|{name}|>", add_special_tokens=False) for name in IDS] == [
        [token] for token in IDS.values()
    ]
