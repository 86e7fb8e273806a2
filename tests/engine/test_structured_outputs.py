"""Structured outputs in one engine and through P and D, with a model whose weights are random: the form does it all."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdserve.common.errors import GrammarUnavailable, InvalidRequest, Overloaded, PeerError
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.structured_outputs import MAX_DEPTH, StructuredOutputsParams
from pdserve.engine.request import RequestStatus, Wait
from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, SourceFinished
from pdserve.engine.structured_outputs import structured_output_manager as grammar_waits
from pdserve.engine.structured_outputs.grammar import GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher, Vocabulary, compile_grammar
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.engine_pair import Pair
from tests.support.run.waiting import HANG_S

VOCAB_SIZE = 320
EOS = 2
PROMPT = list(range(40, 75))
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Lima", "Oslo"]}, "size": {"type": "integer", "minimum": 1, "maximum": 999}},
    "required": ["name", "size"],
}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(folder, VOCAB_SIZE)
    yield compiler
    compiler.close()


Make = Callable[..., Harness]


@pytest.fixture
def make(make_real_engine: Callable[..., Harness], folder: Path, compiler: GrammarCompiler) -> Make:
    def made(**fields: Any) -> Harness:
        return make_real_engine(folder, **({"grammars": compiler} | fields))

    return made


def asked(max_tokens: int = 200, seed: int = 0, temperature: float = 1.0, **form: Any) -> dict[str, Any]:
    """Parameters of a request; form: fields of `StructuredOutputsParams`."""
    params = StructuredOutputsParams(disable_any_whitespace=form.pop("compact", True), **form)
    return {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "structured_outputs": params}


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    return tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def is_city(text: str) -> bool:
    jsonschema.validate(json.loads(text), CITY)
    return True


FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": CITY}, is_city),
    ({"json": json.dumps(CITY)}, is_city),
    ({"regex": r"[A-C]{2}-\d{3}(x|yz)?"}, re.compile(r"[A-C]{2}-\d{3}(x|yz)?").fullmatch),
    (
        {"choice": ["yes", "no", ' "quoted" \\n\n\t', "é\U0001f600\u2028"]},
        lambda text: text in ("yes", "no", ' "quoted" \\n\n\t', "é\U0001f600\u2028"),
    ),
    ({"grammar": 'root ::= "a" (b | "c") "!"\nb ::= [0-9] [0-9]'}, re.compile(r"a(\d\d|c)!").fullmatch),
    (
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<city>",
                        "content": {"type": "json_schema", "json_schema": CITY, "max_whitespace_cnt": 1},
                        "end": "</city>",
                    },
                }
            )
        },
        lambda text: is_city(text.removeprefix("<city>").removesuffix("</city>")),
    ),
]
EACH = pytest.mark.parametrize(
    ("form", "fits"), FORMS, ids=[f"{n}-{next(iter(form))}" for n, (form, _) in enumerate(FORMS)]
)


@pytest.mark.few(1)
@EACH
def test_each_form_in_one_engine_and_through_p_and_d(
    make: Make, tokenizer: Tokenizer, form: dict[str, Any], fits: Callable[[str], Any]
) -> None:
    alone, pair = make(max_num_batched_tokens=16), Pair(make(max_num_batched_tokens=16), make())
    for seed in range(4):
        params = asked(seed=seed, temperature=float(seed > 0), **form)
        answer = alone.ask(PROMPT, eos=(EOS,), params=params)
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == EOS
        assert fits(text_of(tokenizer, answer)), text_of(tokenizer, answer)
        pair.add(PROMPT, f"r{seed}", eos=(EOS,), params=params)
        pair.run()
        assert pair.answer(f"r{seed}").token_ids == answer.token_ids


def test_any_json_object(make: Make, tokenizer: Tokenizer) -> None:
    engine = make(max_num_seqs=16)
    ids = [engine.add(PROMPT, eos=(EOS,), params=asked(120, seed=seed, json_object=True)) for seed in range(16)]
    answers = engine.run()
    ended = [answers[name] for name in ids if answers[name].finish_reason is FinishReason.STOP]
    assert ended, "none came to an end"
    for answer in ended:
        assert isinstance(json.loads(text_of(tokenizer, answer)), dict)
    for name in ids:
        assert text_of(tokenizer, answers[name]).startswith("{")


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = ["a", "b", 'c "d"', "é"]
    properties = st.dictionaries(st.sampled_from(names), inner, min_size=1, max_size=3)
    return properties.flatmap(
        lambda given: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(given),
                "required": st.lists(st.sampled_from(sorted(given)), unique=True),
            },
            optional={"additionalProperties": st.just(False), "title": st.just("something")},
        )
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 3)},
        optional={"minItems": st.integers(0, 1)},
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return lists | tuples


def numbers(kind: str) -> st.SearchStrategy[Any]:
    return st.tuples(st.integers(-1000, 1000), st.integers(0, 2000)).map(
        lambda ends: {"type": kind, "minimum": ends[0], "maximum": ends[0] + ends[1]}
    )


SCALARS = st.one_of(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"], "minimum": -5, "maximum": 5},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
            *({"type": "string", "pattern": each} for each in ("^[a-f]{1,5}$", "^\\d\\d?x$", "^(a|b)c*d$")),
            *({"type": "string", "format": each} for each in ("date", "ipv4", "uuid")),
        ]
    ),
    numbers("integer"),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 5)] * 2
    ),
    st.lists(
        st.one_of(st.text(max_size=6), st.integers(-99, 99), st.booleans(), st.none()), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    st.builds(lambda value: {"const": value}, st.text(max_size=6) | st.floats(-1, 1, width=16)),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=6,
)
BATCH = 20
NUM_BATCHES = 10
RANDOM_SCHEMAS = st.lists(SCHEMAS, min_size=BATCH, max_size=BATCH)
FEW = settings(
    max_examples=NUM_BATCHES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Tally:
    """How many answers came to an end, over all batches."""

    def __init__(self) -> None:
        self.num_ended = self.num_asked = 0

    def check(self, tokenizer: Tokenizer, schema: Any, answer: Answer) -> None:
        self.num_asked += 1
        assert not answer.error_code, (schema, answer.error_message)
        text = text_of(tokenizer, answer)
        # surrogates and the like, which xgrammar takes for characters, and which no trained model writes
        if answer.finish_reason is FinishReason.STOP and "\ufffd" not in text:
            self.num_ended += 1
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_to_random_schemas_validate(make: Make, tokenizer: Tokenizer) -> None:
    engine, tally = make(num_blocks=600, max_num_seqs=BATCH), Tally()

    @FEW
    @given(RANDOM_SCHEMAS)
    def ask(schemas: list[Any]) -> None:
        ids = [
            engine.add(PROMPT[:9], eos=(EOS,), params=asked(seed=seed, json=json.dumps(schema)))
            for seed, schema in enumerate(schemas)
        ]
        answers = engine.run()
        for schema, name in zip(schemas, ids, strict=True):
            tally.check(tokenizer, schema, answers[name])

    ask()
    assert tally.num_asked >= NUM_BATCHES * BATCH
    assert tally.num_ended > 0.8 * tally.num_asked


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_batches", [3, pytest.param(NUM_BATCHES, marks=pytest.mark.slow)])
def test_answers_to_random_schemas_validate_through_p_and_d(make: Make, tokenizer: Tokenizer, num_batches: int) -> None:
    pair, tally = Pair(make(num_blocks=100), make(num_blocks=600, max_num_seqs=BATCH)), Tally()

    @settings(FEW, max_examples=num_batches)
    @given(RANDOM_SCHEMAS)
    def ask(schemas: list[Any]) -> None:
        ids = [f"r{tally.num_asked}-{seed}" for seed in range(len(schemas))]
        for seed, (schema, name) in enumerate(zip(schemas, ids, strict=True)):
            pair.add(PROMPT, name, eos=(EOS,), params=asked(seed=seed, json=json.dumps(schema)))
        pair.run()
        for schema, name in zip(schemas, ids, strict=True):
            tally.check(tokenizer, schema, pair.answer(name))

    ask()
    assert tally.num_asked >= num_batches * BATCH
    assert tally.num_ended > 0.8 * tally.num_asked


@pytest.mark.slow
def test_i5_preemption_and_batch_mates_change_nothing(make: Make) -> None:
    forms = [asked(seed=seed, json=CITY) for seed in range(3)] + [asked(60, regex="[a-z ]+")]
    alone = [make().ask(PROMPT, eos=(EOS,), params=params).token_ids for params in forms]
    # so few blocks that the batch mates preempt each other, however late the grammars are compiled
    engine = make(num_blocks=8, max_model_len=128, max_num_batched_tokens=64)
    ids = [engine.add(PROMPT, eos=(EOS,), params=params) for params in forms]
    mates = [engine.add([n] * 40, params={"max_tokens": 40}) for n in range(3, 6)]
    answers = engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert [answers[name].token_ids for name in ids] == alone
    for n, mate in enumerate(mates, 3):
        assert answers[mate].token_ids == make().ask([n] * 40, params={"max_tokens": 40}).token_ids


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "minimum greater than maximum"),
    ({"json": {"$ref": "#/nowhere"}}, "$ref names nothing: there is no 'nowhere'"),
    ({"json": {"anyOf": []}}, "the JSON schema at #: anyOf has no entry, at least 1 is needed"),
    ({"json": {"type": "array", "items": {"enum": []}}}, "at #/items: enum has no entry"),
    ({"json": {"type": "array", "uniqueItems": True}}, "the JSON schema at #: uniqueItems is not supported"),
    ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, "at #/properties/a: not is not supported"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "at #: a pattern with look-around is not supported"),
    ({"regex": "(?=a)b"}, "Lookahead is not supported"),
    ({"regex": "(a"}, "parenthesis is not closed"),
    ({"grammar": "root ::= other"}, 'Rule "other" is not defined'),
    ({"structural_tag": "{}"}, "must have a format field"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("form", "told"), REFUSED)
def test_what_cannot_be_compiled_ends_before_any_token(make: Make, form: dict[str, Any], told: str) -> None:
    engine = make()
    mate = engine.add(PROMPT, params={"max_tokens": 6})
    answer = engine.ask(PROMPT, eos=(EOS,), params=asked(**form))
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.ERROR, [])
    assert answer.error_code == InvalidRequest.code
    assert answer.error_message.startswith("structured_outputs")
    assert told in answer.error_message
    assert ".cc:" not in answer.error_message
    assert len(engine.answers[mate].token_ids) == 6
    pair = Pair(make(), make())
    pair.add(PROMPT, "r", eos=(EOS,), params=asked(**form))
    pair.run()
    assert pair.answer("r").error_code == InvalidRequest.code
    # in a pair the first of the two to say so ends both
    source = make()
    source.add(PROMPT, "r", eos=(EOS,), params=asked(**form), transfer_source=True)
    assert source.run()["r"].error_code == InvalidRequest.code


def test_deep_schemas_are_refused_before_they_are_compiled(make: Make) -> None:
    schema: Any = {"type": "null"}
    for _ in range(MAX_DEPTH):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match=f"nested deeper than {MAX_DEPTH} levels"):
        make().request(PROMPT, params=asked(json=schema))


def test_an_engine_without_a_tokenizer_refuses(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs needs a tokenizer"):
        make(grammars=None).request(PROMPT, params=asked(json_object=True))


class HeldCompiler(GrammarCompiler):
    """Compiles when it is told to, in the caller's thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, VOCAB_SIZE)
        self.held: list[GrammarJob] = []
        self._vocabulary = Vocabulary(folder, VOCAB_SIZE)

    def submit(self, job: GrammarJob) -> None:
        self.held.append(job)

    def release(self) -> None:
        held, self.held = self.held, []
        for job in held:
            if job.is_wanted():
                job.deliver(self._grammar(job))

    def _grammar(self, job: GrammarJob) -> GrammarMatcher:
        compiled = compile_grammar(self._vocabulary, job.params)
        return GrammarMatcher(compiled, job.eos_token_ids, VOCAB_SIZE, job.output_token_ids)


