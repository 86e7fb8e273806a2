"""The LoRA adapters that a worker offers to requests: name -> fingerprint of the content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import LORA_FINGERPRINT, LORA_NAME, LORA_NAME_RULE

MAX_ADAPTERS = 1024
"""Adapters that a worker offers, at most."""
KnownAdapters = Mapping[str, str]
"""Name -> fingerprint."""
NO_ADAPTERS: KnownAdapters = MappingProxyType({})


def read_known_adapters(pairs: Iterable[tuple[str, str]], num_pairs: int) -> KnownAdapters:
    """A worker's adapters, by name. pairs: (name, fingerprint), as a peer sent them.

    Raises: InvalidRequest naming the entry, its value and the limit.
    """
    if num_pairs > MAX_ADAPTERS:
        raise InvalidRequest(f"its list of adapters has {num_pairs} entries, at most {MAX_ADAPTERS} are allowed")
    adapters: dict[str, str] = {}
    for name, fingerprint in pairs:
        if not LORA_NAME.fullmatch(name):
            raise InvalidRequest(f"its adapter {name[:80]!r} has a wrong name, {LORA_NAME_RULE} are needed")
        if not LORA_FINGERPRINT.fullmatch(fingerprint):
            raise InvalidRequest(
                f"its adapter {name!r} has the fingerprint {fingerprint[:40]!r}, 32 hex digits are needed"
            )
        if name in adapters:
            raise InvalidRequest(f"its list of adapters has {name!r} twice")
        adapters[name] = fingerprint
    return MappingProxyType(adapters)
