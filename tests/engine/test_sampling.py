"""Sampling: noise by coordinates, exact distributions, forbidden tokens, and no dependence on batch mates (I5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.sampling.logprobs import LogprobsRows
from pdserve.engine.sampling.penalties import Penalties
from pdserve.engine.sampling.sampler import Sampler, SamplingMetadata
from pdserve.engine.sampling.sparse_indices import SparseIndices
from pdserve.engine.sampling.token_mask import TokenMask
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import VOCAB_SIZE, greedy_answer, next_logits
from tests.support.kernels import sampling_reference

LOGITS = np.array([2.0, 1.5, 1.5, 0.7, 0.0, -0.4, -1.0, -3.0], dtype=np.float32)
DRAWS = 20_000


def metadata(count: int, **fields: Any) -> SamplingMetadata:
    """One row a draw: the same parameters, another output position."""
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": len(LOGITS), "min_p": 0.0} | fields
    return SamplingMetadata(
        temperature=np.full(count, given["temperature"], dtype=np.float32),
        top_p=np.full(count, given["top_p"], dtype=np.float32),
        top_k=np.full(count, given["top_k"], dtype=np.int64),
        min_p=np.full(count, given["min_p"], dtype=np.float32),
        seeds=np.full(count, 42, dtype=np.int64),
        indexes=np.zeros(count, dtype=np.int64),
        positions=np.arange(count, dtype=np.int64),
        token_rules=given.get("token_rules"),
        penalties=given.get("penalties"),
        logprobs=LogprobsRows.of(given["num_logprobs"]) if "num_logprobs" in given else None,
    )


def forbidden(*parts: tuple[int, tuple[int, ...]]) -> TokenMask:
    return TokenMask(forbidden=SparseIndices.of([(row, np.array(token_ids)) for row, token_ids in parts]))


def draw(count: int = DRAWS, **fields: Any) -> NDArray[np.int64]:
    logits = torch.from_numpy(np.tile(LOGITS, (count, 1)))
    return Sampler()(logits, metadata(count, **fields)).sampled_token_ids


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def filtered(temperature: float = 1.0, top_k: int = 8, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.float64]:
    """The exact distribution, by the words of the parameters, one token after another."""
    probs = softmax(LOGITS.astype(np.float64) / temperature)
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    left = [token for token in order[:top_k] if probs[token] >= min_p * probs.max()]
    total, kept, reached = sum(probs[token] for token in left), [], 0.0
    for token in left:
        if reached >= top_p:
            break
        kept.append(token)
        reached += probs[token] / total
    expected = np.zeros(len(probs))
    expected[kept] = probs[kept] / probs[kept].sum()
    return expected


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 5},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_tokens_come_in_their_exact_distribution(fields: dict[str, Any]) -> None:
    counts = np.bincount(draw(**fields), minlength=len(LOGITS))
    expected = filtered(**fields) * DRAWS
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = float(((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum())
    # the 99.99 % quantile for at most 7 degrees of freedom is 29.9; the seed is fixed
    assert chi_square < 29.9


def test_greedy_takes_the_most_likely_token_whatever_the_filters() -> None:
    assert set(draw(8, temperature=0.0).tolist()) == {0}
    assert set(draw(8, temperature=0.0, top_k=3, top_p=0.1).tolist()) == {0}


def test_forbidden_tokens_never_come() -> None:
    count = 500
    fields: dict[str, Any] = {"token_rules": forbidden(*((row, (0, 2)) for row in range(count)))}
    assert not {0, 2} & set(draw(count, **fields).tolist())
    assert not {0, 2} & set(draw(count, top_k=3, **fields).tolist())
    assert set(draw(count, temperature=0.0, **fields).tolist()) == {1}
    assert 0 in draw(count, token_rules=forbidden((0, (0,))))[1:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_takes_its_most_likely_token(temperature: float) -> None:
    logits = np.tile(LOGITS, (4, 1))
    logits[0, 5] = np.inf
    logits[1, [3, 6]] = np.inf
    logits[2, 4] = np.nan
    for fields in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}):
        asked = metadata(4, temperature=temperature, **fields)
        sampled = Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids
        assert sampled[:3].tolist() == [5, 3, 4]
        assert 0 <= sampled[3] < len(LOGITS)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1.6},
        {"top_k": 30},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_tokens_of_many_seeds_come_in_their_exact_distribution(fields: dict[str, Any], vocab_size: int) -> None:
    random = np.random.default_rng(12)
    row = (random.permutation(-1.1 * np.log(np.arange(1, vocab_size + 1)))).astype(np.float32)
    count = 20_000
    asked = metadata(count, **({"top_k": vocab_size} | fields))
    asked.seeds[:] = np.arange(count) * 977 - 10_000
    asked.positions[:] = 5
    sampler = Sampler()
    sampled = np.concatenate(
        [
            sampler(
                torch.from_numpy(np.tile(row, (2000, 1))), part(asked, slice(first, first + 2000))
            ).sampled_token_ids
            for first in range(0, count, 2000)
        ]
    )
    params = sampling_reference.Params(**fields)
    kept, _ = sampling_reference.kept(row.astype(np.float64).tolist(), params)
    expected = np.zeros(vocab_size)
    expected[kept] = softmax(row[kept].astype(np.float64) / params.temperature) * count
    counts = np.bincount(sampled, minlength=vocab_size)
    assert not counts[expected == 0].any()
    chi_square(counts, expected)


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Tokens that are expected less than 10 times count together."""
    rare = expected < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    value = float(((seen - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty: 4.9 standard deviations, 99.9999 %
    assert value < freedom * (1 - 2 / (9 * freedom) + 4.9 * np.sqrt(2 / (9 * freedom))) ** 3, (value, freedom)


@pytest.mark.few(1)
@pytest.mark.parametrize("apart", [{"positions": 1}, {"indexes": 1}, {"seeds": 1}, {"positions": 1, "seeds": -1}])
def test_tokens_of_neighbouring_positions_sequences_and_seeds_are_independent(apart: dict[str, int]) -> None:
    count = 40_000
    first = metadata(count)
    first.seeds[:], first.positions[:] = np.arange(count) % 200, np.arange(count) // 200 * 2
    second = metadata(count)
    for name in ("seeds", "indexes", "positions"):
        getattr(second, name)[:] = getattr(first, name) + apart.get(name, 0)
    tokens = [
        Sampler()(torch.from_numpy(np.tile(LOGITS, (count, 1))), each).sampled_token_ids for each in (first, second)
    ]
    pairs = np.bincount(tokens[0] * len(LOGITS) + tokens[1], minlength=len(LOGITS) ** 2)
    probs = softmax(LOGITS.astype(np.float64))
    chi_square(pairs, np.outer(probs, probs).reshape(-1) * count)


def part(whole: SamplingMetadata, rows: slice) -> SamplingMetadata:
    fields = {field: getattr(whole, field) for field in SamplingMetadata.__slots__}
    return SamplingMetadata(**{field: values[rows] for field, values in fields.items() if values is not None})


@pytest.mark.parametrize("name", ["top_p", "min_p", "top_k"])
def test_a_row_does_not_depend_on_its_batch_mates(name: str) -> None:
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random.normal(size=(12, 40)).astype(np.float32))
    whole = metadata(12, top_k=40)
    values = {"top_p": np.linspace(0.2, 1, 12), "min_p": np.linspace(0, 0.5, 12), "top_k": np.arange(29, 41)}[name]
    getattr(whole, name)[:] = values
    whole.temperature[::4] = 0
    together = Sampler()(logits.clone(), whole).sampled_token_ids
    for row in range(12):
        alone = part(whole, slice(row, row + 1))
        assert Sampler()(logits[row : row + 1].clone(), alone).sampled_token_ids[0] == together[row]


@pytest.mark.few(8)
@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.9}, {"top_k": 25}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.7}], ids=str
)
@pytest.mark.parametrize("temperature", [1.1e-5, 0.3, 1.0, 5.0, 100.0])
def test_tokens_are_the_references(fields: dict[str, Any], temperature: float) -> None:
    random = np.random.default_rng(13)
    logits = (random.normal(size=(150, 90)) * random.uniform(0.3, 6, (150, 1))).astype(np.float32)
    asked = metadata(150, temperature=temperature, **({"top_k": 90} | fields))
    asked.seeds[:], asked.indexes[:] = random.integers(-(2**63), 2**63 - 1, 150), np.arange(150) % 4
    sampled = Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids
    rounded: dict[str, Any] = {
        name: float(np.float32(value)) if name != "top_k" else value for name, value in fields.items()
    }
    params = sampling_reference.Params(temperature=float(np.float32(temperature)), **rounded)
    for row in range(150):
        coordinates = (int(asked.seeds[row]), int(asked.indexes[row]), int(asked.positions[row]))
        expected = sampling_reference.sample(logits[row].astype(np.float64).tolist(), params, *coordinates)
        assert sampled[row] == expected.token_id or expected.margin < 1e-5, (row, expected)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("num_allowed", [1, 2, 30])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 25}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("temperature", [1.1e-5, 1.0, 100.0])
