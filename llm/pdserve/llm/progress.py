"""The progress bar of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tqdm.auto import tqdm

from pdserve.common import clock


class Bar(Protocol):
    """The part of tqdm's interface that is used."""

    def update(self, n: int) -> object: ...
    def set_postfix_str(self, s: str, refresh: bool) -> object: ...
    def close(self) -> object: ...


MakeBar = Callable[..., Bar]
"""Takes tqdm's `total`, `desc` and `unit`."""


class Progress:
    """Counts finished requests, and shows tokens per second."""

    def __init__(self, num_requests: int, use_tqdm: bool | MakeBar) -> None:
        make_bar: MakeBar | None = tqdm if use_tqdm is True else use_tqdm or None
        self._bar = make_bar(total=num_requests, desc="requests", unit="request") if make_bar else None
        self._started_at = clock.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def finished(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One more of the requests."""
        if self._bar is None:
            return
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        seconds = max(clock.monotonic() - self._started_at, 1e-6)
        self._bar.set_postfix_str(
            f"tokens/s: {self._num_prompt_tokens / seconds:.0f} in, {self._num_output_tokens / seconds:.0f} out",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
