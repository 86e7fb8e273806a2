"""`LLM`: the same answers as transformers, whatever the batch, the pool and the shape of the prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.llm import LLM, NamedLogitsProcessor, RequestOutputKind, TokensPrompt
from tests.support.engine.llm_requests import MESSAGES, TEXT, core_of, greedy, prompts_of, sampled
from tests.support.engine.logits_plugins import installed
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S

OTHER_MESSAGES = [{"role": "user", "content": "Who counted the boats?"}]


def ask(llm: LLM, prompts: Any, params: Any = None) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]


def test_i1_greedy_answers_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    prompts = prompts_of([1, 4, 5, 17, 90])
    for prompt, answer in zip(prompts, ask(llm, prompts, greedy()), strict=True):
        oracle.check(prompt, answer)


def test_i5_a_seeded_answer_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    prompts = prompts_of([3, 9, 30, 31])
    params = [sampled(seed=seed, temperature=0.5 + seed / 4, top_p=0.95) for seed in range(4)]
    together = ask(llm, prompts, params)
    assert together == [ask(llm, prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert together != ask(llm, prompts, sampled(seed=9))


def test_seeds_that_nobody_gave_come_from_the_seed_of_the_llm(make_llm: Callable[..., LLM]) -> None:
    prompts = prompts_of([8]) * 3
    first, again, other, fresh = (make_llm(seed=seed) for seed in (1, 1, 2, None))
    answers = ask(first, prompts, sampled())
    assert len({tuple(answer) for answer in answers}) == 3  # each request has its own
    assert ask(again, prompts, sampled()) == answers
    assert ask(other, prompts, sampled()) != answers
    assert ask(fresh, prompts, sampled()) != answers


def test_a_tiny_pool_preempts_and_changes_no_answer(make_llm: Callable[..., LLM]) -> None:
    prompts = prompts_of([20, 25, 30, 22])
    params = [greedy(max_tokens=40), sampled(seed=3, max_tokens=40)] * 2
    expected = ask(make_llm(num_blocks=128, max_model_len=80), prompts, params)
    small = make_llm(num_blocks=24, max_model_len=80)
    assert ask(small, prompts, params) == expected
    assert core_of(small).scheduler.num_preemptions > 0


def test_logprobs_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    [prompt] = prompts_of([9])
    [answer] = llm.generate(prompt, sampled(seed=4, logprobs=3), use_tqdm=False)
    [sequence] = answer.outputs
    expected = oracle.logits([*prompt, *sequence.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
    assert sequence.logprobs is not None
    for token_id, candidates, row in zip(sequence.token_ids, sequence.logprobs, expected, strict=True):
        assert {*candidates} == {token_id, *row.topk(3).indices.tolist()}
        for candidate, entry in candidates.items():
            assert entry.logprob == pytest.approx(float(row[candidate]), abs=1e-4)
    assert sequence.cumulative_logprob == pytest.approx(
        sum(entries[token_id].logprob for token_id, entries in zip(sequence.token_ids, sequence.logprobs, strict=True))
    )


def test_bad_words_are_not_generated(llm: LLM) -> None:
    [usual] = llm.generate(TEXT, greedy(), use_tqdm=False)
    word = llm.get_tokenizer().decode(usual.outputs[0].token_ids[1:2], skip_special_tokens=False)
    [other] = llm.generate(TEXT, greedy(bad_words=(word,)), use_tqdm=False)
    assert usual.outputs[0].token_ids[1] not in other.outputs[0].token_ids


def test_no_spelling_of_a_bad_word_is_generated() -> None:
    llm = LLM("demo", num_blocks=64)
    prompt, asked = "The capital of France is", greedy(max_tokens=6)
    [usual] = llm.generate([prompt], asked, use_tqdm=False)
    assert "Paris" in usual.outputs[0].text
    for word in ("Paris", " Paris", "aris", "P", "capital of"):
        params = [greedy(max_tokens=40, bad_words=(word,)), sampled(seed=3, max_tokens=40, bad_words=(word,))]
        other = llm.generate([prompt] * 2, params, use_tqdm=False)
        assert not any(word.strip() in answer.outputs[0].text for answer in other), word


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    [whole] = llm.generate(TEXT, greedy(), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    [answer] = llm.generate(TEXT, greedy(stop=(stop,)), use_tqdm=False)
    [sequence] = answer.outputs
    assert sequence.text == text[: text.index(stop)]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)
    assert sequence.token_ids == whole.outputs[0].token_ids[: len(sequence.token_ids)]
    assert len(sequence.token_ids) < 12
    [kept] = llm.generate(TEXT, greedy(stop=[stop], include_stop_str_in_output=True), use_tqdm=False)
    assert kept.outputs[0].text == sequence.text + stop


def test_an_answer_tells_everything(llm: LLM) -> None:
    [answer] = llm.generate(TEXT, greedy(), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert answer.request_id == "0"
    assert answer.prompt == TEXT
    assert answer.prompt_token_ids == tokenizer.encode(TEXT, add_special_tokens=True)
    assert answer.finished
    assert answer.num_cached_tokens == 0
    [sequence] = answer.outputs
    assert (sequence.index, sequence.finish_reason, sequence.stop_reason) == (0, "length", None)
    assert sequence.text == tokenizer.decode(sequence.token_ids, skip_special_tokens=True)


def test_eos_ends_an_answer(llm: LLM) -> None:
    token = ask(llm, TEXT, greedy())[0][4]
    [answer] = llm.generate(TEXT, greedy(stop_token_ids=[token]), use_tqdm=False)
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", token)
    assert answer.outputs[0].token_ids[-1] == token


def test_every_shape_of_a_prompt_means_the_same(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT, add_special_tokens=True)
    [expected] = ask(llm, TEXT, greedy())
    for prompt in (token_ids, tuple(token_ids), {"prompt": TEXT}, {"prompt_token_ids": token_ids}):
        assert ask(llm, prompt, greedy()) == [expected]
        assert ask(llm, [prompt, TEXT], greedy()) == [expected, expected]
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_chat_is_generate_with_the_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES)
    [one] = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    assert one.prompt == text
    assert one.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert [one.outputs[0].token_ids] == ask(llm, one.prompt_token_ids, greedy())
    many = llm.chat([OTHER_MESSAGES, MESSAGES], greedy(), use_tqdm=False)
    assert many[1].outputs == one.outputs
    assert many[0].prompt_token_ids != one.prompt_token_ids
    [without] = llm.chat(MESSAGES, greedy(), use_tqdm=False, add_generation_prompt=False)
    assert without.prompt == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)


def test_without_parameters_each_kind_of_prompt_has_its_length(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=80)
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.max_tokens) == (1.0, 16)
    [completion] = llm.generate([5] * 60, use_tqdm=False)
    [short] = llm.generate([5] * 70, use_tqdm=False)
    [chat] = llm.chat(MESSAGES, use_tqdm=False)
    for answer, most in ((completion, 16), (short, 10), (chat, 80 - len(chat.prompt_token_ids))):
        [sequence] = answer.outputs
        assert len(sequence.token_ids) == most or sequence.finish_reason == "stop"
        assert len(sequence.token_ids) <= most


def test_the_prefix_cache_stays_from_call_to_call_and_is_parted_by_salt(llm: LLM) -> None:
    [prompt] = prompts_of([41])
    cached = [
        llm.generate(cast(TokensPrompt, {"prompt_token_ids": prompt, **salt}), greedy(), use_tqdm=False)[
            0
        ].num_cached_tokens
        for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    assert cached == [0, 40, 0, 40, 0]


class RecordedBar:
    """A progress bar that keeps what it was told."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.count = 0
        self.postfix = ""
        self.closed = False

    def update(self, n: int) -> None:
        self.count += n

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        self.postfix = s

    def close(self) -> None:
        self.closed = True


