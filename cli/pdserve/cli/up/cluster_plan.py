"""`ClusterPlan`: the services of `pdserve up` with their settings, complete and verified before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pdserve.cli.doctor.port_check import Port, ports_of
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import new_deployment_key
from pdserve.common.settings.catalogue import ENV_PREFIX, SERVICES, hint, settings_of
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings, names_given, values_of
from pdserve.common.settings.worker_settings import WORKER_SETTINGS, WorkerSettings

MIN_CORES_FOR_PINNING = 2
WorkerRole = Literal["prefill", "decode"]
_ON_LOOPBACK = {"host": "127.0.0.1", "advertise_host": "127.0.0.1", "data_port": 0, "attach_port": 0}
"""Settings of all workers, which only this machine reaches, whatever the router listens on."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """A worker process."""

    role: WorkerRole
    name: str
    flags: tuple[str, ...]
    environ: dict[str, str]
    """All settings but the file's: any may be a secret, and every user of a machine can read command lines."""
    settings: WorkerSettings
    """As the process will read them."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The router, which runs in this process, and the workers."""

    router: RouterSettings
    children: tuple[ChildPlan, ...]
    on_ray: bool = False
    """True if workers run on nodes of a Ray cluster."""

    def ports(self) -> list[Port]:
        """The ports on this machine: the router's three, then the port of metrics of each worker."""
        if self.on_ray:
            return ports_of(self.router)
        workers = [
            Port("metrics_port", f"metrics of {child.name}", child.settings.metrics_at, child.settings.metrics_port)
            for child in self.children
        ]
        return ports_of(self.router) + workers


def make_plan(
    given: Mapping[str, object],
    config: Path | None,
    num_workers: Mapping[WorkerRole, int],
    environ: Mapping[str, str] | None = None,
    *,
    on_ray: bool = False,
) -> ClusterPlan:
    """The services with the settings that each has. given: settings of the command line; None counts as not given.
    on_ray: workers run on nodes of a Ray cluster, which read neither the file nor the environment of this machine.

    Every service reads the environment (default: this process's) and the file, too. Raises: ConfigError naming the
    setting and what is wrong with it.
    """
    environ = os.environ if environ is None else environ
    by_role = settings_by_role({name: value for name, value in given.items() if value is not None})
    router = load_settings(RouterSettings, flags=by_role["router"], toml=config, environ=environ)
    if "log_level" not in by_role["router"].keys() | names_given(RouterSettings, config, environ):
        router = msgspec.structs.replace(router, log_level="warning")
    if router.deployment_key is None:
        router = msgspec.structs.replace(router, deployment_key=new_deployment_key())
    names: list[tuple[WorkerRole, str]] = [
        (role, f"{role}-{index}") for role, count in num_workers.items() for index in range(count)
    ]
    sizes = {
        role: load_settings(
            WORKER_SETTINGS[role], flags={**by_role[role], **_ON_LOOPBACK, "port": 0}, toml=config, environ=environ
        ).tensor_parallel_size
        for role in num_workers
    }
    num_processes = sum(sizes[role] for role, _ in names)
    children: list[ChildPlan] = []
    place = 0
    for role, name in names:
        # the environment overrides the file, so `up` sets no default that either sets
        known = names_given(WORKER_SETTINGS[role], config, environ)
        defaults = {"log_level": "warning"} if on_ray else _defaults(place, num_processes)
        settings = {key: value for key, value in defaults.items() if key not in known}
        settings |= by_role[role] | _ON_LOOPBACK | {"worker_id": name}
        settings["metrics_port"] = router.metrics_port and router.metrics_port + 1 + len(children)
        settings["deployment_key"] = router.deployment_key
        if router.deployment_key_file is not None:
            settings["deployment_key_file"] = router.deployment_key_file
        place += sizes[role]
        # a worker may take the other role, with what only that has
        others = {
            name: value
            for other in WORKER_SETTINGS
            for name, value in by_role[other].items()
            if name not in by_role[role]
        }
        child = _child(role, name, settings, others, config, environ)
        children.append(_for_another_machine(child) if on_ray else child)
        if children[-1].settings.key() != router.key():
            raise ConfigError(
                f"deployment_key_file in [{role}] has another key than the router: give one key for all services"
            )
    return ClusterPlan(router, tuple(children), on_ray)


