"""`InfiniteCache`: tokens of prompts that a prefix cache which never evicts anything would have."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_SIZE = 16


class InfiniteCache:
    """Full blocks of all texts that were added, found by their tokens and all tokens before them."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self._block_size = block_size
        self._known: set[int] = set()

    def num_cached(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that need not be computed. The last one always is: its output is needed."""
        count = 0
        for key in self._keys(prompt[:-1]):
            if key not in self._known:
                break
            count += self._block_size
        return count

    def add(self, text: Sequence[int]) -> None:
        """Keep the full blocks of a text that is computed."""
        self._known.update(self._keys(text))

    def _keys(self, text: Sequence[int]) -> list[int]:
        """One key per full block, for it and what is before it."""
        keys, key = list[int](), 0
        for start in range(0, len(text) - self._block_size + 1, self._block_size):
            key = hash((key, *text[start : start + self._block_size]))
            keys.append(key)
        return keys
