"""Tenants at one router: whose cached prefixes they meet, what they see of each other, and what their keys allow."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.net.rpc import ERROR_CODE_KEY, ERROR_FIELD_KEY
from pdserve.common.settings.api_key_file import key_hash
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import ADMITTED, LANDED, RELEASED, decode_outputs, first, forever, play

PROMPT = "a_prompt_of_more_than_two_blocks_of_tokens"


def key_of(name):
    return f"{name}-0123456789abcdef"


def headers(name):
    return {"authorization": f"Bearer {key_of(name)}"}


def metadata(name):
    return (("authorization", f"Bearer {key_of(name)}"),)


def keys_file(folder, **fields):
    """name -> fields of its entry, as TOML."""
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(key_of(name))}"\n{lines}\n'
            for name, lines in fields.items()
        )
    )
    return str(path)


async def complete(cluster, name, **fields):
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    return await cluster.http.post("/v1/completions", json=body, headers=headers(name))


async def root_of(cluster, name, **fields):
    """The hash root that the workers get for a client's request."""
    before = len(cluster.of("decode").calls)
    assert (await complete(cluster, name, **fields)).status_code == 200
    return cluster.of("decode").calls[before].request.hash_root


async def test_tenants_share_no_prefix_and_the_keys_of_one_tenant_do(cluster, tmp_path):
    file = keys_file(tmp_path, alice="", alice2='tenant = "alice"', bob="", eve='tenant = "b"')
    await cluster.start(api_keys_file=file)
    roots = {name: await root_of(cluster, name) for name in ("alice", "alice2", "bob", "eve")}
    assert roots["alice"] == roots["alice2"]
    assert len(set(roots.values())) == 3
    # neither can a salt reach another tenant's
    assert await root_of(cluster, "eve", cache_salt="ob") not in roots.values()
    assert await root_of(cluster, "alice") == roots["alice"]


