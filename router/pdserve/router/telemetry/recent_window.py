"""`RecentWindow`: the requests of one router process that ended lately; `recent_view` sums those of several."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.router.telemetry.status_view import RecentView


class RecentWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended within the last `window_s` seconds and that one client may see."""

    window_s: float
    num_requests: int = 0
    num_failed: int = 0
    """Requests that ended with an error, without those whose client left."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttfts_s: list[float] = []
    durations_s: list[float] = []
    """Durations of requests that did not fail."""


def recent_view(windows: Sequence[RecentWindow], *, sees_all: bool) -> RecentView:
    """Rates are added; percentiles are those of all requests. windows: at least one. sees_all: False for a user's view."""
    num_prompt_tokens = sum(window.num_prompt_tokens for window in windows)
    num_cached_tokens = sum(window.num_cached_tokens for window in windows)
    ttfts = sorted(ttft for window in windows for ttft in window.ttfts_s)
    durations = sorted(duration for window in windows for duration in window.durations_s)
    return RecentView(
        window_s=min(window.window_s for window in windows),
        num_requests=sum(window.num_requests for window in windows),
        requests_per_s=sum(window.num_requests / window.window_s for window in windows),
        failed_per_s=sum(window.num_failed / window.window_s for window in windows),
        prompt_tokens_per_s=sum(window.num_prompt_tokens / window.window_s for window in windows),
        output_tokens_per_s=sum(window.num_output_tokens / window.window_s for window in windows),
        cached_fraction=num_cached_tokens / num_prompt_tokens if num_prompt_tokens and sees_all else None,
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p95_s=_percentile(ttfts, 0.95),
        duration_p50_s=_percentile(durations, 0.5),
        duration_p95_s=_percentile(durations, 0.95),
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """The nearest rank; None without a value."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None
