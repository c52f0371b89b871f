"""Certificates of a port: unusable ones are reported, and no passphrase is prompted for."""

import subprocess
import sys
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

LOAD = """
from types import SimpleNamespace
from martlet.errors import ConfigError
from martlet.net.tls import Tls
try:
    Tls(SimpleNamespace(tls="permissive", tls_cert={cert!r}, tls_key={key!r}, tls_client_ca=""), "remoting")
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
