"""Connections that are cut anywhere in an answer, answers in small pieces, and answers that never come."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from tests.interop.martlet_process import Martlet

from martlet.net.addresses import split_address
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import ReadError

from .clusters import Messages, Stream, batch_of
from .proxy import Proxy, proxy

pytestmark = pytest.mark.spark
MESSAGES = 400  # of 1 KiB in each queue
FETCH = {"fetchBytes": "64k", "columns": "body,queue,offset"}


@dataclass(frozen=True)
class Broken:
    """A topic of a broker that clients reach through a proxy."""

    topic: Messages
    proxy: Proxy


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    broker = Martlet(tmp_path_factory.mktemp("broken"), {"broker.advertise": "127.0.0.2"})
    try:
        host, port = split_address(broker.address)
        with proxy(("127.0.0.2", port), (host, port)) as found:
            topic = Messages(broker.name_server)
            topic.send(MESSAGES, body_bytes=1024)
            yield Broken(topic, found)
            CONNECTIONS.close()
    finally:
        broker.close()


def by_queue(bodies: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """The *bodies* of each queue, in their order."""
    found: dict[bytes, list[bytes]] = {}
    for body in bodies:
        found.setdefault(body.split()[1], []).append(body)
    return found


@pytest.mark.parametrize(
    "cuts",
    [
        (0, 0, 1, 3),
        (5, 20, 100, 110, 120),
        (300, 1000, 1025, 1300, 4096),
        (70_000, 65_000, 66_000, 130_000, 131_072),
        (200_000, 1, 200_000, 1, 200_000, 1),
        (64 << 10, 0, 64 << 10, 7),
    ],
)
def test_each_message_comes_once_however_connections_are_cut(broken: Broken, cuts: tuple[int, ...]) -> None:
    broken.proxy.cut(cuts)
    before = broken.proxy.was_cut
    assert by_queue(batch_of(broken.topic, **FETCH)) == by_queue(broken.topic.bodies)
    stream = Stream(broken.topic, **FETCH)
    assert stream.batch() == sorted(broken.topic.bodies)
    assert broken.proxy.was_cut - before == len(cuts)
    stream.reader.stop()


def test_answers_may_come_in_small_pieces(broken: Broken) -> None:
    broken.proxy.piece_bytes = 700
    try:
        assert sorted(batch_of(broken.topic, **FETCH)) == sorted(broken.topic.bodies)
    finally:
        broken.proxy.piece_bytes = 1 << 16


def test_answers_that_do_not_come_fail_the_query(broken: Broken) -> None:
    stream = Stream(broken.topic, timeoutMs="0")
    end = stream.plan()
    [partition] = stream.reader.partitions(stream.offset, end)
    broken.proxy.silent = True
    try:
        with pytest.raises(ReadError, match=r"broker 'martlet' cannot be reached: .* no answer in time; start it"):
            stream.plan()
        with pytest.raises(ReadError, match=r"broker 'martlet' cannot be read: .* no answer in time; start it"):
            list(stream.reader.read(partition))
    finally:
        broken.proxy.silent = False
        broken.proxy.cut(())
        stream.reader.stop()
    assert stream.batch(end) == sorted(broken.topic.bodies)
