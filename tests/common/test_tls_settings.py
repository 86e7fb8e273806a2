"""TLS settings: whatever a peer would find wrong with the files is told at start, by setting and file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.kv_transfer.make_connectors import make_connectors
from tests.support.processes.tls_authority import Authority, IssuedFiles

PAST: dict[str, Any] = {"not_before": datetime(2020, 1, 1, tzinfo=UTC), "not_after": datetime(2021, 1, 1, tzinfo=UTC)}
FUTURE: dict[str, Any] = {"not_before": datetime(2900, 1, 1, tzinfo=UTC), "not_after": datetime(2901, 1, 1, tzinfo=UTC)}
KINDS = pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings, DecodeSettings])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Each test's own: some spoil its file."""
    return Authority(tmp_path / "ca")


@pytest.fixture
def other_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other-ca")


def load(kind: type[ServiceSettings], **flags: Any) -> ServiceSettings:
    return load_settings(kind, flags=flags, environ={})


@KINDS
def test_files_that_fit_make_an_identity(kind: type[ServiceSettings], authority: Authority) -> None:
    files = authority.issue()
    identity = load(kind, **files.settings()).tls()
    assert identity is not None
    assert (identity.server.certificate, identity.server.client_ca) == (files.cert.read_bytes(), files.ca.read_bytes())
    assert load(kind).tls() is None
    key = files.key.read_text()
    assert key not in repr(identity)
    assert key.splitlines()[1] not in repr(identity)


