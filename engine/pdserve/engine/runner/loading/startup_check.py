"""`python -m pdserve.engine.runner.loading.startup_check`: reads a `StartupQuestion` from standard input, prints a `StartupAnswer`.

A process of its own: torch takes seconds to import, and a driver may hang.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import msgspec

from pdserve.common.errors import PdServeError
from pdserve.common.processes.child_answers import ChildAnswers
from pdserve.common.settings.worker_settings import WORKER_SETTINGS


class StartupQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers that would serve the model of one folder on this machine."""

    folder: str
    workers: dict[Literal["prefill", "decode"], msgspec.Raw]
    """Role -> the settings of its workers, as JSON."""


class StartupAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Role -> the reason why its workers would not start. A role without one is left out."""

    problems: dict[str, str]


def startup_answer(question: StartupQuestion) -> StartupAnswer:
    """Check each role's device and model, without reading weights."""
    # may print, so it is imported after standard output was redirected
    from pdserve.engine.runner.loading.loaded_model import verify_worker

    problems: dict[str, str] = {}
    for role, settings in question.workers.items():
        try:
            verify_worker(Path(question.folder), msgspec.json.decode(settings, type=WORKER_SETTINGS[role]))
        except PdServeError as error:
            problems[role] = error.message
    return StartupAnswer(problems)


if __name__ == "__main__":
    answers = ChildAnswers()
    answers.send(startup_answer(msgspec.json.decode(sys.stdin.buffer.readline(), type=StartupQuestion)))
