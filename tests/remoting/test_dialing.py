"""Connections to name servers elsewhere: plain unless a TLS key is set, and with files that can be read again."""

from pathlib import Path

import pytest
import trustme
from msgspec.structs import replace

from martlet.errors import ConfigError
from martlet_remoting.config import RemotingConfig
from martlet_remoting.dialing import NameServerDialer


def test_any_tls_key_encrypts(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    plain = RemotingConfig()
    assert NameServerDialer(plain)._context is None
    for keys in ({"nameservers_tls": True}, {"nameservers_tls_ca": str(ca)}, {"nameservers_tls_insecure": True}):
        assert NameServerDialer(replace(plain, **keys))._context is not None


def test_files_are_read_again_and_a_bad_one_leaves_the_old_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    dialer = NameServerDialer(RemotingConfig(nameservers_tls_ca=str(ca)))
    first = dialer._context
    ca.write_bytes(b"not a certificate")
    dialer.reload()
    assert dialer._context is first
    assert "TLS files for name servers cannot be reloaded" in caplog.text
    trustme.CA().cert_pem.write_to_path(str(ca))
    dialer.reload()
    assert dialer._context is not first
    ca.unlink()
    with pytest.raises(ConfigError, match=r"remoting\.nameservers_tls: TLS authority"):
        NameServerDialer(RemotingConfig(nameservers_tls_ca=str(ca)))
