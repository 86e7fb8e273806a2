"""Questions to pairs of workers whose prompts have images or sound, and whose engines have processes of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.common.request.generation_request import GenerationRequest
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.worker.worker import Worker
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_pair import Pair, decode_call


def is_at_rest(worker: Worker) -> bool:
    """Whole pool, no transfer open."""
    stats, counts = worker.engine.stats, worker.engine.transfer_counts
    assert stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_in_use == stats.num_blocks_total
    return not (stats.num_blocks_in_use or counts.num_open or worker.engine.num_streams)


async def prefilled_at_decode(pair: Pair, request: GenerationRequest) -> list[int]:
    """The answer without a prefill worker. Raises: PdServeError."""
    call = decode_call(pair, request, prefill_here=True)
    async with asyncio.timeout(HANG_S):
        return [token async for event in call for token in event.outputs.token_ids]


def values_of(verifier: RequestVerifier) -> dict[str, Any]:
    """All but the plug-ins, which are made in each process."""
    names = set(RequestVerifier.__slots__) - {"logits_processors"}
    return {name: getattr(verifier, name) for name in names}
