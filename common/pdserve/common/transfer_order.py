"""`TransferOrder`: the numbers that blocks of a prompt have in a transfer, equal at source and receiver.

With one KV cache group of keys a block's number is its place in the sequence. With several, and with one of states, blocks that a
receiver may want are numbered by their places, and at one place by group: of groups with a window or with chunks those that the
first token after the prompt sees, of others all. What a receiver wants is then the end of this list, from the first place on that
it has not cached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


def num_skipped_blocks(num_tokens: int, window: int, block_size: int, *, is_chunk: bool = False) -> int:
    """Number of a sequence's first blocks that no token after its first `num_tokens` can see.

    window: tokens that a token sees, itself included; with is_chunk the length of a chunk: a token sees those of its own.
    """
    first_seen = num_tokens // window * window if is_chunk else max(0, num_tokens - window + 1)
    return first_seen // block_size


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """The list of one prompt."""

    firsts: tuple[int, ...]
    """Per group, the place of its first block in the list."""
    num_places: int
    """Blocks of the prompt in each group, the last of which may be partial."""

    @classmethod
    def of(
        cls, group_windows: Sequence[int], num_tokens: int, block_size: int, group_chunks: Sequence[int] = ()
    ) -> TransferOrder:
        """group_windows, group_chunks: see `KvLayout`. num_tokens: of the prompt, with the output of earlier attempts."""
        firsts = []
        for group, window in enumerate(group_windows):
            chunk = group_chunks[group] if group_chunks else 0
            reach = window or chunk
            firsts.append(num_skipped_blocks(num_tokens, reach, block_size, is_chunk=chunk > 0) if reach else 0)
        return cls(tuple(firsts), -(-num_tokens // block_size))

    def __len__(self) -> int:
        """Blocks that a receiver may want."""
        return self.number(self.num_places)

    def number(self, place: int) -> int:
        """The number of the first block at or after this place."""
        return sum([max(0, place - first) for first in self.firsts])

    def num_complete(self, number: int) -> int:
        """Places from the first, of which all blocks have numbers below this one."""
        return bisect_right(range(self.num_places + 1), number, key=self.number) - 1

    def blocks(self, first: int, end: int) -> list[tuple[int, int]]:
        """(group, place) of the blocks with the numbers `first` to `end` - 1."""
        if end <= first:
            return []
        if self.firsts == (0,):
            return [(0, place) for place in range(first, end)]
        begin = self.num_complete(first)
        found = [
            (group, place)
            for place in range(begin, self.num_complete(end - 1) + 1)
            for group, of_group in enumerate(self.firsts)
            if place >= of_group
        ]
        skipped = first - self.number(begin)
        return found[skipped : skipped + end - first]
