"""`examine`: runs all checks at once, each in a thread of its own and at most until its deadline."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from functools import partial

from pdserve.cli.doctor.background import in_background
from pdserve.cli.doctor.finding import Check, Examined, Finding, failed
from pdserve.common.errors import PdServeError

_REPORT = "this is a fault of the doctor's, not of yours: report it, and go by the other findings"


def examine(checks: Sequence[Check]) -> Iterator[Examined]:
    """Yield the findings of each check, in the given order, as soon as they are known."""
    started_at = time.monotonic()
    running = [(check, in_background(partial(_look, check), check.name)) for check in checks]
    for check, answer in running:
        left_s = started_at + check.deadline_s - time.monotonic()
        try:
            findings = answer.get(timeout=max(0.0, left_s))
        except queue.Empty:
            findings = [
                failed(f"no answer within {check.deadline_s:g} s", "find out what hangs: disk, network, name service or driver")
            ]  # fmt: skip
        yield Examined(check.name, findings)


def _look(check: Check) -> list[Finding]:
    try:
        return check.run()
    except PdServeError as error:
        return [failed(error.message, "correct what is named here")]
    except Exception as error:
        return [failed(f"the check broke: {type(error).__name__}: {error}", _REPORT)]
