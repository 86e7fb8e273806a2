"""Head groups: every head of every rank arrives once, from a rank that has it, at its place; what a source may not say of them."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from pdserve.common.errors import TransferFailed
from pdserve.common.kv_layout import KvLayout
from pdserve.common.security.block_digest import XXH3, Gmac
from pdserve.kv_transfer.control.attach_client import accepted_groups
from pdserve.kv_transfer.heads.group_digest import GroupDigest
from pdserve.kv_transfer.heads.head_groups import head_groups
from pdserve.models.weights.rank_shard import RankShard
from pdserve.v1 import kv_source_pb2
from tests.support.models.kv_layouts import make_layout, with_shape

SIZES = (1, 2, 3, 4, 6, 8)


def layout_of(total: int, tp_size: int) -> KvLayout:
    """The layout that rank 0 of `tp_size` announces."""
    heads = RankShard(0, tp_size).heads(total)
    return msgspec.structs.replace(
        with_shape(make_layout(num_kv_heads=total), num_kv_heads=len(heads)), tp_size=tp_size
    )


def with_shapes(*layouts: KvLayout) -> KvLayout:
    """A layout with the shapes of these, and a group of each."""
    shapes = tuple(layout.shapes[0] for layout in layouts)
    groups = tuple(range(len(shapes)))
    return msgspec.structs.replace(layouts[0], shapes=shapes, group_shapes=groups, group_windows=(0,) * len(shapes))


def is_possible(total: int, tp_size: int) -> bool:
    return total % tp_size == 0 or tp_size % total == 0


@pytest.mark.parametrize("total", [1, 2, 4, 6, 8, 12])
def test_every_rank_gets_each_of_its_heads_once_from_one_that_has_it(total: int) -> None:
    for source_size, receiver_size in product(SIZES, SIZES):
        if not is_possible(total, source_size) or not is_possible(total, receiver_size):
            continue
        source, receiver = layout_of(total, source_size), layout_of(total, receiver_size)
        assert source.differences(receiver) == []
        arrived: dict[int, dict[int, int]] = {rank: {} for rank in range(receiver_size)}
        for group in head_groups(source, receiver):
            there = RankShard(group.source.rank, source_size).heads(total)
            for part in group.receivers:
                for number in range(group.num_heads):
                    # as the bytes are copied: place within the rank's block on either side
                    head = there[group.source.part * (len(there) // group.source.parts) + number]
                    place = part.part * (receiver.shapes[0].num_kv_heads // part.parts) + number
                    assert arrived[part.rank].setdefault(place, head) == head == group.first_head + number
        for rank, places in arrived.items():
            expected = RankShard(rank, receiver_size).heads(total)
            assert [places[place] for place in range(len(expected))] == list(expected)


def test_uneven_ranks_are_refused_with_both_degrees() -> None:
    even = layout_of(6, 2)
    uneven = msgspec.structs.replace(with_shape(even, num_kv_heads=2), tp_size=4)
    [reason] = even.differences(uneven)
    assert "tp_size: 2 and 4 ranks with 3 and 2 of 6 KV heads each" in reason
    assert even.differences(with_shape(even, num_kv_heads=2)), "heads that are on no rank"
    assert even.differences(msgspec.structs.replace(even, tp_size=0))


def answer(*groups: tuple[int, ...]) -> kv_source_pb2.Accepted:
    """Groups as (first head, heads, parts, part), perhaps with their shape after these."""
    accepted = kv_source_pb2.Accepted(metadata=b"where", token=b"t" * 16)
    for first_head, num_heads, parts, part, *shape in groups:
        number = shape[0] if shape else 0
        accepted.head_groups.add(first_head=first_head, num_heads=num_heads, parts=parts, part=part, shape=number)
    return accepted


def test_blocks_of_each_shape_have_groups_of_their_own() -> None:
    """Eight heads in one shape, a row that all ranks have in another."""
    source, receiver = (with_shapes(layout_of(8, size), layout_of(1, size)) for size in (2, 4))
    assert source.differences(receiver) == []
    groups = head_groups(source, receiver)
    assert [(group.source.shape, group.first_head, group.num_heads) for group in groups] == [
        (0, 0, 2), (0, 2, 2), (0, 4, 2), (0, 6, 2), (1, 0, 1),
    ]  # fmt: skip
    assert [part.rank for part in groups[-1].receivers] == [0, 1, 2, 3]
    said = answer(*((*group[:2], *group.source[1:]) for group in groups))
    assert len(accepted_groups(said, receiver)) == 5


@pytest.mark.parametrize(
    "said",
    [
        answer(),
        answer((0, 8, 1, 0)),
        answer((0, 8, 1, 0), (0, 1, 1, 0)),
        answer((0, 1, 1, 0, 1), (0, 8, 1, 0)),
        answer((0, 8, 1, 0), (0, 1, 1, 0, 1), (0, 1, 1, 0, 2)),
        answer((0, 8, 1, 0), (0, 8, 1, 0, 1)),
    ],
    ids=["none", "one shape", "twice", "another order", "a third shape", "other heads"],
)
def test_i14_a_source_that_leaves_out_blocks_of_a_shape_fails_the_transfer(said: kv_source_pb2.Accepted) -> None:
    with pytest.raises(TransferFailed):
        accepted_groups(said, with_shapes(layout_of(8, 1), layout_of(1, 1)))


def test_what_a_source_may_say() -> None:
    assert len(accepted_groups(answer(), layout_of(4, 1))) == 1
    assert len(accepted_groups(answer((0, 2, 1, 0), (2, 2, 1, 0)), layout_of(4, 2))) == 2
    assert len(accepted_groups(answer((0, 1, 1, 0)), layout_of(1, 2))[0].receivers) == 2


@pytest.mark.parametrize(
    "said",
    [
        answer((0, 2, 1, 0)),
        answer((2, 2, 1, 0), (0, 2, 1, 0)),
        answer((0, 2, 1, 0), (0, 2, 1, 0)),
        answer((0, 3, 1, 0), (3, 1, 1, 0)),
        answer((0, 0, 1, 0)),
        answer((0, 4, 1, 0)),
        answer(*[(0, 2, 1, 0)] * 5),
        answer((0, 2, 0, 0), (2, 2, 1, 0)),
        answer((0, 2, 1, 1), (2, 2, 1, 0)),
        answer((0, 2, 1 << 31, 0), (2, 2, 1, 0)),
        answer(),
    ],
)
def test_i9_groups_that_are_not_all_heads_once_fail_the_transfer(said: kv_source_pb2.Accepted) -> None:
    with pytest.raises(TransferFailed):
        accepted_groups(said, layout_of(4, 2))


def test_digests_of_two_groups_cannot_be_exchanged() -> None:
    content = memoryview(b"some bytes")
    whole = Gmac(bytes(32))
    found = {GroupDigest(whole, 2, group).of(content, index) for group in range(2) for index in range(8)}
    assert len(found) == 16
    assert GroupDigest(XXH3, 2, 1).name == XXH3.name
