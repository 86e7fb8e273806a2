"""`examine`: runs all checks at once, each in its own thread and until its deadline at most."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from pdserve.cli.doctor.finding import Check, Examined, Finding, failed
from pdserve.common.errors import PdServeError

_REPORT = "this is a fault of the doctor's, not of yours: report it, and go by the other findings"
Result = TypeVar("Result")


def examine(checks: Sequence[Check]) -> Iterator[Examined]:
    """Yield the findings of each check, in the given order, as soon as they are known."""
    started_at = time.monotonic()
    running = [(check, in_background(partial(_findings, check), check.name)) for check in checks]
    for check, answer in running:
        left_s = started_at + check.deadline_s - time.monotonic()
        try:
            findings = answer.get(timeout=max(0.0, left_s))
        except queue.Empty:
            findings = [
                failed(f"no answer within {check.deadline_s:g} s", "find out what hangs: disk, network, name service or driver")
            ]  # fmt: skip
        yield Examined(check.name, findings)


def _findings(check: Check) -> list[Finding]:
    try:
        return list(check.run())
    except PdServeError as error:
        return [failed(error.message, "correct what is named here")]
    except Exception as error:
        return [failed(f"the check broke: {type(error).__name__}: {error}", _REPORT)]


def in_background(call: Callable[[], Result], name: str) -> queue.SimpleQueue[Result]:
    """Start a call that may hang in a daemon thread; returns the queue that receives its result, or nothing if it raises.

    A thread pool would not do: at exit the interpreter waits for its threads, and a name service may block one for minutes.
    """
    answer: queue.SimpleQueue[Result] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), name=f"doctor-{name}", daemon=True).start()
    return answer
