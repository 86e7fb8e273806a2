"""`settings_in_other_role`: a worker's settings in the role with which it was not started, if it can take that role.

A worker that has changed its role behaves as one that was started in it with the same file, environment and options. So each
setting is one of three kinds:

* It is read when a call begins, and follows the role (`READ_PER_CALL`).
* It belongs to the process, whatever its role (`OF_THE_PROCESS`): addresses, names, logs.
* It shapes the loaded model, the pool or the steps of the engine, and cannot change: all others. They must be equal in both roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.common.errors import ConfigError
from pdserve.common.settings.catalogue import SECRETS, settings_of
from pdserve.common.settings.settings import load_settings, values_of
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings

READ_PER_CALL = frozenset(("stream_interval", "max_waiting", "max_sessions", "session_idle_timeout_s"))
OF_THE_PROCESS = frozenset(
    (
        "host", "port", "data_port", "attach_port", "advertise_host", "metrics_port", "metrics_host", "worker_id", "cpu_core",
        "log_level", "log_format", "stat_loggers", "profile_interval_s", "profile_steps", "drain_s", "engine_stuck_exit_s",
    )
)  # fmt: skip
_MAX_NAMED = 3


def settings_in_other_role(
    settings: WorkerSettings, flags: Mapping[str, Any], toml: Path | None, environ: Mapping[str, str] | None = None
) -> WorkerSettings:
    """settings: those of the worker's own role, from these flags, this file and this environment.

    Raises: ConfigError with the reason why a worker with them has to be started anew for the other role.
    """
    kind = PrefillSettings if isinstance(settings, DecodeSettings) else DecodeSettings
    known = settings_of(kind)
    other: WorkerSettings = load_settings(
        kind, flags={name: value for name, value in flags.items() if name in known}, toml=toml, environ=environ
    )
    here, there = values_of(settings), values_of(other)
    fixed = [name for name in here if name in there and name not in READ_PER_CALL | OF_THE_PROCESS]
    differing = [name for name in fixed if here[name] != there[name]]
    if differing:
        told = [
            f"{name} is {here[name]!r:.100} in [{settings.section}] and {there[name]!r:.100} in [{kind.section}]"
            if name not in (*SECRETS, "redis")
            else f"{name} differs in [{settings.section}] and [{kind.section}]"
            for name in differing[:_MAX_NAMED]
        ]
        more = f", and {len(differing) - _MAX_NAMED} more differ" if len(differing) > _MAX_NAMED else ""
        raise ConfigError(
            f"{'; '.join(told)}{more}: equal settings are needed, or a worker that is started in that role"
        )
    return other
