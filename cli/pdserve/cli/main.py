"""The `pdserve` command. Each command imports its modules when it runs, so that a client does not wait for torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pdserve.cli.bench.command import bench
from pdserve.cli.client_options import DEFAULT_URL, CaFile, CertFile, ClientKeyFile, client_tls
from pdserve.common.errors import PdServeError

if TYPE_CHECKING:
    from pdserve.cli.grpc_client import GrpcClient

SAMPLE_QUESTION = "What is the capital of France?"
EXIT_CONFIG = 2
EXIT_FAILED = 1

app = typer.Typer(
    help="LLM serving with prefill and decode in separate gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

keys = typer.Typer(help="API keys of a router's clients.", no_args_is_help=True)
app.add_typer(keys, name="keys")
app.command()(bench)

Model = Annotated[str | None, typer.Option(help="A Hugging Face checkpoint's folder, or 'demo' for the bundled model.")]
Host = Annotated[
    str | None, typer.Option(help="Address to listen on; other addresses than loopback need TLS or --insecure.")
]
Port = Annotated[int | None, typer.Option(help="gRPC port; 0 for a free one.")]
Insecure = Annotated[bool | None, typer.Option("--insecure", help="Listen and connect beyond loopback without TLS.")]
NoAuth = Annotated[bool | None, typer.Option("--no-auth", help="Listen beyond loopback without API keys.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="redis://host:port/db of the registry of workers and their cached blocks.")
]
KeyFile = Annotated[str | None, typer.Option(help="File with the secret that all services share.")]
Config = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any other setting, as name=value; may be repeated.")]
LocalPrefill = Annotated[
    str | None,
    typer.Option(help="Whether decode workers may prefill: auto (default), never or always.", show_default=False),
]
Policy = Annotated[
    str | None,
    typer.Option(help="How workers are chosen: kv_aware (default), least_loaded or round_robin.", show_default=False),
]
Connector = Annotated[
    str | None, typer.Option(help="How KV blocks move: auto (default), nixl or tcp.", show_default=False)
]
GrpcUrl = Annotated[str, typer.Option("--url", help="host:port of the router's gRPC front end.")]
ShowTimeline = Annotated[bool, typer.Option("--timeline", help="Show the time of each phase.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling, for a repeatable answer.")]
Otlp = Annotated[
    str | None, typer.Option(help="Collector for traces: grpc://host:port or http://host:port.", show_default=False)
]
Hidden = Annotated[int | None, typer.Option(hidden=True)]


@app.command()
def up(
    model: Model = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    connector: Connector = None,
    local_prefill: LocalPrefill = None,
    policy: Policy = None,
    otlp: Otlp = None,
    port: Annotated[int | None, typer.Option(help="OpenAI HTTP port; default: 8000.", show_default=False)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; default: 50051.", show_default=False)] = None,
    redis: RedisUrl = None,
    config: Config = None,
    ask: Annotated[str, typer.Option(help="Question to ask once when ready; empty: none.")] = SAMPLE_QUESTION,
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the workers' INFO lines.")] = False,
    set_: Set = None,
) -> None:
    """The whole cluster on this machine: a router, prefill and decode workers, one process each."""
    from rich.console import Console

    from pdserve.cli.cluster import ClusterPlan, run_cluster, settings_by_role
    from pdserve.cli.greeting import Greeting
    from pdserve.cli.service_commands import parse_assignments, warn_of_secrets
    from pdserve.common.settings.router_settings import RouterSettings
    from pdserve.common.settings.settings import load_settings
    from pdserve.common.telemetry.logging_setup import configure_logging
    from pdserve.models.model_folder import model_folder

    configure_logging("router", "info" if verbose else "warning")
    console = Console()
    of_workers = {"connector": connector, "otlp": otlp}
    router_flags: dict[str, object] = {
        "port": port, "grpc_port": grpc_port, "local_prefill": local_prefill, "policy": policy, "otlp": otlp,
    }  # fmt: skip
    assignments = parse_assignments(set_ or [])
    assigned = assignments.pop("redis", None)
    redis = redis or assigned
    warn_of_secrets(assignments | {"redis": redis, "otlp": otlp})
    by_role = settings_by_role(assignments)
    router_flags |= by_role.pop("router")
    name = model or load_settings(RouterSettings, flags=router_flags, toml=config).model
    given = {name: value for name, value in of_workers.items() if value}
    plan = ClusterPlan(
        model=name,
        folder=model_folder(name),
        num_prefill=prefill,
        num_decode=decode,
        router_flags=router_flags,
        worker_settings={role: settings | given for role, settings in by_role.items()},
        quiet_children=not verbose,
        redis=redis,
        config=config,
    )
    greeting = Greeting(console, ask, once, DEFAULT_URL)
    asyncio.run(run_cluster(plan, console, greeting))
    if once and not greeting.answered:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def router(
    prefill: Annotated[list[str] | None, typer.Option(help="host:port of a prefill worker; may be repeated.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="host:port of a decode worker; may be repeated.")] = None,
    model: Model = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="OpenAI HTTP port; default: 8000.", show_default=False)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; default: 50051.", show_default=False)] = None,
    local_prefill: LocalPrefill = None,
    policy: Policy = None,
    redis: RedisUrl = None,
    otlp: Otlp = None,
    insecure: Insecure = None,
    no_auth: NoAuth = None,
    deployment_key_file: KeyFile = None,
    config: Config = None,
    set_: Set = None,
) -> None:
    """One router: OpenAI HTTP and gRPC for clients, in front of any number of workers."""
    from pdserve.cli.service_commands import parse_assignments, serve_router, warn_of_secrets

    flags = {
        "prefill": prefill, "decode": decode, "model": model, "host": host, "port": port, "grpc_port": grpc_port,
        "local_prefill": local_prefill, "policy": policy, "redis": redis, "otlp": otlp, "insecure": insecure,
        "no_auth": no_auth, "deployment_key_file": deployment_key_file,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    given = parse_assignments(set_ or []) | given
    warn_of_secrets(given)
    serve_router(given, config)


def _worker(role: Literal["prefill", "decode"], set_: list[str] | None, config: Path | None, **flags: Any) -> None:
    from pdserve.cli.service_commands import ReportedFailure, parse_assignments, serve_worker, warn_of_secrets
    from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

    report_fd, lifeline_fd = flags.pop("report_fd"), flags.pop("lifeline_fd")
    kind = PrefillSettings if role == "prefill" else DecodeSettings
    given = parse_assignments(set_ or []) | {name: value for name, value in flags.items() if value is not None}
    warn_of_secrets(given)
    try:
        lived = serve_worker(kind, given, config, report_fd, lifeline_fd)
    except ReportedFailure:
        raise typer.Exit(EXIT_CONFIG) from None
    if not lived:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def prefill(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_port: Annotated[int | None, typer.Option(help="Port for KV blocks; 0 for a free one.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Host that peers connect to; default: --host.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker in logs and at peers.")] = None,
    connector: Connector = None,
    redis: RedisUrl = None,
    otlp: Otlp = None,
    insecure: Insecure = None,
    deployment_key_file: KeyFile = None,
    config: Config = None,
    set_: Set = None,
    report_fd: Hidden = None,
    lifeline_fd: Hidden = None,
) -> None:
    """One prefill worker: computes prompts and lets decode workers read their KV blocks."""
    _worker(
        "prefill", set_, config, model=model, host=host, port=port, data_port=data_port, advertise_host=advertise_host,
        worker_id=worker_id, connector=connector, redis=redis, otlp=otlp, insecure=insecure,
        deployment_key_file=deployment_key_file, report_fd=report_fd, lifeline_fd=lifeline_fd,
    )  # fmt: skip


@app.command()
def decode(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_port: Annotated[int | None, typer.Option(help="Port for KV blocks; 0 for a free one.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Host that peers connect to; default: --host.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker in logs and at peers.")] = None,
    connector: Connector = None,
    max_local_prefill_tokens: Annotated[
        int | None, typer.Option(help="Longest uncached prompt this worker prefills itself; default: no limit.")
    ] = None,
    redis: RedisUrl = None,
    otlp: Otlp = None,
    insecure: Insecure = None,
    deployment_key_file: KeyFile = None,
    config: Config = None,
    set_: Set = None,
    report_fd: Hidden = None,
    lifeline_fd: Hidden = None,
) -> None:
    """One decode worker: receives KV blocks, or prefills itself, and streams tokens."""
    _worker(
        "decode", set_, config, model=model, host=host, port=port, data_port=data_port, advertise_host=advertise_host,
        worker_id=worker_id, connector=connector, max_local_prefill_tokens=max_local_prefill_tokens, redis=redis,
        otlp=otlp, insecure=insecure, deployment_key_file=deployment_key_file, report_fd=report_fd,
        lifeline_fd=lifeline_fd,
    )  # fmt: skip


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: GrpcUrl = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    timeline: ShowTimeline = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Ask the model; the answer streams."""
    from pdserve.cli.conversation import converse

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    connect = _way_to(url, ca_file, cert_file, key_file)
    asyncio.run(converse(connect, message, system, sampling, timeline))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    url: GrpcUrl = DEFAULT_URL,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    timeline: ShowTimeline = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Continue a text; the continuation streams."""
    from pdserve.cli.conversation import continue_text

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    connect = _way_to(url, ca_file, cert_file, key_file)
    asyncio.run(continue_text(connect, prompt, sampling, timeline))


def _way_to(url: str, ca_file: str | None, cert_file: str | None, key_file: str | None) -> Callable[[], GrpcClient]:
    """The channel's address and TLS. Raises: ConfigError for files that cannot be used."""
    from pdserve.cli.grpc_client import GrpcClient

    tls = client_tls(ca_file, cert_file, key_file)
    return lambda: GrpcClient(url, os.environ.get("PDSERVE_API_KEY"), tls)


