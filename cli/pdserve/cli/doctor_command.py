"""`pdserve doctor`: checks the environment of a service before it is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from pdserve.cli.doctor.address_check import check_addresses
from pdserve.cli.doctor.credentials_check import check_clients, check_key, check_tls
from pdserve.cli.doctor.examination import examine
from pdserve.cli.doctor.finding import Check, Examined, Verdict, failed
from pdserve.cli.doctor.gpu_check import check_gpu
from pdserve.cli.doctor.lora_check import check_adapters
from pdserve.cli.doctor.memory_check import check_memory
from pdserve.cli.doctor.model_check import check_model
from pdserve.cli.doctor.native_check import check_native
from pdserve.cli.doctor.nixl_check import check_nixl
from pdserve.cli.doctor.port_check import check_descriptors, check_ports
from pdserve.cli.doctor.redis_check import check_redis
from pdserve.cli.doctor.report import make_report, show, show_summary
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings

Role = Literal["prefill", "decode", "router"]
_UNWRAPPED = 1 << 16
"""Width of output that goes to a file or another program, so that its lines are not wrapped."""
_SETTINGS: dict[Role, type[PrefillSettings | DecodeSettings | RouterSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}


def checks_for(settings: WorkerSettings | RouterSettings) -> list[Check]:
    """The checks for a service with these settings, in the order of the report."""
    model = Check("model", partial(check_model, settings), deadline_s=60.0)
    everywhere = [
        Check("key", partial(check_key, settings)),
        Check("tls", partial(check_tls, settings)),
        Check("ports", partial(check_ports, settings)),
        Check("addresses", partial(check_addresses, settings), deadline_s=15.0),
        Check("files", partial(check_descriptors, settings)),
        Check("redis", partial(check_redis, settings), deadline_s=15.0),
    ]
    if isinstance(settings, RouterSettings):
        return [model, *everywhere, Check("clients", partial(check_clients, settings))]
    return [
        model,
        Check("adapters", partial(check_adapters, settings), deadline_s=60.0),
        Check("memory", partial(check_memory, settings), deadline_s=70.0),
        Check("native", partial(check_native, settings), deadline_s=60.0),
        Check("gpu", partial(check_gpu, settings), deadline_s=60.0),
        *everywhere,
        Check("nixl", partial(check_nixl, settings), deadline_s=100.0),
    ]


def examine_service(role: Role, flags: Mapping[str, Any], config: Path | None, *, as_json: bool) -> bool:
    """Print the findings; True if no check failed."""
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNWRAPPED)
    examined: list[Examined] = []
    for one in _examine(role, flags, config):
        examined.append(one)
        if not as_json:
            show(console, one)
    report = make_report(role, examined)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        show_summary(console, report)
    return report.verdict is not Verdict.FAILED


def _examine(role: Role, flags: Mapping[str, Any], config: Path | None) -> Iterable[Examined]:
    try:
        settings = load_settings(_SETTINGS[role], flags=flags, toml=config)
    except ConfigError as error:
        advice = "correct the setting; defaults < TOML file < PDSERVE_* < flags, the last one wins"
        return [Examined("settings", [failed(error.message, advice)])]
    return examine(checks_for(settings))
