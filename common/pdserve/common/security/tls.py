"""TLS identity and trust of a service: PEM files, checked before the service starts.

The check is a handshake with itself in memory: it finds the errors that a peer would find in a certificate, in time for
a clear message. Contexts are for sockets, the PEM bytes for gRPC, which takes no contexts.

What is loaded is one generation. When the files change (`common/net/tls_renewal.py`) another is loaded and replaces it: holders
of the first call its `current`. Open connections continue.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pdserve.common import clock
from pdserve.common.errors import ConfigError
from pdserve.common.security.tls_roles import PeerRoles, ServiceRole, own_roles

_EXPIRED, _NOT_YET_VALID = 10, 9
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""
_FLIGHTS = 3
"""Messages of a handshake in memory, at most."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """Fields of a certificate, after a handshake."""

    valid_until: float
    uris: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TlsFile:
    """A PEM file, and the setting that named it."""

    setting: str
    path: str

    def __str__(self) -> str:
        return f"{self.setting} {self.path}"

    def read(self) -> bytes:
        """Raises: ConfigError when it is missing or unreadable."""
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self}: {error.strerror or error}") from error


@dataclass(slots=True, eq=False, kw_only=True)
class _Generation:
    """The files as loaded at one time; a later load may have taken their place."""

    peers: PeerRoles | None = None
    """Roles that peers must have; None: roles do not count."""
    _renewed: Self | None = field(default=None, init=False, repr=False)

    @property
    def current(self) -> Self:
        """The generation that counts now."""
        return self._renewed or self

    def renew(self, other: Self) -> None:
        """`other` was loaded later, and takes over."""
        self._renewed = other


@dataclass(slots=True, eq=False)
class ServerTls(_Generation):
    """Certificate and trust of a listening side. Its `context` serves all generations."""

    certificate: bytes
    """PEM, with the intermediate certificates that peers need."""
    key: bytes = field(repr=False)
    client_ca: bytes | None
    """Clients must show a certificate that this CA signed; None lets in clients without one."""
    context: ssl.SSLContext
    valid_until: float
    """The certificate's last second, in Unix time."""

    def __post_init__(self) -> None:
        # Each handshake takes certificate, key and CAs from the context of the generation that is current then. A context
        # cannot be emptied of CAs, and a listener keeps one for good.
        def show_current(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            if (current := self.current.context) is not context:
                connection.context = current

        self.context.sni_callback = show_current


@dataclass(slots=True, eq=False)
class ClientTls(_Generation):
    """TLS of a connecting side: trusted authorities, and its own certificate."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    server_name: str | None
    """The name in the servers' certificates, where it is not the host that is connected to."""
    context: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A service among services: one certificate for both directions, and one CA that signed those of all."""

    server: ServerTls
    client: ClientTls

    def renew(self, other: TlsIdentity) -> None:
        """`other` was loaded later, and takes over."""
        self.server.renew(other.server)
        self.client.renew(other.client)


def load_identity(
    certificate: TlsFile,
    key: TlsFile,
    ca: TlsFile,
    *,
    server_name: str | None,
    own_host: str | None,
    role: ServiceRole | None = None,
    worker_id: str | None = None,
) -> TlsIdentity:
    """own_host: the host that peers connect to, for which, or for `server_name`, the certificate must be issued; None: no check.

    role: this service's, which its certificate must name, for the worker `worker_id` if for only one; peers must have
    roles, too. None: roles do not count.
    Raises: ConfigError naming setting and file: unreadable, no PEM, key and certificate do not fit, not signed by the
    CA, not valid today, made out to another name, or without the role.
    """
    server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, ca)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    # peers keep their connections and resume no session
    server.num_tickets = 0
    name = None if own_host is None else server_name or own_host
    shown = _prove(server, _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca), name, certificate, ca)
    peers = None if role is None else own_roles(shown.uris, role, worker_id, str(certificate))
    return TlsIdentity(
        ServerTls(certificate.read(), key.read(), ca.read(), server, shown.valid_until, peers=peers),
        ClientTls(ca.read(), certificate.read(), key.read(), server_name, client, peers=peers),
    )


def load_front(certificate: TlsFile, key: TlsFile, client_ca: TlsFile | None) -> ServerTls:
    """The side of a server whose clients trust a CA of their own choice. Raises: ConfigError as `load_identity`."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, None)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certificate.path)
    # its issuer is the clients' business: here the certificate itself is trusted, and so only its own dates count
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    shown = _prove(server, client, None, certificate, None)
    if client_ca is not None:
        _trust(server, client_ca)
        server.verify_mode = ssl.CERT_REQUIRED
        # a resumed session would not show its certificate again, and so outlive a CA that is trusted no more
        server.num_tickets = 0
        server.options |= ssl.OP_NO_TICKET
    return ServerTls(certificate.read(), key.read(), client_ca.read() if client_ca else None, server, shown.valid_until)


def load_client(ca: TlsFile, certificate: TlsFile | None = None, key: TlsFile | None = None) -> ClientTls:
    """TLS of a front end's client. certificate and key: if the front end requires them. Raises: ConfigError."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)
    return ClientTls(ca.read(), certificate.read() if certificate else None, key.read() if key else None, None, context)


def certificate_uris(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The URIs among the names of a certificate, given as `getpeercert` gives it."""
    return tuple(name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI")


def tls_problem(error: ssl.SSLError) -> str:
    """Readable cause of a TLS error: the result of a certificate's check, or OpenSSL's reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"


def _context(protocol: int, certificate: TlsFile | None, key: TlsFile | None, ca: TlsFile | None) -> ssl.SSLContext:
    """With a CA the other side must show a certificate; a client always checks one, by name."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None and key is not None:
        _show(context, certificate, key)
    if ca is not None:
        _trust(context, ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _show(context: ssl.SSLContext, certificate: TlsFile, key: TlsFile) -> None:
    if b"-----BEGIN CERTIFICATE-----" not in certificate.read():
        raise ConfigError(f"{certificate}: no certificate in PEM")
    if b"PRIVATE KEY-----" not in key.read():
        raise ConfigError(f"{key}: no private key in PEM")

    def no_password() -> str:
        # without this OpenSSL would ask for one on the terminal
        raise ConfigError(f"{key}: the key is encrypted, and a service cannot ask for its password")

    try:
        context.load_cert_chain(certificate.path, key.path, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} does not belong to the certificate in {certificate}") from error
        raise ConfigError(f"{certificate} and {key} cannot be used: {tls_problem(error)}") from error


def _trust(context: ssl.SSLContext, ca: TlsFile) -> None:
    ca.read()
    try:
        context.load_verify_locations(ca.path)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca}: no certificate in PEM") from error
    if not context.get_ca_certs():
        raise ConfigError(f"{ca}: no certificate of a CA")


def _prove(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str | None, certificate: TlsFile, ca: TlsFile | None
) -> _Shown:
    """The fields of a certificate.

    Raises: ConfigError when `client` would not accept `server` for `name` (None: any name), or the other way round.
    """
    client.check_hostname = name is not None
    try:
        return _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        if ca is not None and error.verify_code in (_EXPIRED, _NOT_YET_VALID) and (old := _out_of_date(server)):
            raise ConfigError(f"{ca}: {old}") from error
        whose = "" if ca is None else f" (checked with {ca})"
        raise ConfigError(f"{certificate}: {error.verify_message.rstrip('.')}{whose}") from error
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} cannot be used: {tls_problem(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{certificate}: no certificate can be made out to {name!r}") from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> _Shown:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_FLIGHTS):
        for side in sides:
            _unless_waiting(side.do_handshake)
    shown = sides[0].getpeercert() or {}
    return _Shown(float(ssl.cert_time_to_seconds(str(shown["notAfter"]))), certificate_uris(shown))


def _unless_waiting(step: Callable[[], None]) -> None:
    try:
        step()
    except ssl.SSLWantReadError:
        return


def _out_of_date(context: ssl.SSLContext) -> str | None:
    """Error text about the dates of the CAs, when none of them is valid today."""
    now, verdict = clock.unix_s(), None
    for ca in context.get_ca_certs():
        begins, ends = (str(ca[date]) for date in ("notBefore", "notAfter"))
        if ssl.cert_time_to_seconds(begins) > now:
            verdict = f"the CA's certificate is not valid before {begins}"
        elif ssl.cert_time_to_seconds(ends) < now:
            verdict = f"the CA's certificate has expired, {ends}"
        else:
            return None
    return verdict
