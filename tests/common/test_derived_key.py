"""Sub-keys of the deployment key: one for each purpose, equal in every process."""

from __future__ import annotations

import time

from pdserve.common.security import deployment_key
from pdserve.common.security.deployment_key import SUB_KEY_BYTES, DeploymentKey, new_deployment_key

KEY = DeploymentKey(b"0123456789abcdef")
LABELS = [value for name, value in vars(deployment_key).items() if name.isupper() and isinstance(value, str)]


def test_each_label_and_context_has_a_key_of_its_own() -> None:
    assert len(LABELS) == len(set(LABELS)) >= 6
    keys = [KEY.derive(label) for label in LABELS]
    keys += [KEY.derive("data plane", b"a"), KEY.derive("data plane", b"b"), KEY.derive("data plan", b"ea")]
    keys += [DeploymentKey(b"0123456789abcdeg").derive(label) for label in LABELS]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {SUB_KEY_BYTES}


def test_sub_keys_are_equal_in_every_process_and_release() -> None:
    assert KEY.derive("block hashes").hex() == GOLDEN
    assert DeploymentKey(bytes(KEY.secret)).derive("block hashes") == KEY.derive("block hashes")


GOLDEN = "6080a90ca8266dfbc9558b5a2adc5817a2c6fedc2887bf9913fb67e241ba14fa"


def test_a_guess_of_the_secret_costs_a_stretch() -> None:
    began = time.thread_time()
    for number in range(4):
        DeploymentKey(b"guess %d of sixteen" % number).derive("block hashes")
    # 50 ms each where this was measured; a plain hash takes microseconds
    assert time.thread_time() - began > 4 * 0.01


def test_the_fingerprint_compares_keys_and_the_secret_is_in_no_representation() -> None:
    one, two = new_deployment_key(), new_deployment_key()
    assert len(one) == 64
    first = DeploymentKey(one.encode())
    assert first.fingerprint == DeploymentKey(one.encode()).fingerprint != DeploymentKey(two.encode()).fingerprint
    assert len(first.fingerprint) == 12
    assert one not in repr(first)