def test_forbidden_tokens_stay_out_whatever_biases_and_penalties_add(
    num_allowed: int, fields: dict[str, Any], temperature: float
) -> None:
    random, count, vocab_size = np.random.default_rng(15), 40, 2000
    logits = (random.normal(size=(count, vocab_size)) * 4).astype(np.float32)
    allowed = np.sort(random.permuted(np.tile(np.arange(vocab_size), (count, 1)), axis=1)[:, :num_allowed])
    rows = np.arange(count)
    every = SparseIndices(np.repeat(rows, vocab_size), np.tile(np.arange(vocab_size), count))
    size = len(every.rows)
    rules = TokenMask(
        allowed=SparseIndices(np.repeat(rows, num_allowed), allowed.reshape(-1)),
        biased=every,
        biases=random.uniform(-1, 100, size).astype(np.float32),
    )
    penalties = Penalties(
        repeated=every,
        repetition=np.full(size, 0.5, dtype=np.float32),
        in_output=every,
        frequency=np.full(size, -2, dtype=np.float32),
        presence=np.full(size, -2, dtype=np.float32),
    )
    asked = metadata(
        count, token_rules=rules, penalties=penalties, temperature=temperature, **({"top_k": vocab_size} | fields)
    )
    after = torch.from_numpy(logits)
    sampled = Sampler()(after, asked).sampled_token_ids
    params = sampling_reference.Params(temperature=float(np.float32(temperature)), **fields)
    for row in range(count):
        assert np.flatnonzero(np.isfinite(logits[row])).tolist() == allowed[row].tolist()
        expected = sampling_reference.sample(logits[row].astype(np.float64).tolist(), params, 42, 0, row)
        assert sampled[row] in allowed[row]
        assert sampled[row] == expected.token_id or expected.margin < 1e-5, (row, expected)


