"""Servers that are no brokers, that never answer, or that take TLS otherwise: the sentence says what to do."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trustme
from tests.broker_process import broker_process

from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import BrokerGroup, TopicRoute
from martlet_spark.cluster import Cluster, UnknownTopic
from martlet_spark.connection import CONNECTIONS, Security
from martlet_spark.errors import ReadError
from martlet_spark.read.watching import Watch
from martlet_spark.source import MartletDataSource

from .fake_brokers import FakeBroker

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """A server that sends *answer* to whatever it gets and closes the connection; None: it never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                if answer is not None:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname()[:2])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in held:
            connection.close()
        CONNECTIONS.close()


def refusal(*endpoints: str, timeout_s: float = 0, tls: bool = False) -> str:
    """The error of a query for the route of a topic."""
    with pytest.raises(ReadError) as caught:
        Cluster(endpoints, Security(tls, verify=False), timeout_s).route("Orders")
    return str(caught.value)


def test_a_server_of_another_kind_fails_the_query_at_once() -> None:
    with server(HTTP) as address:
        text = refusal(address, timeout_s=3600)
    assert f"no name server of {address} answered the request for the route of topic 'Orders'" in text
    assert "sent a frame of " in text
    assert "; check the option endpoints, and that a name server runs there" in text


def test_a_server_that_never_answers_fails_the_query() -> None:
    with server(None) as address:
        assert "no answer in time; check the option endpoints" in refusal(address)


@pytest.mark.parametrize("first", [HTTP, None, b""])
def test_another_name_server_answers_for_one_that_does_not(
    first: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet_spark.cluster.SILENCE_S", 0.0)
    with server(first) as address:
        names = FakeBroker("names")
        names.topics["Orders"] = {"brokerDatas": [], "queueDatas": []}
        try:
            found = Cluster([address, names.address], Security(), 3600)
            assert found.route("Orders") == found.route("Orders")
            assert found._endpoints[0] == names.address  # which is asked first from now on
        finally:
            CONNECTIONS.close()
            names.close()


def test_a_port_that_may_take_tls_only_is_named() -> None:
    with server(b"") as address:
        text = refusal(address)
    assert "closed the connection without an answer, as a port does that takes TLS only; if it is one, set the" in text


def test_a_port_without_tls_is_named() -> None:
    with server(b"") as address:
        text = refusal(address, tls=True)
    assert "closed the connection while TLS began, as a port without TLS does; if it has none, leave out" in text
    with server(HTTP) as address:
        assert "check that the port takes TLS" in refusal(address, tls=True)


def test_a_broker_that_cannot_be_reached_is_named() -> None:
    names = FakeBroker("names")
    queues = {"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    address = {"cluster": "c", "brokerName": "a", "brokerAddrs": {"0": "127.0.0.1:1"}}
    names.topics["Orders"] = {"brokerDatas": [address], "queueDatas": [queues]}
    try:
        cluster = Cluster([names.address], Security(), 0)
        routes = cluster.routes(["Orders", "Nothing"])
        assert routes.keys() == {"Orders"}
        with pytest.raises(ReadError, match=r"broker 'a' cannot be reached: cannot connect to 127\.0\.0\.1:1: "):
            cluster.bounds(routes)
    finally:
        CONNECTIONS.close()
        names.close()


def test_a_broker_that_cannot_be_watched_is_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would use a core, because Spark asks for offsets without a pause."""
    pauses: list[float] = []
    monkeypatch.setattr("martlet_spark.read.watching.sleep", pauses.append)
    watch = Watch(Cluster(["127.0.0.1:1"], Security(), 0))
    routes = {"Orders": TopicRoute((), {"a": BrokerGroup("", "a", {0: "127.0.0.1:1"})})}
    for wait_s in (0.02, 5.0):
        assert watch.wait({MessageQueue("Orders", "a", 0): 4}, routes, wait_s)
    assert pauses == [0.02, 0.1]


def test_a_client_certificate_opens_ports_that_ask_for_one(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    own = authority.issue_cert("client")
    (tmp_path / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    own.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    said = {"tls": "enforcing", "tls_cert": str(tmp_path / "server.pem"), "tls_client_ca": str(tmp_path / "ca.pem")}
    settings = {f"{part}.{name}": text for part in ("remoting", "nameserver") for name, text in said.items()}
    with broker_process(tmp_path / "data", settings) as endpoints:
        files = {"tlsCa": str(tmp_path / "ca.pem"), "timeoutMs": "0", "subscribe": "Nobody-made-it"}
        for given in ({"tlsCert": "chain.pem", "tlsKey": "key.pem"}, {"tlsCert": "both.pem"}):
            options = {**files, "endpoints": endpoints, **{name: str(tmp_path / file) for name, file in given.items()}}
            source = MartletDataSource(options)
            with pytest.raises(UnknownTopic, match="'Nobody-made-it' is unknown to name server"):  # so it answered
                source.reader(source.schema()).partitions()
        without = MartletDataSource({**files, "endpoints": endpoints})
        with pytest.raises(ReadError, match=r"tlsCert, tlsKey|no name server"):
            without.reader(without.schema()).partitions()
        CONNECTIONS.close()