@pytest.fixture
def held(folder: Path) -> HeldCompiler:
    return HeldCompiler(folder)


def test_a_slow_grammar_delays_nobody_else(make: Make, held: HeldCompiler, tokenizer: Tokenizer) -> None:
    engine = make(grammars=held)
    slow = engine.add(PROMPT, eos=(EOS,), params=asked(choice=["yes"]))
    assert engine.scheduler.requests[slow].status is RequestStatus.WAITING_FOR_FSM
    mate = engine.add(PROMPT[:5], params={"max_tokens": 30})
    for _ in range(31):
        engine.step()
    assert len(engine.answers[mate].token_ids) == 30
    assert slow not in engine.answers
    assert not engine.scheduler.has_tokens_to_compute
    held.release()
    assert text_of(tokenizer, engine.run()[slow]) == "yes"


@pytest.mark.parametrize(
    ("begins", "code", "told"),
    [
        (True, GrammarUnavailable.code, "structured_outputs was not compiled within 0 s, for lack of CPU time"),
        (False, Overloaded.code, "structured_outputs waited 0 s for its turn: this worker compiles others"),
    ],
)
def test_a_grammar_that_is_not_compiled_in_time_ends_its_request(
    make: Make, held: HeldCompiler, begins: bool, code: str, told: str
) -> None:
    engine = make(grammars=held, grammar_timeout_s=0.0)
    request_id = engine.add(PROMPT, eos=(EOS,), params=asked(choice=["yes"]))
    if begins:
        held.held[0].begins()
    answer = engine.run()[request_id]
    assert (answer.error_code, answer.error_message) == (code, told)
    held.release()
    engine.step()
    assert not engine.scheduler.requests


