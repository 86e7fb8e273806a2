"""Keys and fields of Redis about workers and their blocks, and the checks on everything that is read.

    {ns}:workers                 sorted set   worker ids, by their last refresh, instead of scanning the keyspace
    {ns}:worker:<id>             hash         one `WorkerRecord`; expires `RECORD_TTL_S` after the last refresh
    {ns}:blocks:<id>:<epoch>     set          placement hashes of the blocks that this epoch holds
    {ns}:events:<id>:<epoch>     stream       the numbered changes of that set, the last `EVENTS_KEPT` of them

`{ns}` is the deployment's namespace in braces, a hash tag: all keys of one deployment are in one slot of a Redis
cluster. An epoch is written as 16 hex digits. No key and no field of these
holds token ids or text.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.common.address.peer_address import PEER_ADDRESS, WORKER_ID, verify_peer_address
from pdserve.common.block_hash import PLACEMENT_HASH_BYTES
from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import MAX_BLOCKS, MAX_HASHES, KvCacheEvents
from pdserve.common.kv_layout import KvLayout
from pdserve.common.protocol import OLDEST_VERSION, version_objection
from pdserve.common.security.deployment_key import REDIS_RECORDS, DeploymentKey

RECORD_TTL_S = 3.0
BEAT_S = 1.0
"""Seconds between a worker's refreshes of its record and comparisons of Redis with its state."""
BLOCKS_TTL_S = 10.0
"""Set and stream outlive the record, so that a short hiccup does not cost their contents."""
WORKERS_TTL_S = 60.0
"""Seconds without a refresh after which an id leaves the set of ids."""
EVENTS_KEPT = 512
MAX_WORKERS = 1024
"""Ids that a router reads, the latest first."""
MAX_NUMBER = (1 << 63) - 1

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EPOCH = re.compile(r"[0-9a-f]{16}")
_FINGERPRINT = re.compile(r"[0-9a-f]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,19}")
_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_ROLES = ("prefill", "decode")
_SHOWN = 40


def is_namespace(text: str) -> bool:
    """True if this may be a namespace: 1 to 64 of letters, digits, `_`, `.` and `-`."""
    return _NAMESPACE.fullmatch(text) is not None


def is_worker_id(text: str) -> bool:
    """True if this may be a worker id: 1 to 128 of letters, digits, `_`, `.` and `-`."""
    return WORKER_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one deployment's keys."""

    namespace: str

    @property
    def workers(self) -> str:
        return f"{{{self.namespace}}}:workers"

    @property
    def routers(self) -> str:
        return f"{{{self.namespace}}}:routers"

    def usage(self, router_id: str) -> str:
        return f"{{{self.namespace}}}:usage:{router_id}"

    def response(self, tenant: str, response_id: str) -> str:
        """tenant: digest in hexadecimal."""
        return f"{{{self.namespace}}}:response:{tenant}:{response_id}"

    def responses(self, tenant: str) -> str:
        return f"{{{self.namespace}}}:responses:{tenant}"

    def worker(self, worker_id: str) -> str:
        return f"{{{self.namespace}}}:worker:{worker_id}"

    def blocks(self, worker_id: str, epoch: int) -> str:
        return f"{{{self.namespace}}}:blocks:{worker_id}:{epoch:016x}"

    def events(self, worker_id: str, epoch: int) -> str:
        return f"{{{self.namespace}}}:events:{worker_id}:{epoch:016x}"


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own record, one hash."""

    worker_id: str
    epoch: int
    """64 random bits, new at each start."""
    registered_us: int
    """Time of this epoch's registration, by Redis' clock: of two epochs with one id the later one has the record."""
    role: str
    """`prefill` or `decode`."""
    address: str
    """host:port of its gRPC services."""
    protocol_version: int
    model_fingerprint: str
    layout_fingerprint: str
    """Over every field of its `KvLayout`."""
    tokenizer_fingerprint: str
    seq: int = 0
    """Number of the last change in the stream; 0 before the first."""
    count: int = 0
    """Blocks in the set after that change."""
    signature: str = ""
    """Over all other fields and the namespace, made and checked by `RecordSigner`."""

    @property
    def key(self) -> tuple[str, int]:
        """(worker_id, epoch)."""
        return self.worker_id, self.epoch

    def fields(self) -> dict[Any, Any]:
        """As the hash holds it."""
        values = msgspec.structs.asdict(self)
        return {name: f"{self.epoch:016x}" if name == "epoch" else values[name] for name in RECORD_FIELDS}


class RecordSigner:
    """Signs and checks the records of one deployment in one namespace.

    The signature covers the worker, its epoch, its address and its registration time: a record that is copied to another
    worker's key, changed, or written without the deployment key does not verify.
    """

    def __init__(self, key: DeploymentKey, namespace: str) -> None:
        self._key = key.derive(REDIS_RECORDS, namespace.encode())

    def signed(self, record: WorkerRecord) -> WorkerRecord:
        """The record with its signature."""
        return msgspec.structs.replace(record, signature=self._signature(record))

    def verify(self, record: WorkerRecord) -> None:
        """Raises: InvalidRequest."""
        if not hmac.compare_digest(record.signature, self._signature(record)):
            raise InvalidRequest(
                f"the record of worker {record.worker_id} at {record.address} does not verify: it was changed or copied, "
                "or the worker has another deployment key",
                "signature",
            )

    def _signature(self, record: WorkerRecord) -> str:
        parts = [record.worker_id, *(str(value) for name, value in record.fields().items() if name != "signature")]
        data = b"".join(len(part).to_bytes(4, "big") + part for part in map(str.encode, parts))
        return hashlib.blake2b(data, key=self._key, digest_size=32).hexdigest()


RECORD_FIELDS = tuple(name for name in WorkerRecord.__struct_fields__ if name != "worker_id")


def layout_fingerprint(layout: KvLayout) -> str:
    """16 hex digits over all fields: equal where workers can be paired."""
    return hashlib.blake2b(msgspec.json.encode(layout), digest_size=8, person=b"layout").hexdigest()


def read_worker_id(value: object) -> str:
    """A member of the set of ids. Raises: InvalidRequest."""
    return _text("worker_id", value, WORKER_ID)


def read_record(worker_id: str, values: Sequence[object]) -> WorkerRecord | None:
    """The answer to HMGET of `RECORD_FIELDS`; None when there is no record. `RecordSigner.verify` comes after it.

    Raises: InvalidRequest naming the field, its value and the allowed form.
    """
    if all(value is None for value in values):
        return None
    if len(values) != len(RECORD_FIELDS):
        raise InvalidRequest(f"a record has {len(values)} fields, {len(RECORD_FIELDS)} are needed", "record")
    found = dict(zip(RECORD_FIELDS, values, strict=True))
    version = read_number("protocol_version", found["protocol_version"])
    if version < OLDEST_VERSION:
        raise InvalidRequest(f"protocol_version is {version}: {version_objection(version)}", "protocol_version")
    role = _text("role", found["role"], re.compile("|".join(_ROLES)))
    return WorkerRecord(
        worker_id=worker_id,
        epoch=int(_text("epoch", found["epoch"], _EPOCH), 16),
        registered_us=read_number("registered_us", found["registered_us"]),
        role=role,
        address=_address(found["address"]),
        protocol_version=version,
        model_fingerprint=_text("model_fingerprint", found["model_fingerprint"], _FINGERPRINT),
        layout_fingerprint=_text("layout_fingerprint", found["layout_fingerprint"], _FINGERPRINT),
        tokenizer_fingerprint=_text("tokenizer_fingerprint", found["tokenizer_fingerprint"], _FINGERPRINT),
        seq=read_number("seq", found["seq"]),
        count=read_number("count", found["count"], MAX_BLOCKS),
        signature=_text("signature", found["signature"], _FINGERPRINT),
    )


class NumberedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a stream of changes."""

    seq: int
    """1, 2, 3, ... in one epoch of a worker. A gap means that changes are missing, unless this one clears."""
    change: KvCacheEvents

    def fields(self) -> dict[Any, Any]:
        """As the stream holds it."""
        return {
            "seq": self.seq,
            "cleared": int(self.change.cleared),
            "stored": b"".join(self.change.stored),
            "removed": b"".join(self.change.removed),
        }


