"""Checks a worker's identity once on arrival, so that later code can rely on its names and bounds."""

from __future__ import annotations

import re

from pdserve.common.address.peer_address import verify_peer_address
from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import MAX_BLOCKS
from pdserve.common.kv_layout import DTYPE_BYTES, KvLayout
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.registry.registry import is_worker_id
from pdserve.common.request.generation_request import MAX_DATA_PARALLEL_RANK
from pdserve.common.worker_identity import WorkerIdentity

MAX_TOKENS = 1 << 24
"""Largest length of a model, and largest vocabulary, in tokens."""
MAX_SEQS = 1 << 16
MAX_HIDDEN_SIZE = 1 << 20
MAX_LABELS = 1 << 16
MAX_CONNECTORS = 16
MAX_SAMPLER_VERSION = 1 << 16
MAX_BLOCK_BYTES = 1 << 30
MAX_GROUPS = 64
LEAST_REQUEST_BYTES = 1 << 20
"""Requests of this size every worker takes."""
_LAYOUT_LIMITS = {"tp_size": 1 << 12, "block_size": 1 << 14}
_SHAPE_LIMITS = {
    "num_layers": 1 << 12,
    "total_num_kv_heads": 1 << 12,
    "head_dim": 1 << 24,  # of a state the numbers of a head, hundreds of thousands in large models
    "block_size": 1 << 14,
    "rows_per_token": 2,
}
_FINGERPRINT = re.compile(r"[0-9A-Za-z]{1,64}")
_CONNECTOR = re.compile(r"[0-9A-Za-z_.-]{1,64}")
_SHOWN_CHARS = 64


def verify_identity(identity: WorkerIdentity) -> None:
    """Raises: InvalidRequest naming the field, its value and the allowed values."""
    if not is_worker_id(identity.worker_id):
        raise _wrong("worker_id", identity.worker_id, "1 to 128 letters, digits, `_`, `.` or `-` are needed")
    verify_peer_address("address", identity.address)
    verify_peer_address("attach_address", identity.attach_address)
    fingerprints = {
        "tokenizer_fingerprint": identity.tokenizer_fingerprint,
        "model_fingerprint": identity.layout.model_fingerprint,
    }
    for name, value in fingerprints.items():
        if not _FINGERPRINT.fullmatch(value):
            raise _wrong(name, value, "1 to 64 letters or digits are needed")
    _verify_layout(identity.layout)
    # these limit every request, including requests to other workers
    _within("num_blocks", identity.num_blocks, 1, MAX_BLOCKS)
    _within("max_model_len", identity.max_model_len, 1, MAX_TOKENS)
    _within("vocab_size", identity.vocab_size, 1, MAX_TOKENS)
    _within("max_num_seqs", identity.max_num_seqs, 1, MAX_SEQS)
    _within("max_logprobs", identity.max_logprobs, 0, MAX_TOKENS)
    _within("max_n_sequences", identity.max_n_sequences, 1, MAX_SEQS)
    _within("hidden_size", identity.hidden_size, 0, MAX_HIDDEN_SIZE)
    _within("num_labels", identity.num_labels, 0, MAX_LABELS)
    _within("sampler_version", identity.sampler_version, 1, MAX_SAMPLER_VERSION)
    _within("max_request_bytes", identity.max_request_bytes, LEAST_REQUEST_BYTES, MAX_MESSAGE_BYTES)
    _within("decoder_prompt_len", identity.decoder_prompt_len, 0, identity.max_model_len - 1)
    _within("data_parallel_rank", identity.data_parallel_rank or 0, 0, MAX_DATA_PARALLEL_RANK)
    _within("the number of connectors", len(identity.connectors), 0, MAX_CONNECTORS)
    for connector in identity.connectors:
        if not _CONNECTOR.fullmatch(connector):
            raise _wrong("connectors", connector, "1 to 64 letters, digits, `_`, `.` or `-` are needed")


def _verify_layout(layout: KvLayout) -> None:
    for name, limit in _LAYOUT_LIMITS.items():
        _within(name, getattr(layout, name), 1, limit)
    _within("tp_rank", layout.tp_rank, 0, layout.tp_size - 1)
    _within("the number of group_shapes", len(layout.group_shapes), 1, MAX_GROUPS)
    _within(
        "the number of group_windows", len(layout.group_windows), len(layout.group_shapes), len(layout.group_shapes)
    )
    if layout.draft_head:
        if not _FINGERPRINT.fullmatch(layout.draft_head):
            raise _wrong("draft_head", layout.draft_head, "1 to 64 letters or digits are needed")
        _within("the number of group_shapes with a draft_head", len(layout.group_shapes), 2, MAX_GROUPS)
    if layout.group_chunks:
        _within(
            "the number of group_chunks", len(layout.group_chunks), len(layout.group_shapes), len(layout.group_shapes)
        )
        for window, chunk in zip(layout.group_windows, layout.group_chunks, strict=True):
            _within("group_chunks", chunk, 0, 0 if window else MAX_TOKENS)
    _within("the number of shapes", len(layout.shapes), 1, len(layout.group_shapes))
    for number in layout.group_shapes:
        _within("group_shapes", number, 0, len(layout.shapes) - 1)
    for shape in layout.shapes:
        if shape.dtype not in DTYPE_BYTES:
            raise _wrong("dtype", shape.dtype, f"this router knows {', '.join(DTYPE_BYTES)}")
        for name, limit in _SHAPE_LIMITS.items():
            _within(name, getattr(shape, name), 1, limit)
        _within("num_kv_heads", shape.num_kv_heads, 1, shape.total_num_kv_heads)
        _within("block_bytes", shape.block_bytes, 1, MAX_BLOCK_BYTES)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"its {name} is {value}, {least} to {most} is needed", name)


def _wrong(name: str, value: str, needed: str) -> InvalidRequest:
    return InvalidRequest(f"its {name} is {value[:_SHOWN_CHARS]!r}, {needed}", name)