def test_a_grammar_has_its_whole_time_after_a_long_wait_for_its_turn(
    make: Make, held: HeldCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(grammar_waits, "clock", SimpleNamespace(monotonic=lambda: now))
    engine = make(grammars=held, grammar_timeout_s=10.0)
    first = engine.add(PROMPT, eos=(EOS,), params=asked(choice=["yes"]))
    late = engine.add(PROMPT, eos=(EOS,), params=asked(choice=["no"]))
    now += 9.0
    for job in held.held:
        job.begins()
    now += 9.0
    engine.step()
    assert len(engine.scheduler.requests) == 2
    held.held.pop(0)
    held.release()
    while late in engine.scheduler.requests:
        engine.step()
    assert text_of(tokenizer, engine.answers[late]) == "no"
    now += 21.0
    assert engine.run()[first].error_code == GrammarUnavailable.code


def test_abort_while_compiling(make: Make, held: HeldCompiler) -> None:
    engine = make(grammars=held)
    names = [engine.add(PROMPT, eos=(EOS,), params=asked(choice=["yes"]), remote_prefill=remote) for remote in (0, 1)]
    engine.step()
    engine.outbox.take()
    [room] = [request for request in engine.scheduler.requests.values() if request.core.remote_prefill]
    [hold] = engine.scheduler.kv.block_rows(room)
    assert hold
    wanted = [job.is_wanted() for job in held.held]
    for name in names:
        engine.core.abort_request(name)
    assert wanted == [True, True]
    assert [job.is_wanted() for job in held.held] == [False, False]
    held.release()
    engine.must_be_idle = False  # the receiving one's blocks are out until their hold is returned
    engine.step()
    assert not engine.scheduler.requests
    assert all(engine.answers[name].finish_reason is FinishReason.ABORT for name in names)


def received(engine: Harness, name: str, first_token: int) -> list[Any]:
    """Everything that a source says of a request, in order."""
    [into] = [message for message in engine.outbox.take() if isinstance(message, ReceiveInto)]
    return [
        Landed(name, len(into.hold)),
        SourceFinished(name, len(PROMPT), (first_token,)),
        HoldReturned(name, into.hold),
    ]


@pytest.mark.parametrize("grammar_comes", range(4))
def test_grammar_and_kv_come_in_any_order(
    make: Make, held: HeldCompiler, tokenizer: Tokenizer, grammar_comes: int
) -> None:
    [letter] = tokenizer.encode("y", add_special_tokens=False)
    engine = make(grammars=held)
    name = engine.add(PROMPT, eos=(EOS,), params=asked(choice=["yes"]), remote_prefill=True)
    request = engine.scheduler.requests[name]
    assert request.waits_for == {Wait.GRAMMAR, Wait.REMOTE_KV}
    engine.step()
    events = received(engine, name, letter)
    for place in range(4):
        if place == grammar_comes:
            held.release()
            engine.step()
            assert Wait.GRAMMAR not in request.waits_for
        else:
            engine.core.apply(events.pop(0))
        expected = RequestStatus.WAITING_FOR_FSM
        if place >= grammar_comes:
            expected = RequestStatus.WAITING_FOR_REMOTE_KVS
        if place < 3:
            assert request.status is expected
    answer = engine.run()[name]
    assert tokenizer.decode([letter, *answer.token_ids], skip_special_tokens=True) == "yes"
    assert (answer.finish_reason, answer.first_position) == (FinishReason.STOP, 1)


def test_a_first_token_that_does_not_fit_ends_the_request(make: Make, tokenizer: Tokenizer) -> None:
    engine = make()
    name = engine.add(PROMPT, eos=(EOS,), params=asked(regex="[0-9]+"), remote_prefill=True)
    engine.step()
    [letter] = tokenizer.encode("y", add_special_tokens=False)
    for event in received(engine, name, letter):
        engine.core.apply(event)
    answer = engine.run()[name]
    assert (answer.error_code, answer.token_ids) == ("transfer_failed", [])


def test_rules_that_leave_no_token_name_the_form(make: Make, tokenizer: Tokenizer) -> None:
    [letter] = tokenizer.encode("y", add_special_tokens=False)
    answer = make().ask(PROMPT, eos=(EOS,), params=asked(regex="[0-9]+") | {"allowed_token_ids": (letter,)})
    assert answer.error_message == "structured_outputs, allowed_token_ids leave no token for output position 0"
    answer = make().ask(PROMPT, eos=(EOS,), params=asked(choice=["yes"]) | {"min_tokens": 50})
    assert answer.error_message.startswith("structured_outputs, min_tokens leave no token for output position")


def test_special_tokens_are_no_text(make: Make, tokenizer: Tokenizer) -> None:
    answer = make().ask(PROMPT, eos=(EOS,), params=asked(choice=["<|im_start|>"]))
    assert tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True) == "<|im_start|>"


