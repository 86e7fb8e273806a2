"""The place of a prefill on real engines: by the blocks that decode holds; decode decides last."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.net.rpc import make_channel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.v1 import decode_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import KEY, Cluster, pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S
from tests.support.transfers.signed_channel import identity_of, signed
from tests.support.transfers.worker_call import WorkerCall

pytestmark = pytest.mark.process

MAX_TOKENS = 6
MAX_LOCAL = 69


@pytest.fixture(scope="module")
def served(
    tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Oracle]]:
    model = tiny_checkpoints("llama")
    flags = ("--dtype=float32", "--num-blocks=256")
    # so that no estimate, of models that take a millisecond, sends a whole prompt to decode
    decode = ("--max-local-prefill-tokens", str(MAX_LOCAL))
    with pd_cluster(tmp_path_factory.mktemp("cluster"), model, both=flags, decode=decode) as cluster:
        yield cluster, Oracle(model)
        cluster.check_pools()
        cluster.check_logs()


def kinds(cluster: Cluster) -> list[str]:
    """Kinds of the last placements, newest first."""
    page = httpx.get(f"http://{cluster.router.http}/debug/routing", timeout=HANG_S, trust_env=False).json()
    return [placement["kind"] for placement in page["placements"]]


async def test_a_prompt_that_decode_has_seen_is_prefilled_there(served: tuple[Cluster, Oracle]) -> None:
    cluster, oracle = served
    prompt = prompt_of(100, seed=1)
    async with InferenceClient(cluster.router.address) as router:
        cold = await router.ask(prompt, max_tokens=MAX_TOKENS)
        assert "kv_landed" in cold.moments
        oracle.check(prompt, cold.token_ids)
        async with asyncio.timeout(HANG_S):
            while True:
                warm = await router.ask(prompt, max_tokens=MAX_TOKENS)
                assert warm.token_ids == cold.token_ids
                # decode tells what it holds a moment after it does
                if "kv_landed" not in warm.moments:
                    break
        assert warm.cached_tokens == 96
        assert kinds(cluster)[0] == "local"


async def ask_decode(cluster: Cluster, prompt: list[int], *, source: bool, limit: int | None) -> list[str]:
    """The events of a decode call that no router asked for; token ids are checked by whoever has them all."""
    worker = cluster.services["decode"]
    async with make_channel(worker.address) as channel:
        key = DeploymentKey(KEY.encode())
        identity = await identity_of(channel, key)
        hasher = BlockHasher(key, identity.layout.block_size)
        root = hasher.root(identity.layout.model_fingerprint)
        hashes = hasher.extend(root, prompt)
        request = GenerationRequest(
            request_id=secrets.token_hex(8),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
            hash_root=root,
            request_digest=hasher.request_digest(root, hashes, prompt),
            deadline=time.monotonic() + HANG_S,
        )
        # nobody prefills there: whoever waits for these blocks waits in vain
        nobody = decode_pb2.Source(
            worker_id="prefill", epoch=1, address=cluster.services["prefill"].address,
            transfer_id=secrets.token_bytes(16),
        )  # fmt: skip
        service = signed(channel, (identity.worker_id, identity.epoch), key)
        fields: dict[str, Any] = {"source": nobody} if source else {}
        call = WorkerCall(service, "decode", request, local_prefill_tokens=limit, **fields)
        return [name async for name in _names(call)]


async def _names(events: Any) -> AsyncIterator[str]:
    async for event in events:
        name = event.WhichOneof("event")
        if name == "needs_prefill":
            yield f"needs_prefill {event.needs_prefill.uncached_tokens}"
        elif name == "outputs":
            yield f"{len(event.outputs.token_ids)} from {event.outputs.first_position}"
        else:
            yield name


async def test_decode_goes_by_its_own_cache(served: tuple[Cluster, Oracle]) -> None:
    cluster, _ = served
    prompt = prompt_of(70, seed=2)
    computed = cluster.load(cluster.services["decode"]).prompt_tokens_computed
    assert await ask_decode(cluster, prompt, source=False, limit=69) == ["admitted", "needs_prefill 70"]
    assert cluster.load(cluster.services["decode"]).prompt_tokens_computed == computed
    async with InferenceClient(cluster.router.address) as router:
        await router.ask(prompt, max_tokens=MAX_TOKENS)
    for source, limit in ((True, 6), (False, 6)):
        events = await ask_decode(cluster, prompt, source=source, limit=limit)
        assert events[0] == "admitted"
        assert events[1] == "prefilling_locally" if source else events[1].endswith(" from 0")
        num_last, _, position = events[-1].partition(" from ")  # tokens of several steps may come in one message
        assert int(position) + int(num_last) == MAX_TOKENS
    assert (await ask_decode(cluster, prompt, source=False, limit=5))[-1] == "needs_prefill 6"
