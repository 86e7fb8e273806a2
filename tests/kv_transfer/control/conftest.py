"""A source and a receiver in one process: the control stream over real gRPC, blocks over the `local` connector."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from pdserve.common.errors import PdServeError
from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.security.role_guard import CallerRoles
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control import attach_client, attach_servicer
from pdserve.kv_transfer.control.attach_client import ReceiverInfo, attach
from pdserve.kv_transfer.control.attach_servicer import AttachServicer, answer_parts
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, LeaseLimits, SourceResult, SourceTransfer
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.pull.digest import block_digests
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.v1 import kv_source_pb2_grpc
from tests.support.models.kv_layouts import make_layout
from tests.support.run.waiting import HANG_S
from tests.support.transfers.local_connector import LocalConnector, LocalNetwork
from tests.support.transfers.signed_channel import signed
from tests.support.transfers.transfer_fakes import DIGEST, RECEIVER, TRANSFER_ID, ReceiverOwner, SourceOwner

NUM_BLOCKS, BLOCK_BYTES = 16, 64
LAYOUT = make_layout(head_dim=2)
SOURCE_EPOCH = 7
ALIVE_EVERY_S, TICK_STALLED_S, GRACE_S, REATTACH_EVERY_S = 0.1, 0.8, 1.0, 0.05
"""Several times faster than in service; a stream breaks within two of the second."""


def sub_key(context: bytes) -> bytes:
    """Key of a deployment that all ends share."""
    return hashlib.blake2b(context, digest_size=32).digest()


def pool(first_byte: int) -> HostPool:
    content = bytearray((first_byte + number * 3) % 251 for number in range(NUM_BLOCKS) for _ in range(BLOCK_BYTES))
    return HostPool(memoryview(content), BLOCK_BYTES, NUM_BLOCKS)


class HearingCauses(ReceiverOwner):
    """Keeps the error, too."""

    cause: PdServeError | None = None

    def failed(self, transfer: ReceiverTransfer, cause: PdServeError) -> None:
        self.cause = cause
        super().failed(transfer, cause)


class Rig:
    """One source that serves, and any number of receivers."""

    def __init__(self) -> None:
        self.network = LocalNetwork()
        self.source_pool, self.receiver_pool = pool(1), pool(100)
        self.source_connector, self.receiver_connector = LocalConnector(self.network), LocalConnector(self.network)
        self.source_owner, self.owner = SourceOwner(), HearingCauses()
        self.limits = LeaseLimits(attach_timeout_s=HANG_S, grace_s=GRACE_S, max_s=20.0)
        self.ticks = {"source": 0, "receiver": 0}
        self.tick_runs = {"source": True, "receiver": True}
        self.server: grpc.aio.Server | None = None
        self.source_digests = self.digests = DigestRule("auto", sub_key, clear=True)
        self.num_streams = 0
        self.layout = LAYOUT
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.source_connector.serve(self.source_pool)
        self.receiver_connector.serve(self.receiver_pool)
        self.transfers = SourceTransfers(ConnectorSet([self.source_connector]), self.limits, self.source_owner)
        await self.serve(0)
        self.channel = make_channel(f"127.0.0.1:{self.port}")

    async def serve(self, port: int) -> None:
        rig = self

        class Counting(AttachServicer):
            async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:
                rig.num_streams += 1
                async for event in super().Attach(requests, context):
                    yield event

        self.server = make_server()
        self.servicer = servicer = Counting(
            self.transfers,
            ConnectorSet([self.source_connector]),
            self.layout,
            SOURCE_EPOCH,
            lambda: self._tick("source"),
            self.source_digests,
            CallerRoles(None),
        )
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(servicer, self.server)
        self.port = bind(self.server, "127.0.0.1", port)
        await self.server.start()

    async def play(self, attach: Callable[[int, Any], AsyncIterator[Any]], *, signs: bool = True) -> None:
        """Instead of a source, answer each stream as `attach(number of the stream, requests)` does.

        signs: whether it has the deployment key.
        """
        rig = self

        class Played(kv_source_pb2_grpc.KvSourceServiceServicer):
            async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:
                rig.num_streams += 1
                async for event in attach(rig.num_streams, requests):
                    if event.HasField("accepted") and signs:
                        said = answer_parts(event.accepted)
                        event.accepted.proof = rig.digests.answer_proof(TRANSFER_ID, SOURCE_EPOCH, said)
                    yield event

        assert self.server is not None
        await self.server.stop(None)
        await self.channel.close()
        self.server = make_server()
        kv_source_pb2_grpc.add_KvSourceServiceServicer_to_server(Played(), self.server)
        self.port = bind(self.server, "127.0.0.1", 0)
        await self.server.start()
        self.channel = make_channel(f"127.0.0.1:{self.port}")

    def _tick(self, side: str) -> int:
        self.ticks[side] += self.tick_runs[side]
        return self.ticks[side]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.channel.close()
        if self.server is not None:
            await self.server.stop(None)
        for transfer in list(self.transfers._transfers.values()):
            transfer.cancel()
        self.receiver_connector.close()
        self.source_connector.close()

    # ---- the two calls

    def expect(self, draft_head: str = "") -> SourceTransfer:
        expected = ExpectedTransfer(TRANSFER_ID, "r.0.0", RECEIVER, DIGEST, 20.0, NUM_BLOCKS, draft_head)
        return self.transfers.expect(expected)

    def receive(self, **changes: Any) -> ReceiverTransfer:
        """Open the control stream; changes: what it says that it should not, or how long it waits."""
        fields: dict[str, Any] = {
            "worker_id": "prefill-1",
            "epoch": SOURCE_EPOCH,
            "transfer_id": TRANSFER_ID,
            "request_digest": DIGEST,
            "without_draft_head": False,
        }
        ref = SourceRef(address="", **(fields | {name: changes.pop(name) for name in fields if name in changes}))
        connectors = changes.get("connector_set") or ConnectorSet([self.receiver_connector])
        transfer = ReceiverTransfer("r.0.0", ref, connectors, self.owner)
        receiving = ReceiverInfo(
            identity=changes.get("identity", RECEIVER),
            layout=changes.get("layout", LAYOUT),
            connectors=changes.get("connectors", ("local",)),
            engine_tick=lambda: self._tick("receiver"),
            attach_timeout_s=changes.get("attach_timeout_s", HANG_S),
            grace_s=changes.get("grace_s", GRACE_S),
            digests=changes.get("digests", self.digests),
        )
        self.tasks.append(
            asyncio.create_task(attach(transfer, receiving, signed(self.channel, ("prefill-1", SOURCE_EPOCH))))
        )
        return transfer

    def settle(self, transfer: SourceTransfer, first_index: int, *blocks: int) -> None:
        assert transfer.digest is not None
        digests = block_digests(self.source_pool, blocks, transfer.digest, first_index)
        transfer.settled(first_index, blocks, [(digest,) for digest in digests])

    def compute(self, transfer: SourceTransfer) -> None:
        transfer.computed(SourceResult(22, (5,)))

    def same(self, source: int, receiver: int) -> bool:
        return bytes(self.source_pool.block(source)) == bytes(self.receiver_pool.block(receiver))


async def until(condition: Callable[[], Any], limit_s: float = HANG_S) -> None:
    """Turn the loop until it holds. limit_s: what a promise allows, where the test is of that."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - fakes and transport threads tell nobody
            await asyncio.sleep(0.005)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(attach_servicer, "ALIVE_EVERY_S", ALIVE_EVERY_S)
    monkeypatch.setattr(attach_servicer, "TICK_STALLED_S", TICK_STALLED_S)
    monkeypatch.setattr(attach_client, "TICK_STALLED_S", TICK_STALLED_S)
    monkeypatch.setattr(attach_client, "REATTACH_EVERY_S", REATTACH_EVERY_S)
    made = Rig()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until
