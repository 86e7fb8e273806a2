"""`check_workers`: finds in one process, before workers are started, what would keep them from starting."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.cli.doctor.child_process import ChildBroke, child
from pdserve.cli.up.cluster_plan import ClusterPlan
from pdserve.common.errors import ConfigError
from pdserve.engine.runner.loading.startup_check import StartupAnswer, StartupQuestion
from pdserve.models.model_folder import BUNDLED

CHECK_S = 60.0
"""Seconds after which the workers are started, and find out by themselves."""


def check_workers(plan: ClusterPlan, folder: Path) -> None:
    """Check devices and the model. A bundled model on CPUs always works and is not checked.

    folder: of the model. Raises: ConfigError naming a worker and the reason.
    """
    # one per role: those of a role differ in names, ports and cores
    asked = {
        worker.role: worker
        for worker in reversed(plan.children)
        if worker.settings.device != "cpu" or worker.settings.model not in BUNDLED
    }
    if not asked:
        return
    settings = {role: msgspec.Raw(msgspec.json.encode(worker.settings)) for role, worker in asked.items()}
    try:
        with child("pdserve.engine.runner.loading.startup_check", timeout_s=CHECK_S) as check:
            check.send(StartupQuestion(str(folder), settings))
            problems = check.answer(StartupAnswer).problems
    except (ChildBroke, TimeoutError):
        return
    for worker in plan.children:
        if (problem := problems.get(worker.role)) is not None:
            raise ConfigError(f"{worker.name}: {problem}")
