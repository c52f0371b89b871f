"""The port two below a broker's own, to which clients up to 4.4 send everything but pulls, heartbeats and the like."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from . import fetch, wire
from .conftest import RocketMQ
from .java import Java, Jvm, message
from .martlet_process import Martlet
from .process import free_ports

COUNT = 20


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ | Martlet]:
    """A broker on a port with a free one two below it."""
    folder = tmp_path_factory.mktemp("vip")
    if target_kind == "rocketmq":
        broker: RocketMQ | Martlet = RocketMQ(folder)
    else:
        broker = Martlet(folder, {"remoting.listen": f"127.0.0.1:{free_ports((0, -2))}", "remoting.vip": "true"})
    yield broker
    broker.close()


@pytest.mark.parametrize("version", fetch.CLIENT_VERSIONS)
def test_clients_that_use_it_work(version: str, jvms: Callable[[str], Jvm], target: RocketMQ | Martlet) -> None:
    clients = Java(jvms(version), target.name_server)
    topic = f"vip_{version.replace('.', '_')}"
    bodies = [f"{i}".encode() for i in range(COUNT)]
    clients.producer(vip=True, queues=2).send(*(message(topic, body) for body in bodies))
    for orderly in (False, True):
        group = f"group_{topic}_{orderly}"
        consumer = clients.push(group, topic, vip=True, orderly=orderly)
        assert Counter(m.body for m in consumer.wait_bodies(bodies)) == Counter(bodies)
        wire.wait_committed(target.address, group, topic, len(bodies), queues=2, tell=consumer.commit)
        consumer.stop()
        again = clients.push(group, topic, vip=True, orderly=orderly)
        clients.producer(vip=True).send(message(topic, f"last {orderly}"))
        last = f"last {orderly}".encode()
        assert [m.body for m in again.wait_bodies([last])] == [last], "its offsets were kept"
        bodies.append(last)
    clients.close()


def test_a_pull_is_not_answered_there(target: RocketMQ | Martlet) -> None:
    host, _, port = target.address.rpartition(":")
    vip = f"{host}:{int(port) - 2}"
    info, pull = wire.ask(vip, wire.GET_BROKER_RUNTIME_INFO), wire.ask(vip, wire.PULL_MESSAGE)
    assert info is not None
    assert info.code == 0
    assert pull is not None
    assert pull.code == 3
