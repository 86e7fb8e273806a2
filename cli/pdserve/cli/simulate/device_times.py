"""`DeviceOptions`: from which options a simulation has the times of steps and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.simulator.profile import Level, ProfileStepTimes, read_profile
from pdserve.simulator.step_times import LinearStepTimes, StepTimes
from pdserve.simulator.virtual_tiers import DISK_LINK, HOST_LINK
from pdserve.simulator.virtual_transfer import Link

LATENCY_S = 100e-6
"""Of a transfer, where no profile says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """A profile, or times that are given one by one. None: not given."""

    profile: Path | None = None
    level: Level = "median"
    step_ms: float | None = None
    token_us: float | None = None
    attended_ns: float | None = None
    bandwidth: float | None = None
    """Gigabytes per second into each rank of a worker; that of the profile if it has one."""
    host_bandwidth: float = HOST_LINK.bytes_per_s / 1e9
    disk_bandwidth: float = DISK_LINK.bytes_per_s / 1e9

    @property
    def host(self) -> Link:
        """Between each rank's device and host memory."""
        return Link(self.host_bandwidth * 1e9, HOST_LINK.latency_s)

    @property
    def disk(self) -> Link:
        """Of a worker."""
        return Link(self.disk_bandwidth * 1e9, DISK_LINK.latency_s)

    def times(self) -> tuple[StepTimes, Link]:
        """Raises: ConfigError naming the option, its value and its limit."""
        given = {"--step-ms": self.step_ms, "--token-us": self.token_us, "--attended-ns": self.attended_ns}
        for name, value in given.items():
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value:g}, at least 0 is needed")
        rates = {
            "--bandwidth": self.bandwidth, "--host-bandwidth": self.host_bandwidth, "--disk-bandwidth": self.disk_bandwidth
        }  # fmt: skip
        for name, value in rates.items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value:g}, above 0 is needed")
        bytes_per_s = None if self.bandwidth is None else self.bandwidth * 1e9
        if self.profile is None:
            times = LinearStepTimes(
                (10.0 if self.step_ms is None else self.step_ms) / 1e3,
                (100.0 if self.token_us is None else self.token_us) / 1e6,
                (self.attended_ns or 0.0) / 1e9,
            )
            if not times.base_s and not times.token_s:
                raise ConfigError("--step-ms and --token-us are 0: a step takes some time")
            return times, Link(bytes_per_s or 1e9, LATENCY_S)
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} is {value:g}, and --profile has times of steps, too: give one of them")
        profile = read_profile(self.profile)
        transfer = profile.transfer
        if bytes_per_s is None and transfer is None:
            raise ConfigError(f"profile {self.profile} has no times of transfers: --bandwidth is needed")
        return ProfileStepTimes(profile, self.level), Link(
            bytes_per_s or (transfer.bytes_per_s if transfer else 0.0), transfer.latency_s if transfer else LATENCY_S
        )
