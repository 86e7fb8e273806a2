"""Commands of clients. Each imports its modules when it runs, so that other commands do not wait for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdserve.cli.clients.client_options import (
    DEFAULT_HTTP_URL,
    DEFAULT_URL,
    CaFile,
    CertFile,
    ClientKeyFile,
    GrpcUrl,
    HttpUrl,
    MaxTokens,
    Seed,
    ShowTimeline,
    Temperature,
    client_tls,
)

if TYPE_CHECKING:
    from pdserve.cli.clients.grpc_client import GrpcClient
    from pdserve.cli.status.status_client import StatusClient


def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: GrpcUrl = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    image: Annotated[Path | None, typer.Option(help="File of a picture that is sent with the first message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    timeline: ShowTimeline = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Ask the model; the answer streams."""
    from pdserve.cli.clients.conversation import converse
    from pdserve.cli.clients.picture_file import data_url

    image_url = None if image is None else data_url(image)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    connect = _way_to(url, ca_file, cert_file, key_file)
    asyncio.run(converse(connect, message, system, sampling, timeline, image_url))


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
    from pdserve.cli.clients.conversation import continue_text

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    connect = _way_to(url, ca_file, cert_file, key_file)
    asyncio.run(continue_text(connect, prompt, sampling, timeline))


def top(
    url: HttpUrl = DEFAULT_HTTP_URL,
    interval: Annotated[float, typer.Option(help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Workers, queues, rates and the slowest requests of a router, live; q ends. The API key is read from PDSERVE_API_KEY."""
    from pdserve.cli.status.top_command import run_top

    with _status_of(url, ca_file, cert_file, key_file) as client:
        run_top(client, interval, once=once)


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id, as `pdserve top` shows it.")],
    url: HttpUrl = DEFAULT_HTTP_URL,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Wait so long until it has left; 0: do not wait."),
    ] = 600.0,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Have a worker leave: its running requests move to other workers. The API key, of an operator, is read from
    PDSERVE_API_KEY."""
    from pdserve.cli.status.drain_command import run_drain

    with _status_of(url, ca_file, cert_file, key_file) as client:
        run_drain(client, worker, timeout_s)


def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id, as `pdserve top` shows it.")],
    new_role: Annotated[
        Literal["prefill", "decode"], typer.Argument(metavar="prefill|decode", help="The role that it takes.")
    ],
    url: HttpUrl = DEFAULT_HTTP_URL,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no other live worker has the role that it gives up.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", min=0, metavar="SECONDS", help="Wait so long for calls of its other role; 0: do not wait."
        ),
    ] = 600.0,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """Have a worker prefill, or decode, from now on: what it decodes moves to other workers, and its cache stays. The API key, of
    an operator, is read from PDSERVE_API_KEY."""
    from pdserve.cli.status.role_command import run_role

    with _status_of(url, ca_file, cert_file, key_file) as client:
        run_role(client, worker, new_role, timeout_s, force=force)


def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="A response's id or x-request-id, or the client's own id.")
    ],
    url: HttpUrl = DEFAULT_HTTP_URL,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: ClientKeyFile = None,
) -> None:
    """The phases of one recent request, by service. The API key is read from PDSERVE_API_KEY."""
    from pdserve.cli.status.trace_command import show_trace

    with _status_of(url, ca_file, cert_file, key_file) as client:
        show_trace(client, request_id)


def _status_of(url: str, ca_file: str | None, cert_file: str | None, key_file: str | None) -> StatusClient:
    from pdserve.cli.status.status_client import StatusClient

    return StatusClient(url, os.environ.get("PDSERVE_API_KEY"), client_tls(ca_file, cert_file, key_file))


def _way_to(url: str, ca_file: str | None, cert_file: str | None, key_file: str | None) -> Callable[[], GrpcClient]:
    """A function that makes a client for this address. Raises: ConfigError if a certificate file cannot be used."""
    from pdserve.cli.clients.grpc_client import GrpcClient

    tls = client_tls(ca_file, cert_file, key_file)
    return lambda: GrpcClient(url, os.environ.get("PDSERVE_API_KEY"), tls)
