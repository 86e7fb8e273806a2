"""`WorkerIdentity`: the description of one epoch of one worker."""

from __future__ import annotations

import enum

import msgspec

from pdserve.common.kv_events import WorkerKey
from pdserve.common.kv_layout import KvLayout

MAX_ROLE_DWELL_S = 86_400.0
"""Seconds for which a router may ask a worker to keep its role, at most."""


class WorkerRole(enum.Enum):
    """What routers may place at a worker."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> WorkerRole:
        return WorkerRole.DECODE if self is WorkerRole.PREFILL else WorkerRole.PREFILL


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own description, the first message of its watch; a part of it is written to Redis."""

    worker_id: str
    epoch: int
    role: WorkerRole | None
    """With which it was started; the present one is in its `Load`. None for a role that this router does not know."""
    protocol_version: int
    address: str
    """host:port at which peers reach its gRPC services."""
    attach_address: str
    """host:port at which receivers reach `KvSourceService`: `address`, or a port of the engine's process."""
    layout: KvLayout
    tokenizer_fingerprint: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    connectors: tuple[str, ...] = ()
    max_local_prefill_tokens: int | None = None
    max_num_seqs: int = 64
    """Most sequences in one step of its engine."""
    hidden_size: int = 0
    """Length of an embedding; 0 if it computes none."""
    num_labels: int = 0
    """Labels of the model's classification head; 0: it has none, and generates."""
    sampler_version: int = 1
    """Workers of one version sample the same tokens from the same logits."""
    max_logprobs: int = 20
    """Most likely tokens per position for which a client may ask."""
    max_n_sequences: int = 16
    """Sequences of one request, at most."""
    max_request_bytes: int = 1 << 20
    """Bytes of one encoded request (`request/request_bytes.py`), at most."""
    data_parallel_rank: int | None = None
    """The setting of this name: requests may prefer the decode workers of a rank."""
    decoder_prompt_len: int = 0
    """Tokens with which a decoder with an encoder begins; 0: no encoder. With an encoder, prompt and decoder's tokens have
    the length `max_model_len` each."""

    @property
    def key(self) -> WorkerKey:
        return self.worker_id, self.epoch

    @property
    def role_name(self) -> str:
        """For logs and metrics."""
        return self.role.value if self.role is not None else "unknown"
