"""`pdserve trace`: a request's waterfall in the terminal."""

from __future__ import annotations

import datetime

from rich.console import Console
from rich.text import Text

from pdserve.cli.status.status_client import StatusClient, plain
from pdserve.cli.status.status_text import by_source, outcome, seconds, waterfall


def show_trace(client: StatusClient, request_id: str) -> None:
    """Print a request and its phases. Raises: NotFound for an unknown id; NotReached if no router answers."""
    request = client.request(request_id)
    console = Console(highlight=False)
    console.print(Text(f"{plain(request.request_id)}  ", style="bold") + outcome(request), soft_wrap=True)
    arrived = datetime.datetime.fromtimestamp(request.arrived_unix_s, datetime.UTC).isoformat(timespec="milliseconds")
    sources = by_source(request.cached_tokens)
    cached = f"{request.num_cached_tokens} cached" + (f": {sources}" if sources else "")
    cached = "" if request.num_cached_tokens is None else f" ({cached})"
    lines = [
        f"{request.operation}, arrived {arrived}, {seconds(request.duration_s)}, first token after {seconds(request.ttft_s)}",
        f"{request.num_prompt_tokens} prompt tokens{cached}, {request.num_output_tokens} new",
    ]
    if request.num_prompts > 1:
        lines.append(f"{request.num_prompts} prompts; the phases are those of the one that ended last")
    if request.num_attempts > 1:
        lines.append(f"{request.num_attempts} attempts; the phases of workers are those of the last one")
    named = {
        "client's id": request.client_request_id, "tenant": request.tenant, "key": request.key_name,
        "prefill": request.prefill, "decode": request.decode,
    }  # fmt: skip
    lines.append(", ".join(f"{name} {value}" for name, value in named.items() if value))
    for line in filter(None, lines):
        console.print(Text(plain(line)), style="dim", soft_wrap=True)
    console.print()
    console.print(waterfall(request, console.width))
