"""`best_of`: generate more sequences than are returned, and return the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.request.sampling_params import SamplingParams
from pdserve.text.outputs.request_output import CompletionOutput


def for_engines(params: SamplingParams) -> SamplingParams:
    """Parameters for engines: `best_of` sequences, with the log-probabilities that rank them."""
    if params.num_sequences == params.n:
        return msgspec.structs.replace(params, best_of=None)
    logprobs = 0 if params.logprobs is None else params.logprobs
    return msgspec.structs.replace(params, n=params.num_sequences, best_of=None, logprobs=logprobs)


def best(outputs: Sequence[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The n sequences with the highest cumulative log-probability, the highest first, renumbered from 0.

    outputs: all sequences, finished. params: the client's; log-probabilities that the client did not request are left out.
    Source: vLLM's rule; of equal sequences the lower index comes first.
    """
    ranked = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
    hidden = {} if params.logprobs is not None else {"logprobs": None, "cumulative_logprob": None, "text_offsets": None}
    return [msgspec.structs.replace(output, index=index, **hidden) for index, output in enumerate(ranked[: params.n])]
