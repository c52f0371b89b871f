"""The Java client over TLS, to a broker and a name server that take TLS and plain text on one port."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from . import fetch
from .conftest import RocketMQ
from .java import Failed, Java, Jvm, message
from .martlet_process import Martlet

COUNT = 30
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ | Martlet]:
    """A broker with a certificate; RocketMQ makes itself one, as its test mode is the default."""
    folder = tmp_path_factory.mktemp("tls")
    broker = RocketMQ(folder, tls=True) if target_kind == "rocketmq" else Martlet(folder, certificates(folder))
    yield broker
    broker.close()


def certificates(folder: Path) -> dict[str, str]:
    issued = trustme.CA().issue_cert("127.0.0.1", "localhost")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return both_ports({"tls_cert": str(chain), "tls_key": str(key)})


def both_ports(settings: dict[str, str]) -> dict[str, str]:
    return {f"{part}.{name}": value for part in ("remoting", "nameserver") for name, value in settings.items()}


@pytest.fixture(params=fetch.CLIENT_VERSIONS)
def jvm(request: pytest.FixtureRequest, jvms: Callable[[str], Jvm]) -> Jvm:
    return jvms(request.param)


def test_java_clients_with_and_without_tls_meet(jvm: Jvm, target: RocketMQ | Martlet) -> None:
    check_that_they_meet(Java(jvm, target.name_server), jvm)


def test_java_clients_use_tls_with_a_fresh_broker_that_has_no_certificate(jvm: Jvm, tmp_path: Path) -> None:
    """They verify nothing by default (`tls.test.mode.enable`), and RocketMQ makes a certificate, too."""
    broker = Martlet(tmp_path)
    try:
        check_that_they_meet(Java(jvm, broker.name_server), jvm)
    finally:
        broker.close()


def check_that_they_meet(clients: Java, jvm: Jvm) -> None:
    topic = f"tls_{jvm.version.replace('.', '_')}"
    secret, plain = clients.producer(tls=True), clients.producer("interop_plain")
    secret.send(*(message(topic, f"secret {i}") for i in range(COUNT)))
    plain.send(*(message(topic, f"plain {i}") for i in range(COUNT)))
    secret.send(message(topic, "large " * 100_000))
    wanted = {f"{how} {i}".encode() for how in ("secret", "plain") for i in range(COUNT)} | {b"large " * 100_000}
    for tls in (True, False):
        consumer = clients.push(f"group_{topic}_{tls}", topic, tls=tls)
        assert {m.body for m in consumer.wait_bodies(wanted)} == wanted
    clients.close()


def documented_properties(folder: Path) -> dict[str, str]:
    """Return the Java system properties that the page on operations names, with files of *folder*."""
    named = dict(re.findall(r"-D(tls[\w.]+)=([^\s`]+)", PAGE.read_text()))
    return {key: str(folder / Path(value).name) if value.endswith(".pem") else value for key, value in named.items()}


def documented_certificates(folder: Path) -> None:
    """Make the page's certificates with its commands."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text().partition("\n## TLS\n")[2], re.DOTALL)
    lines = "".join(blocks[index].partition("/opt/")[0] for index in (0, 2))
    commands = lines.replace("/etc/martlet/tls", str(folder)).replace("mq.example.org", "localhost")
    fetch.run(["bash", "-euc", "chgrp() { true; }\n" + commands])


def test_java_properties_of_the_page_check_the_broker_and_present_a_certificate(tmp_path: Path) -> None:
    documented_certificates(tmp_path)
    server = {"tls_cert": str(tmp_path / "chain.pem"), "tls_key": str(tmp_path / "key.pem"), "tls": "enforcing"}
    broker = Martlet(tmp_path / "broker", both_ports({**server, "tls_client_ca": str(tmp_path / "ca.pem")}))
    good = documented_properties(tmp_path)
    assert {"tls.client.trustCertPath", "tls.client.certPath", "tls.client.keyPath"} <= good.keys()
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    jvms = [
        Jvm("5.5.0", tmp_path / "good", good),
        Jvm("5.5.0", tmp_path / "bad", {**good, "tls.client.trustCertPath": str(tmp_path / "other.pem")}),
    ]
    trusting, doubting = (Java(jvm, broker.name_server).producer(tls=True) for jvm in jvms)
    try:
        trusting.send(message("Secure", "hello"))
        with pytest.raises(Failed, match=r"(send request|connect) to .* failed"):
            doubting.send(message("Secure", "hello"))
    finally:
        for jvm in jvms:
            jvm.kill()
        broker.close()
