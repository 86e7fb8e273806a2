"""Which of its settings `pdserve up` gives to which service."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.cluster import ClusterPlan, child_plans, settings_by_role
from pdserve.common.errors import ConfigError


def test_each_service_is_given_the_settings_that_it_has() -> None:
    given = {"stream_interval": "4", "max_attempts": "2", "log_level": "debug", "num_blocks": "100"}
    assert settings_by_role(given) == {
        "router": {"max_attempts": "2", "log_level": "debug"},
        "prefill": {"log_level": "debug", "num_blocks": "100"},
        "decode": {"stream_interval": "4", "log_level": "debug", "num_blocks": "100"},
    }


def test_a_setting_that_no_service_has_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stream_intervall"):
        settings_by_role({"stream_intervall": "4"})


def test_what_was_asked_for_comes_after_what_up_chooses_itself() -> None:
    settings = {"decode": {"log_level": "debug", "stream_interval": "4"}}
    plan = ClusterPlan("demo", Path(), 1, 1, {}, worker_settings=settings)
    [prefill, decode] = child_plans(plan, "a key")
    assert "stream_interval=4" not in prefill.flags
    assert decode.flags.index("log_level=debug") > decode.flags.index("log_level=warning")
    assert "stream_interval=4" in decode.flags
