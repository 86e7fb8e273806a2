"""`num_calls_in_memory`: gRPC calls of servers in this process, running ones and ended ones that something still holds."""

from __future__ import annotations

import gc


def num_calls_in_memory() -> int:
    return sum(type(one).__name__ == "RPCState" for one in gc.get_objects())
