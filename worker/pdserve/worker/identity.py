"""`WorkerIdentity`: the description of this epoch of this worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.common.kv_layout import KvLayout
from pdserve.kv_transfer.control.source_transfer import PeerId


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's identity, sent in the first message of `Watch` and written to Redis."""

    peer: PeerId
    role: Role
    address: str
    """host:port at which peers reach this worker's gRPC services."""
    layout: KvLayout
    tokenizer_fingerprint: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    connectors: tuple[str, ...]
    max_local_prefill_tokens: int | None
    max_num_seqs: int
    hidden_size: int
    """Hidden size H, the largest length of an embedding."""
    sampler_version: int
    """Workers of one version sample the same tokens from the same logits."""
