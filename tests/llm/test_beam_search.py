"""`LLM.beam_search`, by transformers' beam search in float32: beams, their order and their scores."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM, BeamSearchOutput, BeamSearchParams, PromptType, TextPrompt
from pdserve.text.beam_search import Beam, BeamSearch
from tests.support.engine.llm_requests import TEXT, core_of, prompts_of
from tests.support.models.oracle import NEAR_TIE, Oracle

EOS = list(range(5, 315, 8))
"""Many tokens that end a text, so that beams end at every length."""


@pytest.fixture(scope="module")
def eager_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("eager") / "model")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return copy


@pytest.fixture
def eager(eager_folder: Path) -> Any:
    with LLM(eager_folder, dtype="float32", block_size=4, num_blocks=256, max_model_len=256) as llm:
        yield llm
        core_of(llm).scheduler.check(idle=True)


def check(
    oracle: Oracle, prompt: list[int], output: BeamSearchOutput, params: BeamSearchParams, eos: list[int]
) -> None:
    """The same beams in the same order; where two differ, their scores are a near-tie."""
    expected = oracle.beams(prompt, params, [] if params.ignore_eos else eos)
    assert len(output.sequences) == len(expected) == params.beam_width
    for ours, (tokens, score) in zip(output.sequences, expected, strict=True):
        assert abs(ours.score - score) < NEAR_TIE, (params, prompt)
        if ours.tokens != [*prompt, *tokens]:
            others = [other for other_tokens, other in expected if other_tokens != tokens]
            assert min(abs(score - other) for other in others) < NEAR_TIE, (params, prompt)
            print(f"near-tie between beams: {params}")
        generated = ours.tokens[len(prompt) :]
        ended = not params.ignore_eos and generated[-1] in eos
        assert ours.finish_reason == ("stop" if ended else "length")
        assert ended or len(generated) == params.max_tokens
        logprobs = oracle.logits(ours.tokens).log_softmax(-1)[len(prompt) - 1 : -1]
        sum_of = sum(float(row[token]) for row, token in zip(logprobs, generated, strict=True))
        assert abs(ours.cum_logprob - sum_of) < 1e-3


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("beam_width", [2, 5])
def test_equal_to_transformers(eager: LLM, oracle: Oracle, beam_width: int, early_stopping: Any) -> None:
    prompts = prompts_of([1, 30])
    stopped = 0
    for max_tokens, length_penalty in ((1, 1.0), (5, 0.0), (14, 1.0), (12, 2.5), (9, -0.5)):
        params = BeamSearchParams(
            beam_width=beam_width, max_tokens=max_tokens, length_penalty=length_penalty, early_stopping=early_stopping
        )
        outputs = eager.beam_search(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            check(oracle, prompt, output, params, EOS)
            stopped += sum(sequence.finish_reason == "stop" for sequence in output.sequences)
    assert stopped


def test_wide_and_without_an_end(llm: LLM, oracle: Oracle) -> None:
    """More candidates a step than any client may ask log-probabilities for."""
    params = BeamSearchParams(beam_width=16, max_tokens=8, ignore_eos=True)
    [prompt] = prompts_of([21])
    [output] = llm.beam_search(prompt, params, use_tqdm=False)
    check(oracle, prompt, output, params, [])
    assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 16


def test_one_beam_is_greedy(llm: LLM, oracle: Oracle) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    prompts = prompts_of([4, 11])
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        oracle.check(prompt, output.sequences[0].tokens[len(prompt) :])


def test_a_pool_that_holds_few_beams_changes_nothing(make_llm: Callable[..., LLM]) -> None:
    params = BeamSearchParams(beam_width=6, max_tokens=6, ignore_eos=True)
    prompts = prompts_of([40, 33])
    expected = make_llm().beam_search(prompts, params, use_tqdm=False)
    small = make_llm(num_blocks=14, max_model_len=56).beam_search(prompts, params, use_tqdm=False)
    assert [[one.tokens for one in output.sequences] for output in small] == [
        [one.tokens for one in output.sequences] for output in expected
    ]


def test_text_and_progress(llm: LLM) -> None:
    bars = []

    class Bar:
        def __init__(self, **fields: Any) -> None:
            self.total, self.n = fields["total"], 0
            bars.append(self)

        def update(self, n: int) -> None:
            self.n += n

        def set_postfix_str(self, s: str, refresh: bool) -> None: ...

        def close(self) -> None: ...

    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    prompts: list[PromptType] = [TEXT, TextPrompt(prompt=TEXT, cache_salt="mine")]
    outputs = llm.beam_search(prompts, params, use_tqdm=Bar)
    assert [(bar.n, bar.total) for bar in bars] == [(2, 2)]
    tokenizer = llm.get_tokenizer()
    num_prompt = len(tokenizer.encode(TEXT, add_special_tokens=True))
    for output in outputs:
        for sequence in output.sequences:
            whole = tokenizer.decode(sequence.tokens[num_prompt:], skip_special_tokens=True)
            assert sequence.text == whole
    assert outputs[0] == outputs[1]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        (TEXT, {"beam_width": 0}, "beam_width must be from 1 to 160 with a vocabulary of 320 tokens, not 0"),
        (TEXT, {"beam_width": 161}, "not 161"),
        (TEXT, {"beam_width": "4"}, "beam_width is '4'"),
        (TEXT, {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        (TEXT, {"max_tokens": 300}, "max_tokens is 300"),
        (TEXT, {"length_penalty": float("nan")}, "length_penalty must be from -32 to 32, not nan"),
        (TEXT, {"length_penalty": 1e300}, "length_penalty must be from -32 to 32"),
        (TEXT, {"length_penalty": -1e300}, "length_penalty must be from -32 to 32"),
        (TEXT, {"early_stopping": "always"}, "early_stopping is 'always'"),
        ([5, 400], {}, r"prompt\[1\] is 400"),
        ("", {}, "prompt is empty"),
        ([TEXT, ""], {}, r"prompts\[1\]: prompt is empty"),
    ],
)
def test_refusals(llm: LLM, prompt: Any, fields: dict[str, Any], message: str) -> None:
    params = BeamSearchParams(**({"beam_width": 2} | fields))
    with pytest.raises(InvalidRequest, match=message):
        llm.beam_search(prompt, params, use_tqdm=False)


def test_params_of_another_kind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="params must be BeamSearchParams, not dict"):
        llm.beam_search(TEXT, {"beam_width": 2}, use_tqdm=False)  # type: ignore[arg-type]


def test_what_lies_beyond_the_width_goes_on_but_is_no_answer() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=3), eos_token_ids=(0,))
    # the end is second: the beam goes on without it
    search.advance([[(7, -0.1), (0, -0.2)]])
    assert [beam.token_ids for beam in search.live] == [(7,)]
    assert not search.finished
    search.advance([[(0, -0.1), (8, -3.0)]])
    assert [one.beam.token_ids for one in search.finished] == [(7, 0)]
    assert search.done


def test_a_step_copies_only_the_beams_that_it_keeps() -> None:
    width, length = 16, 4096
    search = BeamSearch(BeamSearchParams(beam_width=width, max_tokens=2 * length), eos_token_ids=(0, 1, 2))
    search.live = [Beam(tuple(range(length)), -float(place)) for place in range(width)]
    candidates = [[(3 + rank, -float(rank)) for rank in range(search.num_candidates)]] * width
    tracemalloc.start()
    search.advance(candidates)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(search.live) == width
    assert peak_bytes < 2 * width * length * 8
