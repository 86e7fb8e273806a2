"""Options that the commands of a client share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.common.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.common.security.tls import ClientTls

DEFAULT_URL = "127.0.0.1:50051"
DEFAULT_HTTP_URL = "http://127.0.0.1:8000"
CaFile = Annotated[str | None, typer.Option(help="PEM certificates to trust; connects with TLS.", show_default=False)]
CertFile = Annotated[
    str | None, typer.Option(help="PEM client certificate, if the router requires one.", show_default=False)
]
ClientKeyFile = Annotated[
    str | None, typer.Option("--key-file", help="Private key of --cert-file.", show_default=False)
]
HttpUrl = Annotated[str, typer.Option("--url", help="http://host:port of the router.")]
GrpcUrl = Annotated[str, typer.Option("--url", help="host:port of the router's gRPC front end.")]
ShowTimeline = Annotated[bool, typer.Option("--timeline", help="Show the time of each phase.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling, for a repeatable answer.")]


def client_tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> ClientTls | None:
    """Load the files that the options name; None without --ca-file. Raises: ConfigError."""
    from pdserve.common.security.tls import TlsFile, load_client

    files = {"--ca-file": ca_file, "--cert-file": cert_file, "--key-file": key_file}
    ca, certificate, key = (TlsFile(flag, path) if path else None for flag, path in files.items())
    if (certificate is None) != (key is None) or (ca is None and certificate is not None):
        raise ConfigError("--cert-file and --key-file go together, with --ca-file")
    return load_client(ca, certificate, key) if ca is not None else None
