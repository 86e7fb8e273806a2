"""Which of its settings `pdserve up` gives to which service."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.cluster import ClusterPlan, child_plans, settings_by_role
from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings


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
    assert "PDSERVE_STREAM_INTERVAL" not in prefill.environ
    assert (prefill.environ["PDSERVE_LOG_LEVEL"], decode.environ["PDSERVE_LOG_LEVEL"]) == ("warning", "debug")
    assert decode.environ["PDSERVE_STREAM_INTERVAL"] == "4"


def test_no_setting_stands_in_a_childs_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "deployment_key": "s3cr3t of many characters",
        "otlp_headers": "auth=s3cr3t",
        "otlp": "http://a:s3cr3t@127.0.0.1:1",
    }
    by_role = settings_by_role(secrets)
    plan = ClusterPlan("demo", Path(), 1, 1, {}, worker_settings=by_role, redis="redis://:s3cr3t@127.0.0.1")
    kinds: tuple[type[WorkerSettings], ...] = (PrefillSettings, DecodeSettings)
    for child, kind in zip(child_plans(plan, "another key of many characters"), kinds, strict=True):
        assert child.flags == ()
        settings = load_settings(kind, environ={k: v for k, v in child.environ.items() if k.startswith("PDSERVE_")})
        assert settings.deployment_key == secrets["deployment_key"]
        assert (settings.otlp_headers, settings.otlp) == (secrets["otlp_headers"], secrets["otlp"])
        assert settings.redis == "redis://:s3cr3t@127.0.0.1"


def test_the_file_counts_more_than_what_up_chooses_itself(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text('[prefill]\nnum_threads = 7\nlog_level = "info"\n')
    [prefill, decode] = child_plans(ClusterPlan("demo", Path(), 1, 1, {}, config=file), "a key of many characters")
    assert prefill.flags == ("--config", str(file))
    assert "PDSERVE_NUM_THREADS" not in prefill.environ
    environ = {k: v for k, v in prefill.environ.items() if k.startswith("PDSERVE_")}
    settings = load_settings(PrefillSettings, toml=file, environ=environ)
    assert (settings.num_threads, settings.log_level) == (7, "info")
    assert decode.environ["PDSERVE_LOG_LEVEL"] == "warning"
