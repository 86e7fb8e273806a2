"""The role of a worker, and its changes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.common.errors import Draining, InvalidRequest, Overloaded, PdServeError
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import SET_ROLE
from pdserve.common.request.wire.messages import role_from_wire, role_to_wire
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.v1 import worker_pb2
from pdserve.worker.worker import Worker
from pdserve.worker.worker_roles import WorkerRoles
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_call import WorkerCall
from tests.support.transfers.worker_pair import (
    PROMPT,
    Pair,
    ask,
    check_at_rest,
    decode_call,
    generation_request,
    running_pair,
)

BOTH = {WorkerRole.PREFILL: PrefillSettings(), WorkerRole.DECODE: DecodeSettings(max_num_seqs=3)}


def test_a_change_counts_once_and_is_told() -> None:
    told: list[WorkerRole] = []
    roles = WorkerRoles(WorkerRole.PREFILL, BOTH, "", lambda: told.append(roles.role))
    assert not roles.change(WorkerRole.PREFILL)
    assert roles.change(WorkerRole.DECODE)
    assert roles.settings.max_num_seqs == 3
    assert not roles.change(WorkerRole.DECODE, dwell_s=10.0), "it has the role"
    assert (told, roles.num_changes[WorkerRole.DECODE], roles.num_changes[WorkerRole.PREFILL]) == ([roles.role], 1, 0)


def test_a_second_change_within_the_dwell_time_is_refused() -> None:
    now_s = 100.0
    roles = WorkerRoles(WorkerRole.PREFILL, BOTH, "", lambda: None, clock=lambda: now_s)
    assert roles.change(WorkerRole.DECODE, dwell_s=30.0), "a worker that was never changed may be"
    now_s += 29.5
    with pytest.raises(Overloaded, match=r"changed 29\.5 s ago, and may be changed after 30 s"):
        roles.change(WorkerRole.PREFILL, dwell_s=30.0)
    assert roles.change(WorkerRole.PREFILL), "an operator need not wait"
    now_s += 30.0
    assert roles.change(WorkerRole.DECODE, dwell_s=30.0)


def test_a_role_that_it_cannot_take_is_refused_with_the_reason() -> None:
    roles = WorkerRoles(WorkerRole.PREFILL, {WorkerRole.PREFILL: PrefillSettings()}, "dtype differs", lambda: None)
    with pytest.raises(InvalidRequest, match="role is decode, which this worker cannot take: dtype differs") as caught:
        roles.change(WorkerRole.DECODE)
    assert caught.value.field == "role"


async def set_role(pair: Pair, worker: Worker, role: int, dwell_s: float = 0.0) -> PdServeError | None:
    """The error of `SetRole`."""
    request = worker_pb2.SetRoleRequest(role=role, dwell_s=dwell_s)  # type: ignore[arg-type]
    try:
        await pair.service(worker).unary_unary(SET_ROLE, request, timeout=HANG_S)
    except Exception as error:
        return from_rpc_error(error)  # type: ignore[arg-type]
    return None


async def test_a_pair_that_changes_places(tiny_checkpoints: Callable[..., Path]) -> None:
    """Both workers serve both kinds of calls at any time, and what they have cached stays."""
    async with running_pair(
        tiny_checkpoints("llama"), may_switch=True, num_blocks=64, max_model_len=128, max_sessions=5, max_waiting=9
    ) as pair:
        before = await ask(pair, PROMPT)
        assert await set_role(pair, pair.p, role_to_wire(WorkerRole.DECODE)) is None
        assert await set_role(pair, pair.d, role_to_wire(WorkerRole.PREFILL)) is None
        assert (pair.p.roles.role, pair.d.roles.role) == (WorkerRole.DECODE, WorkerRole.PREFILL)
        assert (pair.p.engine.max_sessions, pair.d.engine.max_sessions) == (5, 0)
        loads = [role_from_wire(worker._watch._load_message().role) for worker in (pair.p, pair.d)]
        assert loads == [WorkerRole.DECODE, WorkerRole.PREFILL]
        assert [worker.identity.role for worker in (pair.p, pair.d)] == [WorkerRole.PREFILL, WorkerRole.DECODE]
        computed = pair.d.engine.stats.num_computed_prompt_tokens
        swapped = Pair(pair.d, pair.p, pair.channel(pair.d), pair.channel(pair.p))
        after = await ask(swapped, PROMPT)
        assert after.token_ids == before.token_ids
        # all but the last block of the prompt was received earlier, and is not computed now
        assert pair.d.engine.stats.num_computed_prompt_tokens - computed <= len(PROMPT) - 32
        # calls of a role that it has given up are served, too
        assert (await ask(pair, [*PROMPT, 3])).token_ids
        for worker in (pair.p, pair.d):
            await check_at_rest(worker)


async def test_open_calls_of_the_other_role_are_counted(tiny_checkpoints: Callable[..., Path]) -> None:
    async with running_pair(tiny_checkpoints("llama"), may_switch=True, num_blocks=64, max_model_len=128) as pair:
        request = generation_request(pair.d)
        call = WorkerCall(pair.service(pair.d), "session", request)
        while not (await call.read()).outputs.finish_reason:
            pass
        assert pair.d._watch._load_message().num_other_calls == 0
        assert await set_role(pair, pair.d, role_to_wire(WorkerRole.PREFILL)) is None
        assert pair.d._watch._load_message().num_other_calls == 1
        async with asyncio.timeout(HANG_S):
            async for event in decode_call(pair, generation_request(pair.d), prefill_here=True):
                assert pair.d._watch._load_message().num_other_calls >= 1 or event.outputs.finish_reason
            call.cancel()
            while pair.d._watch._load_message().num_other_calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await check_at_rest(pair.d)


@pytest.mark.parametrize(
    ("role", "dwell_s", "field"),
    [(0, 0.0, "role"), (7, 0.0, "role"), (1, -1.0, "dwell_s"), (1, math.nan, "dwell_s"), (1, 86_401.0, "dwell_s")],
)
async def test_wrong_fields_are_named(
    tiny_checkpoints: Callable[..., Path], role: int, dwell_s: float, field: str
) -> None:
    async with running_pair(tiny_checkpoints("llama"), may_switch=True, num_blocks=8, max_model_len=64) as pair:
        error = await set_role(pair, pair.d, role, dwell_s)
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert pair.d.roles.role is WorkerRole.DECODE
        if field == "role" and not role:
            await pair.d.drain()
            assert isinstance(await set_role(pair, pair.d, role_to_wire(WorkerRole.PREFILL)), Draining)


async def test_a_worker_that_was_started_for_one_role(tiny_checkpoints: Callable[..., Path]) -> None:
    async with running_pair(tiny_checkpoints("llama"), num_blocks=8, max_model_len=64) as pair:
        error = await set_role(pair, pair.d, role_to_wire(WorkerRole.PREFILL))
        assert isinstance(error, InvalidRequest)
        assert "this pair keeps its roles" in error.message
        call = WorkerCall(pair.service(pair.d), "prefill", generation_request(pair.d))
        with pytest.raises(InvalidRequest, match="this worker takes decode, session, fetch"):
            await call.read()
