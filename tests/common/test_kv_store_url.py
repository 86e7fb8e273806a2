"""`kv_store`: what its URL says, and what is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.kv_store_url import MooncakeUrl
from pdserve.common.settings.worker_settings import WorkerSettings

LOCAL = "mooncake://127.0.0.1:5?segment_mib=16"


def test_a_url_has_the_master_and_options() -> None:
    assert MooncakeUrl.parse("mooncake://m.example:50051?segment_mib=0") == MooncakeUrl("m.example", 50051, 0)
    text = (
        "mooncake://[::1]:7?segment_mib=64&metadata=http://a:8080/metadata&protocol=rdma&devices=mlx5_0,mlx5_1&host=b"
    )
    url = MooncakeUrl.parse(text)
    assert url == MooncakeUrl("::1", 7, 64, "http://a:8080/metadata", "rdma", "mlx5_0,mlx5_1", "b")
    assert url.master == "[::1]:7"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(url), type=MooncakeUrl) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it does not begin with mooncake://"),
        ("redis://a:1?segment_mib=16", "it does not begin with mooncake://"),
        ("mooncake://?segment_mib=16", "host and port of the master are missing: mooncake://HOST:PORT"),
        ("mooncake://a?segment_mib=16", "host and port of the master are missing"),
        ("mooncake://a:0?segment_mib=16", "host and port of the master are missing"),
        ("mooncake://a:x?segment_mib=16", "Port could not be cast to integer"),
        ("mooncake://a:70000?segment_mib=16", "Port out of range"),
        ("mooncake://a:1/path?segment_mib=16", "nothing but HOST:PORT may stand before the options"),
        ("mooncake://user@a:1?segment_mib=16", "nothing but HOST:PORT may stand before the options"),
        ("mooncake://a:1?segment_mib=16#x", "nothing but HOST:PORT may stand before the options"),
        ("mooncake://a:1", "segment_mib is missing: the memory that this worker adds to the store"),
        ("mooncake://a:1?segment_mib", "bad query field: 'segment_mib'"),
        ("mooncake://a:1?segment_mib=", "segment_mib is '', 0 or at least 16 is needed"),
        ("mooncake://a:1?segment_mib=-1", "segment_mib is '-1', 0 or at least 16 is needed"),
        ("mooncake://a:1?segment_mib=15", "segment_mib is '15', 0 or at least 16 is needed"),
        ("mooncake://a:1?segment_mib=16&protocol=udp", "protocol is 'udp', known are tcp, rdma"),
        ("mooncake://a:1?segment_mib=16&plaintext=1", "plaintext is '1', true or false is needed"),
        (
            "mooncake://a:1?segment_mib=16&size=1",
            "it has the option 'size', known are devices, host, metadata, plaintext",
        ),
        ("mooncake://a:1?segment_mib=16&master_host=b", "it has the option 'master_host'"),
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MooncakeUrl.parse(text)
    assert str(caught.value).startswith(f"kv_store is {text!r}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_store": LOCAL}, r"kv_store is '.*', and kv_host_mib is 0: blocks get to the store through host memory"),
        (
            {"kv_store": LOCAL, "kv_host_mib": 1, "kv_disk_path": "/tmp", "kv_disk_gib": 1.0},
            "kv_store is '.*' and kv_disk_path is '/tmp': blocks are kept in one of them",
        ),
        ({"kv_store": "x", "kv_host_mib": 1}, "kv_store is 'x': it does not begin with mooncake://"),
        (
            {"kv_store": "mooncake://10.0.0.9:1?segment_mib=0", "kv_host_mib": 1},
            "kv_store names 10.0.0.9, which is not loopback, and Mooncake encrypts nothing: plaintext=true in it is needed",
        ),
    ],
)
def test_settings_that_contradict_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.convert(settings, WorkerSettings).verify()


def test_a_store_beyond_loopback_is_allowed_by_name() -> None:
    url = "mooncake://10.0.0.9:1?segment_mib=0"
    WorkerSettings(kv_store=url, kv_host_mib=1, insecure=True).verify()
    WorkerSettings(kv_store=f"{url}&plaintext=true", kv_host_mib=1).verify()
