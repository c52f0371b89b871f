"""Clients behind haproxy, from Debian, with the configuration that docs/operations.md shows."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from tests.remoting.conftest import pull_ext
from tests.wire_clients.remoting import BlockingRemotingClient

from martlet.records.codec import decode_records
from martlet_remoting.wire.codes import RequestCode

from . import mosquitto, wire
from .fetch import tool
from .java import Java, Jvm, message
from .martlet_process import Martlet
from .mqtt_clients import Link
from .process import Process, eventually, free_port, free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "haproxy" / "haproxy.cfg"
PUBLIC = "127.0.0.3"  # where haproxy listens
PROXY = "127.0.0.2"  # from where it connects to the broker
CLIENT = "127.0.0.7"
JAVA_CLIENT = "127.0.0.1"  # of clients that name no address


class Proxied:
    """A broker behind haproxy."""

    def __init__(self, folder: Path, version: str) -> None:
        folder.mkdir()
        remoting = free_ports((0, -2))
        self.ports = {9876: free_port(), 10911: remoting, 10909: remoting - 2, 1883: free_port(), 61613: free_port()}
        authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        authority.issue_cert(PUBLIC).private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        settings = {"broker.advertise": PUBLIC, "remoting.vip": "true"}
        for section, port in ("nameserver", 9876), ("remoting", 10911), ("mqtt", 1883), ("stomp", 61613):
            settings[f"{section}.listen"] = f"127.0.0.1:{self.ports[port]}"
            settings[f"{section}.tls_cert"] = str(folder / "server.pem")
            settings[f"{section}.proxy_networks"] = f'["{PROXY}"]'
        self.broker = Martlet(folder / "broker", settings)
        self.haproxy = self._start(folder, version)

    def _start(self, folder: Path, version: str) -> Process:
        lines = EXAMPLE.read_text().replace("maxconn 20000", "maxconn 200").replace("10.0.0.5:", "127.0.0.1:")
        lines = lines.replace("send-proxy-v2", f"{version} source {PROXY}").replace("bind :", f"bind {PUBLIC}:")
        lines = re.sub(r":(\d+)", lambda found: f":{self.ports[int(found[1])]}", lines)
        (folder / "haproxy.cfg").write_text(lines)
        haproxy = Process([tool("haproxy"), "-db", "-f", str(folder / "haproxy.cfg")], folder / "haproxy.log")
        haproxy.wait_until(lambda: wire.ask(self.address(9876), wire.GET_BROKER_CLUSTER_INFO), "haproxy")
        return haproxy

    def address(self, port: int) -> str:
        """Return where haproxy has the usual port."""
        return f"{PUBLIC}:{self.ports[port]}"

    def log(self) -> str:
        return self.broker.process.output()

    def close(self) -> None:
        self.haproxy.kill()
        self.broker.close()


@pytest.fixture(scope="module", params=["send-proxy", "send-proxy-v2"])
def proxied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    found = Proxied(tmp_path_factory.mktemp("haproxy") / "all", request.param)
    yield found
    found.close()


def born_hosts(proxied: Proxied, topic: str) -> set[str]:
    """Return the addresses of the clients in all records of *topic*."""
    with BlockingRemotingClient(proxied.broker.address) as direct:
        answers = [direct.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0, queue)) for queue in range(8)]
    records = [record for answer in answers for record in decode_records(answer.body)]
    return {".".join(map(str, record.born_host[:4])) for record in records}


@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_the_address_of_an_mqtt_client_arrives(proxied: Proxied, scheme: str) -> None:
    link = Link(f"{scheme}://{proxied.address(1883)}", 5, proxied.ca if scheme == "mqtts" else None)
    mosquitto.publish(link, "-A", CLIENT, "-i", f"door-{scheme}", "-t", "home/door", "-m", "open", "-q", "1")
    assert f"mqtt client 'door-{scheme}' at {CLIENT}:" in proxied.log()
    assert born_hosts(proxied, "mqtt") == {CLIENT}


def test_the_address_of_a_java_client_arrives(proxied: Proxied, jvms: Callable[[str], Jvm]) -> None:
    clients = Java(jvms("5.5.0"), proxied.address(9876))
    clients.producer(queues=2).send(*(message("haproxied", f"{number}") for number in range(4)))
    assert born_hosts(proxied, "haproxied") == {JAVA_CLIENT}
    consumer = clients.push("haproxied_group", "haproxied")
    consumer.wait_bodies([b"%d" % number for number in range(4)])
    clients.close()
    assert re.search(rf"remoting client '.*' at {JAVA_CLIENT}:\d+ connected", proxied.log())


def test_the_address_of_a_stomp_client_arrives(proxied: Proxied) -> None:
    host, port = proxied.address(61613).split(":")
    with socket.create_connection((host, int(port)), 120, (CLIENT, 0)) as client:
        client.sendall(b"CONNECT\naccept-version:1.2\nhost:h\nclient-id:shop\n\n\0")
        assert client.recv(65536).startswith(b"CONNECTED\n")
    assert f"stomp client 'shop' at {CLIENT}:" in proxied.log()


def test_the_old_port_of_rocketmq_is_proxied_as_well(proxied: Proxied) -> None:
    answer = wire.ask(proxied.address(10909), wire.GET_BROKER_RUNTIME_INFO)
    assert answer is not None
    assert answer.code == 0


def test_health_checks_are_neither_errors_nor_clients(proxied: Proxied) -> None:
    """haproxy connects to each port every two seconds."""
    before = accepted(proxied)
    eventually(lambda: accepted(proxied) > before + 5 or None)
    assert PROXY not in proxied.log()
    assert " is DOWN" not in proxied.haproxy.output()
    assert "WARNING" not in re.sub(r".*is open to the network.*", "", proxied.log())


def accepted(proxied: Proxied) -> int:
    """Return how many connections the broker has accepted."""
    words = [sys.executable, "-m", "martlet", "stats", "server.accepted", "--json", "--name-server"]
    shown = subprocess.run([*words, proxied.broker.name_server], capture_output=True, text=True, check=True).stdout
    (counters,) = json.loads(shown).values()
    return int(counters["server.accepted"])