@app.command()
def doctor(
    role: Annotated[Literal["prefill", "decode", "router"], typer.Option(help="The service to check.")] = "prefill",
    model: Model = None,
    redis: RedisUrl = None,
    prefill: Annotated[list[str] | None, typer.Option(help="For a router: host:port of a prefill worker.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="For a router: host:port of a decode worker.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Config = None,
    set_: Set = None,
) -> None:
    """Preflight: whether a service with these settings would run here, and what to do where not."""
    from pdserve.cli.doctor_command import examine_service
    from pdserve.cli.service_commands import parse_assignments

    flags: dict[str, Any] = {"model": model, "redis": redis, "prefill": prefill, "decode": decode}
    flags = parse_assignments(set_ or []) | {name: value for name, value in flags.items() if value is not None}
    if not examine_service(role, flags, config, as_json=json):
        raise typer.Exit(EXIT_FAILED)


@keys.command("new")
def keys_new(
    name: Annotated[str, typer.Argument(help="Name of the key in metrics, spans and the audit log.")],
    tenant: Annotated[
        str | None, typer.Option(help="Owner of the key; default: NAME. Two keys of one tenant allow rotation.")
    ] = None,
    role: Annotated[Literal["user", "operator"], typer.Option(help="An operator sees all tenants' requests.")] = "user",
) -> None:
    """A new API key, shown once, and its entry for api_keys_file on standard output."""
    from pdserve.cli.keys_command import make_key

    make_key(name, tenant, role)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; made if it does not exist.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address or DNS name that others connect to; may be repeated. Default: loopback."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 365,
    trust_domain: Annotated[str, typer.Option(help="Prefix of the role in a certificate.")] = "pdserve.internal",
) -> None:
    """TLS for development: two authorities, and a certificate with its role for each kind of service."""
    from pdserve.cli.development_certificates import write_certificates

    files = write_certificates(folder, host or ["127.0.0.1", "localhost"], days, trust_domain)
    for path in files:
        print(path)
    print(f"\nservices:  pdserve router|prefill|decode --config {files[-1]}")
    print(f"clients:   --ca-file {folder / 'clients-ca.pem'}")
    print("The authorities' keys, services-ca.key and clients-ca.key, issue more certificates; no service needs them.")


def main() -> None:
    """Entry point. Errors of pdserve are printed as one line, without a traceback."""
    try:
        app()
    except PdServeError as error:
        print(f"pdserve: {error.message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except ValueError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
