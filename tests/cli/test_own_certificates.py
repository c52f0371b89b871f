"""A broker without configuration serves TLS on all its ports, as RocketMQ does, with certificates made when needed."""

import re
import ssl
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tests.cli.conftest import Process

PORTS = ("remoting", "nameserver", "mqtt", "stomp")
FINGERPRINT = re.compile(r"clients of (\S+) that begin TLS get .* fingerprint ([0-9A-F:]{95});")


def test_commands_with_tls_work_on_a_fresh_broker(
    start: Callable[..., Process], martlet: Callable[..., tuple[int, str, str]]
) -> None:
    process = start("run")
    at = process.addresses()
    insecure = ("--tls", "--tls-insecure")
    assert "begin TLS" not in process.log.read_text()
    assert martlet("send", "Secret", "hush", "-n", at["nameserver"], *insecure)[0] == 0
    assert "hush" in martlet("tail", "Secret", "--from", "begin", "--no-follow", "-n", at["nameserver"], *insecure)[1]
    assert martlet("mqtt", "publish", "a/b", "hush", "--retain", "--address", at["mqtt"], *insecure)[0] == 0
    assert "hush" in martlet("mqtt", "subscribe", "a/b", "--count", "1", "--address", at["mqtt"])[1]
    assert martlet("stomp", "connections", "--address", at["stomp"], *insecure)[0] == 0
    code, _, error = martlet("topic", "list", "-n", at["nameserver"], "--tls")
    assert code != 0
    assert "its certificate was rejected: " in error
    logged = dict(FINGERPRINT.findall(process.log.read_text()))
    assert logged.keys() == set(PORTS)
    for port in PORTS:
        host, _, number = at[port].rpartition(":")
        der = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(number))))
        assert logged[port] == sha256(der).digest().hex(":").upper()
    assert "cryptography" not in Path(f"/proc/{process.child.pid}/maps").read_text(), "it takes 20 MB"
    assert not list(process.data.rglob("*.pem"))
    assert process.stop() == 0
