"""Roles of services, as their certificates name them: a URI among the subject's alternative names.

    spiffe://<trust domain>/pdserve/router
    spiffe://<trust domain>/pdserve/prefill[/<worker id>]
    spiffe://<trust domain>/pdserve/decode[/<worker id>]

A certificate may carry several. A peer's role counts when its trust domain is the one of this service's own certificate;
any other URI is ignored.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pdserve.common.errors import ConfigError

_URI = re.compile(r"spiffe://([a-z0-9._-]{1,255})/pdserve/(router|prefill|decode)(?:/([A-Za-z0-9_.-]{1,128}))?")
MAX_SHOWN_URIS = 4
_MAX_SHOWN_CHARS = 128


class ServiceRole(enum.Enum):
    """The role of a service."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


WORKERS = (ServiceRole.PREFILL, ServiceRole.DECODE)
"""Roles that have KV blocks, and read them from each other."""


@dataclass(frozen=True, slots=True)
class RoleName:
    """One role in a certificate."""

    trust_domain: str
    role: ServiceRole
    worker_id: str | None = None
    """The only worker that may use it; None: any of its role."""

    def __str__(self) -> str:
        worker = "" if self.worker_id is None else f"/{self.worker_id}"
        return f"spiffe://{self.trust_domain}/pdserve/{self.role.value}{worker}"


def role_names(uris: Iterable[str]) -> tuple[RoleName, ...]:
    """The roles among a certificate's URIs."""
    matches = (_URI.fullmatch(uri) for uri in uris)
    return tuple(RoleName(match[1], ServiceRole(match[2]), match[3]) for match in matches if match is not None)


@dataclass(frozen=True, slots=True)
class PeerRoles:
    """Checks peers' certificates against the trust domain of this service's own."""

    trust_domain: str

    def names(self, uris: Iterable[str]) -> tuple[RoleName, ...]:
        """The roles of a peer whose certificate carries these URIs."""
        return tuple(name for name in role_names(uris) if name.trust_domain == self.trust_domain)

    def objection(
        self, uris: Collection[str], allowed: Collection[ServiceRole], worker_id: str | None = None
    ) -> str | None:
        """Error text if a peer with these URIs in its certificate has none of the allowed roles; None if it has one.

        worker_id: the peer's claimed id; a role that names a worker counts only for that worker.
        """
        names = [name for name in self.names(uris) if name.role in allowed]
        if any(worker_id is None or name.worker_id in (None, worker_id) for name in names):
            return None
        if names:
            return f"its certificate is for {names[0]}, not for the worker {(worker_id or '')[:_MAX_SHOWN_CHARS]!r}"
        wanted = " or ".join(str(RoleName(self.trust_domain, role)) for role in allowed)
        return f"its certificate has no role {wanted}{_found(uris)}"


def own_roles(uris: Collection[str], role: ServiceRole, worker_id: str | None, named_by: str) -> PeerRoles:
    """The checks of peers' roles, in the trust domain of a service's own certificate. named_by: setting and file of it.

    Raises: ConfigError when the certificate lacks the service's role, has it in two trust domains, or is for a worker of
    another id.
    """
    names = [name for name in role_names(uris) if name.role is role]
    if not names:
        raise ConfigError(
            f"{named_by}: no role {RoleName('<trust domain>', role)} among its names{_found(uris)}; `pdserve certs` makes "
            "certificates with roles, and tls_roles = ignore does without them"
        )
    domains = sorted({name.trust_domain for name in names})
    if len(domains) > 1:
        raise ConfigError(f"{named_by}: its role {role.value} is in {len(domains)} trust domains, {', '.join(domains)}")
    if role is not ServiceRole.ROUTER and not any(name.worker_id in (None, worker_id) for name in names):
        raise ConfigError(
            f"{named_by}: it is for {names[0]}, and worker_id is {worker_id!r}: {names[0].worker_id!r} is needed"
        )
    return PeerRoles(domains[0])


def _found(uris: Collection[str]) -> str:
    if not uris:
        return ", and no URI at all"
    shown = ", ".join(uri[:_MAX_SHOWN_CHARS] for uri in list(uris)[:MAX_SHOWN_URIS])
    return f", but {shown}" + (" and more" if len(uris) > MAX_SHOWN_URIS else "")
