"""`merged`: what a reader has not read yet of a request's sequences, as one output per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pdserve.text.outputs.request_output import CompletionOutput

T = TypeVar("T")


def merged(outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    """In the order of the sequences. outputs: those of a sequence in the order of its tokens."""
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        parts.setdefault(output.index, []).append(output)
    return [
        CompletionOutput(
            index=index,
            text="".join(part.text for part in of_choice),
            token_ids=[token_id for part in of_choice for token_id in part.token_ids],
            prompt_logprobs=of_choice[0].prompt_logprobs,
            prompt_token_ids=of_choice[0].prompt_token_ids,
            finish_reason=of_choice[-1].finish_reason,
            stop_reason=of_choice[-1].stop_reason,
            cumulative_logprob=of_choice[-1].cumulative_logprob,
            logprobs=_joined([part.logprobs for part in of_choice]),
            text_offsets=_joined([part.text_offsets for part in of_choice]),
        )
        for index, of_choice in sorted(parts.items())
    ]


def _joined(parts: list[list[T] | None]) -> list[T] | None:
    """The concatenated lists of a sequence's outputs; None if there are none."""
    if all(part is None for part in parts):
        return None
    return [entry for part in parts if part is not None for entry in part]
