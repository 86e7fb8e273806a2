"""Options of the commands that replay a trace."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

TraceFormat = Literal["mooncake", "azure", "weka", "servegen"]
TraceFormatOption = Annotated[
    TraceFormat | None, typer.Option(help="Format of the trace. Default: told by its content.", show_default=False)
]
TraceSpeed = Annotated[float, typer.Option(help="Factor on the trace's speed; 2 replays it in half the time.")]
TraceScale = Annotated[
    int, typer.Option(help="Divisor of the trace's lengths, and of its blocks, so that prefixes stay shared.")
]
