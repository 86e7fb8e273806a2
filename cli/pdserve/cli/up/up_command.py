"""`pdserve up`: from the options of the command line to a running cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from pdserve.cli.clients.client_options import DEFAULT_URL
from pdserve.cli.clients.picture_file import data_url
from pdserve.cli.service_commands import warn_of_secrets
from pdserve.cli.up.cluster import RayCluster, run_cluster
from pdserve.cli.up.cluster_plan import WorkerRole, make_plan
from pdserve.cli.up.greeting import Greeting
from pdserve.common.telemetry.logging_setup import configure_logging


def run_up(
    given: Mapping[str, object],
    config: Path | None,
    num_workers: Mapping[WorkerRole, int],
    question: str,
    image: Path | None = None,
    *,
    once: bool,
    on_ray: RayCluster | None = None,
) -> bool:
    """Run a cluster until it is stopped; True if the question was answered.

    given: settings of the command line. question: empty for none. image: file of a picture for it. once: stop after the
    answer. on_ray: the cluster for the workers.
    Raises: ConfigError.
    """
    warn_of_secrets(given)
    url = None if image is None else data_url(image)
    plan = make_plan(given, config, num_workers, on_ray=on_ray is not None)
    configure_logging("router", plan.router.log_level, plan.router.log_format)
    console = Console()
    greeting = Greeting(console, question, once, DEFAULT_URL, url)
    run_cluster(plan, console, greeting, on_ray)
    return greeting.answered
