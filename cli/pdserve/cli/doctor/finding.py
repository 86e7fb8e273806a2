"""`Finding`: one line of the doctor's report, and `Check`, which makes findings."""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """A service would start, and something would not be as it might be."""
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


class Check(Protocol):
    """One noun that is looked at. It leaves nothing behind, and waits for nothing longer than its deadline."""

    @property
    def name(self) -> str: ...

    @property
    def deadline_s(self) -> float:
        """Findings that are not here by then are not waited for."""

    def run(self) -> list[Finding]:
        """Run the check. Called once, in a thread of its own; an exception is a finding, too."""


class Examined(msgspec.Struct, frozen=True):
    """The findings of one check."""

    check: str
    findings: list[Finding]
