"""`app`: the commands of `pdserve`. Each imports its modules when it runs, so that a client command does not wait for torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pdserve.cli.bench.command import bench
from pdserve.cli.bench.trace_options import TraceFormatOption, TraceScale, TraceSpeed
from pdserve.cli.clients.client_commands import chat, drain, generate, role, top, trace
from pdserve.cli.exit_status import EXIT_CONFIG, EXIT_FAILED
from pdserve.cli.settings_command import FlagsWithValues, given_settings, settings_command
from pdserve.cli.simulate.device_options import (
    AttendedNs,
    Bandwidth,
    DiskBandwidth,
    DraftAcceptance,
    HostBandwidth,
    ProfileOption,
    StepMs,
    TokenUs,
)
from pdserve.common.errors import ConfigError

Config = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run workers on this Ray cluster: auto, host:port or ray://host:port. Needs the extra 'ray'.",
    ),
]
RayTimeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="Limit of the connection to Ray, and of the wait for resources.")
]
Hidden = Annotated[int | None, typer.Option(hidden=True)]
CHOSEN_BY_UP = ("prefill", "decode", "worker_id", "advertise_host", "data_port")
"""Settings that `up` chooses for each service."""
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


def _with_model(given: dict[str, Any], model_argument: str | None) -> dict[str, Any]:
    """The given settings with MODEL. Raises: ConfigError if both name one."""
    if model_argument is None:
        return given
    if "model" in given:
        raise ConfigError(f"MODEL is {model_argument!r} and --model is {given['model']!r}: give one of them")
    return {**given, "model": model_argument}


@app.callback()
def pdserve(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM serving with prefill and decode in separate gRPC services."""


@app.command(cls=settings_command("router", "prefill", "decode", without=CHOSEN_BY_UP))
def up(
    context: typer.Context,
    model_argument: ModelArgument = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers; 0 for a model that only classifies.")] = 1,
    ray: Ray = None,
    ray_timeout_s: RayTimeout = 30.0,
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
) -> None:
    """The whole cluster: a router on this machine, prefill and decode workers here or on a Ray cluster, one process each."""
    from pdserve.cli.up.cluster import RayCluster
    from pdserve.cli.up.up_command import run_up

    given = _with_model(given_settings(context), model_argument)
    if verbose:
        given["log_level"] = "info"
    on_ray = None if ray is None else RayCluster(ray, ray_timeout_s, verbose)
    num_workers: dict[Literal["prefill", "decode"], int] = {"prefill": prefill, "decode": decode}
    question = ask if ask is not None else SAMPLE_QUESTION if image is None else IMAGE_QUESTION
    answered = run_up(given, config, num_workers, question, image, once=once, on_ray=on_ray)
    if once and not answered:
        raise typer.Exit(EXIT_FAILED)


@app.command(cls=settings_command("router", "prefill", "decode", without=CHOSEN_BY_UP))
def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="What `pdserve bench --trace` takes.")],
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    config: Config = None,
    num: Annotated[int, typer.Option(help="Sessions of the trace.")] = 100,
    trace_format: TraceFormatOption = None,
    trace_speed: TraceSpeed = 1.0,
    trace_scale: TraceScale = 1,
    profile: ProfileOption = None,
    level: Annotated[
        Literal["low", "median", "high"],
        typer.Option(help="Which of the profile's times: those that a tenth was below or above, or the median."),
    ] = "median",
    step_ms: StepMs = None,
    token_us: TokenUs = None,
    attended_ns: AttendedNs = None,
    bandwidth: Bandwidth = None,
    host_bandwidth: HostBandwidth = 25.0,
    disk_bandwidth: DiskBandwidth = 3.0,
    draft_acceptance: DraftAcceptance = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Target in milliseconds, as of `pdserve bench`.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tokens, and of what the services draw.")] = 0,
    coarse: Annotated[
        bool,
        typer.Option("--coarse", help="Simulate batches in place of sequences: for many workers, or many requests."),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.", show_default=False)] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with results and plots to this file.", show_default=False)
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this folder.", show_default=False)] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write queues and pools of each virtual second to this CSV file.", show_default=False),
    ] = None,
) -> None:
    """A trace on a fleet in virtual time: the router and workers of `pdserve up`, whose steps take the given times.

    Nothing is computed, and no weights are read.
    """
    from pdserve.cli.bench.report_files import ReportFiles
    from pdserve.cli.simulate.device_times import DeviceOptions
    from pdserve.cli.simulate.run_simulate import SimulateOptions, run_simulate

    device = DeviceOptions(
        profile=profile, level=level, step_ms=step_ms, token_us=token_us, attended_ns=attended_ns, bandwidth=bandwidth,
        host_bandwidth=host_bandwidth, disk_bandwidth=disk_bandwidth,
    )  # fmt: skip
    times, link = device.times()
    status = run_simulate(
        SimulateOptions(
            trace=trace,
            trace_format=trace_format,
            num_sessions=num,
            trace_speed=trace_speed,
            trace_scale=trace_scale,
            num_prefill=prefill,
            num_decode=decode,
            times=times,
            link=link,
            host=device.host,
            disk=device.disk,
            draft_acceptance=draft_acceptance,
            settings=given_settings(context),
            config=config,
            goodput=goodput or [],
            seed=seed,
            is_coarse=coarse,
            files=ReportFiles(json, html, plots),
            timeline_file=timeline,
        )
    )
    raise typer.Exit(status)


