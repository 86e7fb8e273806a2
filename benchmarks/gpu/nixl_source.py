"""`python -m gpu.nixl_source BYTES PIECE DEVICE`: the process whose memory `stages/nixl_copies.py` reads.

Prints one JSON line, the address and the agent's metadata in hexadecimal digits, and ends with its standard input.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from pdserve.kv_transfer.nixl.nixl_agent import MemoryKind, Region, UcxAgent, prepare_device_memory

NAME = "gpu-source"
FACTOR = 3


def numbers(num_bytes: int, factor: int, device: str) -> Tensor:
    """`[num_bytes / 8]`: the n-th number is `factor * n`."""
    return torch.arange(num_bytes // 8, dtype=torch.int64, device=device) * factor


def region(tensor: Tensor, piece_bytes: int) -> Region:
    kind = MemoryKind.VRAM if tensor.is_cuda else MemoryKind.DRAM
    return Region(tensor.data_ptr(), piece_bytes, tensor.nbytes // piece_bytes, kind, tensor.device.index or 0)


def main() -> None:
    num_bytes, piece_bytes, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    memory = numbers(num_bytes, FACTOR, device)
    if memory.is_cuda:
        torch.cuda.synchronize()  # the reader begins when it has the line
        prepare_device_memory()
    agent = UcxAgent(NAME)
    agent.register(region(memory, piece_bytes))
    print(json.dumps({"address": memory.data_ptr(), "metadata": agent.metadata.hex()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