def test_extreme_logits_overflow_nothing() -> None:
    logits = np.array([[3e38, -3e38, 0.0, 2.9e38, -np.inf, -3.4e38]] * 30, dtype=np.float32)
    for fields in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 1e-9}):
        for temperature in (1.1e-5, 1.0, 100.0):
            asked = metadata(30, temperature=temperature, **({"top_k": 6} | fields))
            assert set(Sampler()(torch.from_numpy(logits.copy()), asked).sampled_token_ids.tolist()) == {0}


SAMPLED = {"temperature": 1.0, "max_tokens": 12, "top_p": 0.95}


def test_i5_a_sampled_text_depends_on_seed_and_index_alone(make_engine: MakeEngine) -> None:
    prompt = list(range(13))
    params = [SAMPLED | {"seed": seed} for seed in (5, 6, 7, -3)]
    alone = [make_engine().ask(prompt, params=given).token_ids for given in params]
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert make_engine().ask(prompt, index=1, params=params[0]).token_ids != alone[0]
    settings: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 3},
        {"num_blocks": 9, "max_model_len": 36},
        {"num_blocks": 9, "max_model_len": 36, "max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
    ]
    for fields in settings:
        engine = make_engine(**fields)
        ids = [engine.add(prompt, params=given) for given in params]
        ids += [engine.add([n] * 7, params={"temperature": 0.0, "max_tokens": 9}) for n in range(3)]
        answers = engine.run()
        assert [answers[request_id].token_ids for request_id in ids[:4]] == alone
        if "num_blocks" in fields:
            assert engine.scheduler.num_preemptions > 0


