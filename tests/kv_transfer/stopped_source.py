"""A process that serves a pool until it is killed: `python stopped_source.py SEED NUM_BLOCKS BLOCK_BYTES TOKEN_HEX`.

Prints its metadata, one line, when it serves all blocks of the pool under the token.
"""

from __future__ import annotations

import random
import signal
import sys

from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.tcp import TcpConnector


def main() -> None:
    seed, num_blocks, block_bytes = (int(argument) for argument in sys.argv[1:4])
    content = bytearray(random.Random(seed).randbytes(num_blocks * block_bytes))
    connector = TcpConnector()
    connector.serve(PoolMemory(memoryview(content), block_bytes, num_blocks))
    connector.grant(bytes.fromhex(sys.argv[4])).publish(0, range(num_blocks))
    print(connector.metadata.decode(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
