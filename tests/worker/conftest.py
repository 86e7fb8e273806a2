"""Two workers' insides in one process: engine threads, KV transfer managers, control stream over gRPC, a real data plane."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import InternalError
from pdserve.common.net.rpc import bind, make_server
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, FinishReason
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DATA_PLANE, DEVELOPMENT_KEY
from pdserve.common.security.role_guard import CallerRoles
from pdserve.engine.client.engine_side import EngineSide
from pdserve.engine.config import EngineConfig
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.scheduler.kv_messages import OutOfEngine
from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_client import ReceiverInfo
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, LeaseLimits, PeerId, SourceTransfer
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.kv_transfer.landing_ring import RingConnector
from pdserve.kv_transfer.memory.device_pool import DevicePool, host_pool
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings
from pdserve.v1 import kv_source_pb2_grpc
from pdserve.worker.engine_client import EngineClient, RequestStream
from pdserve.worker.kv_transfer_manager import KvTransferManager
from pdserve.worker.peer_channels import PeerChannels
from tests.support.engine.bare_engine import client_of
from tests.support.engine.engine_harness import KEY
from tests.support.engine.hash_model import VOCAB_SIZE, HashAttention, HashModel, make_hash_cache
from tests.support.engine.late_executor import LateExecutor
from tests.support.models.kv_layouts import make_layout
from tests.support.run.waiting import HANG_S
from tests.support.transfers.local_connector import LocalConnector, LocalNetwork

BLOCK_SIZE = 4
LAYOUT = make_layout()
HASHER = BlockHasher(KEY, BLOCK_SIZE)
ROOT = HASHER.root("fingerprint")
DIGESTS = DigestRule("auto", lambda context: KEY.derive(DATA_PLANE, context), clear=True)
_numbers = itertools.count()


class NodeTransfers:
    """The `EngineTransfers` of a `Node`, whose test begins and ends transfers to receivers and from sources itself."""

    properties = state = None
    utilities: Mapping[str, Callable[..., object]] = {}

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()

    def bind(self, side: EngineSide) -> None:
        pass

    def begin(self, request: EngineCoreRequest, transfer: object) -> None:
        if transfer is not None:
            raise InternalError("a node's transfers are begun by its test")
        if request.block_source is not None:
            self._node.adapter.fetch(request, request.block_source)

    def migrate(self, request_id: str, index: int, receiver: object) -> None:
        raise InternalError("no sequence of a node migrates")

    def released(self, request_id: str) -> None:
        pass

    def take_received(self, request_id: str) -> object:
        return None

    def outputs(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self._node.adapter.on_output(output)

    def send(self, message: OutOfEngine) -> None:
        self._loop.call_soon_threadsafe(self._node.adapter.on_message, message)

    async def close(self) -> None:
        pass


class Node:
    """The parts of a worker, without its process."""

    def __init__(
        self,
        name: str,
        *connectors: Any,
        on_device: bool = False,
        late: bool = False,
        grace_s: float = HANG_S,
        **fields: Any,
    ) -> None:
        """on_device: as if the engine's pool were on a device, with connectors that reach host memory only. late: steps write the
        pool as late as on a device. grace_s: the lease's."""
        fields = {
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "max_model_len": 128,
            "max_num_batched_tokens": 16,
        } | fields
        self.config = EngineConfig(**fields)
        self.model = HashModel()
        self.cache = make_hash_cache(self.config.num_blocks, BLOCK_SIZE)
        self.device_pool = DevicePool(self.cache, 16, 4, HANG_S) if on_device else None
        self.connector = connectors[0]
        self.connectors = ConnectorSet(connectors)
        if self.device_pool is None:
            self.connectors.serve(host_pool(self.cache))
        else:
            self.connectors.serve(self.device_pool, self._with_ring)
        pool = self.device_pool or host_pool(self.cache)
        outbox = NodeTransfers(self)
        attention = [HashAttention(self.cache)]
        self.core = make_engine_core(
            self.config, self.model, [self.cache], HASHER, VOCAB_SIZE, outbox, attention=attention
        )
        if late:
            self.core.executor = LateExecutor(self.core.executor, self.cache, self.device_pool)
        self.door = client_of(self.core, outbox)
        self.engine = EngineClient(self.door)
        self.peer = PeerId(name, secrets.randbits(64))
        receiving = ReceiverInfo(
            self.peer, LAYOUT, self.connectors.names, lambda: self.engine.tick, HANG_S, grace_s, DIGESTS
        )
        self.peers = PeerChannels(CallSigner(DEVELOPMENT_KEY))
        self.adapter = KvTransferManager(self.door.side, self.connectors, [pool], self.peers, receiving)
        self.transfers = SourceTransfers(self.connectors, LeaseLimits(HANG_S, grace_s, 2 * HANG_S), self.adapter)
        self.server: grpc.aio.Server | None = make_server()
        servicer = AttachServicer(
            self.transfers,
            self.connectors,
            LAYOUT,
            self.peer.epoch,
            lambda: self.engine.tick,
            DIGESTS,
            CallerRoles(None),
        )
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(servicer, self.server)
        self.port = bind(self.server, "127.0.0.1", 0)
        self.must_be_idle = True

    def _with_ring(self, connector: BlockConnector) -> RingConnector:
        assert self.device_pool is not None
        ring = self.device_pool.new_ring(16, pinned=True)
        return RingConnector(connector, self.device_pool, ring, host_pool(ring), HANG_S)

    async def start(self) -> None:
        self.door.start(warm_up=False)
        assert self.server is not None
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
        self.adapter.close()
        await self.peers.close()
        await asyncio.to_thread(self.connectors.close)
        await self.engine.close()
        self.core.scheduler.check(idle=self.must_be_idle)

    async def idle(self) -> None:
        """Wait until nothing is under way and every block is back."""
        async with asyncio.timeout(HANG_S):
            while (  # noqa: ASYNC110 - four counters in two threads
                self.core.scheduler.requests
                or self.core.scheduler.pool.num_in_use
                or self.adapter.num_open
                or len(self.transfers)
            ):
                await asyncio.sleep(0.005)


