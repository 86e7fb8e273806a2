"""Profiles: what is read and refused, and the step times that come out of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.simulator import profile as module
from pdserve.simulator.profile import (
    AttentionTime,
    CountTime,
    Curve,
    Profile,
    ProfileStepTimes,
    Spread,
    TransferTime,
    read_profile,
    write_profile,
)
from pdserve.simulator.step_times import Chunk

MS = 1e-3


def spread(ms: float) -> Spread:
    return Spread(ms * MS, 0.5 * ms * MS, 2 * ms * MS)


def counts(samples: dict[int, float]) -> tuple[CountTime, ...]:
    return tuple(CountTime(count, spread(ms)) for count, ms in samples.items())


def attention(samples: dict[tuple[int, int, int, int], float]) -> tuple[AttentionTime, ...]:
    return tuple(AttentionTime(*shape, spread(ms)) for shape, ms in samples.items())


SINGLES = {(0, 0, 1, 0): 1.0, (0, 0, 1, 100): 2.0, (0, 0, 4, 0): 2.0, (0, 0, 4, 100): 6.0}
CHUNKS = {(16, 0, 0, 0): 0.5, (16, 100, 0, 0): 1.5, (64, 0, 0, 0): 3.0, (64, 100, 0, 0): 7.0}
MIXED = {(16, 0, 1, 0): 1.2, (64, 0, 1, 0): 8.0}


def make_profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "model": "some",
        "device": "none",
        "tokens": counts({1: 10.0, 16: 10.0, 64: 20.0}),
        "outputs": counts({1: 1.0, 4: 2.0}),
        "attention": attention(SINGLES | CHUNKS | MIXED),
    }
    return Profile(**fields | changes)


def step_ms(profile: Profile, *chunks: Chunk) -> float:
    return ProfileStepTimes(profile).step_s(chunks) / MS


# ---- files


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = make_profile(
        settings={"max_num_seqs": 64, "device": "cpu"}, conditions="never", further_chunk_s=0.1,
        transfer=TransferTime(bytes_per_s=1e9, latency_s=1e-4), start_s=Spread.of([1.0, 2.0, 3.0]), whole_steps=True,
    )  # fmt: skip
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


NAN, INFINITY = float("nan"), float("inf")
LINK = {"bytes_per_s": 1.0, "latency_s": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2, this version reads 1"),
        ({"tokens": ()}, "tokens has no samples"),
        ({"outputs": ()}, "outputs has no samples"),
        ({"attention": ()}, "attention has no samples"),
        ({"tokens": counts({1: 1.0, 0: 1.0})}, "tokens[1] has a count of 0, at least 1 is needed"),
        ({"outputs": counts({-1: 1.0})}, "outputs[0] has a count of -1, at least 1 is needed"),
        ({"tokens": (CountTime(1, Spread(NAN, 0.0, 0.0)),)}, "tokens[0] has median_s nan, a number is needed"),
        ({"outputs": (CountTime(1, Spread(0.0, INFINITY, 0.0)),)}, "outputs[0] has low_s inf, a number is needed"),
        (
            {"attention": (AttentionTime(0, 0, 1, 0, Spread(0.0, 0.0, -INFINITY)),)},
            "attention[0] has high_s -inf, a number is needed",
        ),
        ({"attention": attention({(-1, 0, 1, 0): 1.0})}, "attention[0] has chunk -1, 0 to 1099511627775 are needed"),
        ({"attention": attention({(1, -2, 1, 0): 1.0})}, "attention[0] has before -2, 0 to 1099511627775 are needed"),
        ({"attention": attention({(1, 0, -3, 0): 1.0})}, "attention[0] has sequences -3, 0 to 1099511627775 are needed"),
        ({"attention": attention({(0, 0, 1, 1 << 40): 1.0})}, "attention[0] has context 1099511627776, 0 to"),
        ({"attention": attention({(0, 5, 0, 5): 1.0})}, "attention[0] has neither a chunk nor sequences"),
        ({"further_chunk_s": -0.5}, "further_chunk_s is -0.5, at least 0 is needed"),
        ({"transfer": TransferTime(**LINK | {"bytes_per_s": 0.0})}, "transfer.bytes_per_s is 0, above 0 is needed"),
        ({"transfer": TransferTime(**LINK | {"latency_s": -1.0})}, "transfer.latency_s is -1, at least 0 is needed"),
        ({"start_s": Spread(NAN, 0.0, 0.0)}, "start_s has median_s nan, a number is needed"),
    ],
)  # fmt: skip
def test_each_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_profile(**changes).verify()
    assert caught.value.message.startswith(message)


def test_a_wrong_field_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(make_profile(tokens=counts({0: 1.0})), path)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert caught.value.message == f"profile {path}: tokens[0] has a count of 0, at least 1 is needed"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "Expected `object`"),
        (b'{"model": 5}', "$.model"),
        (b'{"model": "a", "device": "b", "tokens": [[1, [0]]], "outputs": [], "attention": []}', "$.tokens[0][1]"),
        (msgspec.json.encode(msgspec.to_builtins(make_profile()) | {"more": 1}), "unknown field `more`"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert caught.value.message.startswith(f"profile {path}: ")
    assert message in caught.value.message


def test_files_that_cannot_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        write_profile(make_profile(), tmp_path)
    write_profile(make_profile(), tmp_path / "profile.json")
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="has more than 100 bytes"):
        read_profile(tmp_path / "profile.json")


def test_a_spread_has_the_median_and_two_tenths() -> None:
    found = Spread.of([float(number) for number in range(11)])
    assert (found.low_s, found.median_s, found.high_s) == (1.0, 5.0, 9.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


# ---- curves


def test_a_curve_is_exact_at_its_samples_and_straight_between_and_beyond() -> None:
    curve = Curve({10: 1.0, 1: 0.1, 40: 7.0})
    assert [curve(count) for count in (1, 10, 40)] == [0.1, 1.0, 7.0]
    assert curve(25) == pytest.approx(4.0)
    assert curve(70) == pytest.approx(13.0)
    assert Curve({5: 2.0})(1000) == 2.0


def test_a_curve_neither_falls_beyond_its_samples_nor_below_nothing() -> None:
    assert Curve({1: 1.0, 10: 5.0, 20: 4.0})(1000) == 4.0
    assert Curve({10: 1.0, 20: 3.0})(0) == 0.0
    # what is below nothing is a difference, and stays one
    assert Curve({10: -1.0, 20: 3.0})(0) == -1.0
    assert Curve({10: -3.0, 20: -1.0})(15) == -2.0


# ---- steps


def test_the_parts_of_a_step_add_up() -> None:
    profile = make_profile()
    assert step_ms(profile, Chunk(64, 100)) == pytest.approx(20 + 7)
    assert step_ms(profile, Chunk(64, 100, 1)) == pytest.approx(20 + 7 + 1)
    assert step_ms(profile, *[Chunk(1, 100, 1)] * 4) == pytest.approx(10 + 6 + 2)
    # of sequences the mean context counts, and between samples lines are straight in both numbers
    assert step_ms(profile, Chunk(1, 0, 1), Chunk(1, 100, 1)) == pytest.approx(
        10 + (1.5 + 4.0 - 1.5 + 1.5 * 2) / 3 + 4 / 3
    )
    assert step_ms(profile, Chunk(64, 50)) == pytest.approx(20 + 5)
    assert step_ms(profile, Chunk(40, 0)) == pytest.approx(15 + 1.75)


def test_a_chunk_of_one_token_is_a_single_token() -> None:
    profile = make_profile()
    assert step_ms(profile, Chunk(1, 100)) == pytest.approx(10 + 2)
    # and the least of all chunks
    halfway = Chunk(8, 100)
    assert step_ms(profile, halfway) == pytest.approx(10 + 2.0 + (1.5 - 2.0) * 7 / 15)


def test_chunks_share_a_launch_and_may_have_a_time_of_their_own() -> None:
    two = (Chunk(16, 100), Chunk(16, 100))
    of_tokens = 10 + 10 * 16 / 48
    assert step_ms(make_profile(), *two) == pytest.approx(of_tokens + 2 * 1.5 - 0.5)
    assert step_ms(make_profile(further_chunk_s=2 * MS), *two) == pytest.approx(of_tokens + 2 * 1.5 - 0.5 + 2)


def test_each_level_has_its_own_times() -> None:
    low, median, high = (
        ProfileStepTimes(make_profile(), level).step_s([Chunk(64, 100, 1)]) for level in ("low", "median", "high")
    )
    assert low == pytest.approx(median / 2)
    assert high == pytest.approx(median * 2)


def test_mixed_steps_are_exact_where_they_were_measured() -> None:
    profile = make_profile()
    assert step_ms(profile, Chunk(16, 0), Chunk(1, 0)) == pytest.approx(10 + 10 / 48 + 1.2)
    assert step_ms(profile, Chunk(64, 0), Chunk(1, 0)) == pytest.approx(20 + 10 / 48 + 8.0)


def test_the_factor_of_mixing_changes_evenly_with_powers_of_two_and_not_beyond() -> None:
    small, large = 1.2 / 1.5, 8.0 / 4.0
    # in the middle of log2(1 + 16) and log2(1 + 64)
    middle = round((17 * 65) ** 0.5) - 1
    apart = 1.0 + 0.5 + 2.5 * (middle - 16) / 48
    tokens = 10 + 10 * (middle + 1 - 16) / 48
    found = step_ms(make_profile(), Chunk(middle, 0), Chunk(1, 0))
    assert found == pytest.approx(tokens + apart * (small + large) / 2, rel=1e-3)
    beyond = step_ms(make_profile(), Chunk(64, 100), *[Chunk(1, 100)] * 4)
    assert beyond == pytest.approx(20 + 40 / 48 + large * (7 + 6))


def test_without_mixed_samples_the_kinds_add_up() -> None:
    profile = make_profile(attention=attention(SINGLES | CHUNKS))
    assert step_ms(profile, Chunk(64, 0), Chunk(1, 0)) == pytest.approx(20 + 10 / 48 + 3 + 1)


def test_missing_mixtures_take_the_nearest_ones() -> None:
    profile = make_profile(attention=attention(SINGLES | CHUNKS | {(16, 0, 1, 0): 1.5 * 2, (64, 0, 4, 0): 5.0 * 3}))
    assert step_ms(profile, Chunk(64, 0), Chunk(1, 0)) == pytest.approx(20 + 10 / 48 + 3 * (3 + 1))
    assert step_ms(profile, Chunk(16, 0), *[Chunk(1, 0)] * 4) == pytest.approx(10 + 40 / 48 + 2 * (0.5 + 2))


def test_whole_steps_are_mixed_as_a_whole() -> None:
    """Attention that is a difference of steps may be next to nothing: a factor on it would mean nothing elsewhere."""
    samples = attention({(0, 0, 1, 0): -2.0, (0, 0, 1, 100): 6.0, (16, 0, 0, 0): 2.0, (16, 0, 1, 0): 1.1})
    profile = make_profile(tokens=counts({17: 11.0}), attention=samples, whole_steps=True)
    assert step_ms(profile, Chunk(16, 0), Chunk(1, 0)) == pytest.approx(11 + 1.1)
    assert step_ms(profile, Chunk(16, 0), Chunk(1, 100)) == pytest.approx((11 + 2 + 6) * (11 + 1.1) / 11)
    of_layers = make_profile(tokens=counts({17: 11.0}), attention=samples)
    assert step_ms(of_layers, Chunk(16, 0), Chunk(1, 100)) == pytest.approx(11 + 2 + 6)


def test_no_step_takes_less_than_nothing() -> None:
    profile = make_profile(attention=attention({(0, 0, 1, 0): -50.0}))
    assert step_ms(profile, Chunk(1, 0)) == 0.0


def test_a_profile_needs_samples_of_one_sequence() -> None:
    with pytest.raises(ConfigError, match="no samples of one sequence"):
        ProfileStepTimes(make_profile(attention=attention(CHUNKS | {(0, 0, 4, 0): 2.0})))
