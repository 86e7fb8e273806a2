"""A step's work grows with what is scheduled, not with what waits (I10): counted in calls, not in seconds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.common.errors import Cancelled
from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, Settled, SourceFinished
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.late_grammars import EOS, Form, LateCompiler
from tests.support.transfers.step_calls import calls_in

FEW, MANY = 100, 10_000
FORM = Form((1,), (2,), 1, 2).params


def add_many(engine: Harness, count: int, prompt: list[int], *, spread: bool, **fields: Any) -> None:
    """spread: each of a priority of its own."""
    template = engine.request(prompt, "template", **fields)
    for number in range(count):
        name = f"{len(engine.scheduler.requests)}"
        engine.core.add_request(
            msgspec.structs.replace(template, request_id=name, priority=10 + number if spread else 10)
        )


def empty(engine: Harness) -> None:
    engine.core.fail_all(Cancelled("x"))
    for message in engine.outbox.take():
        if isinstance(message, ReceiveInto | Settled):
            engine.core.apply(HoldReturned(message.request_id, message.hold))


def run_two(engine: Harness) -> None:
    for number in range(2):
        engine.add([number] * 5, f"runs{number}", params={"max_tokens": 60})
    engine.core.step()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("no place", "fcfs"),
        pytest.param("no place", "priority", marks=pytest.mark.slow),
        pytest.param("no blocks", "fcfs", marks=pytest.mark.slow),
        ("no blocks", "priority"),
        ("unreserved", "priority"),
        ("parked", "fcfs"),
        ("ready", "priority"),
        ("no grammar", "fcfs"),
        pytest.param("no grammar", "priority", marks=pytest.mark.slow),
        ("KV, but no grammar", "priority"),
    ],
)
def test_i10_a_step_costs_the_same_however_many_wait(make_engine: MakeEngine, kind: str, policy: str) -> None:
    costs = []
    for count in (FEW, MANY):
        early = kind == "KV, but no grammar"
        parked = early or kind in ("parked", "ready")
        engine = make_engine(
            num_blocks=4 * MANY if parked else 64,
            max_num_seqs=2 if kind in ("no place", "ready") else 4,
            max_model_len=120,
            scheduling_policy=policy,
            look_ahead=count if parked else 8,
            grammar_timeout_s=3600.0,
            grammars=LateCompiler(),
        )
        if not parked:
            run_two(engine)
        prompt = [1, 2, 3, 4, 5] if parked or kind == "no place" else [3] * 110
        if kind in ("no blocks", "unreserved"):
            engine.add([9] * 110, "holds", params={"max_tokens": 8}, transfer_source=True, wanted_from=0)
            engine.core.step()
        fields: dict[str, Any] = {"remote_prefill": parked or kind == "unreserved"}
        if "no grammar" in kind:
            fields |= {"params": {"structured_outputs": FORM}, "eos": (EOS,)}
        add_many(engine, count, prompt, spread=policy == "priority", **fields)
        if parked:
            run_two(engine)
            assert engine.scheduler.receives.num_unreserved == 0
        if early or kind == "ready":
            rooms = [message for message in engine.outbox.take() if isinstance(message, ReceiveInto)]
            for room in rooms:
                engine.core.apply(Landed(room.request_id, len(room.hold)))
                engine.core.apply(SourceFinished(room.request_id, len(prompt), (1,)))
                engine.core.apply(HoldReturned(room.request_id, room.hold))
            if early:
                assert engine.scheduler.grammars.num_landed == count
            else:
                assert engine.scheduler.waiting.num_ready >= count - 2
        assert len(engine.scheduler.grammars) == (count if "no grammar" in kind else 0)
        engine.core.step()
        costs.append(calls_in(engine, 5))
        empty(engine)
    assert costs[0] == costs[1]


def test_a_step_without_free_blocks_makes_at_most_half_as_many_calls_again(make_engine: MakeEngine) -> None:
    """A block holds a whole sequence, and one per running sequence stays free: there is none for those that wait."""
    calls = {}
    for places in (32, 64):
        engine = make_engine(
            block_size=128, num_blocks=64, max_num_seqs=places, max_num_batched_tokens=2048, max_model_len=120
        )
        for number in range(32):
            engine.add([number] * 20, f"runs{number}", params={"max_tokens": 60})
        engine.core.step()
        engine.core.step()
        add_many(engine, FEW, [3] * 110, spread=False)
        engine.core.step()
        assert len(engine.scheduler.running) == 32
        assert len(engine.scheduler.waiting) == FEW
        calls[places] = calls_in(engine, 5)
        empty(engine)
    assert calls[32] < calls[64] <= 1.5 * calls[32], calls
