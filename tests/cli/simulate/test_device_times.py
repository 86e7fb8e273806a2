"""From which options a simulation has its times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.simulate.device_times import LATENCY_S, DeviceOptions
from pdserve.common.errors import ConfigError
from pdserve.simulator.profile import AttentionTime, CountTime, Profile, Spread, TransferTime, write_profile
from pdserve.simulator.step_times import Chunk, LinearStepTimes
from pdserve.simulator.virtual_transfer import Link

TIME = Spread(0.002, 0.001, 0.004)
NONE = Spread(0.0, 0.0, 0.0)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """A profile's file; steps of one token take `TIME`."""

    def write(transfer: TransferTime | None = None) -> Path:
        path = tmp_path / "profile.json"
        attention = (AttentionTime(0, 0, 1, 0, NONE),)
        profile = Profile(
            model="some", device="none", tokens=(CountTime(1, TIME),), outputs=(CountTime(1, NONE),), attention=attention,
            transfer=transfer,
        )  # fmt: skip
        write_profile(profile, path)
        return path

    return write


def test_without_options_times_are_those_of_the_help() -> None:
    assert DeviceOptions().times() == (LinearStepTimes(0.010, 100e-6, 0.0), Link(1e9, LATENCY_S))


def test_given_times_are_taken_in_their_units() -> None:
    options = DeviceOptions(step_ms=3, token_us=7, attended_ns=11, bandwidth=2.5)
    times, link = options.times()
    assert times == LinearStepTimes(pytest.approx(3e-3), pytest.approx(7e-6), pytest.approx(11e-9))  # type: ignore[arg-type]
    assert link == Link(2.5e9, LATENCY_S)
    assert DeviceOptions(step_ms=0, token_us=1).times()[0] == LinearStepTimes(0.0, 1e-6, 0.0)


@pytest.mark.parametrize(("level", "seconds"), [("low", 0.001), ("median", 0.002), ("high", 0.004)])
def test_a_profile_has_the_times_of_steps_and_transfers(write: Any, level: Any, seconds: float) -> None:
    path = write(TransferTime(bytes_per_s=3e9, latency_s=5e-6))
    times, link = DeviceOptions(profile=path, level=level).times()
    assert times.step_s([Chunk(1, 0, 1)]) == pytest.approx(seconds)
    assert link == Link(3e9, 5e-6)


def test_a_given_bandwidth_takes_the_place_of_the_profiles(write: Any) -> None:
    path = write(TransferTime(bytes_per_s=3e9, latency_s=5e-6))
    assert DeviceOptions(profile=path, bandwidth=10).times()[1] == Link(10e9, 5e-6)
    assert DeviceOptions(profile=write(), bandwidth=10).times()[1] == Link(10e9, LATENCY_S)


def test_a_profile_without_transfers_needs_a_bandwidth(write: Any) -> None:
    with pytest.raises(ConfigError, match="has no times of transfers: --bandwidth is needed"):
        DeviceOptions(profile=write()).times()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_ms": -1}, "--step-ms is -1, at least 0 is needed"),
        ({"token_us": float("nan")}, "--token-us is nan, at least 0 is needed"),
        ({"attended_ns": float("inf")}, "--attended-ns is inf, at least 0 is needed"),
        ({"bandwidth": 0}, "--bandwidth is 0, above 0 is needed"),
        ({"bandwidth": float("inf")}, "--bandwidth is inf, above 0 is needed"),
        ({"step_ms": 0, "token_us": 0}, "--step-ms and --token-us are 0: a step takes some time"),
        ({"profile": Path("/nowhere")}, "profile /nowhere: No such file or directory"),
        (
            {"profile": Path("x"), "step_ms": 5},
            "--step-ms is 5, and --profile has times of steps, too: give one of them",
        ),
        ({"profile": Path("x"), "token_us": 0}, "--token-us is 0, and --profile has times of steps"),
        ({"profile": Path("x"), "attended_ns": 1}, "--attended-ns is 1, and --profile has times of steps"),
    ],
)
def test_each_wrong_option_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeviceOptions(**fields).times()
    assert message in caught.value.message