async def answer_of(stream: RequestStream) -> list[int]:
    """All tokens of a request that one worker computes."""
    async with asyncio.timeout(HANG_S):
        return [token async for output in stream for token in output.new_token_ids]


@dataclass
class Asked:
    """A request through P and D."""

    prompt: list[int]
    prefill: RequestStream
    decode: RequestStream
    transfer: SourceTransfer
    landed: asyncio.Future[ReceiverTransfer]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    async def answer(self) -> list[int]:
        """All tokens. Raises what either call raises."""
        first = await self.prefill.get()
        self.tokens += first.new_token_ids
        if first.finish_reason is None:
            async for output in self.decode:
                assert output.first_position == len(self.tokens), "a position was lost or repeated"
                self.tokens += output.new_token_ids
                self.finish_reason = output.finish_reason
        return self.tokens


class Pair:
    """P, D and the router's part of an attempt."""

    def __init__(self, p: Node, d: Node) -> None:
        self.p, self.d = p, d

    def ask(self, prompt: list[int], max_tokens: int = 4, index: int = 0, **params: Any) -> Asked:
        request = _replace(self._request(prompt, max_tokens, **params), index=index)
        request_id = request.request_id
        digest = HASHER.request_digest(ROOT, request.block_hashes, prompt)
        transfer_id = secrets.token_bytes(16)
        address = f"127.0.0.1:{self.p.port}"
        ref = SourceRef(self.p.peer.worker_id, self.p.peer.epoch, address, transfer_id, digest)
        landed = self.d.adapter.receive(request_id, ref)
        decode = self.d.engine.submit(_replace(request, remote_prefill=True))
        expected = ExpectedTransfer(transfer_id, request_id, self.d.peer, digest, 20.0, -(-len(prompt) // BLOCK_SIZE))
        transfer = self.p.transfers.expect(expected)
        source = _replace(request, transfer_source=True)
        self.p.adapter.source(source, transfer)
        return Asked(prompt, self.p.engine.submit(source), decode, transfer, landed)

    def ask_alone(
        self, at: Node, prompt: list[int], source: Node | None = None, limit_s: float = HANG_S, **params: Any
    ) -> RequestStream:
        """A request that one of the two computes. source: the other, which has blocks of the prompt."""
        request = self._request(prompt, **params)
        if source is not None:
            of_blocks = BlockSource(*source.peer.key, f"127.0.0.1:{source.port}", limit_s)
            request = _replace(request, block_source=of_blocks)
        return at.engine.submit(request)

    def _request(self, prompt: list[int], max_tokens: int = 4, **params: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=f"r{next(_numbers)}.0.0",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | params)),
            block_hashes=HASHER.extend(ROOT, prompt),
            hash_root=ROOT,
        )

    def leave(self, asked: Asked) -> None:
        """Both calls end, in whatever state they are."""
        self.d.engine.release(asked.decode)
        self.p.engine.release(asked.prefill)
        asked.transfer.cancel()

    async def idle(self) -> None:
        await self.d.idle()
        await self.p.idle()


def _replace(request: EngineCoreRequest, **changes: Any) -> EngineCoreRequest:
    import msgspec

    return msgspec.structs.replace(request, **changes)


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """`await make_pair("local" | "tcp" | "both", p={...}, d={...})`: both pools are checked, and idle, after the test.

    local_stall_s: how long the receiver's `local` waits for bytes. grace_s: of both sides' leases. All other limits of a transfer
    are those of a hang.
    """
    made: list[Pair] = []

    async def make(
        kind: str = "local",
        p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None,
        local_stall_s: float = HANG_S,
        grace_s: float = HANG_S,
    ) -> Pair:
        network = LocalNetwork()

        def connectors() -> list[Any]:
            local = LocalConnector(network, read_stall_s=local_stall_s)
            tcp = TcpConnector(
                TcpSettings(request_bytes=256, longest_request_bytes=256, read_window_bytes=1024, read_stall_s=HANG_S)
            )
            by_kind: dict[str, list[Any]] = {"local": [local], "tcp": [tcp], "both": [local, tcp]}
            return by_kind[kind]

        pair = Pair(
            Node("prefill-1", *connectors(), **({"grace_s": grace_s} | (p or {}))),
            Node("decode-1", *connectors(), **({"grace_s": grace_s} | (d or {}))),
        )
        made.append(pair)
        await pair.p.start()
        await pair.d.start()
        return pair

    yield make
    for pair in made:
        try:
            if pair.p.must_be_idle and pair.d.must_be_idle:
                await pair.idle()
        finally:
            await pair.d.stop()
            await pair.p.stop()
