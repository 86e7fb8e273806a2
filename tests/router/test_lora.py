"""Adapters in the router: names for clients, placement by name and content, and requests that outlive a worker's list."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pdserve.common.block_hash import BlockHasher, request_extras
from pdserve.common.errors import AdapterUnavailable, WorkerLost
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.router.placement.placement import LORA_LOAD_BLOCKS, Candidate, PlacementRules, place
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.candidates import worker
from tests.router.fake_worker import LAYOUT, decode_outputs, play, said
from tests.router.test_tenants import headers, keys_file, metadata
from tests.support.run.waiting import HANG_S

ONE, OTHER = "1" * 32, "2" * 32


async def fleet(cluster, *adapters, **settings):
    """A router over workers with these adapters. adapters: (role, name -> fingerprint)."""
    for role, known in adapters:
        made = cluster.worker(role)
        made.adapters = dict(known)
        await made.start()
    return await cluster.start(prefill=0, decode=0, **settings)


def sent(call):
    """The request of a call, with its adapter."""
    return call.request


async def until(is_there):
    async with asyncio.timeout(HANG_S):
        while not await is_there():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def names(cluster):
    return [card["id"] for card in (await cluster.http.get("/v1/models")).json()["data"] if card["parent"]]


async def test_both_legs_get_name_content_root_and_digest(cluster):
    both = {"sql": ONE}
    await fleet(cluster, ("prefill", both), ("decode", both), local_prefill="never")
    prompt = "x" * 40
    assert (await cluster.complete(prompt=prompt, model="sql")).json()["model"] == "sql"
    requests = [sent(worker.calls[0]) for worker in cluster.workers]
    hasher = BlockHasher(DEVELOPMENT_KEY, LAYOUT.block_size)
    root = hasher.root(LAYOUT.model_fingerprint, lora=ONE)
    given = requests[0].prompt_token_ids
    digest = hasher.request_digest(root, hasher.extend(root, given), given, request_extras(ONE))
    for request in requests:
        assert (request.lora_name, request.lora_fingerprint) == ("sql", ONE)
        assert (request.hash_root, request.request_digest) == (root, digest)
    await cluster.complete(prompt=prompt)
    base = sent(cluster.workers[0].calls[1])
    assert (base.lora_name, base.lora_fingerprint) == ("", "")
    assert base.hash_root == hasher.root(LAYOUT.model_fingerprint)
    assert base.request_digest == hasher.request_digest(base.hash_root, hasher.extend(base.hash_root, given), given)


async def test_workers_with_other_content_under_the_name_are_never_a_pair(cluster):
    await fleet(cluster, ("prefill", {"sql": ONE}), ("prefill", {"sql": OTHER}), ("decode", {"sql": OTHER}))
    first, second, decode = cluster.workers
    for _ in range(4):
        assert (await cluster.complete(model="sql", max_tokens=3)).status_code == 200
    assert not first.calls
    assert all(sent(call).lora_fingerprint == OTHER for call in (*second.calls, *decode.calls))


async def test_decode_prefills_alone_where_no_prefill_worker_has_its_content(cluster):
    await fleet(cluster, ("prefill", {"sql": ONE}), ("decode", {"sql": OTHER}))
    assert (await cluster.complete(model="sql", max_tokens=3)).status_code == 200
    prefill, decode = cluster.workers
    assert not prefill.calls
    assert not decode.calls[0].sent.decode.HasField("source")
    assert decode.calls[0].sent.decode.prefill_here


async def test_an_unknown_name_is_refused_with_the_names(cluster):
    await fleet(cluster, ("decode", {f"a{number:02}": ONE for number in range(40)}))
    refused = await cluster.complete(model="nobody")
    assert refused.status_code == 404
    message = refused.json()["error"]["message"]
    assert "'fake-model', and with adapters 'a00', 'a01'" in message
    assert message.endswith("'a31' and 8 more")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await cluster.grpc.Embed(inference_pb2.EmbedRequest(model="nobody"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_lists_follow_the_workers(cluster):
    await fleet(cluster, ("prefill", {"a": ONE}), ("decode", {"a": ONE, "fake-model": ONE}))
    assert await names(cluster) == ["a"], "the base model keeps its name"
    cards = (await cluster.http.get("/v1/models")).json()["data"]
    assert cards[1]["parent"] == cards[0]["id"] == "fake-model"
    assert (await cluster.http.get("/v1/models/a")).json() == cards[1]
    assert list((await cluster.grpc.GetModel(inference_pb2.GetModelRequest())).adapters) == ["a"]
    for one in cluster.workers:
        one.adapters = {"b": OTHER}
        one.report()

    async def is_there():
        return await names(cluster) == ["b"]

    await until(is_there)
    assert (await cluster.complete(model="a")).status_code == 404


async def test_a_worker_that_refuses_an_adapter_is_not_the_last_word(cluster):
    """The worker has removed the adapter since the request was placed."""
    await fleet(cluster, ("decode", {"sql": ONE}), ("decode", {"sql": ONE}))
    left = [play(AdapterUnavailable("it is not offered here"))]

    for one in cluster.workers:
        well = one.script
        one.script = lambda worker, call, well=well: (left.pop() if left else well)(worker, call)
    assert await cluster.text(model="sql") == said(5)
    assert sum(len(one.calls) for one in cluster.workers) == 2


async def test_a_request_without_output_takes_the_content_that_came_meanwhile(cluster):
    await fleet(cluster, ("decode", {"sql": ONE}))
    [decode] = cluster.workers
    well = decode.script

    async def replaced(worker, call):
        worker.adapters = {"sql": OTHER}
        worker.report()
        worker.script = well
        raise AdapterUnavailable("it has other content now")
        yield

    decode.script = replaced
    assert await cluster.text(model="sql") == said(5)
    assert [sent(call).lora_fingerprint for call in decode.calls] == [ONE, OTHER]


async def test_a_refusal_may_overtake_the_report_of_other_content(cluster):
    await fleet(cluster, ("decode", {"sql": ONE}))
    [decode] = cluster.workers
    well = decode.script

    async def replaced(worker, call):
        worker.adapters = {"sql": OTHER}
        worker.script = well
        asyncio.get_running_loop().call_later(0.2, worker.report)
        raise AdapterUnavailable("it has other content now")
        yield

    decode.script = replaced
    assert await cluster.text(model="sql") == said(5)
    assert [sent(call).lora_fingerprint for call in decode.calls] == [ONE, OTHER]


async def test_a_lost_worker_does_not_make_its_adapters_unknown(cluster):
    await fleet(cluster, ("decode", {"sql": ONE}), ("decode", {}))
    first, _ = cluster.workers
    await first.kill()
    await cluster.live(decode=1)
    assert (await cluster.complete(model="nobody")).status_code == 404
    asking = asyncio.create_task(cluster.complete(model="sql"))
    await asyncio.sleep(0.1)
    await first.start()
    assert (await asking).status_code == 200
    first.adapters = {}
    first.report()

    async def is_gone():
        return not await names(cluster)

    await until(is_gone)
    assert (await cluster.complete(model="sql")).status_code == 404, "all workers are here, and none offers it"


async def test_a_text_goes_on_only_with_the_content_that_it_began_with(cluster):
    await fleet(cluster, ("decode", {"sql": ONE}), ("decode", {"sql": ONE}), ("decode", {"sql": OTHER}))
    begun = play(*(decode_outputs(place, said(1, place)) for place in range(3)), WorkerLost("gone"))
    scripts = [begun]
    for one in cluster.workers[:2]:
        well = one.script
        one.script = lambda worker, call, well=well: (scripts.pop() if scripts else well)(worker, call)
    assert await cluster.text(model="sql", max_tokens=8) == said(8)
    assert not cluster.workers[2].calls
    assert [sent(call).lora_fingerprint for one in cluster.workers for call in one.calls] == [ONE, ONE]


@pytest.mark.parametrize("known", [{"/etc/passwd": ONE}, {"sql": "short"}])
async def test_a_worker_with_a_list_that_breaks_the_rules_is_refused(cluster, known):
    await fleet(cluster, ("decode", {}))
    bad = cluster.workers[0]
    bad.adapters = known
    bad.report()

    async def is_refused():
        return (await cluster.http.get("/health")).json()["workers"]["decode"]["live"] == 0

    await until(is_refused)
    assert await names(cluster) == []


async def test_a_session_names_its_adapter_once(cluster):
    await fleet(cluster, ("decode", {"sql": ONE, "fr": OTHER}))

    def turn(model=""):
        return inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]),
            sampling=request_pb2.SamplingParams(max_tokens=2),
            model=model,
            stream=True,
        )

    call = cluster.grpc.Session()
    for model in ("sql", "", "sql"):
        await call.write(turn(model))
        while not (await call.read()).finish_reason:
            pass
    asked = [(request.lora_name, request.lora_fingerprint) for request in cluster.workers[0].calls[0].seen]
    assert asked == [("sql", ONE), ("", ""), ("", "")]
    await call.write(turn("fr"))
    with pytest.raises(grpc.aio.AioRpcError, match="model is 'fr', and the session began with 'sql'"):
        await call.read()


async def test_a_key_may_name_its_models_alone(cluster, tmp_path):
    keys = keys_file(
        tmp_path, alice='models = ["sql"]', bob='models = ["fake-model", "fr"]', eve='models = ["gone"]', ops=""
    )
    await fleet(cluster, ("decode", {"sql": ONE, "fr": OTHER}), api_keys_file=keys)

    async def asked(name, **fields):
        body = {"prompt": "x", "max_tokens": 1, **fields}
        answer = await cluster.http.post("/v1/completions", json=body, headers=headers(name))
        return (
            answer.status_code if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["message"])
        )

    assert await asked("alice", model="sql") == 200
    refused = "model 'fr' is not served here; this router serves adapters 'sql'"
    assert await asked("alice", model="fr") == (404, refused)
    assert await asked("alice") == (404, "model is missing, and this API key allows only adapters 'sql'")
    none = "model is missing, and this API key allows none of the models that are served here"
    assert await asked("eve") == (404, none)
    refused = "model 'sql' is not served here; this router serves no model to this API key"
    assert await asked("eve", model="sql") == (404, refused)
    assert await asked("bob") == await asked("bob", model="fr") == await asked("ops", model="sql") == 200
    assert (await asked("bob", model="sql"))[0] == 404
    for name, listed in (("alice", ["sql"]), ("bob", ["fake-model", "fr"]), ("ops", ["fake-model", "fr", "sql"])):
        cards = (await cluster.http.get("/v1/models", headers=headers(name))).json()["data"]
        assert [card["id"] for card in cards] == listed
        model = await cluster.grpc.GetModel(inference_pb2.GetModelRequest(), metadata=metadata(name))
        assert list(model.adapters) == [one for one in listed if one != "fake-model"]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await cluster.http.post(path, json=body | {"model": "fr"}, headers=headers("alice"))
        assert answer.status_code == 404, path
    assert (await cluster.http.get("/v1/models/fr", headers=headers("alice"))).status_code == 404
    for call in (
        cluster.grpc.Embed(inference_pb2.EmbedRequest(model="fr"), metadata=metadata("alice")),
        cluster.grpc.Generate(inference_pb2.GenerateRequest(model="fr"), metadata=metadata("alice")).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_worker_with_the_adapter_loaded_costs_less():
    idle = worker("idle", adapters={"sql": ONE})
    busy = worker("busy", adapters={"sql": ONE}, num_waiting_tokens=16 * (LORA_LOAD_BLOCKS - 1))
    overloaded = worker("overloaded", adapters={"sql": ONE}, num_waiting_tokens=16 * (LORA_LOAD_BLOCKS + 1))
    for policy in ("kv_aware", "least_loaded"):
        for loaded, chosen in ((busy, busy), (overloaded, idle)):
            candidates = [
                Candidate(worker=loaded, num_tokens=10),
                Candidate(worker=idle, num_tokens=10, loads_adapter=True),
            ]
            placed = place(5, prefill=[], decode=candidates, rules=PlacementRules(policy=policy))
            assert placed is not None
            assert placed.decode is chosen


async def test_placements_prefer_workers_that_report_the_adapter_as_loaded(cluster):
    known = {"sql": ONE}
    await fleet(cluster, ("decode", known), ("decode", known))
    first, second = cluster.workers
    second.report(num_waiting_tokens=100)
    second.load.loaded_adapters.append(ONE)
    second.report()

    async def is_seen():
        await cluster.complete(model="sql", max_tokens=2)
        placed = (await cluster.http.get("/debug/routing")).json()["placements"][0]
        assert placed["adapter"] == "sql"
        return {one["worker_id"]: one["loads_adapter"] for one in placed["candidates"]} == {
            first.worker_id: True,
            second.worker_id: False,
        }

    await until(is_seen)
    num_calls = len(second.calls)
    await cluster.complete(model="sql", max_tokens=2)
    assert len(second.calls) == num_calls + 1


async def test_prompts_are_counted_by_adapter(cluster):
    await fleet(cluster, ("decode", {f"a{number:03}": ONE for number in range(130)}))
    for number in range(130):
        await cluster.complete(model=f"a{number:03}", max_tokens=1)
    await cluster.complete(model="a000", prompt=["x", "y"], max_tokens=1)
    await cluster.idle()
    text = (await cluster.http.get("/metrics")).text
    series = [line for line in text.splitlines() if line.startswith("pdserve_lora_requests_total{")]
    assert len(series) == 129
    assert 'pdserve_lora_requests_total{adapter="a000"} 3.0' in series
    assert 'pdserve_lora_requests_total{adapter="other"} 2.0' in series
