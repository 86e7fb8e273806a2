"""`pdserve certs`: what it makes is what services take, and nobody else reads it or loses a file to it."""

from __future__ import annotations

import ssl
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.cli.development_certificates import write_certificates
from pdserve.common.errors import ConfigError
from pdserve.common.security.tls import TlsFile, load_client
from pdserve.common.security.tls_roles import ServiceRole
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

KINDS: list[type[ServiceSettings]] = [RouterSettings, PrefillSettings, DecodeSettings]


def load(folder: Path, kind: type[ServiceSettings], **flags: Any) -> ServiceSettings:
    return load_settings(kind, flags=flags, toml=folder / "pdserve.toml", environ={})


@pytest.mark.parametrize("kind", KINDS)
def test_services_take_what_is_made(tmp_path: Path, kind: type[ServiceSettings]) -> None:
    folder = tmp_path / 'certs of "mine"'
    result = CliRunner().invoke(app, ["certs", str(folder), "--host", "10.1.2.3", "--host", "w.example", "--days", "9"])
    assert result.exit_code == 0, result.output
    identity = load(folder, kind, **({} if kind is RouterSettings else {"host": "10.1.2.3"})).tls()
    assert identity is not None
    assert identity.server.peers is not None
    assert identity.server.peers.trust_domain == "pdserve.internal"
    assert abs(identity.server.valid_until - time.time() - 9 * 86400) < 60
    if kind is not RouterSettings:
        load(folder, kind, host="127.0.0.1", advertise_host="w.example")
        with pytest.raises(ConfigError, match=r"not valid for '10\.9\.9\.9'"):
            load(folder, kind, host="10.9.9.9")


def test_the_front_has_a_ca_of_its_own(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], 30)
    settings = load(tmp_path, RouterSettings)
    assert isinstance(settings, RouterSettings)
    front = settings.front_tls()
    assert front is not None
    load_client(TlsFile("ca", str(tmp_path / "clients-ca.pem")))
    for ca, problem in (("clients-ca", None), ("services-ca", ssl.SSLCertVerificationError)):
        context = ssl.create_default_context(cafile=tmp_path / f"{ca}.pem")
        client, server = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            context.wrap_bio(client, server, server_hostname="127.0.0.1"),
            front.context.wrap_bio(server, client, server_side=True),
        )
        failure = None
        for side in sides * 3:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                failure = type(error)
                break
        assert failure is problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", list(ServiceRole))
def test_each_certificate_is_for_one_role(tmp_path: Path, kind: type[ServiceSettings], role: ServiceRole) -> None:
    write_certificates(tmp_path, ["127.0.0.1"], 30)
    files = {
        f"tls_{name}_file": str(tmp_path / f"{role.value}.{end}") for name, end in (("cert", "pem"), ("key", "key"))
    }
    if kind.section == role.value:
        load(tmp_path, kind, **files)
    else:
        with pytest.raises(ConfigError, match=f"no role spiffe://<trust domain>/pdserve/{kind.section}"):
            load(tmp_path, kind, **files)


def test_private_keys_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    files = write_certificates(folder, ["127.0.0.1"], 30)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = [path for path in files if path.suffix == ".key"]
    assert {path.stem for path in keys} == {"services-ca", "clients-ca", "router", "prefill", "decode", "front"}
    for path in keys:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"PRIVATE KEY" in path.read_bytes()
    assert not [path for path in files if path.suffix == ".pem" and b"PRIVATE KEY" in path.read_bytes()]


@pytest.mark.parametrize("name", ["services-ca.key", "decode.pem", "pdserve.toml"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"{name} is there already"):
        write_certificates(tmp_path, ["127.0.0.1"], 30)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": ["10.0.0.1:50052"]}, "--host is '10.0.0.1:50052': an address or a DNS name is needed"),
        ({"hosts": [""]}, "--host is ''"),
        ({"hosts": ["bücher.example"]}, "--host is 'bücher.example'"),
        ({"days": 0}, "--days is 0, 1 to 36500"),
        ({"days": 10**9}, "--days is 1000000000"),
        ({"trust_domain": "Example.COM"}, "--trust-domain is 'Example.COM'"),
        ({"trust_domain": "a/b"}, "--trust-domain is 'a/b'"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write_certificates(tmp_path, **(dict[str, Any](hosts=["127.0.0.1"], days=30) | changes))
    assert words in caught.value.message
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*(Not a directory|File exists)"):
        write_certificates(tmp_path / "file", ["127.0.0.1"], 30)