async def cached_tokens(cluster, name):
    return (await complete(cluster, name)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_groups_share_prefixes_and_are_told_no_count_of_them(cluster, tmp_path):
    file = keys_file(tmp_path, alice="", bob="", carol="", dave="")
    await cluster.start(api_keys_file=file, shared_prefix_cache=("alice+bob", "dave"))
    roots = [await root_of(cluster, name) for name in ("alice", "bob", "carol", "dave")]
    assert roots[0] == roots[1]
    assert len(set(roots)) == 3
    # the workers say that 3 tokens were cached
    assert [await cached_tokens(cluster, name) for name in ("alice", "bob", "carol", "dave")] == [0, 0, 3, 3]
    embedding = {"input": PROMPT}
    usage = [
        (await cluster.http.post("/v1/embeddings", json=embedding, headers=headers(name))).json()["usage"]
        for name in ("alice", "carol")
    ]
    assert [one["prompt_tokens_details"]["cached_tokens"] > 0 for one in usage] == [False, True]


async def test_all_may_share(cluster, tmp_path):
    await cluster.start(api_keys_file=keys_file(tmp_path, alice="", bob=""), shared_prefix_cache=("*",))
    assert await root_of(cluster, "alice") == await root_of(cluster, "bob")
    assert await cached_tokens(cluster, "bob") == 0


async def test_without_keys_there_is_one_tenant(cluster):
    await cluster.start()
    assert (await cluster.complete(PROMPT)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("groups", "named"),
    [(("a b",), "'a b'"), (("a+",), r"'a\+'"), (("a+b", "b+c"), "'b' more than once"), (("*", "a+b"), "next to other")],
)
def test_groups_that_mean_nothing_are_refused(groups, named):
    with pytest.raises(ConfigError, match=f"shared_prefix_cache .*{named}"):
        load_settings(RouterSettings, flags={"shared_prefix_cache": groups}, environ={})


async def test_a_user_sees_its_own_requests_and_an_operator_all(cluster, tmp_path):
    file = keys_file(tmp_path, alice="", bob="", ops='role = "operator"')
    await cluster.start(api_keys_file=file)
    for name in ("alice", "bob", "bob"):
        await complete(cluster, name)

    async def view(name):
        return (await cluster.http.get("/debug/routing", headers=headers(name))).json()

    assert [len((await view(name))["placements"]) for name in ("alice", "bob", "ops")] == [1, 2, 3]
    everything = await view("ops")
    assert [placement["tenant"] for placement in everything["placements"]] == ["bob", "bob", "alice"]
    assert set(everything["tenants"]) >= {"alice", "bob"}
    own = await view("alice")
    assert set(own) == {"policy", "local_prefill", "running", "queued", "placements"}
    assert set(own["placements"][0]) == {
        "time_unix_s", "request_id", "attempt", "policy", "hint", "kind", "prompt_tokens"
    }  # fmt: skip
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = asyncio.create_task(complete(cluster, "bob"))
    await cluster.of("decode").called(4)
    assert [(await view(name))["running"] for name in ("alice", "bob", "ops")] == [0, 1, 1]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_priority_outside_of_the_keys_range_is_refused_with_its_field(cluster, tmp_path):
    file = keys_file(tmp_path, alice="min_priority = 2\nmax_priority = 5", bob="", ops="min_priority = -9")
    await cluster.start(api_keys_file=file, scheduling_policy="priority")

    async def sent(name, priority):
        before = len(cluster.of("decode").calls)
        response = await complete(cluster, name, priority=priority)
        if response.status_code == 200:
            return cluster.of("decode").calls[before].request.priority
        return response.json()["error"]["param"]

    assert [await sent("alice", value) for value in (0, 1, 2, 5, 6, -1)] == [
        2,
        "priority",
        2,
        5,
        "priority",
        "priority",
    ]
    assert [await sent("bob", value) for value in (0, -1, 2**31 - 1)] == [0, "priority", 2**31 - 1]
    assert [await sent("ops", value) for value in (-9, -10)] == [-9, "priority"]
    response = await complete(cluster, "alice", priority=9)
    assert "priority is 9, this API key allows 2 to 5" in response.json()["error"]["message"]
    request = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x"), priority=-1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.grpc.Generate(request, metadata=metadata("bob")).read()
    trailing = dict(caught.value.trailing_metadata() or ())
    assert (trailing[ERROR_CODE_KEY], trailing[ERROR_FIELD_KEY]) == ("invalid_request", "priority")
    await cluster.idle()


async def test_limits_count_sequences(cluster, tmp_path):
    await cluster.start(api_keys_file=keys_file(tmp_path, alice="max_sequences = 4", bob=""), max_requests_per_key=2)
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = [asyncio.create_task(complete(cluster, "alice", n=2))]
    await cluster.of("decode").called(1)
    for refused, limit in (
        (await complete(cluster, "alice", n=3), "max_sequences of this API key is 4"),
        (await complete(cluster, "alice", prompt=["a", "b", "c"]), "max_sequences of this API key is 4"),
        (await complete(cluster, "alice", n=1, best_of=3), "max_sequences of this API key is 4"),
    ):
        assert refused.status_code == 429
        assert limit in refused.json()["error"]["message"]
        assert float(refused.headers["retry-after"]) >= 1
    # never, however often it comes
    assert (await complete(cluster, "alice", n=5)).status_code == 400
    too_many = await complete(cluster, "bob", n=3)
    assert (too_many.status_code, "max_requests_per_key is 2" in too_many.text) == (400, True)
    asking.append(asyncio.create_task(complete(cluster, "alice", n=2)))
    asking.append(asyncio.create_task(complete(cluster, "bob", n=2)))
    await cluster.of("decode").called(3)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await cluster.idle()
    cluster.of("decode").script = play(ADMITTED, LANDED, decode_outputs(1, "b", "length"))
    assert (await complete(cluster, "alice")).status_code == 200


async def test_tokens_per_minute_count_prompt_and_output(cluster, tmp_path):
    file = keys_file(tmp_path, alice="tokens_per_minute = 100", bob="")
    await cluster.start(api_keys_file=file)
    answers = [await complete(cluster, "alice", max_tokens=10) for _ in range(3)]
    # 42 and 10 tokens each
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert "tokens_per_minute of this API key is 100" in answers[1].json()["error"]["message"]
    assert 1 <= float(answers[1].headers["retry-after"]) <= 60
    assert (await complete(cluster, "bob", max_tokens=10)).status_code == 200
    assert (await complete(cluster, "alice", prompt="x", max_tokens=5)).status_code == 200


async def test_one_tenant_cannot_fill_the_queue(cluster, tmp_path):
    await cluster.start(
        api_keys_file=keys_file(tmp_path, greedy="", quiet=""), max_running_requests=1, max_queued_requests=8
    )
    gate = asyncio.Event()

    async def wait(worker, call):
        await gate.wait()

    cluster.of("prefill").script = play(wait, first(), RELEASED)
    cluster.of("decode").script = play(wait, ADMITTED, LANDED, decode_outputs(1, "b", "length"))
    greedy = [asyncio.create_task(complete(cluster, "greedy")) for _ in range(20)]
    refused = []
    for done in asyncio.as_completed(greedy):
        refused.append(await done)
        if len(refused) == 15:
            break
    assert {response.status_code for response in refused} == {429}
    assert "as many as stay free for others" in refused[0].text
    quiet = [asyncio.create_task(complete(cluster, "quiet")) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in quiet)
    gate.set()
    served = await asyncio.gather(*quiet)
    assert [response.status_code for response in served] == [200, 200]
    assert sum(response.status_code == 200 for response in await asyncio.gather(*greedy)) == 5


def text_turn(max_tokens=2):
    return inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hi"),
        sampling=request_pb2.SamplingParams(max_tokens=max_tokens),
        stream=True,
    )
