"""`pdserve router`, `prefill` and `decode`: run one service in this process."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from pdserve.cli.up.child_report import (
    MAX_MESSAGE_CHARS,
    FailedReport,
    LoadReport,
    ReadyReport,
    ReportPipe,
    follow_lifeline,
)
from pdserve.common.address.descriptors import raise_descriptor_limit
from pdserve.common.errors import ConfigError
from pdserve.common.settings.catalogue import ENV_PREFIX, SECRETS
from pdserve.common.settings.role_settings import settings_in_other_role
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.common.telemetry.logging_setup import configure_logging
from pdserve.models.model_folder import model_folder

log = logging.getLogger(__name__)

REPORT_EVERY_BYTES = 1 << 20


def serve_router(flags: Mapping[str, Any], config: Path | None) -> None:
    """Run a router until it is stopped. Raises: ConfigError."""
    from pdserve.router.service import run_router  # imported here, so that a router does not import torch

    settings = load_settings(RouterSettings, flags=flags, toml=config)
    configure_logging("router", settings.log_level, settings.log_format)
    raise_descriptor_limit()

    def ready(http_address: str, grpc_address: str) -> None:
        scheme = "https" if settings.front_tls_cert_file is not None else "http"
        # exempt loaded objects from garbage collection; a full collection over them would stop every stream for 0.1 s
        gc.freeze()
        log.info("ready: OpenAI %s://%s/v1  gRPC %s", scheme, http_address, grpc_address)

    uvloop.run(run_router(settings, model_folder=model_folder(settings.model), ready=ready))


def serve_worker(
    kind: type[PrefillSettings] | type[DecodeSettings],
    flags: Mapping[str, Any],
    config: Path | None,
    report_fd: int | None,
    lifeline_fd: int | None,
) -> bool:
    """Run a worker until it is stopped; returns False if its engine failed.

    Raises: ConfigError; ReportedFailure instead if the message went to a parent process.
    """
    pipe = ReportPipe(report_fd)
    try:
        return _serve_worker(kind, flags, config, pipe, lifeline_fd)
    except ConfigError as error:
        if not pipe.is_open:
            raise
        pipe.send(FailedReport(error.message[:MAX_MESSAGE_CHARS]))
        raise ReportedFailure from error


class ReportedFailure(Exception):
    """The service does not start; its parent process prints the reason."""


def _serve_worker(
    kind: type[PrefillSettings] | type[DecodeSettings],
    flags: Mapping[str, Any],
    config: Path | None,
    pipe: ReportPipe,
    lifeline_fd: int | None,
) -> bool:
    settings = load_settings(kind, flags=flags, toml=config)
    configure_logging(kind.section, settings.log_level, settings.log_format)
    raise_descriptor_limit()
    folder = model_folder(settings.model)
    other: WorkerSettings | ConfigError
    try:
        other = settings_in_other_role(settings, flags, config)
    except ConfigError as error:
        other = error
    # imported after the settings were checked, because torch takes seconds to import
    from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
    from pdserve.decode.decode_servicer import decode_calls
    from pdserve.prefill.prefill_servicer import prefill_calls
    from pdserve.worker.worker_process import run_worker

    follow_lifeline(lifeline_fd)
    reported = -REPORT_EVERY_BYTES

    def progress(loaded_bytes: int, total_bytes: int) -> None:
        nonlocal reported
        if loaded_bytes - reported >= REPORT_EVERY_BYTES or loaded_bytes == total_bytes:
            reported = loaded_bytes
            pipe.send(LoadReport(loaded_bytes, total_bytes))

    def ready(identity: WorkerIdentity) -> None:
        pipe.send(ReadyReport(identity.worker_id, identity.address))

    calls = {WorkerRole.PREFILL: prefill_calls, WorkerRole.DECODE: decode_calls}
    return uvloop.run(run_worker(settings, folder, calls, other, on_ready=ready, progress=progress))


def secrets_among(given: Mapping[str, object]) -> list[str]:
    """Names of the settings whose values are secrets, or a Redis URL with a password. given: settings of the command line."""
    return [
        name for name, value in given.items() if value and (name in SECRETS or (name == "redis" and "@" in str(value)))
    ]


def warn_of_secrets(given: Mapping[str, object]) -> None:
    """Print a warning on standard error for each secret, without its value."""
    for name in secrets_among(given):
        print(
            f"pdserve: {name} is in the command line, which every user of this machine can read: "
            f"give it as {ENV_PREFIX}{name.upper()} or in a file with --config",
            file=sys.stderr,
        )
