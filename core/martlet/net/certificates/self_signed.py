"""A self-signed certificate for ports that take TLS and have no other; RocketMQ makes one at each start.

A separate process makes it: importing the package for certificates takes 20 MB of memory, and stops the event loop for
40 ms even in a thread. Key and certificate are kept only in memory, as in RocketMQ, whose `SelfSignedCertificate`
(Netty) removes its files when the process ends (remoting/netty/TlsHelper.java, buildSslContext).
"""

import os
import ssl
import sys
from typing import Final

from martlet.errors import ConfigError

__all__ = ["fingerprint", "load", "make"]

TIMEOUT_S: Final = 30  # it takes 0.3 s
NOT_INSTALLED: Final = 3  # an exit code
# The certificate is valid whatever the clocks of clients say.
FIRST_DAY: Final = 2000, 1, 1
LAST_DAY: Final = 9999, 12, 31
BEGIN: Final = "-----BEGIN CERTIFICATE-----"


def make() -> bytes:
    """Return a new key and its certificate, as PEM. Blocks for about 0.3 s.

    Raises:
      ConfigError: the package is missing, or the process failed; the text says why.
    """
    import subprocess  # few brokers need it

    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the process that makes one failed; {error}") from error
    if done.returncode == NOT_INSTALLED:
        raise ConfigError("to have one made, install the package cryptography: pip install 'martlet[tls]'")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"the process that makes one ended with exit code {done.returncode}; {last}")
    return done.stdout


def load(context: ssl.SSLContext, pem: bytes) -> None:
    """Let *context* use the key and the certificate in *pem*. Raises `OSError` and `ssl.SSLError`."""
    # Python's ssl module lacks OpenSSL's functions that load from memory; a memfd is a file that is on no disk.
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("certificate"), "wb", buffering=0) as file:
            file.write(pem)
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(buffering=0) as named:  # only the owner can read it
        named.write(pem)
        context.load_cert_chain(named.name)


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 fingerprint of the certificate in *pem*, as ``openssl x509 -fingerprint`` writes it."""
    from hashlib import sha256

    text = pem.decode()
    return sha256(ssl.PEM_cert_to_DER_cert(text[text.index(BEGIN) :])).digest().hex(":").upper()


def main() -> int:
    """Write a new key and its certificate to stdout; return the exit code."""
    from datetime import datetime

    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return NOT_INSTALLED
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime(*FIRST_DAY)).not_valid_after(datetime(*LAST_DAY))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    sys.stdout.buffer.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    sys.stdout.buffer.write(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    return 0


if __name__ == "__main__":
    sys.exit(main())
