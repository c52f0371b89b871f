"""The expiry of certificates and its warnings, revocation lists, and optional client certificates."""

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from trio.testing import MockClock, memory_stream_pair

from martlet.contracts import Protocol
from martlet.errors import ConfigError
from martlet.net.certificates.expiry import certificate_days, certificate_end_ms, watch_certificates
from martlet.net.tls import Tls, TlsConfig, client_context

NOON = datetime(2027, 1, 15, 12, tzinfo=UTC)


class Noon:
    def now_ms(self) -> int:
        return int(NOON.timestamp() * 1000)


def certificate(end: datetime) -> str:
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n" * 60)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = builder.not_valid_before(end - timedelta(days=400)).not_valid_after(end).sign(key, SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


ENDS = [NOON, datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)]


@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_read_in_both_forms_of_time(end: datetime) -> None:
    other = certificate(datetime(2030, 1, 1, tzinfo=UTC))
    assert certificate_end_ms(certificate(end) + other) == end.timestamp() * 1000


def test_what_is_no_certificate_has_no_end() -> None:
    pem = certificate(NOON)
    der = ssl.PEM_cert_to_DER_cert(pem)
    assert certificate_end_ms("") == certificate_end_ms("-----BEGIN CERTIFICATE-----") == 0
    for size in range(len(der) // 2):
        assert certificate_end_ms(ssl.DER_cert_to_PEM_cert(der[:size])) == 0


def port(name: str, days: float | None) -> Protocol:
    end_ms = 0 if days is None else int((NOON + timedelta(days=days)).timestamp() * 1000)
    return Protocol(name, "", lambda now: None, lambda peer, connection: None, certificate_end_ms=lambda: end_ms)  # type: ignore[arg-type,return-value]


async def test_certificates_that_end_soon_are_warned_about_each_day(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.WARNING, "martlet.tls")
    ports = [port("mqtt", 13.9), port("stomp", 14.1), port("remoting", -2), port("nameserver", None)]
    assert certificate_days(ports, Noon()) == {"mqtt_days": 13.9, "stomp_days": 14.1, "remoting_days": -2.0}
    with trio.move_on_after(25 * 3600):
        await watch_certificates(ports, Noon())
    assert [record.getMessage() for record in caplog.records] == [
        "the certificate of mqtt ends in 13.9 days; replace it and send SIGHUP",
        "the certificate of remoting has ended 2.0 days ago; replace it and send SIGHUP",
    ] * 2


class Files:
    """A server's certificate, two clients' and the authority's revocation list, in files."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.folder = folder
        self.authority.cert_pem.write_to_path(self.path("ca.pem"))
        self.authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(self.path("server.pem"))
        for name in ("ann", "bob"):
            issued = self.authority.issue_cert(f"{name}@example.org", common_name=name)
            issued.private_key_and_cert_chain_pem.write_to_path(self.path(f"{name}.pem"))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def revoke(self, *names: str) -> None:
        signed_by = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        key = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        now = datetime.now(UTC)
        day = timedelta(days=1)
        builder = x509.CertificateRevocationListBuilder(signed_by.subject, now - day, now + 9 * day)
        for name in names:
            revoked = x509.load_pem_x509_certificate((self.folder / f"{name}.pem").read_bytes())
            entry = x509.RevokedCertificateBuilder(revoked.serial_number, now - timedelta(days=1)).build()
            builder = builder.add_revoked_certificate(entry)
        listed = builder.sign(key, SHA256())  # type: ignore[arg-type]
        (self.folder / "crl.pem").write_bytes(listed.public_bytes(serialization.Encoding.PEM))

    def server(self, **keys: str) -> Tls:
        config = TlsConfig(tls="enforcing", tls_cert=self.path("server.pem"), tls_client_ca=self.path("ca.pem"), **keys)  # type: ignore[arg-type]
        return Tls(config, "mqtt")


async def connects(tls: Tls, client: ssl.SSLContext) -> str:
    """Return the version of TLS with which *client* gets a byte; empty if it is refused."""
    context = tls.context()
    assert context is not None
    ours, theirs = memory_stream_pair()
    server_stream = trio.SSLStream(ours, context, server_side=True)
    client_stream = trio.SSLStream(theirs, client, server_hostname="localhost")
    version = ""

    async def serve() -> None:
        try:
            await server_stream.do_handshake()
            await server_stream.send_all(b"x")
        except trio.BrokenResourceError:
            await ours.aclose()

    async def ask() -> None:
        nonlocal version
        try:
            if await client_stream.receive_some(1) == b"x":
                version = client_stream.version()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        nursery.start_soon(ask)
    return version


async def test_a_client_certificate_is_required_or_optional(tmp_path: Path) -> None:
    files = Files(tmp_path)
    nobody, ann = client_context(files.path("ca.pem")), client_context(files.path("ca.pem"), files.path("ann.pem"))
    stranger = trustme.CA().issue_cert("eve@example.org")
    eve = client_context(files.path("ca.pem"))
    stranger.configure_cert(eve)
    required, optional = files.server(), files.server(tls_client="optional")
    assert [bool(await connects(required, each)) for each in (nobody, ann, eve)] == [False, True, False]
    assert [bool(await connects(optional, each)) for each in (nobody, ann, eve)] == [True, True, False]


async def test_a_revoked_certificate_is_refused_after_a_reload(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.revoke()
    clients = [client_context(files.path("ca.pem"), files.path(f"{name}.pem")) for name in ("ann", "bob")]
    tls = files.server(tls_crl=files.path("crl.pem"))
    assert [bool(await connects(tls, each)) for each in clients] == [True, True]
    files.revoke("bob")
    tls.reload()
    assert [bool(await connects(tls, each)) for each in clients] == [True, False]


async def test_the_oldest_version_of_tls_is_a_setting(tmp_path: Path) -> None:
    files = Files(tmp_path)
    old, new = client_context(files.path("ca.pem"), files.path("ann.pem")), None
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    new = client_context(files.path("ca.pem"), files.path("ann.pem"))
    usual, strict = files.server(), files.server(tls_version_min="1.3")
    assert [await connects(usual, each) for each in (old, new)] == ["TLSv1.2", "TLSv1.3"]
    assert [await connects(strict, each) for each in (old, new)] == ["", "TLSv1.3"]


def test_a_port_knows_when_its_certificate_ends(tmp_path: Path) -> None:
    tls = Files(tmp_path).server()
    text = (tmp_path / "server.pem").read_text()
    assert tls.certificate_end_ms() == certificate_end_ms(text) > 0
    assert Tls(TlsConfig(), "mqtt").certificate_end_ms() == 0


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"tls_crl": "missing.pem"}, "mqtt.tls_crl .* cannot be used; .*No such file"),
        ({"tls_crl": "crl.pem", "tls_client_ca": ""}, "mqtt.tls_crl has no effect without mqtt.tls_client_ca; set it"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, keys: dict[str, str], text: str) -> None:
    files = Files(tmp_path)
    paths = {name: value and str(tmp_path / value) for name, value in keys.items()}
    usual = {"tls_cert": files.path("server.pem"), "tls_client_ca": files.path("ca.pem")}
    with pytest.raises(ConfigError, match=text):
        Tls(TlsConfig(**{**usual, **paths}), "mqtt")  # type: ignore[arg-type]