@app.command(cls=settings_command("router", "prefill", "decode", without=CHOSEN_BY_UP))
def plan(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="What `pdserve bench --trace` takes.")],
    slo: Annotated[
        list[str],
        typer.Option(help="Target in seconds that a percentile keeps: ttft_p99=0.3, tpot_p99=0.05, e2el_p95=10."),
    ],
    config: Config = None,
    profile: ProfileOption = None,
    step_ms: StepMs = None,
    token_us: TokenUs = None,
    attended_ns: AttendedNs = None,
    bandwidth: Bandwidth = None,
    num: Annotated[int, typer.Option(help="Sessions of the trace.")] = 2000,
    trace_format: TraceFormatOption = None,
    trace_speed: TraceSpeed = 1.0,
    trace_scale: TraceScale = 1,
    workers: Annotated[int, typer.Option(help="Workers of both roles together, at most.")] = 32,
    prefill_cost: Annotated[float, typer.Option(help="Cost of a prefill worker, in any unit.")] = 1.0,
    decode_cost: Annotated[float, typer.Option(help="Cost of a decode worker.")] = 1.0,
    check: Annotated[
        int, typer.Option(help="Sessions that are also simulated exactly, to show the coarse mode's error; 0: none.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Of what the services draw.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for values of Helm and commands of Compose, Ray and `up`.", show_default=False),
    ] = None,
) -> None:
    """The cheapest fleet that keeps latency targets under a trace's load."""
    from pdserve.cli.plan.run_plan import PlanOptions, run_plan
    from pdserve.cli.plan.targets import Target
    from pdserve.cli.simulate.device_times import DeviceOptions
    from pdserve.cli.simulate.run_simulate import SimulateOptions

    device = DeviceOptions(
        profile=profile, step_ms=step_ms, token_us=token_us, attended_ns=attended_ns, bandwidth=bandwidth
    )
    times, link = device.times()
    load = SimulateOptions(
        trace=trace, trace_format=trace_format, num_sessions=num, trace_speed=trace_speed, trace_scale=trace_scale,
        num_prefill=1, num_decode=1, times=times, link=link, settings=given_settings(context), config=config,
        goodput=[], seed=seed, is_coarse=True,
    )  # fmt: skip
    targets = [Target.parse(text) for text in slo]
    options = PlanOptions(
        load=load, device=device, targets=targets, max_workers=workers, prefill_cost=prefill_cost,
        decode_cost=decode_cost, num_check=check, folder=out,
    )  # fmt: skip
    raise typer.Exit(run_plan(options))


@app.command(cls=settings_command("router", "prefill", "decode", without=CHOSEN_BY_UP))
def whatif(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="What `pdserve bench --trace` takes.")],
    change: Annotated[
        list[str], typer.Option(help="What is different: decode=+2, prefill=3, or a setting such as kv_host_mib=4096.")
    ],
    prefill: Annotated[
        int | None,
        typer.Option(min=0, help="Prefill workers. Default: those that a record names, else 1.", show_default=False),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(min=1, help="Decode workers. Default: those that a record names, else 1.", show_default=False),
    ] = None,
    config: Config = None,
    num: Annotated[int, typer.Option(help="Sessions of the trace.")] = 100,
    trace_format: TraceFormatOption = None,
    trace_speed: TraceSpeed = 1.0,
    trace_scale: TraceScale = 1,
    profile: ProfileOption = None,
    step_ms: StepMs = None,
    token_us: TokenUs = None,
    attended_ns: AttendedNs = None,
    bandwidth: Bandwidth = None,
    host_bandwidth: HostBandwidth = 25.0,
    disk_bandwidth: DiskBandwidth = 3.0,
    draft_acceptance: DraftAcceptance = None,
    seed: Annotated[int, typer.Option(help="Of tokens, and of what the services draw.")] = 0,
    coarse: Annotated[bool, typer.Option("--coarse", help="As of `pdserve simulate`.")] = False,
) -> None:
    """What a change of a fleet would do to a trace's latencies: both are simulated, side by side."""
    from pdserve.cli.simulate.device_times import DeviceOptions
    from pdserve.cli.simulate.run_simulate import SimulateOptions
    from pdserve.cli.whatif.run_whatif import Change, fleet_now, run_whatif

    device = DeviceOptions(
        profile=profile, step_ms=step_ms, token_us=token_us, attended_ns=attended_ns, bandwidth=bandwidth,
        host_bandwidth=host_bandwidth, disk_bandwidth=disk_bandwidth,
    )  # fmt: skip
    times, link = device.times()
    num_prefill, num_decode = fleet_now(trace, prefill, decode)
    now = SimulateOptions(
        trace=trace, trace_format=trace_format, num_sessions=num, trace_speed=trace_speed, trace_scale=trace_scale,
        num_prefill=num_prefill, num_decode=num_decode, times=times, link=link, host=device.host, disk=device.disk,
        draft_acceptance=draft_acceptance,
        settings=given_settings(context), config=config, goodput=[], seed=seed, is_coarse=coarse,
    )  # fmt: skip
    raise typer.Exit(run_whatif(now, [Change.parse(text) for text in change]))