@KINDS
@pytest.mark.parametrize("left_out", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
def test_an_incomplete_identity_names_what_is_missing(
    kind: type[ServiceSettings], left_out: str, authority: Authority
) -> None:
    settings = authority.issue().settings()
    del settings[left_out]
    with pytest.raises(ConfigError, match=f"so {left_out} must be"):
        load(kind, **settings)


def test_a_name_without_certificates_is_incomplete_too() -> None:
    with pytest.raises(
        ConfigError, match="tls_server_name is given, so tls_cert_file and tls_key_file and tls_ca_file"
    ):
        load(DecodeSettings, tls_server_name="pdserve.internal")


def encrypt(path: Path) -> None:
    key = load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


LABELS = {"cert": "CERTIFICATE", "key": "PRIVATE KEY", "ca": "CERTIFICATE"}
CONTENTS = {
    "missing": lambda label: None,
    "empty": lambda label: "",
    "other text": lambda label: "no PEM\n",
    "broken": lambda label: f"-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", LABELS)
def test_files_that_are_no_pem_are_named(name: str, content: str, authority: Authority) -> None:
    files = authority.issue()
    path: Path = getattr(files, name)
    text = CONTENTS[content](LABELS[name])
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    words = "No such file" if text is None else "PEM|cannot be used"
    with pytest.raises(ConfigError, match=words) as caught:
        load(DecodeSettings, **files.settings())
    assert f"tls_{name}_file {path}" in caught.value.message


@pytest.mark.parametrize(
    ("spoil", "setting", "words"),
    [
        (lambda files: files.cert.write_bytes(files.key.read_bytes()), "tls_cert_file", "no certificate in PEM"),
        (lambda files: files.ca.write_bytes(files.cert.read_bytes()), "tls_ca_file", "no certificate of a CA"),
        (lambda files: encrypt(files.key), "tls_key_file", "encrypted"),
    ],
    ids=["key for a certificate", "certificate for a CA", "encrypted key"],
)
def test_files_that_cannot_be_used_are_named(
    spoil: Callable[[IssuedFiles], None], setting: str, words: str, authority: Authority
) -> None:
    files = authority.issue()
    spoil(files)
    with pytest.raises(ConfigError, match=words) as caught:
        load(DecodeSettings, **files.settings())
    assert f"{setting} {files.settings()[setting]}" in caught.value.message


def test_a_folder_is_no_file(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"tls_key_file {tmp_path}: Is a directory"):
        load(RouterSettings, **authority.issue().settings() | {"tls_key_file": str(tmp_path)})


def test_a_key_of_another_certificate(authority: Authority) -> None:
    one, two = authority.issue(), authority.issue()
    with pytest.raises(ConfigError, match=rf"tls_key_file {two.key} does not belong to .*tls_cert_file {one.cert}"):
        load(RouterSettings, **one.settings() | {"tls_key_file": str(two.key)})


@KINDS
@pytest.mark.parametrize(("dates", "words"), [(PAST, "has expired"), (FUTURE, "not yet valid")])
def test_a_certificate_out_of_date(
    kind: type[ServiceSettings], dates: dict[str, Any], words: str, authority: Authority
) -> None:
    files = authority.issue(**dates)
    with pytest.raises(ConfigError, match=f"tls_cert_file {files.cert}: .*{words}"):
        load(kind, **files.settings())


def test_a_certificate_that_the_ca_did_not_sign(authority: Authority, other_authority: Authority) -> None:
    files = authority.issue()
    with pytest.raises(
        ConfigError, match=rf"tls_cert_file {files.cert}: .*issuer.*tls_ca_file {other_authority.ca_file}"
    ):
        load(RouterSettings, **files.settings() | {"tls_ca_file": str(other_authority.ca_file)})


def test_a_bundle_of_two_cas_serves_while_one_replaces_the_other(
    authority: Authority, other_authority: Authority
) -> None:
    bundle = authority.ca_file.with_name("bundle.pem")
    bundle.write_bytes(other_authority.ca_file.read_bytes() + authority.ca_file.read_bytes())
    assert load(DecodeSettings, **authority.issue().settings() | {"tls_ca_file": str(bundle)}).tls()


@pytest.mark.parametrize(
    ("names", "flags", "words"),
    [
        (["10.1.2.3"], {}, "not valid for '127.0.0.1'"),
        (["127.0.0.1"], {"advertise_host": "d1.example"}, "not valid for 'd1.example'"),
        (["127.0.0.1"], {"tls_server_name": "pdserve.internal"}, "not valid for 'pdserve.internal'"),
        (["127.0.0.1"], {"tls_server_name": ".internal"}, "made out to '.internal'"),
    ],
)
def test_a_worker_that_peers_would_not_believe_does_not_start(
    names: list[str], flags: dict[str, str], words: str, authority: Authority
) -> None:
    files = authority.issue(*names)
    with pytest.raises(ConfigError, match=rf"tls_cert_file {files.cert}: .*{words}"):
        load(DecodeSettings, **files.settings(), **flags)


def test_names_that_peers_believe(authority: Authority) -> None:
    load(DecodeSettings, **authority.issue("d1.example").settings(), advertise_host="d1.example")
    load(DecodeSettings, **authority.issue("pdserve.internal").settings(), tls_server_name="pdserve.internal")
    # nobody connects to a router's identity: any name will do
    load(RouterSettings, **authority.issue("r1.example").settings(), tls_server_name="pdserve.internal")


def test_with_tls_nobody_needs_to_say_insecure(authority: Authority) -> None:
    files = authority.issue("10.1.2.3").settings()
    worker = load(PrefillSettings, host="10.1.2.3", **files)
    with pytest.raises(ConfigError, match="no deployment key"):
        worker.key()
    front = {f"front_{name}": path for name, path in files.items() if name != "tls_ca_file"}
    load(RouterSettings, host="10.1.2.3", api_keys=("0123456789abcdef",), **front)
    load(RouterSettings, host="10.1.2.3", front_tls_client_ca_file=files["tls_ca_file"], **front)
    with pytest.raises(ConfigError, match="no API key"):
        load(RouterSettings, host="10.1.2.3", **front)
    with pytest.raises(ConfigError, match=r"front_tls_cert_file.*--insecure"):
        load(RouterSettings, host="10.1.2.3", **files)
    with pytest.raises(ConfigError, match=r"tls_cert_file.*--insecure"):
        load(DecodeSettings, host="10.1.2.3")


def test_metrics_leave_the_machine_only_where_a_setting_says_so(authority: Authority) -> None:
    files = authority.issue("10.1.2.3", "127.0.0.1").settings()

    def metrics_at(**flags: Any) -> str:
        settings = load(PrefillSettings, **flags)
        assert isinstance(settings, WorkerSettings)
        return settings.metrics_at

    assert metrics_at(host="10.1.2.3", **files) == "127.0.0.1"
    assert metrics_at(host="10.1.2.3", metrics_host="10.1.2.3", **files) == "10.1.2.3"
    assert metrics_at(host="10.1.2.3", insecure=True, **files) == "10.1.2.3"
    assert metrics_at(host="10.1.2.3", insecure=True) == "10.1.2.3"
    assert metrics_at(**files) == "127.0.0.1"


def test_nixl_sends_nothing_in_the_clear_unless_it_is_allowed(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    files = authority.issue().settings()

    def names(**flags: Any) -> tuple[str, ...]:
        settings = load(DecodeSettings, **files, **flags)
        assert isinstance(settings, WorkerSettings)
        return make_connectors(settings, lambda: None, tls=settings.tls()).names

    assert names() == ("tcp",)
    assert "not nixl: it encrypts nothing" in caplog.text
    assert names(nixl_plaintext=True) == ("nixl", "tcp")
    assert names(connector="nixl", nixl_plaintext=True) == ("nixl", "tcp")
    with pytest.raises(ConfigError, match=r"connector is 'nixl'.*nixl_plaintext"):
        names(connector="nixl")


@pytest.mark.parametrize("left_out", ["front_tls_cert_file", "front_tls_key_file"])
def test_an_incomplete_front_names_what_is_missing(left_out: str, authority: Authority) -> None:
    files = authority.issue()
    flags = {
        "front_tls_cert_file": str(files.cert), "front_tls_key_file": str(files.key),
        "front_tls_client_ca_file": str(files.ca),
    }  # fmt: skip
    del flags[left_out]
    with pytest.raises(ConfigError, match=f"so {left_out} must be"):
        load(RouterSettings, **flags)


def test_a_front_needs_no_ca_of_its_own(authority: Authority, other_authority: Authority) -> None:
    def front(files: IssuedFiles, **more: str) -> None:
        load(RouterSettings, front_tls_cert_file=str(files.cert), front_tls_key_file=str(files.key), **more)

    front(authority.issue("llm.example"))
    front(authority.issue("llm.example"), front_tls_client_ca_file=str(other_authority.ca_file))
    with pytest.raises(ConfigError, match=r"front_tls_client_ca_file /no/where: No such file"):
        front(authority.issue(), front_tls_client_ca_file="/no/where")
    for dates, words in ((PAST, "has expired"), (FUTURE, "not yet valid")):
        old = authority.issue("llm.example", **dates)
        with pytest.raises(ConfigError, match=f"front_tls_cert_file {old.cert}: certificate .*{words}"):
            front(old)
    one, two = authority.issue(), authority.issue()
    with pytest.raises(ConfigError, match=f"front_tls_key_file {two.key} does not belong"):
        front(IssuedFiles(one.cert, two.key, one.ca))
