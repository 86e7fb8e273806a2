"""Options that several commands of services have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL = "A Hugging Face checkpoint's folder, ORG/NAME of its hub, or a bundled model: 'demo', 'demo-image'."
Model = Annotated[str | None, typer.Option(help=_MODEL)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
Host = Annotated[
    str | None, typer.Option(help="Address to listen on; other addresses than loopback need TLS or --insecure.")
]
Port = Annotated[int | None, typer.Option(help="gRPC port; 0 for a free one.")]
HttpPort = Annotated[int | None, typer.Option(help="OpenAI HTTP port; default: 8000.", show_default=False)]
GrpcPort = Annotated[int | None, typer.Option(help="gRPC port; default: 50051.", show_default=False)]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="API key for clients; may be repeated. Better given as PDSERVE_API_KEYS: others can read command lines."
    ),
]
RouterProcesses = Annotated[
    int | None,
    typer.Option(help="Router processes behind the two ports; default: 1.", show_default=False),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(help="Name of the model for clients; may be repeated. Default: ORG/NAME, or the folder's name."),
]
ApiKeysFile = Annotated[
    str | None, typer.Option(help="File with hashes of API keys, from 'pdserve keys new', in place of --api-key.")
]
Insecure = Annotated[bool | None, typer.Option("--insecure", help="Listen and connect beyond loopback without TLS.")]
NoAuth = Annotated[bool | None, typer.Option("--no-auth", help="Listen beyond loopback without API keys.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="redis://host:port/db of the registry of workers and their cached blocks.")
]
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
TensorParallelSize = Annotated[
    int | None, typer.Option(help="Processes of a worker that share the model; default: 1.", show_default=False)
]
ModelImpl = Annotated[
    str | None,
    typer.Option(help="Code that computes the model: auto (default), native or transformers.", show_default=False),
]
EnableLora = Annotated[bool | None, typer.Option("--enable-lora", help="Serve LoRA adapters.")]
LoraModules = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter in PEFT's format; may be repeated.")
]
LoraDir = Annotated[
    str | None, typer.Option(help="Folder whose subfolders are LoRA adapters; they may come and go while it is served.")
]
Otlp = Annotated[
    str | None, typer.Option(help="Collector for traces: grpc://host:port or http://host:port.", show_default=False)
]
Hidden = Annotated[int | None, typer.Option(hidden=True)]