def _child(
    role: WorkerRole,
    name: str,
    settings: Mapping[str, object],
    others: Mapping[str, object],
    config: Path | None,
    environ: Mapping[str, str],
) -> ChildPlan:
    """others: given settings of other roles alone. Raises: ConfigError."""
    given = {**others, **settings}
    own = {**environ, **{f"{ENV_PREFIX}{key.upper()}": _as_text(value) for key, value in given.items()}}
    flags = () if config is None else ("--config", str(config))
    # the port of the environment is the router's
    loaded = load_settings(WORKER_SETTINGS[role], flags={**settings, "port": 0}, toml=config, environ=environ)
    return ChildPlan(role, name, flags, own, loaded)


def _for_another_machine(child: ChildPlan) -> ChildPlan:
    """The plan with every setting in its environment, and nothing else of this machine but OpenTelemetry's variables.

    A relative folder of the model becomes an absolute one. Raises: ConfigError for a device that Ray does not assign.
    """
    settings = child.settings
    if settings.tensor_parallel_size > 1:
        raise ConfigError(f"tensor_parallel_size is {settings.tensor_parallel_size}: workers on Ray have one rank each")
    if settings.device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {settings.device!r}: Ray assigns the GPU, so that cpu or cuda is needed")
    # a key's file is read here; files of certificates are those of the nodes
    settings = msgspec.structs.replace(
        settings, deployment_key=settings.key()[0].secret.decode(), deployment_key_file=None
    )
    if (folder := Path(settings.model)).is_dir():
        settings = msgspec.structs.replace(settings, model=str(folder.resolve()))
    modules = {name: str(Path(path).absolute()) for name, path in (settings.lora_modules or {}).items()} or None
    lora_dir = None if settings.lora_dir is None else str(Path(settings.lora_dir).absolute())
    settings = msgspec.structs.replace(settings, lora_modules=modules, lora_dir=lora_dir)
    defaults = values_of(WORKER_SETTINGS[child.role]())
    environ = {name: value for name, value in child.environ.items() if name.startswith("OTEL_")} | {
        f"{ENV_PREFIX}{name.upper()}": _as_text(value)
        for name, value in values_of(settings).items()
        if value is not None and value != defaults[name]
    }
    return ChildPlan(child.role, child.name, (), environ, settings)


def _as_text(value: object) -> str:
    """A setting's value as an environment variable has it: lists with commas, tables as JSON."""
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    if isinstance(value, Mapping):
        return msgspec.json.encode(value).decode()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _defaults(place: int, num_processes: int) -> dict[str, object]:
    """Settings of the worker whose rank 0 is at `place` among all ranks of all workers, each with a core of its own if there are
    enough cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    threads = max(1, len(cores) // num_processes)
    settings: dict[str, object] = {"num_threads": threads, "log_level": "warning"}
    # they are pinned only to consecutive cores, and only if no two of them share one
    if len(cores) >= max(MIN_CORES_FOR_PINNING, num_processes) and cores[-1] - cores[0] == len(cores) - 1:
        settings["cpu_core"] = cores[0] + place * threads
    return settings


def settings_by_role(given: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Role -> the given settings that its service has. Raises: ConfigError for a name that no service has."""
    for name in given:
        if name not in settings_of(*SERVICES):
            raise ConfigError(f"{name}: no service has such a setting{hint(name)}")
    return {
        kind.section: {name: value for name, value in given.items() if name in settings_of(kind)} for kind in SERVICES
    }
