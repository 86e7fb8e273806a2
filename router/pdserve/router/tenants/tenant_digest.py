"""Digests by which other processes distinguish tenants without learning their names."""

from __future__ import annotations

import hashlib

from pdserve.common.security.deployment_key import TENANTS, DeploymentKey

TENANT_DIGEST_BYTES = 8


def tenant_digest(key: DeploymentKey, tenant: str) -> bytes:
    """`TENANT_DIGEST_BYTES` bytes; b"" for the only tenant of a router without keys."""
    if not tenant:
        return b""
    return hashlib.blake2b(tenant.encode(), key=key.derive(TENANTS), digest_size=TENANT_DIGEST_BYTES).digest()