def test_the_grammars_end_ends_the_answer(make: Make, tokenizer: Tokenizer) -> None:
    ignoring = make().ask(PROMPT, eos=(EOS,), params=asked(choice=["yes"]) | {"ignore_eos": True})
    assert (ignoring.finish_reason, ignoring.token_ids[-1]) == (FinishReason.STOP, EOS)
    without_eos = make().ask(PROMPT, params=asked(choice=["yes"]))
    assert (without_eos.finish_reason, text_of(tokenizer, without_eos)) == (FinishReason.STOP, "yes")
    source = make().ask(PROMPT, eos=(EOS,), params=asked(1, choice=["y"]), transfer_source=True)
    assert text_of(tokenizer, source) == "y"


def test_a_place_after_output_is_the_place_that_led_there(folder: Path, tokenizer: Tokenizer) -> None:
    compiled = compile_grammar(Vocabulary(folder, VOCAB_SIZE), StructuredOutputsParams(choice=["yes", "yellow"]))
    tokens = tokenizer.encode("ye", add_special_tokens=False)
    resumed = GrammarMatcher(compiled, (EOS,), VOCAB_SIZE, tokens)
    [letter] = tokenizer.encode("l", add_special_tokens=False)
    assert not resumed.accept(tokens[0])
    assert resumed.accept(letter)
    with pytest.raises(PeerError, match="output position 0 does not fit"):
        GrammarMatcher(compiled, (EOS,), VOCAB_SIZE, [letter])


