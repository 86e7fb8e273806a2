"""Options of the commands that take the times of a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProfileOption = Annotated[
    Path | None,
    typer.Option(help="Times of steps and transfers, as `pdserve profile` writes them.", show_default=False),
]
StepMs = Annotated[
    float | None,
    typer.Option(help="Milliseconds of each step, without a profile. Default: 10.", show_default=False),
]
TokenUs = Annotated[
    float | None,
    typer.Option(help="Microseconds for each token that a step computes. Default: 100.", show_default=False),
]
AttendedNs = Annotated[
    float | None,
    typer.Option(
        help="Nanoseconds for each earlier token that a computed token attends to. Default: 0.", show_default=False
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        help="Gigabytes per second into each rank of a worker. Default: the profile's, else 1.", show_default=False
    ),
]
HostBandwidth = Annotated[float, typer.Option(help="Gigabytes per second between each rank's device and host memory.")]
DiskBandwidth = Annotated[float, typer.Option(help="Gigabytes per second of a worker's disk.")]
DraftAcceptance = Annotated[
    float | None,
    typer.Option(
        help="Part of drafts that is accepted, of those whose predecessors are; needed with speculative_config.",
        show_default=False,
    ),
]
