"""`UseOrder`: what is given up first."""

from __future__ import annotations

import random

from pdserve.engine.kv_cache.use_order import UseOrder


def name_of(number: int) -> bytes:
    return number.to_bytes(3, "big")


def take(order: UseOrder) -> int | None:
    name = order.take_first(lambda name: True)
    return None if name is None else int.from_bytes(name, "big")


def made(*uses: int) -> UseOrder:
    order = UseOrder()
    for number in uses:
        order.use(name_of(number))
    return order


def test_what_was_used_equally_often_goes_by_age() -> None:
    order = made(1, 2, 3)
    assert [take(order) for _ in range(4)] == [1, 2, 3, None]
    assert len(order) == 0


def test_what_was_used_more_often_stays_longer() -> None:
    order = made(1, 1, 2, 3)
    assert [take(order) for _ in range(3)] == [2, 3, 1]


def test_what_is_used_no_more_goes_in_the_end() -> None:
    order = made(*[0] * 5)
    for number in range(1, 20):
        order.use(name_of(number))
        if take(order) == 0:
            break
    else:
        raise AssertionError("it stays for ever")
    assert number > 3


def test_what_is_not_free_is_passed_over_and_keeps_its_place() -> None:
    order = made(1, 2, 3)
    assert order.take_first(lambda name: name not in (name_of(1), name_of(2))) == name_of(3)
    assert order.take_first(lambda name: False) is None
    assert [take(order) for _ in range(2)] == [1, 2]


def test_what_was_removed_is_not_given_up() -> None:
    order = made(1, 2)
    order.remove(name_of(1))
    assert name_of(1) not in order
    assert [take(order) for _ in range(2)] == [2, None]


def test_a_name_that_comes_again_begins_anew() -> None:
    order = made(1, 1, 1, 2)
    order.remove(name_of(1))
    order.use(name_of(1))
    assert [take(order) for _ in range(2)] == [2, 1]


def test_it_needs_no_more_memory_for_more_uses() -> None:
    order, draw = UseOrder(), random.Random(0)
    for _ in range(20_000):
        order.use(name_of(draw.randrange(50)))
    assert len(order) == 50
    assert len(order._heap) <= 2 * 50 + 65


def test_frequent_blocks_survive_a_scan() -> None:
    """Prompts that are asked for once do not drive out one that is asked for again and again."""
    order = made(9999, 9999)
    for number in range(1000):
        for name in (name_of(number), *([name_of(9999)] if number % 8 == 0 else [])):
            if name not in order and len(order) == 8:
                assert take(order) != 9999
            order.use(name)
