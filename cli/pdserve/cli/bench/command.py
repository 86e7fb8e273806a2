"""Options of `pdserve bench`. The command imports its modules when it runs, so that other commands do not wait for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdserve.cli.bench.trace_options import TraceFormatOption, TraceScale, TraceSpeed
from pdserve.cli.clients.client_options import (
    DEFAULT_HTTP_URL,
    DEFAULT_URL,
    CaFile,
    CertFile,
    ClientKeyFile,
    client_tls,
)


def bench(
    url: Annotated[
        str | None,
        typer.Option(
            help="http://host:port, or host:port with --api grpc. Default: this machine's router.", show_default=False
        ),
    ] = None,
    api: Annotated[Literal["completions", "chat", "grpc"], typer.Option(help="API of the server.")] = "completions",
    model: Annotated[
        str | None, typer.Option(help="Served name. Default: the first of /v1/models.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of the model's tokenizer, if the server does not name it.", show_default=False),
    ] = None,
    num: Annotated[int, typer.Option(help="Requests, or sessions of --num-turns requests.")] = 100,
    input_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 64,
    range_ratio: Annotated[
        float, typer.Option(help="Lengths are drawn evenly from (1 - r) to (1 + r) times the given ones.")
    ] = 0.0,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens of a prefix that prompts share, in addition to --input-tokens.")
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(help="Number of different prefixes.")] = 1,
    num_turns: Annotated[
        int, typer.Option(help="Requests per session; each continues the text of the one before.")
    ] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay the first --num sessions of this trace: a file that a router recorded, Mooncake's or Azure's, or a file "
            "or folder of WEKA's sessions or of ServeGen's clients.",
            show_default=False,
        ),
    ] = None,
    trace_format: TraceFormatOption = None,
    trace_speed: TraceSpeed = 1.0,
    trace_scale: TraceScale = 1,
    max_think: Annotated[
        float | None,
        typer.Option(
            help="Longest wait within a session of the trace, in seconds of the trace. Default: no limit.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Sessions at once, default 8; with a rate or a trace an upper limit, default none.",
            show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Sessions that begin per second, at random times (Poisson).", show_default=False),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before the run, which are not counted.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the requested length.")] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object with further fields of each request; not with --api grpc.", show_default=False),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Target in milliseconds: ttft:200, tpot:50 or e2el:2000; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(help="Limit of each request, seconds.")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.", show_default=False)] = None,
    save_requests: Annotated[
        bool, typer.Option("--save-requests", help="With --json: also the times of each request.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with results and plots to this file.", show_default=False)
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this folder.", show_default=False)] = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Measure a server under load: latencies, throughput and goodput. The API key is read from PDSERVE_API_KEY."""
    from pdserve.cli.bench.run_bench import BenchOptions, parse_extra_body, run_bench
    from pdserve.cli.bench.run_load import LoadPlan
    from pdserve.cli.bench.workload import Shape

    shown = {name: value for name, value in locals().items() if isinstance(value, str | int | float | Path | list)}
    if trace is None and request_rate is None and concurrency is None:
        concurrency = 8
    options = BenchOptions(
        api=api, url=url or (DEFAULT_URL if api == "grpc" else DEFAULT_HTTP_URL), model=model, tokenizer=tokenizer,
        api_key=os.environ.get("PDSERVE_API_KEY"), tls=client_tls(ca_file, cert_file, key_file), timeout_s=timeout,
        extra_body=parse_extra_body(extra_body), num_sessions=num, trace=trace, trace_format=trace_format,
        trace_speed=trace_speed, trace_scale=trace_scale, max_think_s=float("inf") if max_think is None else max_think,
        warm_up=warmup,
        shape=Shape(
            input_tokens=input_tokens, output_tokens=output_tokens, range_ratio=range_ratio, prefix_tokens=prefix_tokens,
            num_prefixes=num_prefixes, num_turns=num_turns,
        ),
        plan=LoadPlan(
            concurrency=concurrency, requests_per_s=request_rate, follows_trace=trace is not None, seed=seed
        ), ignore_eos=ignore_eos,
        temperature=temperature, goodput=goodput or [], json_file=json, html_file=html, plots_folder=plots,
        save_requests=save_requests, shown={name: str(value) for name, value in shown.items() if value is not None},
    )  # fmt: skip
    if status := run_bench(options):
        raise typer.Exit(status)
