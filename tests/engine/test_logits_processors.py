"""Plug-ins in the sampler: what they see and may change, in which order, and what becomes of those that fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.engine_types import StreamingUpdate
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import NamedLogitsProcessor, SamplingParams
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import VOCAB_SIZE, greedy_answer, next_logits
from tests.support.engine.logits_plugins import Ban, installed

PROMPT = [5, 6, 7, 8, 9, 10]


def asks(name: str, **args: Any) -> NamedLogitsProcessor:
    return NamedLogitsProcessor(name=name, args=args)


def ask(engine: Harness, *processors: NamedLogitsProcessor, **params: Any) -> Answer:
    return engine.ask(PROMPT, params={"logits_processors": processors} | params)


def without(tokens: set[int], count: int, after: int = 0) -> list[int]:
    """The greedy answer in which these tokens do not stand from a position on."""
    answer: list[int] = []
    while len(answer) < count:
        logits = next_logits([*PROMPT, *answer])
        if len(answer) >= after:
            logits[sorted(tokens)] = -float("inf")
        answer.append(int(logits.argmax()))
    return answer


def test_it_changes_the_rows_that_ask_and_no_other(make_engine: MakeEngine) -> None:
    plugins = installed()
    engine = make_engine(plugins)
    usual = greedy_answer(PROMPT, 6)
    banned = {usual[0], usual[3]}
    expected = without(banned, 6)
    ban = asks("ban", tokens=sorted(banned))
    first = engine.add(PROMPT, params={"max_tokens": 6, "logits_processors": (ban,)})
    plain = engine.add(PROMPT, params={"max_tokens": 6})
    later = engine.add(
        PROMPT, params={"max_tokens": 6, "logits_processors": (asks("ban", tokens=[usual[2]], after=2),)}
    )
    answers = engine.run()
    assert answers[first].token_ids == expected
    assert answers[plain].token_ids == usual
    assert answers[later].token_ids == without({usual[2]}, 6, after=2)
    # one call a step for both rows
    ban_plugin = plugins["ban"]
    assert isinstance(ban_plugin, Ban)
    assert ban_plugin.num_rows == 12
    assert ban_plugin.num_calls < 12


def test_a_sampled_row_is_changed_too(make_engine: MakeEngine) -> None:
    engine = make_engine(installed())
    kept = list(range(40, 44))
    ban = asks("ban", tokens=[token for token in range(VOCAB_SIZE) if token not in kept])
    answer = ask(engine, ban, temperature=1.0, seed=3, max_tokens=20)
    assert set(answer.token_ids) <= set(kept)
    assert len(set(answer.token_ids)) > 1


def test_several_run_in_the_order_of_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(installed())
    # what is out stays out, whoever tries to bring it back
    assert 9 not in ask(engine, asks("ban", tokens=[9]), asks("only", token=9)).token_ids
    assert 9 not in ask(engine, asks("only", token=9), asks("ban", tokens=[9])).token_ids
    assert ask(engine, asks("only", token=9), asks("only", token=11)).token_ids == [9] * 4  # a tie: the first
    assert ask(engine, asks("ban", tokens=[9]), asks("only", token=11)).token_ids == [11] * 4


def test_its_stage_lies_between_token_rules_and_penalties(make_engine: MakeEngine) -> None:
    engine = make_engine(installed())
    allowed = ask(engine, asks("only", token=9), allowed_token_ids=(11, 12))
    assert 9 not in allowed.token_ids
    # 1000 less 2 for each time is far below 1000 over 3
    penalised = ask(engine, asks("only", token=9), repetition_penalty=3.0, max_tokens=3)
    assert penalised.token_ids == [9, 9, 9]
    # log-probabilities are those of the model
    told = ask(engine, asks("only", token=9), logprobs=0, max_tokens=1).logprobs
    assert told is not None
    usual = ask(engine, logit_bias={9: 100.0}, logprobs=0).logprobs
    assert usual is not None
    assert told.logprobs[0][0] == pytest.approx(usual.logprobs[0][0])


def test_where_it_leaves_no_token_the_request_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(installed())
    for temperature in (0.0, 1.0):
        answer = ask(engine, asks("ban", tokens=list(range(VOCAB_SIZE)), after=1), temperature=temperature, seed=1)
        assert (answer.error_code, len(answer.token_ids)) == ("invalid_request", 1)
        assert answer.error_message == "logits_processors leave no token for output position 1"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "logits processor 'broken' failed with RuntimeError; the worker's log has the traceback"),
        ("nan", "logits processor 'broken' made a logit that is NaN"),
        ("write", "logits processor 'broken' failed with ValueError; the worker's log has the traceback"),
    ],
)
def test_one_that_fails_ends_its_request_alone(make_engine: MakeEngine, how: str, message: str) -> None:
    engine = make_engine(installed())
    broken = engine.add(PROMPT, params={"max_tokens": 6, "logits_processors": (asks("broken", how=how, at=2),)})
    # asks for the same plug-in, which does nothing to it
    well = engine.add(PROMPT, params={"max_tokens": 6, "logits_processors": (asks("broken"),)})
    plain = engine.add(PROMPT, params={"max_tokens": 6, "temperature": 0.7, "seed": 5})
    answers = engine.run()
    assert (answers[broken].error_code, answers[broken].error_message) == ("logits_processor_failed", message)
    assert answers[broken].token_ids == greedy_answer(PROMPT, 2)
    assert answers[well].token_ids == greedy_answer(PROMPT, 6)
    assert (
        answers[plain].token_ids
        == engine.ask(PROMPT, params={"max_tokens": 6, "temperature": 0.7, "seed": 5}).token_ids
    )


@pytest.mark.parametrize("at", [0, 2])
def test_one_that_fails_on_one_of_several_sequences(make_engine: MakeEngine, at: int) -> None:
    """Before the first token they are one request, later each is on its own; here all meet the fault."""
    engine = make_engine(installed())
    broken = asks("broken", how="raise", at=at)
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 4, "logits_processors": (broken,)}
    request_id = engine.add(PROMPT, params=params)
    answers = engine.run()
    found = [answer for name, answer in answers.items() if name.startswith(request_id)]
    assert found
    assert {answer.error_code for answer in found} == {"logits_processor_failed"}


def test_the_same_after_a_preemption(make_engine: MakeEngine) -> None:
    ban = asks("ban", tokens=[greedy_answer(PROMPT, 5)[4]], after=4)
    expected = ask(make_engine(installed()), ban, max_tokens=24).token_ids
    small = make_engine(installed(), num_blocks=9, max_num_batched_tokens=7, max_num_seqs=3)
    asked = [small.add(PROMPT, params={"max_tokens": 24, "logits_processors": (ban,)}) for _ in range(3)]
    answers = small.run()
    assert small.scheduler.num_preemptions > 0
    assert [answers[request_id].token_ids for request_id in asked] == [expected] * 3


def test_the_same_through_prefill_and_decode(make_engine: MakeEngine) -> None:
    first = greedy_answer(PROMPT, 1)
    ban = asks("ban", tokens=first)
    expected = ask(make_engine(installed()), ban, max_tokens=8).token_ids
    pair = Pair(make_engine(installed()), make_engine(installed()))
    pair.add(PROMPT, "r", params={"max_tokens": 8, "logits_processors": (ban,)})
    pair.run()
    assert pair.answer("r").token_ids == expected


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "nobody",
            {},
            r"logits_processors\[0\].name is 'nobody', which is not known; loaded here: ban, broken, only",
        ),
        ("", {}, "name must be 1 to 128 characters, not ''"),
        ("x" * 129, {}, "name must be 1 to 128 characters"),
        ("ban", {}, r"logits_processors\[0\].args were refused by 'ban': tokens must be token ids below"),
        ("ban", {"tokens": ["x"] * 2000}, "at most 4096 bytes of JSON"),
        ("ban", {"tokens": object()}, "args must be JSON values"),
    ],
)
def test_refusals(make_engine: MakeEngine, name: str, args: dict[str, Any], message: str) -> None:
    engine = make_engine(installed())
    with pytest.raises(InvalidRequest, match=message) as refused:
        ask(engine, NamedLogitsProcessor(name=name, args=args))
    assert refused.value.field == "logits_processors"


def test_a_turn_of_a_session_is_held_to_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(installed())
    turn = SamplingParams(logits_processors=(asks("nobody"),))
    with pytest.raises(InvalidRequest, match="loaded here: ban, broken, only"):
        engine.core.verify_update(StreamingUpdate(request_id="r", prompt_token_ids=[5], sampling_params=turn))
    with pytest.raises(InvalidRequest, match="an embedding ends with its prompt"):
        engine.request(PROMPT, resumable=True, pooling_params=PoolingParams())


def test_an_engine_without_any(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="none is loaded here"):
        ask(engine, asks("ban"))
    with pytest.raises(InvalidRequest, match="at most 8, not 9"):
        ask(engine, *[asks("ban")] * 9)


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("plugin_of_a_test", None)


def test_entry_points_are_loaded_by_name(plugin_folder: Path) -> None:
    install(plugin_folder, "quiet = plugin_of_a_test:Quiet\nother = plugin_of_a_test:Quiet")
    processors = LogitsProcessors.from_entry_points(["quiet"])
    assert processors.names == ["quiet"]
    processors.verify([asks("quiet")], 10)
    with pytest.raises(InvalidRequest, match="'other', which is not known; loaded here: quiet"):
        processors.verify([asks("other")], 10)


@pytest.mark.parametrize("names", [(), ("quiet",)])
def test_an_unnamed_plug_in_is_not_imported(plugin_folder: Path, names: tuple[str, ...]) -> None:
    (plugin_folder / "unnamed_plugin_of_a_test.py").write_text("raise RuntimeError('imported')")
    install(plugin_folder, "quiet = plugin_of_a_test:Quiet\nunnamed = unnamed_plugin_of_a_test:Any")
    assert LogitsProcessors.from_entry_points(names).names == list(names)
    assert "unnamed_plugin_of_a_test" not in sys.modules
    assert ("plugin_of_a_test" in sys.modules) == bool(names)


def test_a_name_that_is_missing_or_ambiguous_stops_the_start(plugin_folder: Path) -> None:
    install(plugin_folder, "quiet = plugin_of_a_test:Quiet")
    with pytest.raises(ConfigError, match="logits_processors names 'loud', which is not installed; installed: quiet"):
        LogitsProcessors.from_entry_points(["loud"])
    install(plugin_folder, "quiet = plugin_of_a_test:BAD", "another-plugin")
    with pytest.raises(ConfigError, match="'quiet', which is installed 2 times: "):
        LogitsProcessors.from_entry_points(["quiet"])


@pytest.mark.parametrize("target", ["plugin_of_a_test:Missing", "plugin_of_a_test:BAD", "no_such_module:Quiet"])
def test_one_that_cannot_be_made_stops_the_start(plugin_folder: Path, target: str) -> None:
    install(plugin_folder, f"loud = {target}")
    with pytest.raises(ConfigError, match=f"logits processor 'loud' .{target}. cannot be loaded"):
        LogitsProcessors.from_entry_points(["loud"])


def install(folder: Path, entry_point: str, name: str = "plugin-of-a-test") -> None:
    (folder / "plugin_of_a_test.py").write_text(
        "class Quiet:\n    def check(self, args, vocab_size): ...\n    def apply(self, logits, rows): ...\nBAD = 5\n"
    )
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pdserve.logits_processors]\n{entry_point}\n")