def test_threads_compile_and_wake(folder: Path, compiler: GrammarCompiler) -> None:
    arrived = threading.Event()
    got: list[Any] = []

    def deliver(grammar: Any) -> None:
        got.append(grammar)
        arrived.set()

    for wanted in (False, True):
        params = StructuredOutputsParams(choice=["yes"])
        compiler.submit(GrammarJob(params, (EOS,), (), partial(bool, wanted), lambda: None, deliver))
    assert arrived.wait(HANG_S)
    assert len(got) == 1
    assert not got[0].has_ended


def test_each_of_n_sequences_has_a_place_of_its_own(make: Make, tokenizer: Tokenizer) -> None:
    params = asked(json=CITY, seed=5) | {"n": 4}
    alone = make()
    alone.add(PROMPT, "r.0", eos=(EOS,), params=params, n=4)
    answers = alone.run()
    texts = [text_of(tokenizer, answer) for answer in answers.values()]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert all(map(is_city, texts))
    pair = Pair(make(max_num_batched_tokens=16), make())
    pair.add(PROMPT, "r", eos=(EOS,), params=params, n=4)
    pair.run()
    assert [pair.answer("r", index).token_ids for index in range(4)] == [
        answers[f"r.0/{index}"].token_ids for index in range(4)
    ]


