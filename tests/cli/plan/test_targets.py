"""Targets of a plan."""

from __future__ import annotations

import math

import pytest

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.plan.targets import Target
from pdserve.common.errors import ConfigError


def answered(ttft_s: float, tpot_s: float = 0.1, num_tokens: int = 11) -> RequestRecord:
    return RequestRecord(
        "r", 5.0, 5.0, [5.0 + ttft_s, 5.0 + ttft_s + tpot_s * (num_tokens - 1)], output_tokens=num_tokens
    )


FAILED = RequestRecord("r", 5.0, 5.0, error="overloaded")


def test_a_target_is_kept_by_its_percentile_of_all_requests() -> None:
    target = Target.parse("ttft_p90=0.3")
    assert (target.name, target.percent, target.limit_s, str(target)) == ("ttft", 90.0, 0.3, "ttft_p90=0.3")
    records = [answered(0.1 * number + 0.11) for number in range(10)]
    assert target.attained(records[1:5]) == pytest.approx(1 / 4)
    assert not target.is_met(records)
    assert target.value_s(records) == pytest.approx(0.91)
    assert target.is_met([answered(0.2)] * 9 + [answered(9.0)])
    assert target.value_s([answered(0.2)] * 9 + [answered(9.0)]) == pytest.approx(0.2)


def test_a_failed_request_keeps_no_target() -> None:
    target = Target.parse("e2el_p50=60")
    assert target.attained([answered(0.1), FAILED]) == 0.5
    assert target.is_met([answered(0.1), FAILED])
    assert not target.is_met([answered(0.1), FAILED, FAILED])
    assert math.isinf(target.value_s([answered(0.1), FAILED, FAILED]))


def test_an_answer_of_one_token_keeps_every_time_per_token() -> None:
    target = Target.parse("tpot_p99.9=0.01")
    assert target.is_met([answered(0.1, num_tokens=1)])
    assert not target.is_met([answered(0.1, tpot_s=0.011)])
    assert target.value_s([]) == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=0.3", "--slo is 'ttft=0.3', ttft|tpot|e2el_pPERCENT=SECONDS is needed"),
        ("itl_p99=0.3", "_pPERCENT=SECONDS is needed"),
        ("ttft_p100=0.3", "_pPERCENT=SECONDS is needed"),
        ("ttft_p0=0.3", "its percentile is 0, above 0 and below 100 is needed"),
        ("ttft_p99=0", "its limit is 0, seconds above 0 are needed"),
        ("ttft_p99=1e999", "its limit is 1e999, seconds above 0"),
        ("ttft_p99=--", "its limit is --, seconds above 0 are needed"),
        ("ttft_p99=" + "9" * 500, "is needed"),
    ],
)
def test_a_wrong_target_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Target.parse(text)
    assert message in caught.value.message
    assert len(caught.value.message) < 300
