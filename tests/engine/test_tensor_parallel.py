"""An engine whose model several ranks share gives the tokens that one rank gives; the other ranks are threads."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.config import EngineConfig
from pdserve.engine.ranks.rank_messages import DiskOptions, SampleTokens, StoreOptions
from pdserve.engine.runner.pool.disk_store import DiskStore
from pdserve.engine.scheduler.scheduler import Scheduler
from pdserve.engine.scheduler_output import GrammarOutput
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_messages import mask_bytes
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.engine.drafters import drafter_of, speculation, use_drafter
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.rank_threads import RankThreads
from tests.support.models.checkpoints import ARCHITECTURES, VOCAB_SIZE
from tests.support.models.oracle import Oracle

PROMPTS = [[(7 * place + length) % VOCAB_SIZE for place in range(length)] for length in (1, 5, 17, 30)]
ONE_KV_HEAD: dict[str, Any] = {"num_key_value_heads": 1}


class RankedHarness(Harness):
    """An engine with other ranks."""

    ranks: RankThreads


Make = Callable[..., RankedHarness]


@pytest.fixture
def make_ranked(harnesses: list[Harness]) -> Iterator[Make]:
    """`make_ranked(folder, size, ...)`; after the test all ranks have the same sequences."""
    made: list[RankedHarness] = []

    def make(
        folder: Path,
        size: int = 2,
        grammars: Any = None,
        processors: Any = None,
        store: StoreOptions | None = None,
        **fields: Any,
    ) -> RankedHarness:
        fields = {
            "block_size": 4,
            "num_blocks": 64,
            "max_model_len": 128,
            "has_block_store": store is not None,
        } | fields
        config = EngineConfig(**fields)
        ranks = RankThreads(folder, config, size)
        harness = RankedHarness(
            config, ranks.decoder, ranks.kv_cache, VOCAB_SIZE, grammars, processors, ranks=ranks, store=store
        )
        harness.ranks = ranks
        made.append(harness)
        harnesses.append(harness)
        return harness

    yield make
    for harness in made:
        harness.ranks.close()
        harness.ranks.check(harness.runner)


def values(answer: Answer) -> Any:
    """The values that must be equal."""
    return answer.token_ids, answer.finish_reason, answer.error_code


def assert_close(one: Answer, other: Answer) -> None:
    """The same tokens, and log-probabilities but for their last digits."""
    assert values(one) == values(other)
    for ours, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.logprob_token_ids == theirs.logprob_token_ids
            for row, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert row == pytest.approx(expected, abs=1e-3)
    if one.pooling_output is not None:
        assert one.pooling_output == pytest.approx(other.pooling_output, abs=1e-4)


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{}, ONE_KV_HEAD], ids=["", "one_kv_head"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i1_two_ranks_give_the_tokens_of_transformers(
    architecture: str, options: dict[str, Any], tiny_checkpoints: Callable[..., Path], make_ranked: Make
) -> None:
    folder = tiny_checkpoints(architecture, **options)
    engine, oracle = make_ranked(folder, max_num_batched_tokens=24), Oracle(folder)
    ids = [engine.add(prompt, params={"max_tokens": 8}) for prompt in PROMPTS]
    answers = engine.run()
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        oracle.check(prompt, answers[request_id].token_ids)


MIXED: list[dict[str, Any]] = [
    {"params": {"temperature": 1.0, "seed": 3, "max_tokens": 12}, "n": 3},
    {"params": {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.3, "max_tokens": 12}},
    {"params": {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 5}},
    {"params": {"bad_words_token_ids": ((3, 4), (9,)), "min_tokens": 4, "logit_bias": {7: 5.0}, "max_tokens": 9}},
    {"params": {"temperature": 0.7, "seed": 1, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "max_tokens": 9}},
    {"params": {"allowed_token_ids": (5, 6, 7, 8), "max_tokens": 9}},
    {"pooling_params": PoolingParams(pooling_type="mean"), "params": {}},
]


MIXED_PROMPTS = {f"r{number}": PROMPTS[number % len(PROMPTS)] + [number] for number in range(2 * len(MIXED))}


def run_mixed(engine: Harness) -> dict[str, Answer]:
    """Requests of every kind; a new one arrives in each step."""
    for (name, prompt), fields in zip(MIXED_PROMPTS.items(), MIXED * 2, strict=True):
        engine.add(prompt, name, **fields)
        engine.step()
    return engine.run()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields", [{}, {"async_scheduling": True}, {"num_blocks": 24, "max_model_len": 64}], ids=["", "ahead", "preempted"]
)
def test_requests_of_every_kind_get_the_answers_of_one_rank(
    fields: dict[str, Any],
    tiny_checkpoints: Callable[..., Path],
    make_ranked: Make,
    make_real_engine: Callable[..., Harness],
) -> None:
    folder = tiny_checkpoints("qwen3")
    given = {"block_size": 4, "num_blocks": 96, "max_model_len": 128, "max_num_batched_tokens": 20} | fields
    one, two = make_real_engine(folder, **given), make_ranked(folder, **given)
    expected, answers = run_mixed(one), run_mixed(two)
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert_close(answer, expected[name])
    assert two.scheduler.num_preemptions == one.scheduler.num_preemptions
    assert bool(two.scheduler.num_preemptions) == ("max_model_len" in fields)


def draft_from(engine: Harness, prompts: dict[str, list[int]], expected: dict[str, Answer]) -> None:
    """Draft the expected texts; a fifth of the tokens is wrong."""
    texts = [prompts[name.partition("/")[0]] + answer.token_ids for name, answer in expected.items()]
    use_drafter(engine, drafter_of(texts, 0.8, VOCAB_SIZE))


def num_accepted(engine: Harness) -> int:
    stats = engine.scheduler.drafts.stats
    return 0 if stats is None else stats.num_accepted_tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields", [{}, {"async_scheduling": True, "num_blocks": 16, "max_model_len": 64}], ids=["", "preempted"]
)
def test_i5_two_ranks_with_drafts_give_the_answers_of_one_rank_without(
    fields: dict[str, Any],
    tiny_checkpoints: Callable[..., Path],
    make_ranked: Make,
    make_real_engine: Callable[..., Harness],
) -> None:
    folder = tiny_checkpoints("qwen3")
    given = {"block_size": 4, "num_blocks": 96, "max_model_len": 128, "max_num_batched_tokens": 40} | fields
    one, two = make_real_engine(folder, **given), make_ranked(folder, speculative_config=speculation(3), **given)
    expected = run_mixed(one)
    draft_from(two, MIXED_PROMPTS, expected)
    answers = run_mixed(two)
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert_close(answer, expected[name])
    assert num_accepted(two) > 20
    assert bool(two.scheduler.num_preemptions) == ("max_model_len" in fields)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_i5_random_lives_of_two_ranks_with_drafts(
    seed: int, tiny_checkpoints: Callable[..., Path], make_ranked: Make, make_real_engine: Callable[..., Harness]
) -> None:
    """Requests come and are aborted at random, in a pool that is too small: the texts are those of one rank, one at a time."""
    draw, folder = random.Random(seed), tiny_checkpoints("llama")
    given = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    one = make_real_engine(folder, num_blocks=64, **given)
    two = make_ranked(
        folder, num_blocks=18, async_scheduling=bool(seed % 2), speculative_config=speculation(2 + seed), **given
    )
    prompts: dict[str, list[int]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for number in range(24):
        name = f"r{number}"
        prompts[name] = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
        kinds[name] = draw.choice([*MIXED, *[{"params": {"max_tokens": 20, "ignore_eos": True}}] * 4])
        one.add(prompts[name], name, **kinds[name])
        one.run()
    draft_from(two, prompts, one.answers)
    aborted, added = set(), []
    for name, prompt in prompts.items():
        added.append(two.add(prompt, name, **kinds[name]))
        if draw.random() < 0.2:
            aborted.add(gone := draw.choice(added))
            two.core.abort_request(gone)
        for _ in range(draw.randrange(4)):
            two.step()
    answers = two.run()
    for name, answer in answers.items():
        if name.partition("/")[0] in aborted:
            assert answer.token_ids == one.answers[name].token_ids[: len(answer.token_ids)]
        else:
            assert_close(answer, one.answers[name])
    assert num_accepted(two) > 20
    assert two.scheduler.num_preemptions > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [False, True])
def test_i1_ranks_load_their_parts_of_blocks_from_main_memory(
    ahead: bool, tiny_checkpoints: Callable[..., Path], make_ranked: Make, make_real_engine: Callable[..., Harness]
) -> None:
    """The pool has room for two of the prompts, which are asked in turns: each is found in the tier, and loaded by every rank."""
    draw, folder = random.Random(0), tiny_checkpoints("llama")
    given = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(20, 40))] for _ in range(6)]
    one = make_real_engine(folder, num_blocks=200, **given)
    expected = [one.ask(prompt, params={"max_tokens": 8}).token_ids for prompt in prompts]
    two = make_ranked(folder, num_blocks=24, num_host_blocks=(100,), async_scheduling=ahead, **given)
    asked: dict[str, list[int]] = {}
    for _ in range(40):
        place = draw.randrange(len(prompts))
        asked[two.add(prompts[place], params={"max_tokens": 8})] = expected[place]
        for _ in range(draw.randrange(8)):
            two.step()
    answers = two.run()
    assert {name: answers[name].token_ids for name in asked} == asked
    tier = two.scheduler.pool.tier
    assert tier is not None
    assert tier.num_loaded > 20


@pytest.mark.parametrize("fault", ["", "one rank loses all", "one rank loses some", "one rank is slow"])
def test_i1_ranks_read_their_parts_of_blocks_from_the_store(
    fault: str,
    tiny_checkpoints: Callable[..., Path],
    make_ranked: Make,
    make_real_engine: Callable[..., Harness],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block is there if all ranks have it."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda self, num_tokens: None)
    real_read, slow = DiskStore.read, threading.Event()

    def read(store: DiskStore, name: bytes, into: memoryview) -> int | None:
        if "rank1" in str(store._folder):
            slow.wait(0.02 if fault == "one rank is slow" else 0)
            if fault == "one rank loses all" or (fault == "one rank loses some" and name[0] % 32 == 0):
                return None
        return real_read(store, name, into)

    monkeypatch.setattr(DiskStore, "read", read)
    draw, folder = random.Random(0), tiny_checkpoints("llama")
    given = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(20, 40))] for _ in range(6)]
    one = make_real_engine(folder, num_blocks=200, **given)
    expected = [one.ask(prompt, params={"max_tokens": 8}).token_ids for prompt in prompts]
    options = DiskOptions(str(tmp_path), 1 << 24, bytes(32))
    two = make_ranked(folder, num_blocks=24, num_host_blocks=(12,), store=options, **given)
    for _ in range(40):
        place = draw.randrange(len(prompts))
        assert two.ask(prompts[place], params={"max_tokens": 8}).token_ids == expected[place]
    store = two.scheduler.pool.store
    assert store is not None
    assert store.num_written > 20
    assert (store.num_failed > 0) is fault.startswith("one rank loses")
    assert (store.num_read > 20) is (fault != "one rank loses all")


def test_four_ranks_with_two_kv_heads_have_each_head_twice(
    tiny_checkpoints: Callable[..., Path], make_ranked: Make, make_real_engine: Callable[..., Harness]
) -> None:
    folder = tiny_checkpoints("llama")
    one, four = make_real_engine(folder, block_size=4, num_blocks=64, max_model_len=128), make_ranked(folder, 4)
    for engine in (one, four):
        engine.add(PROMPTS[3], "r")
        engine.run()
    assert four.answers["r"].token_ids == one.answers["r"].token_ids
    heads = four.ranks.gathered
    torch.testing.assert_close(heads[:, [0, 2]], one.kv_cache, atol=1e-4, rtol=0)
    torch.testing.assert_close(heads[:, [1, 3]], one.kv_cache, atol=1e-4, rtol=0)


def test_the_ranks_pools_together_are_the_pool_of_one_rank(
    tiny_checkpoints: Callable[..., Path], make_ranked: Make, make_real_engine: Callable[..., Harness]
) -> None:
    folder = tiny_checkpoints("qwen2")
    one, two = make_real_engine(folder, block_size=4, num_blocks=64, max_model_len=128), make_ranked(folder)
    for engine in (one, two):
        run_mixed(engine)
    torch.testing.assert_close(two.ranks.gathered, one.kv_cache, atol=1e-3, rtol=0)


def test_a_step_without_tokens_ends_after_the_keys_and_values_of_all_ranks(
    tiny_checkpoints: Callable[..., Path],
    make_ranked: Make,
    make_real_engine: Callable[..., Harness],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, fields = tiny_checkpoints("qwen2"), {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 16}
    one, two = make_real_engine(folder, max_model_len=128, **fields), make_ranked(folder, **fields)
    store, own_thread = SelfAttention.store, threading.get_ident()

    def slow_on_other_ranks(*args: Any) -> tuple[torch.Tensor, ...]:
        if threading.get_ident() != own_thread:
            time.sleep(0.05)
        return store(*args)

    monkeypatch.setattr(SelfAttention, "store", slow_on_other_ranks)
    for engine in (one, two):
        engine.add(PROMPTS[3], "r")
        engine.step()
        assert "r" not in engine.answers
    torch.testing.assert_close(two.ranks.gathered, one.kv_cache, atol=1e-3, rtol=0)
    for engine in (one, two):
        engine.run()


@pytest.mark.slow
def test_a_grammar_holds_on_rank_0_alone(tiny_checkpoints: Callable[..., Path], make_ranked: Make) -> None:
    folder = tiny_checkpoints("llama")
    compiler = GrammarCompiler(folder, VOCAB_SIZE)
    try:
        engine, tokenizer = make_ranked(folder, grammars=compiler), Tokenizer.from_folder(folder)
        pattern = r"[A-C]{2}-\d{3}(x|yz)?"
        form = StructuredOutputsParams(regex=pattern)
        for number in range(3):
            params = {"temperature": 1.0, "seed": number, "max_tokens": 40, "structured_outputs": form}
            engine.add(PROMPTS[2], f"r{number}", params=params, eos=(2,))
            engine.add(PROMPTS[1], f"plain{number}")
        answers = engine.run()
        for number in range(3):
            text = tokenizer.decode(answers[f"r{number}"].token_ids, skip_special_tokens=True)
            assert re.fullmatch(pattern, text), text
    finally:
        compiler.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_late_grammar_holds_back_the_same_rows_on_every_rank(
    num_drafts: int, tiny_checkpoints: Callable[..., Path], make_ranked: Make
) -> None:
    """The mask of a sequence is late in some steps: its last token is computed again, on every rank. In others the masks behind its
    drafts are late: they do not stand on any rank, though they are right."""
    engine = make_ranked(tiny_checkpoints("llama"), speculative_config=speculation(num_drafts) if num_drafts else None)
    executor, sent = engine.core.executor, []
    send = engine.ranks.send

    def watch(message: Any) -> None:
        sent.append(message)
        send(message)

    engine.ranks.send = watch  # type: ignore[method-assign]
    expected = engine.ask(PROMPTS[2], params={"max_tokens": 20}).token_ids
    if num_drafts:
        use_drafter(engine, drafter_of([PROMPTS[2] + expected], vocab_size=VOCAB_SIZE))
    sample, calls = executor.sample_tokens, 0

    def late(grammar: GrammarOutput | None) -> Any:
        nonlocal calls
        calls += 1
        [name] = engine.runner.batch.rows
        if calls % 4 == 1:
            grammar = GrammarOutput(late_req_ids=[name])
        if calls % 4 == 3 and engine.runner.batch.num_drafts.any():
            allows_all = b"\xff" * mask_bytes(VOCAB_SIZE)
            grammar = GrammarOutput(structured_output_request_ids=[name], grammar_bitmask=[allows_all])
        return sample(grammar)

    executor.sample_tokens = late  # type: ignore[method-assign]
    engine.scheduler.pool.forget_cached()
    assert engine.ask(PROMPTS[2], params={"max_tokens": 20}).token_ids == expected
    assert num_accepted(engine) > 0 or not num_drafts
    assert any(isinstance(message, SampleTokens) and message.late_req_ids for message in sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_random_lives_of_two_ranks_are_those_of_one(
    seed: int, tiny_checkpoints: Callable[..., Path], make_ranked: Make, make_real_engine: Callable[..., Harness]
) -> None:
    """Requests come and are aborted at random; a pool that is too small preempts them, and odd seeds launch steps ahead."""
    draw = random.Random(seed)
    given = {
        "block_size": 4, "num_blocks": 18, "max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 6,
        "async_scheduling": bool(seed % 2),
    }  # fmt: skip
    folder = tiny_checkpoints("llama")
    one, two = engines = make_real_engine(folder, **given), make_ranked(folder, **given)
    names: list[str] = []
    for number in range(60):
        if draw.random() < 0.4:
            prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
            fields: dict[str, Any] = {"params": {"max_tokens": 20, "ignore_eos": True}}
            if draw.random() < 0.5:
                fields = draw.choice(MIXED)
            names.append(f"r{number}")
            for engine in engines:
                engine.add(prompt, names[-1], **fields)
        if names and draw.random() < 0.1:
            name = names.pop(draw.randrange(len(names)))
            for engine in engines:
                engine.core.abort_request(name)
        for engine in engines:
            engine.step()
    expected, answers = one.run(), two.run()
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert_close(answer, expected[name])
    assert two.scheduler.num_preemptions == one.scheduler.num_preemptions > 0