def test_progress_counts_finished_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[RecordedBar] = []

    def make_bar(**options: Any) -> RecordedBar:
        bars.append(RecordedBar(**options))
        return bars[-1]

    llm.generate(prompts_of([3, 4, 5]), greedy(), use_tqdm=make_bar)
    [bar] = bars
    assert bar.options["total"] == bar.count == 3
    assert bar.closed
    assert "tokens/s" in bar.postfix
    llm.generate(TEXT, greedy(), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(TEXT, greedy())
    assert "1/1" in capsys.readouterr().err


def test_after_ctrl_c_the_engine_is_empty_and_ready(llm: LLM) -> None:
    class Interrupting(RecordedBar):
        def update(self, n: int) -> None:
            raise KeyboardInterrupt

    prompts = prompts_of([20, 30])
    expected = ask(llm, prompts, greedy())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, [greedy(max_tokens=2), greedy(max_tokens=200)], use_tqdm=Interrupting)
    core_of(llm).scheduler.check(idle=True)
    assert ask(llm, prompts, greedy()) == expected


def test_it_serves_one_call_at_a_time(llm: LLM) -> None:
    refused: list[str] = []

    class Calling(RecordedBar):
        def update(self, n: int) -> None:
            def call() -> None:
                try:
                    llm.generate(TEXT, use_tqdm=False)
                except RuntimeError as error:
                    refused.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join(HANG_S)

    [answer] = llm.generate(TEXT, greedy(), use_tqdm=Calling)
    assert answer.finished
    assert len(refused) == 1
    assert "one call at a time" in refused[0]