@app.command(cls=settings_command("prefill", "decode"))
def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File that is written, for `pdserve simulate --profile`.")],
    model_argument: ModelArgument = None,
    role: Annotated[Literal["prefill", "decode"], typer.Option(help="The worker whose settings these are.")] = "decode",
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Limit of the measured steps; the coarsest are measured in any case. Default: 120.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing, and add up the tables of single layers in this folder, of LLMServingSim's profiler.",
            show_default=False,
        ),
    ] = None,
    device_name: Annotated[
        str | None, typer.Option(help="Name of the device in the profile. Default: its own.", show_default=False)
    ] = None,
    overhead_us: Annotated[
        float | None,
        typer.Option(
            help="With --layers: microseconds of each step in which the device computes nothing. Default: 0.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
) -> None:
    """Times of a worker's steps, transfers and start, measured on this machine, for `pdserve simulate --profile`."""
    from pdserve.cli.profile.run_profile import ProfileOptions, run_profile

    run_profile(
        ProfileOptions(
            role=role, settings=_with_model(given_settings(context), model_argument), config=config, out=out,
            seconds=seconds, layers=layers, device_name=device_name, overhead_us=overhead_us,
        )
    )  # fmt: skip


@app.command(cls=settings_command("router"))
def router(context: typer.Context, config: Config = None) -> None:
    """One router: OpenAI HTTP and gRPC for clients, in front of any number of workers."""
    from pdserve.cli.service_commands import serve_router, warn_of_secrets

    warn_of_secrets(given_settings(context))
    serve_router(given_settings(context), config)


def _worker(
    role: Literal["prefill", "decode"],
    given: Mapping[str, Any],
    config: Path | None,
    report_fd: int | None,
    lifeline_fd: int | None,
) -> None:
    from pdserve.cli.service_commands import ReportedFailure, serve_worker, warn_of_secrets
    from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

    warn_of_secrets(given)
    try:
        lived = serve_worker(
            PrefillSettings if role == "prefill" else DecodeSettings, given, config, report_fd, lifeline_fd
        )
    except ReportedFailure:
        raise typer.Exit(EXIT_CONFIG) from None
    if not lived:
        raise typer.Exit(EXIT_FAILED)


@app.command(cls=settings_command("prefill"))
def prefill(
    context: typer.Context, config: Config = None, report_fd: Hidden = None, lifeline_fd: Hidden = None
) -> None:
    """One prefill worker: computes prompts and lets decode workers read their KV blocks."""
    _worker("prefill", given_settings(context), config, report_fd, lifeline_fd)


@app.command(cls=settings_command("decode"))
def decode(context: typer.Context, config: Config = None, report_fd: Hidden = None, lifeline_fd: Hidden = None) -> None:
    """One decode worker: receives KV blocks, or prefills itself, and streams tokens."""
    _worker("decode", given_settings(context), config, report_fd, lifeline_fd)


@app.command(cls=settings_command("prefill", "decode", "router"))
def doctor(
    context: typer.Context,
    role: Annotated[Literal["prefill", "decode", "router"], typer.Option(help="The service to check.")] = "prefill",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Config = None,
) -> None:
    """Preflight: whether a service with these settings would run here, and what to do where not."""
    from pdserve.cli.doctor_command import examine_service

    if not examine_service(role, given_settings(context), config, as_json=json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def settings(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Part of a name or of a description.", show_default=False)
    ] = "",
) -> None:
    """The settings of all services: name, type, default, option, environment variable and meaning."""
    from pdserve.cli.settings_list import print_settings

    print_settings(word)


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


for command in (chat, generate, bench, top, trace, drain, role):
    app.command(cls=FlagsWithValues)(command)
