"""`app`: the commands of `pdserve`. Each command imports its modules when it runs, so that a client does not wait for torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pdserve.cli.bench.command import bench
from pdserve.cli.clients.client_commands import chat, generate, top, trace
from pdserve.cli.exit_status import EXIT_CONFIG, EXIT_FAILED
from pdserve.cli.flags_with_values import FlagsWithValues
from pdserve.cli.options import (
    ApiKey,
    ApiKeysFile,
    Config,
    Connector,
    EnableLora,
    GrpcPort,
    Hidden,
    Host,
    HttpPort,
    Insecure,
    KeyFile,
    LocalPrefill,
    LoraDir,
    LoraModules,
    Model,
    ModelArgument,
    ModelImpl,
    NoAuth,
    Otlp,
    Policy,
    Port,
    Ray,
    RayTimeout,
    RedisUrl,
    RouterProcesses,
    ServedModelName,
    Set,
    TensorParallelSize,
)
from pdserve.common.errors import ConfigError

SAMPLE_QUESTION = "What is the capital of France?"
IMAGE_QUESTION = "What is in the picture?"

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"pdserve {version('pdserve')}")
        raise typer.Exit


keys = typer.Typer(help="API keys of a router's clients.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@app.callback()
def pdserve(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM serving with prefill and decode in separate gRPC services."""


@app.command(cls=FlagsWithValues)
def up(
    model_argument: ModelArgument = None,
    model: Model = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers; 0 for a model that only classifies.")] = 1,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address on which the router listens; workers stay on loopback. See 'pdserve router --host'."
        ),
    ] = None,
    port: HttpPort = None,
    grpc_port: GrpcPort = None,
    api_key: ApiKey = None,
    api_keys_file: ApiKeysFile = None,
    served_model_name: ServedModelName = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output together; default: the model's own limit.")
    ] = None,
    connector: Connector = None,
    tensor_parallel_size: TensorParallelSize = None,
    model_impl: ModelImpl = None,
    enable_lora: EnableLora = None,
    lora_modules: LoraModules = None,
    lora_dir: LoraDir = None,
    local_prefill: LocalPrefill = None,
    policy: Policy = None,
    router_processes: RouterProcesses = None,
    redis: RedisUrl = None,
    ray: Ray = None,
    ray_timeout_s: RayTimeout = 30.0,
    otlp: Otlp = None,
    insecure: Insecure = None,
    no_auth: NoAuth = None,
    deployment_key_file: KeyFile = None,
    config: Config = None,
    ask: Annotated[
        str | None,
        typer.Option(
            help=f"Question to ask once when ready; empty: none. Default: {SAMPLE_QUESTION} With --image: {IMAGE_QUESTION}"
        ),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="File of a picture that is sent with the question.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show INFO lines of all services.")] = False,
    set_: Set = None,
) -> None:
    """The whole cluster: a router on this machine, prefill and decode workers here or on a Ray cluster, one process each."""
    from pdserve.cli.up.cluster import RayCluster
    from pdserve.cli.up.up_command import run_up

    if model_argument is not None and model is not None:
        raise ConfigError(f"MODEL is {model_argument!r} and --model is {model!r}: give one of them")
    given = {
        "model": model_argument or model, "host": host, "port": port, "grpc_port": grpc_port, "api_keys": api_key,
        "api_keys_file": api_keys_file, "max_model_len": max_model_len, "connector": connector,
        "local_prefill": local_prefill, "policy": policy, "redis": redis, "otlp": otlp, "insecure": insecure,
        "no_auth": no_auth, "deployment_key_file": deployment_key_file, "served_model_name": served_model_name,
        "tensor_parallel_size": tensor_parallel_size, "model_impl": model_impl, "router_processes": router_processes,
        "enable_lora": enable_lora, "lora_modules": lora_modules, "lora_dir": lora_dir,
        "log_level": "info" if verbose else None,
    }  # fmt: skip
    on_ray = None if ray is None else RayCluster(ray, ray_timeout_s, verbose)
    num_workers: dict[Literal["prefill", "decode"], int] = {"prefill": prefill, "decode": decode}
    question = ask if ask is not None else SAMPLE_QUESTION if image is None else IMAGE_QUESTION
    answered = run_up(given, set_ or [], config, num_workers, question, image, once=once, on_ray=on_ray)
    if once and not answered:
        raise typer.Exit(EXIT_FAILED)


@app.command(cls=FlagsWithValues)
def router(
    prefill: Annotated[list[str] | None, typer.Option(help="host:port of a prefill worker; may be repeated.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="host:port of a decode worker; may be repeated.")] = None,
    model: Model = None,
    host: Host = None,
    port: HttpPort = None,
    grpc_port: GrpcPort = None,
    api_key: ApiKey = None,
    api_keys_file: ApiKeysFile = None,
    served_model_name: ServedModelName = None,
    local_prefill: LocalPrefill = None,
    policy: Policy = None,
    router_processes: RouterProcesses = None,
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
        "no_auth": no_auth, "deployment_key_file": deployment_key_file, "api_keys": api_key,
        "api_keys_file": api_keys_file, "served_model_name": served_model_name, "router_processes": router_processes,
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


@app.command(cls=FlagsWithValues)
def prefill(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_port: Annotated[int | None, typer.Option(help="Port for KV blocks; 0 for a free one.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Host that peers connect to; default: --host.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker in logs and at peers.")] = None,
    connector: Connector = None,
    tensor_parallel_size: TensorParallelSize = None,
    model_impl: ModelImpl = None,
    enable_lora: EnableLora = None,
    lora_modules: LoraModules = None,
    lora_dir: LoraDir = None,
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
        deployment_key_file=deployment_key_file, enable_lora=enable_lora, lora_modules=lora_modules,
        lora_dir=lora_dir, report_fd=report_fd, lifeline_fd=lifeline_fd,
        tensor_parallel_size=tensor_parallel_size, model_impl=model_impl,
    )  # fmt: skip


@app.command(cls=FlagsWithValues)
def decode(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_port: Annotated[int | None, typer.Option(help="Port for KV blocks; 0 for a free one.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Host that peers connect to; default: --host.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker in logs and at peers.")] = None,
    connector: Connector = None,
    tensor_parallel_size: TensorParallelSize = None,
    model_impl: ModelImpl = None,
    enable_lora: EnableLora = None,
    lora_modules: LoraModules = None,
    lora_dir: LoraDir = None,
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
        otlp=otlp, insecure=insecure, deployment_key_file=deployment_key_file, enable_lora=enable_lora,
        lora_modules=lora_modules, lora_dir=lora_dir, report_fd=report_fd, lifeline_fd=lifeline_fd,
        tensor_parallel_size=tensor_parallel_size, model_impl=model_impl,
    )  # fmt: skip


@app.command(cls=FlagsWithValues)
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


@app.command(cls=FlagsWithValues)
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


for command in (chat, generate, bench, top, trace):
    app.command(cls=FlagsWithValues)(command)
