"""One client's stream: positions, stop conditions, held back text, the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.text.outputs.output_processor import OutputProcessor, PositionConflict, PositionGap
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.tokenization.tokenizer import Tokenizer

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
EOS = 1
IM_END = 2
MANY_DRAWS = [HealthCheck.too_slow]
"""Not checked where one example is dozens of draws, each of which depends on what the last one did."""


@pytest.fixture
def make(byte_level_tokenizer: Tokenizer) -> Callable[..., OutputProcessor]:
    def make_processor(num_sequences: int = 1, **params: Any) -> OutputProcessor:
        return OutputProcessor(
            byte_level_tokenizer,
            request_id="r1",
            prompt="hi",
            prompt_token_ids=byte_level_tokenizer.encode("hi", add_special_tokens=True),
            sampling_params=SamplingParams(max_tokens=1000, **params),
            num_sequences=num_sequences,
        )

    return make_processor


@pytest.fixture
def ids_of(byte_level_tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """One token a byte, so that every text has a known number of tokens."""

    def encode(text: str) -> list[int]:
        return [byte_level_tokenizer.encode(c, add_special_tokens=False)[0] for c in text]

    return encode


def delta(
    processor: OutputProcessor,
    token_ids: list[int],
    finish: FinishReason | None = None,
    reason: int | str | None = None,
    at: int | None = None,
    index: int = 0,
) -> CompletionOutput | None:
    first = processor.states[index].next_position if at is None else at
    return processor.process(index, first, token_ids, finish, reason)


def feed(*args: Any, **kwargs: Any) -> CompletionOutput:
    """As `delta`, which must be something."""
    found = delta(*args, **kwargs)
    assert found is not None
    return found


def test_deltas_hold_only_what_is_new(make, ids_of):
    processor = make()
    first, second = ids_of("ab"), ids_of("cd")
    assert feed(processor, first) == CompletionOutput(index=0, text="ab", token_ids=first)
    last = feed(processor, second, LENGTH)
    assert last == CompletionOutput(index=0, text="cd", token_ids=second, finish_reason="length")
    assert processor.finished
    assert processor.num_output_tokens == 4
    assert processor.output_token_ids(0) == first + second
    processor.num_cached_tokens = 1
    whole = processor.request_output()
    assert (whole.request_id, whole.prompt, whole.finished, whole.num_cached_tokens) == ("r1", "hi", True, 1)
    assert whole.outputs == [
        CompletionOutput(index=0, text="abcd", token_ids=first + second, finish_reason="length"),
    ]
    assert last is not None
    assert processor.request_output([last]).outputs == [last]


class TestPositions:
    def test_repeated_and_overlapping_tokens_are_dropped(self, make, ids_of):
        processor = make()
        ids = ids_of("abcdef")
        feed(processor, ids[:3])
        assert delta(processor, ids[:3], at=0) is None
        assert delta(processor, ids[1:2], at=1) is None
        assert feed(processor, ids[2:5], at=2) == CompletionOutput(index=0, text="de", token_ids=ids[3:5])
        assert delta(processor, [], at=0) is None
        assert processor.states[0].next_position == 5

    def test_another_token_at_a_known_position(self, make, ids_of):
        processor = make()
        feed(processor, ids_of("abc"))
        with pytest.raises(PositionConflict, match="at 1") as caught:
            feed(processor, ids_of("xcd"), at=1)
        assert isinstance(caught.value, InternalError)
        assert caught.value.retryable
        assert processor.states[0].next_position == 3
        with pytest.raises(PositionConflict):
            feed(processor, ids_of("a"), at=-1)

    def test_a_gap(self, make, ids_of):
        processor = make()
        feed(processor, ids_of("a"))
        with pytest.raises(PositionGap, match="at 2, but 1 is next") as caught:
            feed(processor, ids_of("c"), at=2)
        assert caught.value.retryable
        with pytest.raises(PositionGap):
            feed(processor, [], STOP, at=2)
        assert feed(processor, ids_of("b")) is not None

    def test_an_end_before_the_last_token_is_a_conflict(self, make, ids_of):
        processor = make()
        feed(processor, ids_of("abc"))
        with pytest.raises(PositionConflict, match="ends after 2 tokens, but has 3"):
            feed(processor, ids_of("ab"), LENGTH, at=0)
        assert not processor.finished

    def test_a_repeat_may_bring_the_end(self, make, ids_of):
        processor = make()
        ids = ids_of("ab")
        feed(processor, ids)
        assert feed(processor, ids, LENGTH, at=0) == CompletionOutput(
            index=0, text="", token_ids=[], finish_reason="length"
        )

    def test_an_unknown_sequence(self, make, ids_of):
        processor = make(num_sequences=2)
        for index in (2, -1):
            with pytest.raises(PositionConflict, match="no sequence"):
                processor.process(index, 0, ids_of("a"), None, None)

    @given(data=st.data())
    @settings(max_examples=60, suppress_health_check=MANY_DRAWS)
    def test_any_schedule_of_repeats_gives_the_stream_once(self, byte_level_tokenizer, data):
        ids = byte_level_tokenizer.encode(data.draw(st.text(max_size=20)), add_special_tokens=False)
        processor = OutputProcessor(
            byte_level_tokenizer,
            request_id="r",
            prompt=None,
            prompt_token_ids=[],
            sampling_params=SamplingParams(skip_special_tokens=False),
        )
        text, got = "", []
        while processor.states[0].next_position < len(ids):
            first = data.draw(st.integers(0, processor.states[0].next_position))
            end = data.draw(st.integers(first, len(ids)))
            piece = processor.process(0, first, ids[first:end], None, None)
            text += piece.text if piece else ""
            got += piece.token_ids if piece else []
        assert text + feed(processor, [], LENGTH).text == byte_level_tokenizer.decode(ids, skip_special_tokens=False)
        assert got == ids


class TestEnd:
    def test_eos_has_no_text_but_counts(self, make, ids_of):
        for skip in (True, False):
            processor = make(skip_special_tokens=skip)
            last = feed(processor, [*ids_of("a"), EOS], STOP)
            assert last == CompletionOutput(
                index=0, text="a", token_ids=[*ids_of("a"), EOS], finish_reason="stop", stop_reason=None
            )
            assert processor.num_output_tokens == 2

    def test_stop_token_has_no_text_but_counts(self, make, ids_of):
        (dot,) = ids_of("x")
        processor = make(stop_token_ids=(dot,))
        last = feed(processor, [*ids_of("a"), dot], STOP, dot)
        assert (last.text, last.token_ids[-1], last.stop_reason) == ("a", dot, dot)

    def test_stop_token_is_shown_on_request(self, make, ids_of):
        (dot,) = ids_of("x")
        assert feed(make(stop_token_ids=(dot,), include_stop_str_in_output=True), [dot], STOP, dot).text == "x"
        shown = make(include_stop_str_in_output=True, skip_special_tokens=False)
        assert feed(shown, [EOS], STOP).text == "</s>"
        assert feed(make(include_stop_str_in_output=True), [EOS], STOP).text == ""

    def test_ignored_eos_is_an_ordinary_token(self, make):
        processor = make(ignore_eos=True, skip_special_tokens=False)
        assert feed(processor, [EOS]).text == "</s>"
        assert feed(processor, [EOS], LENGTH).text == "</s>"

    def test_a_last_token_that_is_no_stop_token_keeps_its_text(self, make, ids_of):
        """A grammar can end a sequence at an ordinary token."""
        assert feed(make(), ids_of("}"), STOP).text == "}"

    def test_only_the_last_token_can_be_silent(self, make, ids_of):
        processor = make(skip_special_tokens=False)
        assert feed(processor, [EOS, *ids_of("a")], LENGTH).text == "</s>a"

    def test_after_the_end_everything_is_ignored(self, make, ids_of):
        processor = make()
        assert feed(processor, ids_of("a"), ABORT).finish_reason == "abort"
        assert delta(processor, ids_of("b")) is None
        assert delta(processor, ids_of("z"), STOP, at=0) is None
        assert delta(processor, ids_of("z"), at=99) is None
        assert processor.output_token_ids(0) == ids_of("a")
        assert processor.request_output().outputs[0].finish_reason == "abort"

    def test_an_abort_needs_no_position(self, make, ids_of):
        processor = make()
        feed(processor, ids_of("abc"))
        assert feed(processor, [], ABORT, at=0).finish_reason == "abort"

    def test_half_a_character_is_held_and_shown_at_the_end(self, make, byte_level_tokenizer):
        emoji = byte_level_tokenizer.encode("🙀", add_special_tokens=False)
        processor = make()
        assert feed(processor, emoji[:-1]).text == ""
        assert feed(processor, emoji[-1:]).text == "🙀"
        assert feed(processor, emoji[:-1]).text == ""
        assert feed(processor, [], ABORT).text == "\ufffd"

    def test_half_a_character_before_eos(self, make, byte_level_tokenizer):
        emoji = byte_level_tokenizer.encode("🙀", add_special_tokens=False)
        for stop in ((), ("x",)):
            assert feed(make(stop=stop), [*emoji[:-1], EOS], STOP).text == "\ufffd"


class TestStopStrings:
    def test_split_over_tokens(self, make, ids_of):
        processor = make(stop=("END",))
        assert feed(processor, ids_of("aE")).text == "a"
        assert feed(processor, ids_of("N")).text == ""
        assert feed(processor, ids_of("E")).text == "EN"
        assert feed(processor, ids_of("ND")) == CompletionOutput(
            index=0, text="", token_ids=ids_of("ND"), finish_reason="stop", stop_reason="END"
        )
        assert processor.finished
        assert processor.request_output().outputs[0].text == "aEN"

    def test_tokens_after_the_match_are_dropped(self, make, ids_of):
        processor = make(stop=("cd",))
        last = feed(processor, ids_of("abcdef"), LENGTH)
        assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("ab", ids_of("abcd"), "stop", "cd")
        assert processor.num_output_tokens == 4

    def test_a_match_inside_one_token(self, make, byte_level_tokenizer):
        ids = byte_level_tokenizer.encode("the cat", add_special_tokens=False)
        processor = make(stop=("h",))
        last = feed(processor, ids)
        assert (last.text, last.token_ids) == ("t", ids[: len(last.token_ids)])
        assert byte_level_tokenizer.decode(last.token_ids, skip_special_tokens=True).startswith("th")

    def test_included_on_request(self, make, ids_of):
        processor = make(stop=("cd",), include_stop_str_in_output=True)
        assert feed(processor, ids_of("abcdef")).text == "abcd"

    def test_held_text_is_released_at_the_end(self, make, ids_of):
        processor = make(stop=("END",))
        assert feed(processor, ids_of("aEN")).text == "a"
        last = feed(processor, [EOS], STOP)
        assert (last.text, last.finish_reason, last.stop_reason) == ("EN", "stop", None)

    def test_wins_over_the_engines_reason(self, make, ids_of):
        last = feed(make(stop=("b",)), [*ids_of("ab"), EOS], STOP)
        assert (last.text, last.token_ids, last.stop_reason) == ("a", ids_of("ab"), "b")

    def test_the_text_of_a_stop_token_is_not_searched(self, make, ids_of):
        (x,) = ids_of("x")
        last = feed(make(stop=("x",), stop_token_ids=(x,)), [x], STOP, x)
        assert (last.text, last.stop_reason) == ("", x)

    def test_min_tokens(self, make, ids_of):
        processor = make(stop=("b",), min_tokens=3)
        assert feed(processor, ids_of("ab")).text == "ab"
        assert feed(processor, ids_of("b")).text == "b"
        last = feed(processor, ids_of("cbd"))
        assert (last.text, last.token_ids, last.stop_reason) == ("c", ids_of("cb"), "b")

    def test_min_tokens_within_one_output(self, make, ids_of):
        last = feed(make(stop=("b",), min_tokens=3), ids_of("bbbb"))
        assert (last.text, last.token_ids) == ("bbb", ids_of("bbbb"))

    def test_in_characters_of_many_tokens(self, make, byte_level_tokenizer):
        ids = byte_level_tokenizer.encode("好🙀🙀!", add_special_tokens=False)
        processor = make(stop=("🙀🙀",))
        deltas = [d for i in ids if (d := delta(processor, [i]))]
        assert "".join(d.text for d in deltas) == "好"
        assert deltas[-1].stop_reason == "🙀🙀"
        assert processor.output_token_ids(0) == ids[:-1]

    @given(data=st.data())
    @settings(max_examples=100, suppress_health_check=MANY_DRAWS)
    def test_any_cut_gives_the_same_stream(self, byte_level_tokenizer, data):
        alphabet = st.sampled_from("ab你🙀e\u0301")
        stops = tuple(data.draw(st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3)))
        ids = byte_level_tokenizer.encode(data.draw(st.text(alphabet, max_size=25)), add_special_tokens=False)
        params = SamplingParams(stop=stops, min_tokens=data.draw(st.integers(0, 5)))
        results = []
        for one_by_one in (True, False):
            processor = OutputProcessor(
                byte_level_tokenizer, request_id="r", prompt=None, prompt_token_ids=[], sampling_params=params
            )
            cuts = [*range(len(ids))] if one_by_one else sorted(data.draw(st.sets(st.integers(0, len(ids)))))
            for first, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
                processor.process(0, first, ids[first:end], None, None)
            processor.process(0, processor.states[0].next_position, [], LENGTH, None)
            results.append(processor.request_output().outputs)
        assert results[0] == results[1]


class TestSequences:
    def test_are_independent(self, make, ids_of):
        processor = make(num_sequences=3, stop=("b",))
        feed(processor, ids_of("ab"), index=1)
        feed(processor, ids_of("acc"), index=2)
        assert processor.unfinished_indices == [0, 2]
        assert not processor.finished
        feed(processor, [EOS], STOP, index=0)
        feed(processor, [], ABORT, index=2)
        assert processor.finished
        outputs = processor.request_output().outputs
        assert [(o.index, o.text, o.finish_reason) for o in outputs] == [
            (0, "", "stop"),
            (1, "a", "stop"),
            (2, "acc", "abort"),
        ]
        assert processor.num_output_tokens == 6

    def test_resume_continues_from_the_ledger(self, make, ids_of):
        """A new attempt is told what was relayed and may repeat any of it."""
        processor = make(num_sequences=2)
        feed(processor, ids_of("abc"), index=1)
        relayed = list(processor.output_token_ids(1))
        assert relayed == ids_of("abc")
        assert feed(processor, [*relayed[2:], *ids_of("d")], at=2, index=1).text == "d"


def logprobs_of(*rows: tuple[tuple[int, ...], tuple[float, ...], int]) -> LogprobsLists:
    """(sampled and most likely ids, their values, the sampled one's rank) of each token."""
    return LogprobsLists([list(ids) for ids, _, _ in rows], [list(v) for _, v, _ in rows], [rank for *_, rank in rows])


class TestLogprobs:
    def test_repeated_positions_are_counted_once(self, make, ids_of):
        processor = make(logprobs=1)
        a, b, c = ids_of("abc")
        rows = [((a, a), (-0.5, -0.5), 1), ((b, a), (-2.0, -0.25), 3), ((c, c), (-0.125, -0.125), 1)]
        first = processor.process(0, 0, [a, b], None, None, logprobs_of(*rows[:2]))
        assert processor.process(0, 0, [a, b], None, None, logprobs_of(*rows[:2])) is None
        last = processor.process(0, 1, [b, c], LENGTH, None, logprobs_of(*rows[1:]))
        assert [len(first.logprobs), len(last.logprobs)] == [2, 1]
        assert (first.cumulative_logprob, last.cumulative_logprob) == (-2.5, -2.625)
        assert (first.text_offsets, last.text_offsets) == ([0, 1], [2])
        assert {token: (entry.decoded_token, entry.rank) for token, entry in first.logprobs[1].items()} == {
            b: ("b", 3),
            a: ("a", 1),
        }
        (whole,) = processor.request_output().outputs
        assert whole.logprobs == first.logprobs + last.logprobs
        assert (whole.cumulative_logprob, whole.text_offsets) == (-2.625, [0, 1, 2])

    def test_end_with_the_token_that_completes_a_stop_string(self, make, ids_of):
        processor = make(logprobs=0, stop=("bc",))
        ids = ids_of("abcd")
        rows = [((token_id,), (-1.0,), 1) for token_id in ids]
        output = processor.process(0, 0, ids, None, None, logprobs_of(*rows))
        assert (output.text, output.token_ids, len(output.logprobs)) == ("a", ids[:3], 3)
        assert (output.text_offsets, output.cumulative_logprob) == ([0, 1, 2], -3.0)

    def test_of_parts_of_a_character_and_of_a_silent_token(self, make, byte_level_tokenizer):
        processor = make(logprobs=0)
        ids = [byte_level_tokenizer._backend.token_to_id(char) for char in "ÃĮa"]  # 0xC3 0x8C, then a
        rows = [((token_id,), (-1.0,), 1) for token_id in [*ids, EOS]]
        output = processor.process(0, 0, [*ids, EOS], STOP, None, logprobs_of(*rows))
        assert output.text == "Ìa"
        entries = [candidates[token] for candidates, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert [entry.decoded_bytes for entry in entries] == [b"\xc3", b"\x8c", b"a", b"</s>"]
        assert [entry.decoded_token for entry in entries] == ["\ufffd", "\ufffd", "a", "</s>"]
        assert output.text_offsets == [0, 0, 1, 2]

    def test_that_are_missing_are_an_error_and_take_nothing(self, make, ids_of):
        processor = make(logprobs=0)
        (a,) = ids_of("a")
        for logprobs in (None, logprobs_of(((a,), (-1.0,), 1), ((a,), (-1.0,), 1))):
            with pytest.raises(InternalError, match="log-probabilities of its 1 tokens"):
                processor.process(0, 0, [a], None, None, logprobs)
        assert processor.process(0, 0, [a], None, None, logprobs_of(((a,), (-1.0,), 1))).token_ids == [a]
        assert processor.process(0, 1, [], ABORT, None).logprobs == []


def test_without_text_there_are_tokens_and_their_log_probabilities(make, ids_of):
    processor = make(detokenize=False, logprobs=0)
    ids = ids_of("hey")
    logprobs = LogprobsLists([[token] for token in ids], [[-0.5]] * 3, [1] * 3)
    output = processor.process(0, 0, ids, FinishReason.LENGTH, None, logprobs)
    assert (output.text, output.token_ids, output.finish_reason) == ("", ids, "length")
    assert [entry[token].decoded_token for entry, token in zip(output.logprobs, ids, strict=True)] == [""] * 3
    assert output.cumulative_logprob == -1.5
    assert output.text_offsets == [0, 0, 0]
    assert processor.request_output().outputs[0].text == ""
