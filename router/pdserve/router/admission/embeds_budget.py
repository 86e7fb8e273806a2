"""`EmbedsBudget`: bounds the bytes of all prompt embeddings that the router keeps."""

from __future__ import annotations

from pdserve.common.errors import Overloaded


class EmbedsBudget:
    """A request keeps its embeddings until its end, since another attempt may need them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Kept now."""

    def take(self, num_bytes: int) -> None:
        """Raises: Overloaded for more than there is room for now; nothing is taken then."""
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"prompt_embeds has {num_bytes} bytes, and requests in the router keep {self.num_bytes} of at most "
                f"{self._max_bytes} (max_prompt_embeds_bytes)"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class EmbedsHold:
    """The bytes of one request."""

    def __init__(self, budget: EmbedsBudget, num_bytes: int) -> None:
        self._budget = budget
        self._num_bytes = num_bytes
        self._is_held = False

    def take(self) -> None:
        """Raises: Overloaded."""
        self._budget.take(self._num_bytes)
        self._is_held = True

    def give_back(self) -> None:
        """No effect if nothing is held."""
        if self._is_held:
            self._is_held = False
            self._budget.give_back(self._num_bytes)