def test_i4_an_answer_resumed_at_any_position_goes_on_in_its_schema(make: Make, tokenizer: Tokenizer) -> None:
    alone, pair = make(max_num_batched_tokens=16), Pair(make(max_num_batched_tokens=16), make())
    params = asked(json=CITY, seed=5)
    whole = alone.ask(PROMPT, eos=(EOS,), params=params)
    assert is_city(text_of(tokenizer, whole))
    for cut in range(len(whole.token_ids)):
        # each with a salt of its own: nothing of it is in a cache
        fields: dict[str, Any] = {
            "eos": (EOS,),
            "params": params,
            "output": whole.token_ids[:cut],
            "salt": f"{cut}",
        }
        answer = alone.ask(PROMPT, **fields)
        assert (answer.first_position, answer.token_ids) == (cut, whole.token_ids[cut:])
        assert answer.finish_reason is FinishReason.STOP
        pair.add(PROMPT, f"r{cut}", **fields)
        pair.run()
        assert pair.answer(f"r{cut}").token_ids == whole.token_ids[cut:]


def test_an_end_token_that_the_model_lacks_is_left_out(make: Make, tokenizer: Tokenizer) -> None:
    """The grammar library refuses an end token outside the vocabulary, and with it the whole grammar."""
    harness = make()
    with_unknown = harness.add(PROMPT, eos=(EOS, 20_000), params=asked(regex="[0-9]{3}"))
    unknown_alone = harness.add(PROMPT, eos=(20_000,), params=asked(regex="[0-9]{3}", max_tokens=8))
    harness.run()
    for request_id in (with_unknown, unknown_alone):
        answer = harness.answers[request_id]
        assert (answer.error_message, answer.finish_reason) == ("", FinishReason.STOP)
        assert re.fullmatch("[0-9]{3}", text_of(tokenizer, answer))
