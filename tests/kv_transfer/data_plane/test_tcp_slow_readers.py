"""Peers that ask a source on a device for many blocks, and read none of them."""

from __future__ import annotations

import contextlib
import socket

import torch

from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_frames import ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import Transfer, make_pool, start_read

NUM_BLOCKS, BLOCK_BYTES = 64, 256 << 10
LITTLE = 32 << 10
"""Bytes of a slow reader's buffer: a fraction of one block."""


def test_readers_that_take_nothing_hold_a_part_of_the_memory_that_blocks_leave_through() -> None:
    pool = make_pool(9, NUM_BLOCKS, BLOCK_BYTES)
    rows = torch.frombuffer(pool.view, dtype=torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)
    device = DevicePool(rows, num_slots=NUM_BLOCKS, num_digest_slots=1, slot_wait_s=1.0)
    source, receiver = (TcpConnector(TcpSettings(read_stall_s=HANG_S, send_stall_s=HANG_S)) for _ in range(2))
    source.serve(device, make_pool(None, 1, BLOCK_BYTES))
    landing = make_pool(None, NUM_BLOCKS, BLOCK_BYTES)
    receiver.serve(landing)
    address = TcpAddress.from_metadata(source.metadata)
    slow, quick = (Transfer(source, pool, range(NUM_BLOCKS)) for _ in range(2))
    with contextlib.ExitStack() as stack:
        # 127.0.0.2 is another host for the source than the receiver's
        for _ in range(5):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
            sock.bind(("127.0.0.2", 0))
            sock.connect((address.host, address.port))
            sock.sendall(ReadRequest(1, slow.token, 0, NUM_BLOCKS, BLOCK_BYTES).encode())
        wait_until(lambda: device.num_free_slots < NUM_BLOCKS)
        expected = [XXH3.of(pool.block(number), 0) for number in range(NUM_BLOCKS)]
        assert device.digests(range(NUM_BLOCKS), range(NUM_BLOCKS), XXH3) == expected
        blocks = quick.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        assert start_read(receiver, source.metadata, quick.token, blocks).wait_ended() is ReadOutcome.DONE
        assert landing.view == pool.view
        assert device.num_free_slots >= NUM_BLOCKS - NUM_BLOCKS // 4
    receiver.close()
    source.close()
    assert device.num_free_slots == NUM_BLOCKS
