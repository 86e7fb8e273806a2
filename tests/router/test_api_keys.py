"""API keys: the file, its reading again, expiry, roles, and what repeated failures cost their address."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os

import grpc
import pytest

from pdserve.common.errors import ConfigError, Unauthenticated
from pdserve.common.settings.api_key_file import key_hash, new_key, read_keys
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.router.tenants import failed_attempts
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.failed_attempts import FailedAttempts
from pdserve.v1 import inference_pb2
from tests.support.run.waiting import HANG_S

ALICE, ALICE_NEXT, BOB, OPERATOR = (f"{name}-0123456789abcdef" for name in ("alice", "next", "bob", "operator"))


def entry(name, key, **fields):
    lines = [
        f'name = "{name}"',
        f'sha256 = "{key_hash(key)}"',
        *(f"{field} = {value}" for field, value in fields.items()),
    ]
    return "[[keys]]\n" + "\n".join(lines) + "\n"


def write(path, *entries):
    """As an editor does: another file takes the name."""
    draft = path.with_suffix(".new")
    draft.write_text("\n".join(entries))
    os.replace(draft, path)  # noqa: PTH105
    return path


@pytest.fixture
def keys_file(tmp_path):
    return write(
        tmp_path / "keys.toml",
        entry("alice", ALICE, max_sequences=4, min_priority=-1, max_priority=5),
        entry("alice-next", ALICE_NEXT, tenant='"alice"'),
        entry("bob", BOB, expires="2030-01-01T00:00:00Z"),
        entry("operator", OPERATOR, role='"operator"'),
    )


def keys_of(path):
    return ApiKeys.from_settings(RouterSettings(api_keys_file=str(path)))


def bearer(key):
    return f"Bearer {key}"


def test_a_key_stands_for_its_tenant_role_and_limits(keys_file):
    keys = keys_of(keys_file)
    client = keys.check(bearer(ALICE), "10.0.0.1")
    assert (client.key_name, client.tenant, client.role, client.address) == ("alice", "alice", "user", "10.0.0.1")
    assert (client.limits.max_sequences, client.limits.tokens_per_minute) == (4, None)
    assert keys.check(bearer(ALICE_NEXT)).tenant == "alice"
    assert keys.check(bearer(OPERATOR)).sees_all
    assert keys.num_tenants == 3
    for header in (None, "", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, bearer(ALICE[:-1]), bearer(key_hash(ALICE))):
        with pytest.raises(Unauthenticated):
            keys.check(header)


def test_a_key_ends_when_it_expires(keys_file):
    now = [datetime.datetime(2029, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)]
    keys = ApiKeys({one.sha256: one for one in read_keys(keys_file)}, now=lambda: now[0])
    assert keys.check(bearer(BOB)).tenant == "bob"
    now[0] += datetime.timedelta(seconds=1)
    with pytest.raises(Unauthenticated, match="bob expired at 2030"):
        keys.check(bearer(BOB))


def test_a_changed_file_is_read_again_and_a_broken_one_is_logged_once(keys_file, caplog):
    keys = keys_of(keys_file)
    write(keys_file, entry("bob", BOB))
    keys.look()
    assert keys.check(bearer(BOB)).limits.max_sequences is None
    with pytest.raises(Unauthenticated):
        keys.check(bearer(ALICE))
    for broken in ("", "[[keys]]\nname = 1", "no toml", entry("bob", BOB, typo=1)):
        caplog.clear()
        write(keys_file, broken)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                keys.look()
        assert len(caplog.records) == 1
        assert "remain unchanged: api_keys_file" in caplog.text
        assert keys.check(bearer(BOB)).tenant == "bob"
    keys_file.unlink()
    keys.look()
    assert keys.check(bearer(BOB)).tenant == "bob"
    write(keys_file, entry("alice", ALICE))
    keys.look()
    assert keys.check(bearer(ALICE)).tenant == "alice"


HEX = key_hash(ALICE)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", r"has no \[\[keys\]\]"),
        ("keys = []", r"has no \[\[keys\]\]"),
        ("keys = 3", r"has no \[\[keys\]\]"),
        ("[[key]]\nname = 'a'", "unknown table 'key'"),
        (f"[[keys]]\nsha256 = '{HEX}'", r"keys\[0\]: .*`name`"),
        (f"[[keys]]\nname = 'a b'\nsha256 = '{HEX}'", r"keys\[0\]\.name is 'a b'"),
        (f"[[keys]]\nname = ''\nsha256 = '{HEX}'", r"keys\[0\]\.name is ''"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{ALICE}'", r"\(a\)\.sha256 is not 64"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\ntenant = 'x+y'", r"\(a\)\.tenant is 'x\+y'"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nrole = 'root'", "role"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nmax_sequences = 0", "max_sequences is 0, 1 to"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nmax_sequences = '9'", "max_sequences"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nmin_priority = 3\nmax_priority = 2", "min_priority is 3"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nmodels = []", "models has 0 names, 1 to 1024"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nmodels = ['']", "models has 1 names, 1 to 1024 that are not empty"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nexpires = 2030-01-01T00:00:00", "offset from UTC"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HEX}'\nkey = '{ALICE}'", "unknown field `key`"),
        (entry("a", ALICE) + entry("a", BOB), "name 'a' is there 2 times"),
        (entry("a", ALICE) + entry("b", ALICE), "sha256 .* is there 2 times"),
        ("\x00", "api_keys_file"),
        ("#" * (5 << 20), "more than 4194304 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path, content, named):
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        load_settings(RouterSettings, flags={"api_keys_file": str(path)}, environ={})
    assert ALICE not in caught.value.message.replace(f"'{ALICE}'", "")


def test_a_file_may_hold_many_keys_and_not_more(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("".join(entry(f"k{number}", new_key()) for number in range(4096)))
    assert len(read_keys(path)) == 4096
    with path.open("a") as file:
        file.write(entry("one-more", ALICE))
    with pytest.raises(ConfigError, match="4097 keys, at most 4096"):
        read_keys(path)


@pytest.mark.parametrize(
    "blank", ["", " ", " , ", ",", f"{ALICE},", "secret", f"{ALICE}, {ALICE}", "schlüssel-0123456789"]
)
def test_keys_that_cannot_be_used_never_mean_that_none_is_needed(blank):
    with pytest.raises(ConfigError, match="api_keys"):
        load_settings(RouterSettings, environ={"PDSERVE_API_KEYS": blank})
    with pytest.raises(ConfigError, match="api_keys"):
        load_settings(RouterSettings, flags={"api_keys": blank}, environ={})


@pytest.mark.parametrize(
    "toml", ["api_keys = []", 'api_keys = [""]', f'api_keys = ["", "{ALICE}"]', 'api_keys_file = ""']
)
def test_blank_keys_in_a_settings_file_stop_the_start(tmp_path, toml):
    path = tmp_path / "settings.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError, match="api_keys"):
        load_settings(RouterSettings, toml=path, environ={})


def test_beyond_loopback_keys_are_needed_or_a_word_that_they_are_not(keys_file):
    far = {"host": "0.0.0.0", "insecure": True}
    with pytest.raises(ConfigError, match=r"not loopback, and clients need no API key: .* --no-auth"):
        load_settings(RouterSettings, flags=far, environ={})
    for enough in ({"no_auth": True}, {"api_keys": ALICE}, {"api_keys_file": str(keys_file)}):
        load_settings(RouterSettings, flags=far | enough, environ={})
    for both in ({"api_keys": ALICE, "no_auth": True}, {"api_keys": ALICE, "api_keys_file": str(keys_file)}):
        with pytest.raises(ConfigError, match=r"no_auth is true|both given"):
            load_settings(RouterSettings, flags=far | both, environ={})


def test_failures_of_one_address_are_answered_ever_later_and_logged_at_a_bounded_rate(caplog):
    now = [1000.0]
    failures = FailedAttempts(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        delays = [failures.add("10.0.0.1", "wrong") for _ in range(100)]
    assert delays[:7] == [0, 0, 0, 0, 0, 0.1, 0.2]
    assert delays == sorted(delays)
    assert delays[-1] == failed_attempts.LONGEST_DELAY_S
    assert len(caplog.records) == 1
    assert failures.add("10.0.0.2", "wrong") == 0
    now[0] += 61
    assert failures.add("10.0.0.1", "wrong") == 0
    assert "100 failed authentication(s) from 10.0.0.1" in caplog.text
    # one host has a whole /64
    delays = [failures.add(f"2001:db8::{number:x}", "wrong") for number in range(1, 50)]
    assert delays[-1] == failed_attempts.LONGEST_DELAY_S
    caplog.clear()
    for number in range(10_000):
        failures.add(f"10.{number >> 8}.{number & 255}.1", "wrong")
    assert len(failures._by_network) <= failed_attempts.MAX_ADDRESSES
    assert len(caplog.records) <= failed_attempts.MAX_LINES_PER_MINUTE


async def test_answers_that_are_held_back_are_bounded(monkeypatch):
    monkeypatch.setattr(failed_attempts, "MAX_DELAYED", 3)
    failures = FailedAttempts()
    held = [asyncio.create_task(failures.hold_back(60)) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in held] == [False, False, False, True, True]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert failures._num_delayed == 0


async def test_both_front_ends_take_keys_of_the_file_and_follow_it(cluster, keys_file, monkeypatch):
    monkeypatch.setattr("pdserve.router.tenants.api_keys.LOOK_EVERY_S", 0.01)
    await cluster.start(api_keys_file=str(keys_file))
    body = {"prompt": "hello", "max_tokens": 1}

    async def status(key):
        return (
            await cluster.http.post("/v1/completions", json=body, headers={"authorization": bearer(key)})
        ).status_code

    assert [await status(key) for key in (ALICE, BOB, "x" * 20)] == [200, 200, 401]
    call = cluster.grpc.GetModel(inference_pb2.GetModelRequest(), metadata=(("authorization", bearer(ALICE)),))
    assert (await call).model
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.grpc.GetModel(inference_pb2.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    write(keys_file, entry("bob", BOB))
    async with asyncio.timeout(HANG_S):
        while await status(ALICE) != 401:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await status(BOB) == 200


@pytest.mark.parametrize(
    "keys", [(BOB, "wrong"), ("wrong", BOB), (BOB, BOB), (BOB, BOB, BOB)], ids=lambda keys: "+".join(keys)
)
@pytest.mark.parametrize("asks_for_keys", [True, False])
async def test_several_authorization_headers_are_refused(cluster, keys, asks_for_keys):
    """Front ends and proxies would take different ones for the client's."""
    await cluster.start(prefill=0, decode=0, api_keys=(BOB,) if asks_for_keys else ())
    headers = [("authorization", bearer(key)) for key in keys]
    message = f"the request has {len(keys)} authorization headers, at most 1 is allowed"
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize")):
        answer = await cluster.http.request(method, path, headers=headers, json={} if method == "POST" else None)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"]) == (400, message, "authorization")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.grpc.GetModel(inference_pb2.GetModelRequest(), metadata=headers)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)


async def test_a_router_that_anybody_may_ask_says_so_once(cluster, caplog):
    with caplog.at_level(logging.WARNING):
        await cluster.start(
            prefill=0, decode=0, host="0.0.0.0", insecure=True, no_auth=True, deployment_key="0123456789abcdef"
        )
    assert sum("every client that reaches 0.0.0.0 is served" in record.message for record in caplog.records) == 1
