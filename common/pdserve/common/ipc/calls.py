"""`Calls`: calls to another process, or another thread, that wait for their answers."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

from pdserve.common.errors import PdServeError


class Calls:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._ended_with: PdServeError | None = None

    def open(self) -> tuple[int, Future[Any]]:
        """The id of a new call, and its answer, which no caller can cancel. After the end the answer is the error that was the
        cause."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        call_id = next(self._ids)
        with self._lock:
            cause = self._ended_with
            if cause is None:
                self._waiting[call_id] = answer
        if cause is not None:
            answer.set_exception(cause)
        return call_id, answer

    def answer(self, call_id: int, result: object, failure: PdServeError | None = None) -> None:
        """Without effect on a call that has an answer."""
        with self._lock:
            answer = self._waiting.pop(call_id, None)
        if answer is not None and failure is not None:
            answer.set_exception(failure)
        elif answer is not None:
            answer.set_result(result)

    def forget(self, call_id: int) -> None:
        """The call could not be sent, or its caller waits no longer."""
        with self._lock:
            self._waiting.pop(call_id, None)

    def end(self, cause: PdServeError) -> None:
        """Answer all calls, and later ones, with an error."""
        with self._lock:
            self._ended_with = self._ended_with or cause
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(cause)
