"""`RequestLog`: the last requests of a router with their phases, for `/debug/status` and `/debug/requests/{request_id}`."""

from __future__ import annotations

import heapq
import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.errors import Cancelled, NotFound
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.router.telemetry.request_trace import PromptTrace, RequestTrace
from pdserve.router.telemetry.status_view import MAX_SLOWEST, PhaseView, RecentView, RequestView
from pdserve.router.tenants.client import Client

KEPT_REQUESTS = 1024
KEPT_S = 600.0
"""Limits of the log: number of ended requests of all tenants, and seconds since the end."""
WINDOW_S = 30.0
"""Seconds over which rates are taken."""
_SERVICES = {
    "prefill_queue": "prefill", "prefill": "prefill", "decode_reserve": "decode", "kv_exposed": "decode",
    "decode_queue": "decode", "decode": "decode",
}  # fmt: skip
"""Phase of the critical path -> the service that spends it; others are the router's."""
_MAX_SHOWN_CHARS = 64
_OUR_ID = re.compile(r"[0-9a-f]{32}")


class AskedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that are known at its arrival."""

    request_id: str
    client_request_id: str
    operation: str
    client: Client
    arrived_unix_ns: int


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with the numbers of its prompts, and the timeline of the prompt that ended last."""

    asked: AskedRequest
    outcome: str
    end_unix_ns: int
    timeline: Timeline | None
    num_prompts: int
    num_prompt_tokens: int
    cached_tokens: CachedTokens
    num_output_tokens: int
    num_attempts: int
    prefill: str
    decode: str

    @classmethod
    def of(cls, asked: AskedRequest, runs: Sequence[PromptTrace], now: int, *, has_ended: bool) -> LoggedRequest:
        """now: Unix time in nanoseconds."""
        last = max(runs, key=lambda run: run.end_unix_ns(now), default=None)
        failed = next((run for run in runs if has_ended and run.cause is not None), last)
        return cls(
            asked=asked,
            outcome=failed.outcome if has_ended and failed is not None else "",
            end_unix_ns=last.end_unix_ns(now) if last is not None else now,
            timeline=last.timeline if last is not None else None,
            num_prompts=len(runs),
            num_prompt_tokens=sum(run.num_prompt_tokens for run in runs),
            cached_tokens=CachedTokens.sum(run.cached_tokens for run in runs),
            num_output_tokens=sum(run.num_output_tokens for run in runs),
            num_attempts=last.num_attempts if last is not None else 0,
            prefill=last.prefill if last is not None else "",
            decode=last.decode if last is not None else "",
        )

    @property
    def duration_s(self) -> float:
        return (self.end_unix_ns - self.asked.arrived_unix_ns) / 1e9

    @property
    def client_left(self) -> bool:
        """True: the time to its end is the client's choice."""
        return self.outcome == Cancelled.code

    @property
    def has_failed(self) -> bool:
        return self.outcome not in ("stop", "length", Cancelled.code)

    def view(self, client: Client) -> RequestView:
        """The request, without the fields that this client may not see."""
        asked, sees_all = self.asked, client.sees_all
        return RequestView(
            request_id=asked.request_id,
            client_request_id=asked.client_request_id,
            tenant=asked.client.tenant,
            key_name=asked.client.key_name,
            operation=asked.operation,
            outcome=self.outcome,
            arrived_unix_s=asked.arrived_unix_ns / 1e9,
            duration_s=self.duration_s,
            ttft_s=self.timeline.ttft_s if self.timeline is not None else None,
            num_prompts=self.num_prompts,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.cached_tokens.total if sees_all else None,
            cached_tokens=self.cached_tokens if sees_all else None,
            num_output_tokens=self.num_output_tokens,
            num_attempts=self.num_attempts,
            prefill=self.prefill if sees_all else "",
            decode=self.decode if sees_all else "",
            phases=list(self._phases()),
        )

    def _phases(self) -> Iterator[PhaseView]:
        if (timeline := self.timeline) is None:
            return
        is_local = not self.prefill and bool(self.decode)
        at = 0.0
        for name, seconds in timeline.critical_path(self.end_unix_ns).items():
            service = _SERVICES.get(name, "router")
            if is_local and service == "prefill":
                service = "decode"
            yield PhaseView(name=name, service=service, start_s=at, duration_s=seconds)
            at += seconds
        start, seconds_of = timeline.seconds(moments.ARRIVED, moments.KV_RESERVED), timeline.seconds
        if start is not None and (transfer := seconds_of(moments.KV_RESERVED, moments.KV_LANDED)) is not None:
            yield PhaseView(name="kv_transfer", service="decode", start_s=start, duration_s=transfer, overlaps=True)


class _Kept:
    """The last ended requests of one tenant."""

    def __init__(self) -> None:
        self.requests: deque[LoggedRequest] = deque()
        self.lost_unix_ns = 0
        """End of the newest request that others displaced; 0 if there is none."""


