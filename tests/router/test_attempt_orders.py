"""An attempt under every order in which the events of its two calls can come."""

from __future__ import annotations

import asyncio
from itertools import combinations

import pytest

from pdserve.common.errors import TransferFailed, WorkerLost
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.timeline import Timeline
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.attempts import attempt as attempt_module
from pdserve.router.attempts.attempt import Attempt
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.attempts.attempt_state import EDGES, AttemptState
from pdserve.router.attempts.call_events import Admitted, Computed, Ended, LandedEvent, Outputs
from pdserve.router.placement.placement import Placement
from pdserve.router.workers.call_failure import CallFailed
from pdserve.text.outputs.output_processor import PositionGap
from tests.router.candidates import worker
from tests.support.run.waiting import HANG_S

DIGEST = b"d" * 16
END = object()
PREFILL = [Admitted({}), Computed(1, DIGEST, [Outputs(0, 0, [10])], {}), Ended(True, "", {}), END]
DECODE = [
    Admitted({}),
    LandedEvent(1, 1, "local", {}),
    Outputs(0, 1, [11]),
    Outputs(0, 2, [12], FinishReason.LENGTH),
    END,
]


class FedCall:
    """A call whose events are fed one by one."""

    def __init__(self, *args, **kwargs):
        self.cancelled = False
        self.has_answered = False
        calls.append(self)

    def cancel(self):
        self.cancelled = True

    def follow(self, on_event, on_end):
        self.on_event, self.on_end = on_event, on_end

    def feed(self, event):
        """Report this, as a call does until it is cancelled."""
        if self.cancelled:
            return
        if event is END or isinstance(event, CallFailed):
            self.on_end(None if event is END else event)
        else:
            self.on_event(event)


calls: list[FedCall] = []


REQUEST = GenerationRequest(
    request_id="r",
    prompt_token_ids=[1],
    sampling_params=SamplingParams(),
    eos_token_ids=(),
    hash_root=b"",
    request_digest=DIGEST,
    deadline=0,
)


async def run(prefill, decode, prefill_turns, monkeypatch, relay=None):
    """Feed both calls, prefill at these turns; (relayed token ids, state, failure)."""
    monkeypatch.setattr(attempt_module, "PrefillCall", FedCall)
    monkeypatch.setattr(attempt_module, "DecodeCall", FedCall)
    calls.clear()
    relayed: list[int] = []

    def note(outputs):
        assert outputs.first_position == len(relayed)
        relayed.extend(outputs.token_ids)
        return outputs.finish_reason is not None

    workers = [worker(role, role) for role in ("prefill", "decode")]
    attempt = Attempt(0, REQUEST, Placement(prefill=workers[0], decode=workers[1]), Timeline(), relay or note)
    running = asyncio.create_task(attempt.run())
    await asyncio.sleep(0)
    feeds = [iter(prefill), iter(decode)]
    for turn in range(len(prefill) + len(decode)):
        role = 0 if turn in prefill_turns else 1
        calls[role].feed(next(feeds[role]))
        await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        [failure] = await asyncio.gather(running, return_exceptions=True)
    assert not EDGES[attempt.state]
    assert all(call.cancelled for call in calls)
    assert [w.num_in_flight for w in workers] == [0, 0]
    return relayed, attempt.state, failure


async def test_every_order_gives_every_token_once(monkeypatch):
    for turns in combinations(range(len(PREFILL) + len(DECODE)), len(PREFILL)):
        relayed, state, failure = await run(PREFILL, DECODE, turns, monkeypatch)
        assert (relayed, state, failure) == ([10, 11, 12], AttemptState.DONE, None), turns


@pytest.mark.parametrize("died", [True, False])
@pytest.mark.parametrize("cut", range(4))
async def test_prefill_failing_at_any_point_in_any_order(monkeypatch, cut, died):
    error = CallFailed(WorkerLost("gone") if died else TransferFailed("lost"), died)
    prefill = [*PREFILL[:cut], error]
    for turns in combinations(range(len(prefill) + len(DECODE)), len(prefill)):
        relayed, state, failure = await run(prefill, DECODE, turns, monkeypatch)
        assert relayed == [10, 11, 12][: len(relayed)]
        if state is AttemptState.DONE:
            # harmless only once the first token and all blocks are there
            assert cut >= 2
            assert relayed == [10, 11, 12]
        else:
            assert isinstance(failure, AttemptFailed)
            assert failure.blamed is not None
            assert failure.blamed.identity.role is WorkerRole.PREFILL
            assert (failure.died, failure.in_transfer) == (died, True)


@pytest.mark.parametrize("cut", range(4))
async def test_decode_failing_at_any_point_in_any_order(monkeypatch, cut):
    decode = [*DECODE[:cut], CallFailed(WorkerLost("gone"), True)]
    for turns in combinations(range(len(PREFILL) + len(decode)), len(PREFILL)):
        relayed, state, failure = await run(PREFILL, decode, turns, monkeypatch)
        assert relayed == [10, 11, 12][: len(relayed)]
        assert state is AttemptState.FAILED
        assert failure.blamed is not None
        assert failure.blamed.identity.role is WorkerRole.DECODE
        assert (failure.died, failure.in_transfer) == (True, False)


async def test_what_decode_says_wrong_is_blamed_on_it_whoever_comes_first(monkeypatch):
    gap = PositionGap("a token is missing")

    def relay(outputs):
        if outputs.first_position == 2:
            raise gap
        return False

    decode = [*DECODE[:2], Outputs(0, 2, [12], FinishReason.LENGTH), END]
    for turns in combinations(range(len(PREFILL) + len(decode)), len(PREFILL)):
        _, state, failure = await run(PREFILL, decode, turns, monkeypatch, relay)
        assert (state, failure.error) == (AttemptState.FAILED, gap)
        assert failure.blamed is not None
        assert failure.blamed.identity.role is WorkerRole.DECODE, turns
