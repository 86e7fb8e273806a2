"""Certificates for development and for small deployments: two authorities, and one certificate per kind of service.

    services-ca.pem      signs the services' certificates; its key signs no other kind
    router.pem, prefill.pem, decode.pem      one role each (`common/security/tls_roles.py`)
    clients-ca.pem       the authority that clients trust
    front.pem            the certificate of the router's front ends
    pdserve.toml         settings that name all of these

The private key of each `.pem` is the `.key` next to it, readable only by its owner.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.common.errors import ConfigError
from pdserve.common.security.tls_roles import RoleName, ServiceRole, role_names

TRUST_DOMAIN = "pdserve.internal"
MAX_DAYS = 36_500
_CLOCK_SKEW = timedelta(minutes=5)
_SETTINGS = "pdserve.toml"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_authority(name: str, begins: datetime, ends: datetime) -> KeyPair:
    """A certificate authority that signs certificates of services or of a server, and no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key, begins, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return KeyPair(builder.sign(key, SHA256()), key)


def issue(
    authority: KeyPair, name: str, hosts: Sequence[str], uris: Sequence[str], begins: datetime, ends: datetime
) -> KeyPair:
    """A certificate for these hosts (addresses or DNS names) and URIs, valid for both sides of a connection."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    builder = _builder(name, str(issuer), key, begins, ends)
    names = [*map(_host_name, hosts), *map(x509.UniformResourceIdentifier, uris)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return KeyPair(builder.sign(authority.key, SHA256()), key)


def write_certificates(folder: Path, hosts: Sequence[str], days: int, trust_domain: str = TRUST_DOMAIN) -> list[Path]:
    """Write all files into `folder` and return them. hosts: addresses or names under which peers and clients reach the services.

    Raises: ConfigError for an invalid host, number of days or trust domain, or if one of the files exists.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days is {days}, 1 to {MAX_DAYS} is needed")
    if not role_names([str(RoleName(trust_domain, ServiceRole.ROUTER))]):
        raise ConfigError(
            f"--trust-domain is {trust_domain!r}, lower-case letters, digits, `.`, `-` and `_` are needed"
        )
    begins = datetime.now(UTC) - _CLOCK_SKEW
    files = dict(_contents(folder, hosts, trust_domain, begins, begins + _CLOCK_SKEW + timedelta(days=days)))
    if there := [path for path in files if path.exists()]:
        raise ConfigError(f"{there[0]} is there already: nothing is overwritten, give another folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content in files.items():
            _write(path, content)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error
    return list(files)


def _contents(
    folder: Path, hosts: Sequence[str], trust_domain: str, begins: datetime, ends: datetime
) -> Iterator[tuple[Path, bytes]]:
    services = make_authority("pdserve services", begins, ends)
    clients = make_authority("pdserve clients", begins, ends)
    pairs = {"services-ca": services, "clients-ca": clients, "front": issue(clients, "front", hosts, [], begins, ends)}
    for role in ServiceRole:
        uri = str(RoleName(trust_domain, role))
        pairs[role.value] = issue(services, role.value, hosts, [uri], begins, ends)
    for stem, pair in pairs.items():
        yield folder / f"{stem}.pem", pair.certificate_pem()
        yield folder / f"{stem}.key", pair.key_pem()
    yield folder / _SETTINGS, _settings(folder.resolve()).encode()


def _settings(folder: Path) -> str:
    def quoted(name: str) -> str:
        return '"' + str(folder / name).replace("\\", "\\\\").replace('"', '\\"') + '"'

    lines = [f"tls_ca_file = {quoted('services-ca.pem')}"]
    for role in ("prefill", "decode", "router"):
        lines += [
            "",
            f"[{role}]",
            f"tls_cert_file = {quoted(f'{role}.pem')}",
            f"tls_key_file = {quoted(f'{role}.key')}",
        ]
    lines += [f"front_tls_cert_file = {quoted('front.pem')}", f"front_tls_key_file = {quoted('front.key')}", ""]
    return "\n".join(lines)


def _write(path: Path, content: bytes) -> None:
    """Create a file that other users cannot read at any time, if it is a private key."""
    mode = 0o600 if path.suffix == ".key" else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with contextlib.closing(os.fdopen(descriptor, "wb")) as file:
        file.write(content)


def _host_name(host: str) -> x509.GeneralName:
    """The host as it is written in a certificate. Raises: ConfigError."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        if not host or host != host.strip() or ":" in host or "/" in host:
            raise ValueError("an address or a DNS name is needed, without a port")
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host is {host!r}: {error}") from error


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(_common_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