def test_after_shutdown_nothing_is_taken(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        assert ask(llm, TEXT, greedy())
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate(TEXT, use_tqdm=False)


def test_metrics_say_when_what_happened(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=24, max_model_len=80, max_num_seqs=2)
    begun = time.time()
    answers = llm.generate(prompts_of([20, 25, 30]), greedy(max_tokens=20), use_tqdm=False)
    ended = time.time()
    metrics: list[Any] = [answer.metrics for answer in answers if answer.metrics is not None]
    assert len(metrics) == 3
    for of_one in metrics:
        moments = [
            of_one.arrival_time,
            of_one.first_scheduled_time,
            of_one.first_token_time,
            of_one.last_token_time,
            of_one.finished_time,
        ]
        assert moments == sorted(moments)
        # the two clocks were read one after the other
        assert begun - 0.1 < moments[0]
        assert moments[-1] < ended + 0.1
        assert of_one.time_to_first_token >= of_one.time_in_queue >= 0
    waited = metrics[2]
    assert waited.first_scheduled_time >= min(of_one.finished_time for of_one in metrics[:2])
    assert sum(of_one.num_preemptions for of_one in metrics) == core_of(llm).scheduler.num_preemptions


def test_a_stop_string_ends_the_metrics_too(llm: LLM) -> None:
    [prompt] = prompts_of([9])
    [plain] = llm.generate(prompt, greedy(max_tokens=12), use_tqdm=False)
    stop = plain.outputs[0].text[2:4]
    [stopped] = llm.generate(prompt, greedy(max_tokens=12, stop=(stop,)), use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop"
    metrics: Any = stopped.metrics
    assert metrics.last_token_time <= metrics.finished_time


def test_tokens_without_text_and_every_output_kind(llm: LLM) -> None:
    [usual] = llm.generate(TEXT, greedy(), use_tqdm=False)
    [silent] = llm.generate(TEXT, greedy(detokenize=False), use_tqdm=False)
    assert silent.outputs[0].token_ids == usual.outputs[0].token_ids
    assert silent.outputs[0].text == ""
    for kind in RequestOutputKind:
        # a batch is told as a whole
        [answer] = llm.generate(TEXT, greedy(output_kind=kind), use_tqdm=False)
        assert answer.outputs == usual.outputs


def test_one_stop_string_may_stand_alone(llm: LLM) -> None:
    [usual] = llm.generate(TEXT, greedy(), use_tqdm=False)
    stop = usual.outputs[0].text[4:7]
    [answer] = llm.generate(TEXT, greedy(stop=stop), use_tqdm=False)
    assert answer.outputs[0].stop_reason == stop


def test_plug_ins(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitsProcessors, "from_entry_points", lambda names: installed())
    llm = make_llm(logits_processors=["ban", "broken", "only"])
    [usual] = ask(llm, TEXT, greedy())
    ban = NamedLogitsProcessor(name="ban", args={"tokens": usual[:1]})
    [other] = ask(llm, TEXT, greedy(logits_processors=[ban]))
    assert usual[0] not in other
    [same] = ask(llm, TEXT, greedy(logits_processors=[{"name": "ban", "args": {"tokens": usual[:1]}}]))
    assert same == other
    with pytest.raises(InvalidRequest, match="loaded here: ban, broken, only"):
        ask(llm, TEXT, greedy(logits_processors=[{"name": "nobody"}]))
    with pytest.raises(
        InternalError, match="logits processor 'broken' failed with RuntimeError; the worker's log has the traceback"
    ):
        ask(llm, TEXT, greedy(logits_processors=[{"name": "broken", "args": {"how": "raise"}}]))


def test_a_prompts_log_probabilities_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    prompt = prompts_of([40])[0]
    answer = llm.generate([prompt], greedy(prompt_logprobs=2), use_tqdm=False)[0]
    expected = torch.log_softmax(oracle.logits(prompt), -1)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    for place, candidates in enumerate(answer.prompt_logprobs[1:]):
        assert candidates is not None
        assert candidates[prompt[place + 1]].logprob == pytest.approx(
            float(expected[place, prompt[place + 1]]), abs=1e-4
        )
    assert llm.generate([prompt], greedy(), use_tqdm=False)[0].prompt_logprobs is None


def test_a_lower_priority_runs_first_where_it_is_the_policy(make_llm: Callable[..., LLM]) -> None:
    prompts, priorities = prompts_of([5] * 4), [3, -1, 2, 0]

    def order(policy: str, priority: list[int] | None) -> list[int]:
        llm = make_llm(scheduling_policy=policy, max_num_seqs=1)
        answers = llm.generate(prompts, greedy(max_tokens=3), use_tqdm=False, priority=priority)
        finished = [answer.metrics.first_token_time if answer.metrics else None for answer in answers]
        return sorted(range(4), key=lambda place: finished[place] or 0)

    assert order("priority", priorities) == [1, 3, 2, 0]
    assert order("fcfs", None) == order("fcfs", [0] * 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"prompts\[0\]: priority is 3, and requests run in order of arrival here"):
        order("fcfs", priorities)


def test_a_trace_context_reaches_the_engine_with_each_request(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(scheduling_policy="priority")
    added = []
    core = core_of(llm)
    add = core.add_request

    def noted(request: Any) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(core, "add_request", noted)
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    llm.generate(prompts_of([3, 4]), greedy(), use_tqdm=False, priority=7, trace_headers=headers)
    llm.chat(MESSAGES, greedy(), use_tqdm=False, priority=-7, speculative_tokens=3, trace_headers=headers)
    llm.generate(TEXT, greedy(), use_tqdm=False)
    assert [request.priority for request in added] == [7, 7, -7, 0]
    assert [request.speculative_tokens for request in added] == [None, None, 3, None]
    assert [request.trace_headers for request in added] == [headers] * 3 + [{}]
