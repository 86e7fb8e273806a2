"""The process of a rank above 0.

Usage, only by `RankProcesses`: python -m pdserve.engine.executor.rank_process DESCRIPTOR; or another program that calls `main`.

DESCRIPTOR is this process's end of a socket pair; the process ends when the other end is closed, by rank 0 or by the end of its
process. A process that is stopped does not see that, so the kernel kills it together with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.common.errors import InternalError, PdServeError, PeerError
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.processes.child_life import end_after, end_with_parent, leave_signals_to_peer
from pdserve.engine.executor.rank_loop import RankLoop
from pdserve.engine.ranks.process_rank_group import ProcessRankGroup
from pdserve.engine.ranks.rank_messages import RankFailed, StartRank, StoreOptions, ToRank, decode_to_rank, encode
from pdserve.engine.runner.device.cuda_devices import rank_devices
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_rank
from pdserve.engine.runner.loading.make_model_runner import make_model_runner
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.runner.pool.open_store import open_store
from pdserve.engine.runner.pool.tier_memory import TensorMemory
from pdserve.engine.scheduler_output import RequestFailure

log = logging.getLogger(__name__)

LAST_STEP_S = 1.0
"""Seconds that a step may go on after the end of rank 0, without which no step of several ranks ends."""


def _receive(rank_0: socket.socket) -> ToRank | None:
    payload = receive_frame(rank_0)
    return None if payload is None else decode_to_rank(payload)


MoveBlocks = Callable[[socket.socket, StartRank, LoadedModel], None]
"""Starts to move the blocks of a rank's pool, by messages of the socket; returns at once."""


def _serve(rank_0: socket.socket, start: StartRank, move_blocks: MoveBlocks | None) -> None:
    """Until the end of rank 0. Raises: the error that ended this rank."""
    transfers = _receive_socket(rank_0) if start.has_transfers else None
    settings = start.settings_of_role()
    torch.set_num_threads(settings.num_threads)
    _pin(settings.cpu_core, start.rank, settings.num_threads)
    device = torch.device(rank_devices(settings)[start.rank])
    group = ProcessRankGroup(Path(start.store), start.rank, settings.tensor_parallel_size, device)
    model = load_rank(Path(start.folder), settings, group)
    group.limit_waits(start.wait_s)
    config, decoder = model.engine_config(settings), model.decoder
    if transfers is not None and move_blocks is not None:
        move_blocks(transfers, start, model)
    vocab_size = decoder.config.vocab_size
    loop = RankLoop(
        lambda: make_model_runner(config, decoder, model.kv_caches, vocab_size, lora=model.lora_runner, group=group),
        group,
        partial(_host_blocks, model, start.rank) if model.host_caches else None,
    )
    gc.collect()
    gc.freeze()
    try:
        while (message := _receive(rank_0)) is not None:
            loop.serve(message)
    finally:
        loop.close()


def _host_blocks(model: LoadedModel, rank: int, store: StoreOptions | None) -> HostBlocks:
    sealed = None if store is None else open_store(store, rank)
    return HostBlocks(TensorMemory(model.kv_caches, model.host_caches), sealed)


def _receive_socket(rank_0: socket.socket) -> socket.socket:
    _, descriptors, _, _ = socket.recv_fds(rank_0, 1, 1)
    if not descriptors:
        raise PeerError("no transfer socket came with StartRank")
    return socket.socket(fileno=descriptors[0])


def _pin(cpu_core: int | None, rank: int, num_threads: int) -> None:
    """To the cores after those of the rank before."""
    if cpu_core is not None:
        first = cpu_core + rank * num_threads
        cores = set(range(first, first + num_threads)) & set(range(os.cpu_count() or 1))
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            log.warning("cannot pin rank %d to core %d: %s", rank, first, error)


def main(move_blocks: MoveBlocks | None = None) -> int:
    """move_blocks: of a program whose rank takes part in transfers."""
    end_with_parent()
    leave_signals_to_peer()
    with socket.socket(fileno=int(sys.argv[1])) as rank_0, contextlib.suppress(OSError):
        end_after(rank_0, LAST_STEP_S)
        start = _receive(rank_0)
        if not isinstance(start, StartRank):
            return 0 if start is None else 1
        try:
            _serve(rank_0, start, move_blocks)
        except Exception as error:
            known = error if isinstance(error, PdServeError) and not isinstance(error, PeerError) else None
            if known is None:
                log.exception("rank %d failed", start.rank)
            text = f"rank {start.rank} failed: {type(error).__name__}: {error}"[:500]
            send_frame(rank_0, encode(RankFailed(RequestFailure.of(known or InternalError(text)))))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
