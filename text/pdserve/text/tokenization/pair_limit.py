"""`PairLimit`: the tokens that are kept of two texts which are one prompt."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pdserve.common.errors import InvalidRequest

TruncationSide = Literal["left", "right"]


class PairLimit(NamedTuple):
    """Keeps tokens by the rule that transformers calls `longest_first`."""

    num_tokens: int
    """Tokens of the prompt at most, special ones included."""
    side: TruncationSide
    """Side of each text at which tokens are dropped."""

    def kept(self, first: list[int], second: list[int], num_special: int) -> tuple[list[int], list[int]]:
        """The kept tokens of both texts: the longer one is cut to what the other leaves, and both to half where that is less.

        num_special: special tokens of the pair, which stay. Raises: InvalidRequest if no token of a text would be left.
        """
        room = self.num_tokens - num_special
        if room < 2:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least {num_special + 2}, not {self.num_tokens}: a pair of texts has "
                f"{num_special} special tokens, and at least one of each text",
                "truncate_prompt_tokens",
            )
        if len(first) + len(second) <= room:
            return first, second
        shorter = min(len(first), len(second), room // 2)
        sizes = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
        return self._cut(first, sizes[0]), self._cut(second, sizes[1])

    def _cut(self, token_ids: list[int], size: int) -> list[int]:
        return token_ids[:size] if self.side == "right" else token_ids[len(token_ids) - size :]
