"""A process that serves a pool until it is killed: `python stopped_source.py CONNECTOR SEED NUM_BLOCKS BLOCK_BYTES TOKEN_HEX`.

Prints its metadata in hex, one line, when it serves all blocks of the pool under the token.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.memory.pool_memory import HostPool


def make_connector(name: str) -> BlockConnector:
    if name == "nixl":
        from pdserve.kv_transfer.nixl.nixl import NixlConnector

        return NixlConnector()
    from pdserve.kv_transfer.tcp.tcp import TcpConnector

    return TcpConnector()


def main() -> None:
    seed, num_blocks, block_bytes = (int(argument) for argument in sys.argv[2:5])
    content = bytearray(np.random.default_rng(seed).integers(256, size=num_blocks * block_bytes, dtype=np.uint8))
    connector = make_connector(sys.argv[1])
    connector.serve(HostPool(memoryview(content), block_bytes, num_blocks))
    connector.grant(bytes.fromhex(sys.argv[5])).publish(0, range(num_blocks))
    print(connector.metadata.hex(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
