"""`pdserve doctor`: checks the environment of a service before it is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from pdserve.cli.doctor.address_check import AddressCheck
from pdserve.cli.doctor.auth_check import AuthCheck
from pdserve.cli.doctor.descriptor_check import DescriptorCheck
from pdserve.cli.doctor.examination import examine
from pdserve.cli.doctor.finding import Check, Examined, Verdict, failed
from pdserve.cli.doctor.gpu_check import GpuCheck
from pdserve.cli.doctor.key_check import KeyCheck
from pdserve.cli.doctor.memory_check import MemoryCheck
from pdserve.cli.doctor.model_check import ModelCheck
from pdserve.cli.doctor.nixl_check import NixlCheck
from pdserve.cli.doctor.port_check import PortCheck
from pdserve.cli.doctor.redis_check import RedisCheck
from pdserve.cli.doctor.report import make_report, show, show_summary
from pdserve.cli.doctor.tls_check import TlsCheck
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings

Role = Literal["prefill", "decode", "router"]
_SETTINGS: dict[Role, type[PrefillSettings | DecodeSettings | RouterSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}


def checks_for(settings: WorkerSettings | RouterSettings) -> list[Check]:
    """The checks for a service with these settings, in the order of the report."""
    everywhere: list[Check] = [
        KeyCheck(settings),
        TlsCheck(settings),
        PortCheck(settings),
        AddressCheck(settings),
        DescriptorCheck(settings),
        RedisCheck(settings),
    ]
    if isinstance(settings, RouterSettings):
        return [ModelCheck(settings), *everywhere, AuthCheck(settings)]
    return [ModelCheck(settings), MemoryCheck(settings), GpuCheck(settings), *everywhere, NixlCheck(settings)]


def examine_service(role: Role, flags: Mapping[str, Any], config: Path | None, *, as_json: bool) -> bool:
    """Print the findings; True if no check failed."""
    console = Console()
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