def test_i5_the_split_into_prefill_and_decode_changes_no_sampled_token(make_engine: MakeEngine) -> None:
    prompt = list(range(13))
    alone = make_engine().ask(prompt, params=SAMPLED | {"seed": 5}).token_ids
    pair = Pair(make_engine(max_num_batched_tokens=5), make_engine())
    pair.add(prompt, "r", params=SAMPLED | {"seed": 5})
    pair.run()
    assert pair.answer("r").token_ids == alone


def test_a_sampled_text_is_more_than_the_greedy_one(make_engine: MakeEngine) -> None:
    prompt = list(range(13))
    assert make_engine().ask(prompt, params=SAMPLED | {"seed": 5}).token_ids != greedy_answer(prompt, 12)
    assert make_engine().ask(prompt, params=SAMPLED | {"seed": 5, "top_k": 1}).token_ids == greedy_answer(prompt, 12)
    assert make_engine().ask(prompt, params={"temperature": 1e-6, "max_tokens": 12}).token_ids == greedy_answer(
        prompt, 12
    )


PROMPT = list(range(13))
ANSWER = greedy_answer(PROMPT, 8)


def test_min_tokens_forbids_eos_and_stop_tokens_until_then(make_engine: MakeEngine) -> None:
    eos, stop = ANSWER[0], ANSWER[1]
    at_once = make_engine().ask(PROMPT, eos=(eos,))
    assert (at_once.token_ids, at_once.finish_reason, at_once.stop_reason) == ([eos], FinishReason.STOP, None)
    answer = make_engine().ask(PROMPT, eos=(eos,), params={"min_tokens": 3, "max_tokens": 9, "stop_token_ids": (stop,)})
    assert not {eos, stop} & set(answer.token_ids[:3])
    assert len(answer.token_ids) >= 3
    best = next_logits(PROMPT).argsort()[::-1]
    assert answer.token_ids[0] == next(token for token in best if token not in (eos, stop))


def test_min_tokens_is_counted_over_both_calls(make_engine: MakeEngine) -> None:
    alone = make_engine().ask(PROMPT, eos=(ANSWER[0],), params={"min_tokens": 4, "max_tokens": 9}).token_ids
    pair = Pair(make_engine(), make_engine())
    pair.add(PROMPT, "r", eos=(ANSWER[0],), params={"min_tokens": 4, "max_tokens": 9})
    pair.run()
    assert pair.answer("r").token_ids == alone


def test_ignored_eos_goes_on_but_stop_tokens_stop(make_engine: MakeEngine) -> None:
    params = {"max_tokens": 8, "ignore_eos": True}
    assert make_engine().ask(PROMPT, eos=tuple(ANSWER[:3]), params=params).token_ids == ANSWER
    stopped = make_engine().ask(PROMPT, eos=(ANSWER[0],), params=params | {"stop_token_ids": (ANSWER[2],)})
    assert (stopped.token_ids, stopped.stop_reason) == (ANSWER[: ANSWER.index(ANSWER[2]) + 1], ANSWER[2])


