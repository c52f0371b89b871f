"""The Java client over TLS, to a broker and a name server that take TLS and plain text on one port."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from . import fetch
from .conftest import RocketMQ
from .java import Java, Jvm, message
from .martlet_process import Martlet

COUNT = 30


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ | Martlet]:
    """A broker with a certificate; RocketMQ makes itself one, as its test mode is the default."""
    folder = tmp_path_factory.mktemp("tls")
    broker = RocketMQ(folder) if target_kind == "rocketmq" else Martlet(folder, certificates(folder))
    yield broker
    broker.close()


def certificates(folder: Path) -> dict[str, str]:
    issued = trustme.CA().issue_cert("127.0.0.1", "localhost")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    own = {"tls_cert": str(chain), "tls_key": str(key)}
    return {f"{part}.{name}": value for part in ("remoting", "nameserver") for name, value in own.items()}


@pytest.fixture(params=fetch.CLIENT_VERSIONS)
def jvm(request: pytest.FixtureRequest, jvms: Callable[[str], Jvm]) -> Jvm:
    return jvms(request.param)


def test_java_clients_with_and_without_tls_meet(jvm: Jvm, target: RocketMQ | Martlet) -> None:
    clients = Java(jvm, target.name_server)
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