def read_change(fields: object) -> NumberedChange:
    """An entry's fields. Raises: InvalidRequest."""
    if not isinstance(fields, Mapping):
        raise InvalidRequest("an entry of the stream has no fields", "events")
    return NumberedChange(
        seq=read_number("seq", fields.get(b"seq")),
        change=KvCacheEvents(
            cleared=bool(read_number("cleared", fields.get(b"cleared"), 1)),
            stored=_hashes("stored", fields.get(b"stored")),
            removed=_hashes("removed", fields.get(b"removed")),
        ),
    )


def read_entry_id(value: object) -> str:
    """A stream's `<ms>-<n>`. Raises: InvalidRequest."""
    return _text("entry id", value, _ENTRY_ID)


def read_hash(value: object) -> bytes:
    """A member of a set of blocks. Raises: InvalidRequest."""
    if not isinstance(value, bytes) or len(value) != PLACEMENT_HASH_BYTES:
        raise InvalidRequest(f"a block's hash is {_shown(value)}, {PLACEMENT_HASH_BYTES} bytes are needed", "blocks")
    return value


def read_number(field: str, value: object, limit: int = MAX_NUMBER) -> int:
    """A decimal number. Raises: InvalidRequest."""
    number = int(_text(field, value, _NUMBER))
    if number > limit:
        raise InvalidRequest(f"{field} is {number}, at most {limit} is allowed", field)
    return number


def _address(value: object) -> str:
    address = _text("address", value, PEER_ADDRESS)
    verify_peer_address("address", address)
    return address


def _hashes(field: str, value: object) -> tuple[bytes, ...]:
    size = PLACEMENT_HASH_BYTES
    if not isinstance(value, bytes) or len(value) % size or len(value) > MAX_HASHES * size:
        found = f"{len(value)} bytes" if isinstance(value, bytes) else "missing"
        raise InvalidRequest(f"{field} is {found}, up to {MAX_HASHES} hashes of {size} bytes are needed", field)
    return tuple(value[at : at + size] for at in range(0, len(value), size))


def _text(field: str, value: object, pattern: re.Pattern[str]) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        text = None
    if text is None or not pattern.fullmatch(text):
        shown = _shown(value)
        raise InvalidRequest(f"{field} is {shown}, it should match {pattern.pattern}", field)
    return text


def _shown(value: object) -> str:
    if not isinstance(value, bytes):
        return "missing" if value is None else type(value).__name__
    return f"{value[:_SHOWN]!r}" + (f" ({len(value)} bytes)" if len(value) > _SHOWN else "")
