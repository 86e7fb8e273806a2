"""`RequestScope`: one client's request in the router, from its admission until nothing of it runs any more."""

from __future__ import annotations

import abc
from typing import Generic, Protocol, TypeVar

from pdserve.common.errors import Cancelled, Draining, PdServeError
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.timeline import Timeline
from pdserve.router.admission.admission import Admission
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.tenants.client import Client


class Run(Protocol):
    """Serves one prompt, or input, of a request."""

    usage: Usage
    timeline: Timeline
    num_sequences: int
    """Sequences that engines are asked for: each takes a place."""

    @property
    def timeout_s(self) -> float:
        """The client's deadline, seconds from the start of the request."""


R = TypeVar("R", bound=Run)
REQUEST_ID_HEADER = "x-request-id"
"""Carries the client's id in a request, and the router's id in a response, over HTTP and gRPC."""


class RequestScope(abc.ABC, Generic[R]):
    """Counts its tasks as requests from `_enter` to `_leave`; admission may cancel it when the router stops."""

    def __init__(
        self,
        request_id: str,
        runs: list[R],
        admission: Admission,
        record: RequestTrace,
        client: Client,
        flex_id: str = "",
    ) -> None:
        """client: owner of the request. flex_id: as in `Admission.enter`."""
        self.request_id = request_id
        self._runs = runs
        self._record = record
        self._admission = admission
        self._client = client
        self._flex_id = flex_id
        self._num_sequences = sum(run.num_sequences for run in runs)

    @abc.abstractmethod
    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs and their calls with `error`; default: the client has left."""

    @property
    def answer_headers(self) -> dict[str, str]:
        """Headers of the response, or gRPC metadata, by which a client finds its request in logs and, if this router traces, among
        the traces."""
        headers = {REQUEST_ID_HEADER: self.request_id}
        traceparent = self._record.traceparent
        return headers if traceparent is None else headers | {TRACEPARENT: traceparent}

    @property
    def usage(self) -> Usage:
        """Usage, summed over the runs; for a single run, its live counter."""
        if len(self._runs) == 1:
            return self._runs[0].usage
        return Usage(
            prompt_tokens=sum(run.usage.prompt_tokens for run in self._runs),
            completion_tokens=sum(run.usage.completion_tokens for run in self._runs),
            cached_tokens=sum(run.usage.cached_tokens for run in self._runs),
        )

    @property
    def timeline(self) -> Timeline:
        """The timeline of the first task."""
        return self._runs[0].timeline

    def _enter(self) -> None:
        """Raises: Overloaded, Draining."""
        timeout_s = min(run.timeout_s for run in self._runs)
        try:
            self._admission.enter(
                len(self._runs),
                self._expelled,
                client=self._client,
                num_sequences=self._num_sequences,
                timeout_s=timeout_s,
                flex_id=self._flex_id,
            )
        except BaseException as error:
            self._record.abort(error if isinstance(error, PdServeError) else Cancelled("the client left"))
            self._record.end()
            raise

    def _leave(self) -> None:
        self._admission.leave(
            len(self._runs),
            self._expelled,
            client=self._client,
            num_sequences=self._num_sequences,
            flex_id=self._flex_id,
        )
        self._record.end()

    def _expelled(self) -> None:
        self.cancel(Draining("this router is shutting down"))
