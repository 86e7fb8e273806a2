"""`Finding`: one line of the doctor's report, and `Check`, which makes findings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """A service would start, with a shortcoming."""
    FAILED = "failed"
    """A service would not start, or could not serve."""


class Finding(msgspec.Struct, frozen=True):
    """A result. advice: the remedy; empty when all is well."""

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
    """Examines one noun. It leaves nothing behind."""

    name: str
    run: Callable[[], Iterable[Finding]]
    """Called once, in a thread of its own; an exception becomes a finding."""
    deadline_s: float = 5.0
    """Seconds after which the report goes on without its findings."""


class Examined(msgspec.Struct, frozen=True):
    """The findings of one check."""

    check: str
    findings: list[Finding]
