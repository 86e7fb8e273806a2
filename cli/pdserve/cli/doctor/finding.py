"""`Finding`: one line of the doctor's report, and `Check`, which makes findings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """A service would start, but a part of its setup should be improved."""
    FAILED = "failed"
    """A service would not start, or would start and be unable to serve."""


class Finding(msgspec.Struct, frozen=True):
    """One result of a check. advice: the remedy; empty for `OK`."""

    verdict: Verdict
    what: str
    advice: str = ""


def ok(what: str) -> Finding:
    return Finding(Verdict.OK, what)


def warning(what: str, advice: str) -> Finding:
    return Finding(Verdict.WARNING, what, advice)


def failed(what: str, advice: str) -> Finding:
    return Finding(Verdict.FAILED, what, advice)


class Check(NamedTuple):
    """Checks one part of a service's environment. It changes nothing."""

    name: str
    run: Callable[[], Iterable[Finding]]
    """Called once, in a thread of its own; an exception becomes a finding."""
    deadline_s: float = 5.0
    """Seconds after which the report goes on without its findings."""


class Examined(msgspec.Struct, frozen=True):
    """The findings of one check."""

    check: str
    findings: list[Finding]
