"""A certificate authority for a test, and the files of those that it vouches for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

from pdserve.common.tls import TlsFile, TlsIdentity, load_identity

HOST = "127.0.0.1"


@dataclass(frozen=True)
class IssuedFiles:
    """What one service is given."""

    cert: Path
    key: Path
    ca: Path

    def settings(self) -> dict[str, str]:
        """As settings of a service."""
        return {"tls_cert_file": str(self.cert), "tls_key_file": str(self.key), "tls_ca_file": str(self.ca)}

    def flags(self) -> tuple[str, ...]:
        """As flags of a service."""
        return tuple(part for name, path in self.settings().items() for part in ("--set", f"{name}={path}"))

    def identity(self, server_name: str | None = None, own_host: str | None = None) -> TlsIdentity:
        certificate, key, ca = (TlsFile(name, path) for name, path in self.settings().items())
        return load_identity(certificate, key, ca, server_name=server_name, own_host=own_host)


class Authority:
    """Its files lie in `folder`, which it makes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self._numbers = itertools.count()
        self.ca_file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, not_before: datetime | None = None, not_after: datetime | None = None) -> IssuedFiles:
        """A key and a certificate for these names; for 127.0.0.1 without any."""
        issued = self._ca.issue_cert(*(names or (HOST,)), not_before=not_before, not_after=not_after)
        stem = self._folder / f"issued-{next(self._numbers)}"
        cert, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return IssuedFiles(cert, key, self.ca_file)

    def identity(self, *names: str, server_name: str | None = None) -> TlsIdentity:
        return self.issue(*names).identity(server_name)
