"""The reader's side of one TCP connection: requests blocks and receives them directly into the pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pdserve.common.errors import TransferFailed
from pdserve.common.security.tls_roles import WORKERS
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.pull.connection import ConnectionBroken
from pdserve.kv_transfer.tcp.tcp_frames import MalformedFrame, ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings
from pdserve.kv_transfer.tcp.tcp_stream import Stream, StreamBroken, dial
from pdserve.kv_transfer.tcp.tls_stream import TlsStream

_STEP_BYTES = 512 << 10
"""Bytes received in one call and then digested while they are in the CPU's cache."""


class TcpConnection:
    """A `Connection` over TCP. Construction raises TransferFailed if the peer cannot be reached."""

    def __init__(self, address: TcpAddress, pool: HostPool, settings: TcpSettings) -> None:
        self._peer = str(address)
        self._pool = pool
        self._step_blocks = max(1, _STEP_BYTES // pool.block_bytes)
        self._serials = itertools.count(1)
        self._header = bytearray(ReadAnswer.NUM_BYTES)
        try:
            self._stream: Stream = _connect(address, settings)
        except StreamBroken as error:
            raise TransferFailed(f"no connection to {self._peer}: {error}") from error

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """As `Connection.fetch`."""
        request = ReadRequest(next(self._serials), token, blocks[0].index, len(blocks), self._pool.block_bytes)
        self._ask(request)
        # Prepare all buffers while the peer prepares its answer; between two steps it would displace data from the cache.
        steps = list(self._steps(blocks))
        answer = self._receive_answer(request)
        if answer.refusal is not None:
            raise TransferFailed(
                f"{self._peer} refused to send blocks {request.first_index} to "
                f"{request.first_index + request.count - 1}: {answer.refusal.explanation}"
            )
        received = 0
        for views, num_blocks in steps:
            try:
                self._stream.receive(views)
            except StreamBroken as error:
                index = blocks[received].index
                raise ConnectionBroken(f"reading blocks from {index} on from {self._peer}: {error}") from error
            received += num_blocks
            yield received

    def interrupt(self) -> bool:
        self._stream.shutdown()
        return True

    def close(self) -> None:
        self._stream.close()

    def _steps(self, blocks: Sequence[BlockToRead]) -> Iterator[tuple[list[memoryview], int]]:
        """(buffers, number of blocks) of the parts that are received in one call each."""
        for first in range(0, len(blocks), self._step_blocks):
            numbers = [block.local_block for block in blocks[first : first + self._step_blocks]]
            yield self._pool.views(numbers), len(numbers)

    def _ask(self, request: ReadRequest) -> None:
        try:
            self._stream.send([memoryview(request.encode())])
        except StreamBroken as error:
            raise self._broken(request, error) from error

    def _receive_answer(self, request: ReadRequest) -> ReadAnswer:
        try:
            self._stream.receive([memoryview(self._header)])
            answer = ReadAnswer.decode(self._header, request)
        except StreamBroken as error:
            raise self._broken(request, error) from error
        except MalformedFrame as error:
            raise ConnectionBroken(f"asking {self._peer} for block {request.first_index}: {error}") from error
        return answer

    def _broken(self, request: ReadRequest, error: StreamBroken) -> ConnectionBroken:
        is_unanswered = not error.is_stall and error.num_bytes == 0
        return ConnectionBroken(f"asking {self._peer} for block {request.first_index}: {error}", is_unanswered)


def _connect(address: TcpAddress, settings: TcpSettings) -> Stream:
    stream = dial(address.host, address.port, settings.connect_timeout_s, settings.read_stall_s, settings.send_stall_s)
    if settings.tls is None:
        return stream
    client = settings.tls.client.current
    try:
        secured = TlsStream(stream, client.context, settings.connect_timeout_s, client.server_name or address.host)
        if client.peers is not None:
            objection = client.peers.objection(secured.peer_uris, WORKERS)
            if objection is not None:
                raise StreamBroken(f"TLS: {objection}")
        return secured
    except BaseException:
        stream.close()
        raise
