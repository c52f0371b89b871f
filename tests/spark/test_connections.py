"""Connections of Python workers: who shares them, and how a request is sent."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.codec import FrameBuffer, encode_response
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_spark.connection import COPIED_BYTES_MAX, BrokerConnection, Connections, Security

from .fake_brokers import FakeBroker

TOPICS = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    found = FakeBroker("a")
    yield found
    found.close()


@pytest.fixture
def pool() -> Iterator[Connections]:
    found = Connections()
    yield found
    found.close()


class Counted:
    """A socket that counts how often it sends."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.sends = 0

    def sendall(self, data: bytes) -> None:
        self.sends += 1
        self._inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("body_bytes", "sends"), [(0, 1), (100, 1), (COPIED_BYTES_MAX, 1), (COPIED_BYTES_MAX + 1, 2)])
def test_a_request_waits_for_no_acknowledgement_of_its_first_bytes(
    broker: FakeBroker, body_bytes: int, sends: int
) -> None:
    """Header and body in two packets, and Nagle's algorithm: each request would take 40 ms."""
    with closing(BrokerConnection(broker.address, Security(), 30)) as connection:
        assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        counted = connection._socket = Counted(connection._socket)  # type: ignore[assignment]
        assert connection.request(TOPICS, {}, bytes(body_bytes)).code == 0
        assert counted.sends == sends


def test_tasks_of_a_process_share_connections_and_a_forked_one_has_its_own(
    broker: FakeBroker, pool: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark forks its Python workers: two that read one socket would take each other's answers."""
    with pool.lent(broker.address, Security(), 30) as first:
        first.request(TOPICS, {})
    with pool.lent(broker.address, Security(), 30) as again:
        assert again is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pool.lent(broker.address, Security(), 30) as other:
        assert other is not first
        assert other.request(TOPICS, {}).code == 0
    first.close()


def test_a_connection_whose_answers_nobody_took_is_not_used_again(broker: FakeBroker, pool: Connections) -> None:
    """A query with a limit ends in the middle of its answers, which are not those of the next task."""
    with pool.lent(broker.address, Security(), 30) as first:
        first.send(TOPICS, {})
    with pool.lent(broker.address, Security(), 30) as other:
        assert other is not first
        assert other.request(TOPICS, {}).code == 0
    assert broker.connections == 2


def test_the_answer_to_an_earlier_request_is_not_taken_for_that_of_the_next(broker: FakeBroker) -> None:
    with closing(BrokerConnection(broker.address, Security(), 30)) as connection:
        connection.send(TOPICS, {})
        with pytest.raises(RemoteProtocolError, match="answered request 1 instead of 2"):
            connection.request(TOPICS, {})
        with pytest.raises(RemoteProtocolError, match="answered other requests than it was sent"):
            connection.request_all(TOPICS, [{}, {}])


def test_answers_in_another_order_are_those_of_their_requests() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_in_reverse() -> None:
        peer, _ = listener.accept()
        buffer, asked = FrameBuffer(), list[Command]()
        with peer:
            while len(asked) < 3:
                buffer.receive_data(peer.recv(65536))
                asked += buffer.commands()
            for command in reversed(asked):
                peer.sendall(encode_response(command.opaque, 0, {"topic": command.text("topic")}))

    thread = threading.Thread(target=answer_in_reverse)
    thread.start()
    with (
        listener,
        closing(BrokerConnection("127.0.0.1:{1}".format(*listener.getsockname()), Security(), 30)) as connection,
    ):
        answers = connection.request_all(TOPICS, [{"topic": name} for name in "abc"])
    thread.join()
    assert [answer.ext["topic"] for answer in answers] == ["a", "b", "c"]