class RequestLog:
    """The last ended requests of each tenant, and those under way, for use in the event loop. Contains no text of requests.

    All tenants share the room for `KEPT_REQUESTS`: when it is full, the tenant that has most loses its oldest, so that each keeps
    as many as it would have if all had equally many.
    """

    def __init__(self, *, clock: Callable[[], int] = now_unix_ns) -> None:
        """clock: Unix time in nanoseconds, which never goes back."""
        self._clock = clock
        self.started_unix_ns = clock()
        # a trace whose request never started has no end
        self._under_way: weakref.WeakKeyDictionary[RequestTrace, AskedRequest] = weakref.WeakKeyDictionary()
        self._ended: OrderedDict[str, _Kept] = OrderedDict()
        """Requests by tenant; last the tenant whose request ended last."""
        self._num_ended = 0
        self._lost_unix_ns = 0
        """As `_Kept.lost_unix_ns`, of all tenants."""

    def began(self, record: RequestTrace, asked: AskedRequest) -> None:
        """Add a request that has arrived."""
        self._under_way[record] = asked

    def ended(self, record: RequestTrace) -> None:
        """Move a request to the ended ones."""
        if (asked := self._under_way.pop(record, None)) is not None:
            now, tenant = self._clock(), asked.client.tenant
            self._ended.setdefault(tenant, _Kept()).requests.append(
                LoggedRequest.of(asked, record.runs, now, has_ended=True)
            )
            self._ended.move_to_end(tenant)
            self._num_ended += 1
            self._make_room(now - int(KEPT_S * 1e9))

    def _make_room(self, oldest_unix_ns: int) -> None:
        """Drop tenants without a request since this time, and what is too much."""
        while next(iter(self._ended.values())).requests[-1].end_unix_ns < oldest_unix_ns:
            _, kept = self._ended.popitem(last=False)
            self._num_ended -= len(kept.requests)
        if self._num_ended > KEPT_REQUESTS:
            # the first of several that have equally many has been idle for longest
            tenant, largest = max(self._ended.items(), key=lambda item: len(item[1].requests))
            self._lost_unix_ns = largest.lost_unix_ns = largest.requests.popleft().end_unix_ns
            self._num_ended -= 1
            if not largest.requests:
                del self._ended[tenant]

    def find(self, name: str, client: Client) -> RequestView:
        """The newest request with this id: the router's, also as a part of a response's or an engine's id, or the client's own.

        Raises: NotFound, also for another tenant's request.
        """
        found = _OUR_ID.search(name)
        ours = found[0] if found else name
        for record, asked in reversed(self._seen_under_way(client)):
            if ours == asked.request_id or name == asked.client_request_id:
                return LoggedRequest.of(asked, record.runs, self._clock(), has_ended=False).view(client)
        for request in self._seen(client, KEPT_S):
            if ours == request.asked.request_id or name == request.asked.client_request_id:
                return request.view(client)
        raise NotFound(
            f"no request {name[:_MAX_SHOWN_CHARS]!r} is known to this router: it keeps the last {KEPT_REQUESTS} "
            f"requests for {KEPT_S:g} s after their end, fewer of a tenant while others need the room, and shows a tenant its own"
        )

    def slowest(self, client: Client) -> list[RequestView]:
        """The slowest requests that the client may see, at most `MAX_SLOWEST`; without those that their clients left."""
        now = self._clock()
        # requests under way are in order of arrival, so the first ones are the slowest
        oldest = islice(self._seen_under_way(client), MAX_SLOWEST)
        requests = [LoggedRequest.of(asked, record.runs, now, has_ended=False) for record, asked in oldest]
        requests += [each for each in self._seen(client, KEPT_S) if not each.client_left]
        return [each.view(client) for each in heapq.nlargest(MAX_SLOWEST, requests, key=lambda each: each.duration_s)]

    def recent(self, client: Client) -> RecentView:
        """Rates and percentiles of requests that ended lately."""
        now = self._clock()
        window_s = min(WINDOW_S, (now - self.started_unix_ns) / 1e9)
        lost_unix_ns = self._lost_unix_ns
        if not client.sees_all:
            kept = self._ended.get(client.tenant)
            lost_unix_ns = kept.lost_unix_ns if kept is not None else 0
        # within the window all requests are known
        window_s = min(window_s, (now - lost_unix_ns) / 1e9)
        window_s = max(window_s, 1.0)
        seen = self._seen(client, window_s)
        num_prompt_tokens = sum(each.num_prompt_tokens for each in seen)
        cached = CachedTokens.sum(each.cached_tokens for each in seen)
        ttfts = sorted(ttft for each in seen if each.timeline and (ttft := each.timeline.ttft_s) is not None)
        durations = sorted(each.duration_s for each in seen if not each.has_failed and not each.client_left)
        return RecentView(
            window_s=window_s,
            num_requests=len(seen),
            requests_per_s=len(seen) / window_s,
            failed_per_s=sum(each.has_failed for each in seen) / window_s,
            prompt_tokens_per_s=num_prompt_tokens / window_s,
            output_tokens_per_s=sum(each.num_output_tokens for each in seen) / window_s,
            num_prompt_tokens=num_prompt_tokens,
            cached_fraction=cached.total / num_prompt_tokens if num_prompt_tokens and client.sees_all else None,
            cached_tokens=cached if client.sees_all else None,
            ttft_p50_s=_percentile(ttfts, 0.5),
            ttft_p95_s=_percentile(ttfts, 0.95),
            duration_p50_s=_percentile(durations, 0.5),
            duration_p95_s=_percentile(durations, 0.95),
        )

    def _seen_under_way(self, client: Client) -> list[tuple[RequestTrace, AskedRequest]]:
        return [(record, asked) for record, asked in self._under_way.items() if _may_see(client, asked)]

    def _seen(self, client: Client, max_age_s: float) -> list[LoggedRequest]:
        """Ended requests that the client may see, the last one first."""
        oldest = self._clock() - max_age_s * 1e9
        seen = [
            request
            for tenant, kept in self._ended.items()
            if client.sees_all or tenant == client.tenant
            for request in kept.requests
            if request.end_unix_ns >= oldest
        ]
        return sorted(seen, key=lambda request: request.end_unix_ns, reverse=True)


def _may_see(client: Client, asked: AskedRequest) -> bool:
    return client.sees_all or asked.client.tenant == client.tenant


def _percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """The nearest rank; None without a value."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None
