"""TLS: unusable certificates are reported, no passphrase is prompted for, and little is encrypted ahead."""

import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from martlet.net.tls import client_context
from martlet.net.transports import TLS_BYTES_AT_ONCE, TlsTransport
from martlet.testing.links import Conditions, MemoryLink

LOAD = """
from martlet.errors import ConfigError
from martlet.net.tls import Tls, TlsConfig
try:
    Tls(TlsConfig(tls_cert={cert!r}, tls_key={key!r}), "remoting")
except ConfigError as error:
    print("REFUSED", error)
"""


def test_no_pass_phrase_is_asked_for_on_the_terminal(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    plain = load_pem_private_key(issued.private_key_pem.bytes(), None)
    key.write_bytes(
        plain.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"abcd"))
    )
    code = LOAD.format(cert=str(cert), key=str(key))
    on_terminal = f"import pty, sys; pty.spawn([sys.executable, '-c', {code!r}])"
    ran = subprocess.run(
        [sys.executable, "-c", on_terminal], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "pass phrase" not in ran.stdout
    assert "REFUSED remoting.tls_cert" in ran.stdout


def test_a_client_with_an_authority_of_its_own_loads_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the system take 50 ms to load."""
    loads = Mock()
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", loads)
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    assert client_context(str(ca)).cert_store_stats()["x509_ca"] == 1
    loads.assert_not_called()
    client_context()
    loads.assert_called_once()


async def test_no_more_than_a_window_is_encrypted_ahead() -> None:
    """A connection that does not read holds a part of a long piece, which it does not share with others."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    link = MemoryLink(Conditions(capacity_bytes=1 << 16))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(verify=False).wrap_bio(incoming, outgoing)
    transport = TlsTransport(link.far, context, b"", lambda certificate: None)
    while client.version() is None or not transport.send([b"."]):
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        link.near.send([outgoing.read()])
        transport.receive(1 << 16)
        incoming.write(link.near.receive(1 << 16) or b"")
    assert transport.send([b"a", bytes(1 << 22), b"b"]) == TLS_BYTES_AT_ONCE
    assert transport.send([b"c"]) == 0
    assert transport.pending()
