"""A certificate authority for a test, and the files of the certificates that it signs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pdserve.cli.development_certificates import TRUST_DOMAIN, issue, make_authority
from pdserve.common.security.tls import TlsFile, TlsIdentity, load_identity
from pdserve.common.security.tls_roles import RoleName, ServiceRole

HOST = "127.0.0.1"
ALL_ROLES = tuple(str(RoleName(TRUST_DOMAIN, role)) for role in ServiceRole)


def role_uri(role: str, worker_id: str | None = None, trust_domain: str = TRUST_DOMAIN) -> str:
    return str(RoleName(trust_domain, ServiceRole(role), worker_id))


@dataclass(frozen=True)
class IssuedFiles:
    """Files of one service."""

    cert: Path
    key: Path
    ca: Path

    def settings(self) -> dict[str, Any]:
        """As settings of a service."""
        return {"tls_cert_file": str(self.cert), "tls_key_file": str(self.key), "tls_ca_file": str(self.ca)}

    def flags(self) -> tuple[str, ...]:
        """As flags of a service."""
        return tuple(f"--{name}={path}" for name, path in self.settings().items())

    def identity(self, server_name: str | None = None, own_host: str | None = None, **roles: Any) -> TlsIdentity:
        certificate, key, ca = (TlsFile(name, path) for name, path in self.settings().items())
        return load_identity(certificate, key, ca, server_name=server_name, own_host=own_host, **roles)


class Authority:
    """Its files lie in `folder`, which it makes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        now = datetime.now(UTC)
        self._dates = (now - timedelta(days=1), now + timedelta(days=30))
        self._ca = make_authority("a CA for tests", datetime(2010, 1, 1, tzinfo=UTC), datetime(3000, 1, 1, tzinfo=UTC))
        self._numbers = itertools.count()
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(self._ca.certificate_pem())

    def issue(
        self,
        *names: str,
        uris: Sequence[str] = ALL_ROLES,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
    ) -> IssuedFiles:
        """A key and a certificate for these names; for 127.0.0.1 without any. uris: every role, where roles do not matter."""
        begins, ends = not_before or self._dates[0], not_after or self._dates[1]
        issued = issue(self._ca, "a test", names or (HOST,), uris, begins, ends)
        stem = self._folder / f"issued-{next(self._numbers)}"
        cert, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        cert.write_bytes(issued.certificate_pem())
        key.touch(0o600)
        key.write_bytes(issued.key_pem())
        return IssuedFiles(cert, key, self.ca_file)

    def identity(self, *names: str, server_name: str | None = None) -> TlsIdentity:
        """Identity of a service that asks its peers for no roles."""
        return self.issue(*names).identity(server_name)
