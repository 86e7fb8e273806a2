"""Settings about Redis: what is refused, and that no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import describe, load_settings
from pdserve.common.settings.worker_settings import DecodeSettings

KEY = "0123456789abcdef"
SECRET = "pa55word"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        ("rediss://h:7/3", "rediss://h:7/3"),
        (f"redis://me:{SECRET}@h:7/3", "redis://me:***@h:7/3"),
        (f"redis://:{SECRET}@[::1]:7", "redis://:***@[::1]:7/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert str(parse_redis_url(url)) == repr(parse_redis_url(url)) == shown


def test_escaped_passwords_are_read() -> None:
    url = parse_redis_url("redis://us%40er:p%2Fw%3A@h")
    assert (url.username, url.password) == ("us@er", "p/w:")


@pytest.mark.parametrize(
    "url",
    [
        "", "h:6379", f"http://:{SECRET}@h", f"redis://:{SECRET}@", f"redis://u:{SECRET}/x@h",
        f"redis://:{SECRET}@h:99999", f"redis://:{SECRET}@h/x{SECRET}", f"redis://:{SECRET}@h?db=1",
        f"redis://h/1#{SECRET}", "redis://h/99999999", "unix:///tmp/redis.sock", f"redis://h:12/{SECRET}@h",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [RouterSettings, DecodeSettings])
def test_a_url_that_cannot_be_used_is_refused_without_being_repeated(kind: type[ServiceSettings], url: str) -> None:
    with pytest.raises(ConfigError, match="redis") as caught:
        load_settings(kind, flags={"redis": url}, environ={})
    assert SECRET not in caught.value.message


def test_the_log_line_of_settings_has_no_password() -> None:
    settings = load_settings(
        RouterSettings,
        flags={"deployment_key": KEY, "insecure": True},
        environ={"PDSERVE_REDIS": f"redis://me:{SECRET}@h"},
    )
    assert SECRET not in describe(settings)
    assert "redis=redis://me:***@h:6379/0" in describe(settings)


def test_with_redis_the_public_development_key_is_refused() -> None:
    settings = load_settings(DecodeSettings, flags={"redis": "redis://127.0.0.1"}, environ={})
    with pytest.raises(ConfigError, match="Redis is given"):
        settings.key()
    with_key = load_settings(DecodeSettings, flags={"redis": "redis://127.0.0.1", "deployment_key": KEY}, environ={})
    assert with_key.key() == (DeploymentKey(KEY.encode()), False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"redis_namespace": ""}, "redis_namespace"),
        ({"redis_namespace": "a{b"}, "redis_namespace"),
        ({"redis_namespace": "x" * 65}, "redis_namespace"),
        ({"redis_ca_file": "/nowhere/at/all"}, "redis_ca_file"),
        ({"worker_id": "a:b"}, "worker_id"),
        ({"worker_id": "x" * 129}, "worker_id"),
    ],
)
def test_what_could_not_stand_in_redis_is_refused(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(DecodeSettings, flags={"redis": "redis://127.0.0.1", **flags}, environ={})


def test_a_file_that_holds_no_certificates_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(ConfigError, match="redis_ca_file"):
        load_settings(RouterSettings, flags={"redis": "rediss://h", "redis_ca_file": str(file)}, environ={})
