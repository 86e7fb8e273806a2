"""A prompt's log-probabilities put together from pieces, from however many attempts they come."""

from __future__ import annotations

import pytest

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.text.outputs.logprobs_accumulator import PromptLogprobsLedger


def _run(first: int, end: int) -> LogprobsLists:
    """Log-probabilities of prompt tokens [first, end): their ids are their positions."""
    return LogprobsLists([[place] for place in range(first, end)], [[-1.0]] * (end - first), [1] * (end - first))


@pytest.fixture
def ledger() -> PromptLogprobsLedger[int]:
    return PromptLogprobsLedger(8, lambda lists: [token_ids[0] for token_ids in lists.logprob_token_ids])


def test_pieces_in_order_make_the_whole(ledger: PromptLogprobsLedger[int]) -> None:
    for first, end in ((1, 3), (3, 4), (4, 8)):
        ledger.add(first, _run(first, end))
    assert ledger.whole == [None, 1, 2, 3, 4, 5, 6, 7]


def test_a_further_attempt_says_again_what_is_known(ledger: PromptLogprobsLedger[int]) -> None:
    for first, end in ((1, 5), (1, 3), (3, 8), (1, 8)):
        ledger.add(first, _run(first, end))
    assert ledger.whole == [None, 1, 2, 3, 4, 5, 6, 7]


def test_a_gap_is_refused_and_an_end_too_soon(ledger: PromptLogprobsLedger[int]) -> None:
    ledger.add(1, _run(1, 3))
    with pytest.raises(InternalError, match="go on at 4, but 3 is next"):
        ledger.add(4, _run(4, 6))
    with pytest.raises(InternalError, match="3 of 8 prompt tokens"):
        _ = ledger.whole


def test_a_prompt_of_one_token_is_whole_without_any() -> None:
    assert PromptLogprobsLedger[int](1, lambda lists: []).whole == [None]