def test_eos_is_allowed_before_min_tokens_when_it_is_ignored(make_engine: MakeEngine) -> None:
    params = {"max_tokens": 8, "ignore_eos": True, "min_tokens": 8}
    assert make_engine().ask(PROMPT, eos=tuple(ANSWER), params=params).token_ids == ANSWER


def test_eos_ids_beyond_the_vocabulary_do_no_harm(make_engine: MakeEngine) -> None:
    answer = make_engine().ask(PROMPT, eos=(VOCAB_SIZE, 10**6), params={"min_tokens": 2, "max_tokens": 8})
    assert answer.token_ids == ANSWER


def test_i9_the_largest_parameters_a_client_may_send_do_no_harm(make_engine: MakeEngine) -> None:
    params = {"temperature": 100.0, "top_k": 2**31 - 1, "max_tokens": 2**32 - 1, "seed": 2**63 - 1}
    assert len(make_engine(num_blocks=8).ask(PROMPT, params=params).token_ids) == 32 - 13


def exact(logits: NDArray[np.float64], **fields: Any) -> None:
    """Draws with these fields come in the distribution of these logits."""
    counts = np.bincount(draw(**fields), minlength=len(LOGITS))
    expected = softmax(logits) * DRAWS
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert float(((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()) < 29.9


def everywhere(*token_ids: int) -> SparseIndices:
    return SparseIndices(np.repeat(np.arange(DRAWS), len(token_ids)), np.tile(np.array(token_ids), DRAWS))


def test_allowed_and_forbidden_tokens_and_biases_come_in_their_exact_distribution() -> None:
    logits = LOGITS.astype(np.float64)
    alone = np.full(len(LOGITS), -np.inf)
    alone[[1, 4, 7]] = logits[[1, 4, 7]]
    exact(alone, token_rules=TokenMask(allowed=everywhere(1, 4, 7)))
    without = logits.copy()
    without[[0, 3]] = -np.inf
    exact(without, token_rules=TokenMask(forbidden=everywhere(0, 3)))
    biased = logits.copy()
    biased[[0, 7]] += [-1.5, 4.0]
    biases = np.tile(np.array([-1.5, 4.0], dtype=np.float32), DRAWS)
    exact(biased, token_rules=TokenMask(biased=everywhere(0, 7), biases=biases))
    biased[[0, 7]] -= [0.0, 4.0]
    biased[[2, 7]] = -np.inf  # a forbidden token stays forbidden whatever its bias
    rules = TokenMask(forbidden=everywhere(2, 7), biased=everywhere(0, 7), biases=biases)
    exact(biased / 0.7, token_rules=rules, temperature=0.7)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "penalty", [{"repetition": 1.8}, {"frequency": 0.7}, {"presence": -1.3}, {"repetition": 0.6, "frequency": -0.4}]
)
def test_penalised_tokens_come_in_their_exact_distribution(penalty: dict[str, float]) -> None:
    counts, in_prompt = np.array([0, 3, 1, 0, 0, 0, 2, 0]), np.array([1, 0, 0, 0, 0, 0, 0, 1], dtype=np.bool_)
    repetition, frequency = penalty.get("repetition", 1.0), penalty.get("frequency", 0.0)
    logits = LOGITS.astype(np.float64)
    for token in range(len(logits)):
        if counts[token] or in_prompt[token]:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * counts[token] + penalty.get("presence", 0.0) * (counts[token] > 0)
    output = np.repeat(np.arange(len(logits)), counts)
    repeated, in_output = everywhere(*np.flatnonzero(in_prompt), *output), everywhere(*output)
    penalties = Penalties(
        repeated=repeated,
        repetition=np.full(len(repeated.rows), repetition, dtype=np.float32),
        in_output=in_output,
        frequency=np.full(len(in_output.rows), frequency, dtype=np.float32),
        presence=np.full(len(in_output.rows), penalty.get("presence", 0.0), dtype=np.float32),
    )
    exact(logits, penalties=penalties)
