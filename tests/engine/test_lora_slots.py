"""`LoraSlots`: which adapter gives way, and what the runner must load."""

from __future__ import annotations

import random

import pytest

from pdserve.engine.scheduler.lora_slots import NO_SLOT, LoraSlots


def loads(slots: LoraSlots) -> dict[int, str]:
    return {load.slot: load.fingerprint for load in slots.take_loads()}


def test_an_adapter_without_a_running_sequence_gives_way_least_recently_used_first() -> None:
    slots = LoraSlots(2)
    for name in ("a", "b"):
        slots.enter(name)
    assert loads(slots) == {slots.slot("a"): "a", slots.slot("b"): "b"}
    assert not slots.fits("c")
    assert slots.fits("a")
    assert slots.fits("")
    with pytest.raises(RuntimeError, match="every slot is in use"):
        slots.enter("c")
    slots.leave("a")
    slots.leave("b")
    slots.enter("a")
    slots.leave("a")
    before = slots.slot("b")
    slots.enter("c")
    assert (slots.slot("c"), slots.slot("b"), slots.num_evictions, slots.num_loads) == (before, NO_SLOT, 1, 3)
    assert loads(slots) == {before: "c"}
    assert loads(slots) == {}


def test_an_adapter_that_could_not_be_loaded_leaves_its_slot() -> None:
    slots = LoraSlots(1)
    slots.enter("a")
    loads(slots)
    slots.forget("a")
    slots.leave("a")
    slots.enter("a")
    assert loads(slots) == {0: "a"}, "it is tried again"


def test_slots_agree_with_a_plain_model_over_random_lives() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randint(1, 4)
        slots, running, held = LoraSlots(count), list[str](), dict[int, str]()
        for _ in range(60):
            name = draw.choice(["", *"abcdefg"])
            used = {one for one in running if one}
            assert slots.fits(name) == (not name or name in used or len(used) < count)
            if slots.fits(name) and draw.random() < 0.6:
                slots.enter(name)
                running.append(name)
            elif running:
                slots.leave(running.pop(draw.randrange(len(running))))
            held |= loads(slots)
            for name in {one for one in running if one}:
                assert held[slots.slot(name)] == name
            assert len({slots.slot(name) for name in slots.loaded}) == len(slots.loaded) <= count
