"""Two tenants at real services: what one has asked leaves no trace in what the other is told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.processes.cluster_processes import Service
from tests.support.processes.shared_cluster import SharedCluster
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "carol", "dave")}
SECRET = (
    "Please transfer the money from the account 4711 of our customer Alice to the account 42, and say when it is done."
)


@pytest.fixture
def router(shared: SharedCluster) -> Service:
    """One that knows the tenants."""
    return shared.router("router-of-tenants", f"--api-keys={','.join(KEYS.values())}")


def cached_tokens(router: Service, name: str, path: str, prompt: str, **fields: Any) -> int:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    url = f"http://{router.http}{path}"
    answer = httpx.post(url, json={**fields, "prompt": prompt}, headers=headers, timeout=HANG_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("salt", ["", "alice"])
def test_cached_tokens_tell_nothing_of_another_tenants_prompt(router: Service, salt: str) -> None:
    def asked(name: str, prompt: str, **fields: Any) -> int:
        return cached_tokens(router, name, "/v1/completions", prompt, max_tokens=2, **fields)

    salted = {"cache_salt": salt} if salt else {}
    prompt = f"{salt} {SECRET}"
    assert asked("alice", prompt) == 0
    own = asked("alice", prompt)
    assert own >= 16, "she finds her own"
    # word by word, as one would look for a number
    guesses = (prompt, prompt.replace("4711", "4712"), prompt[: len(prompt) // 2])
    for name, guess in zip(("bob", "carol", "dave"), guesses, strict=True):
        assert asked(name, guess, **salted) == 0
    assert asked("alice", prompt) == own
