"""Workers and candidates for tests of placement: identities without a network behind them."""

from __future__ import annotations

from typing import Any

from pdserve.common.kv_layout import KvLayout
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.router.placement.placement import Candidate
from pdserve.router.workers.worker import RemoteWorker, WorkerLoad
from tests.router.fake_worker import LAYOUT


def worker(
    name: str,
    role: str = "decode",
    *,
    layout: KvLayout = LAYOUT,
    limit: int | None = None,
    protocol_version: int = PROTOCOL_VERSION,
    sampler_version: int = 2,
    data_parallel_rank: int | None = None,
    adapters: dict[str, str] | None = None,
    **load: Any,
) -> RemoteWorker:
    """A live worker that reported this load. limit: its `max_local_prefill_tokens`."""
    identity = WorkerIdentity(
        worker_id=name,
        epoch=1,
        role=WorkerRole(role),
        protocol_version=protocol_version,
        address="127.0.0.1:1",
        attach_address="127.0.0.1:1",
        layout=layout,
        tokenizer_fingerprint="t",
        max_model_len=4096,
        vocab_size=300,
        num_blocks=1000,
        max_local_prefill_tokens=limit,
        sampler_version=sampler_version,
        data_parallel_rank=data_parallel_rank,
    )
    made = RemoteWorker(identity, None, WorkerLoad(**load), adapters or {})  # type: ignore[arg-type]  # nothing is sent
    made.report(made.load)
    return made


def seen(it: RemoteWorker, num_tokens: int = 100, overlap: int = 0, confirmed: int | None = None) -> Candidate:
    """As a prompt of `num_tokens` sees it. overlap: blocks of it that the worker has; confirmed: as it reported."""
    reported = overlap if confirmed is None else confirmed
    return Candidate(worker=it, num_tokens=num_tokens, overlap_blocks=overlap, confirmed_blocks=reported)
