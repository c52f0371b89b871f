"""A broker that lost parts of its files: each message is read, or the query fails or says which ones it lacks.

Every kind of damage has a topic of its own, in one log, so that one restart damages all of them.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.interop.martlet_process import Martlet

from martlet.records.layout import BLANK_ENTRY, ENTRY_BYTES, HEAD_BYTES, RecordView
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import DataLost, ReadError
from martlet_spark.read.exchange import pull_only

from .clusters import Messages, Stream, batch_of

pytestmark = pytest.mark.spark

COUNT = 30  # of each of two queues
FLIPPED = {15, 38, 40}  # of all messages of a topic, which go to the queues in turn
KINDS = ("flipped", "zeroed", "rebuilt", "entry", "blank", "entries", "segment", "nothing")
REPORTS = re.compile(r"messages (\d+) to (\d+) of queue martlet/(\d) of topic '[^']*' (?:are damaged|were removed)")


@dataclass
class Topic:
    """A topic without the messages with the numbers *lost*."""

    messages: Messages
    lost: set[int] = field(default_factory=set)

    def left(self, tag: str) -> list[bytes]:
        """The bodies with *tag* that can be read."""
        there = [body for body in self.messages.bodies if number_of(body) not in self.lost]
        return sorted(body for body in there if tag in ("", tag_of(number_of(body))))


def number_of(body: bytes) -> int:
    return int(body.split()[2])


def tag_of(number: int) -> str:
    return f"T{number // 2 % 2}"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    broker = Martlet(tmp_path_factory.mktemp("damaged"), {"store.segment_bytes": str(1 << 17)})
    try:
        yield broker
    finally:
        CONNECTIONS.close()
        broker.close()


@pytest.fixture(scope="module")
def damaged(broker: Martlet) -> dict[str, Topic]:
    """The topics of *broker*, by what happened to each."""
    topics: dict[str, Topic] = {}
    for kind in KINDS:
        topics[kind] = Topic(Messages(broker.name_server))
        for number in range(COUNT):
            body_bytes = 20_000 if kind == "segment" else 100
            topics[kind].messages.send(1, body_bytes=body_bytes, tags=tag_of(2 * number))
    broker.stop()
    queues, log = broker.data / "consumequeue", broker.data / "commitlog"
    for kind in ("flipped", "zeroed", "rebuilt"):
        topics[kind].lost = FLIPPED
        for body in topics[kind].messages.bodies:
            if number_of(body) in FLIPPED:
                (zero if kind == "zeroed" else flip)(log, body)
    shutil.rmtree(queues / topics["rebuilt"].messages.name)
    remove_from_the_middle(log, topics["segment"])
    broker.start()
    for kind, entry in (("entry", bytes(ENTRY_BYTES)), ("blank", BLANK_ENTRY)):
        for path in (queues / topics[kind].messages.name).glob("*/*"):
            data = bytearray(path.read_bytes())
            data[5 * ENTRY_BYTES : 6 * ENTRY_BYTES] = entry
            path.write_bytes(data)
    shutil.rmtree(queues / topics["entries"].messages.name)
    return topics


def flip(log: Path, body: bytes) -> None:
    """Change a bit of *body* in the log."""
    path, data, at = find(log, body)
    data[at] ^= 1
    path.write_bytes(data)


def zero(log: Path, body: bytes) -> None:
    """Overwrite the record of *body* with zeros."""
    path, data, at = find(log, body)
    start = at - HEAD_BYTES
    size = RecordView(data, start).size
    data[start : start + size] = bytes(size)
    path.write_bytes(data)


def find(log: Path, body: bytes) -> tuple[Path, bytearray, int]:
    """Return the file of the log with *body*, its content, and where the body is."""
    for path in log.iterdir():
        data = bytearray(path.read_bytes())
        at = data.find(body)
        if at >= 0:
            return path, data, at
    raise AssertionError(f"{body!r} is not in the log")


def remove_from_the_middle(log: Path, topic: Topic) -> None:
    """Remove a file of the log, which has only messages of *topic*."""
    body = re.compile(re.escape(topic.messages.name.encode()) + rb" martlet/\d (\d+)")
    paths = [path for path in sorted(log.iterdir()) if body.search(path.read_bytes())]
    path = paths[len(paths) // 2]
    topic.lost = {int(number) for number in body.findall(path.read_bytes())}
    path.unlink()


def stream_of(messages: Messages, **options: str) -> Iterator[bytes]:
    stream = Stream(messages, **options)
    try:
        yield from stream.rows(stream.plan())
    finally:
        stream.reader.stop()


@pytest.fixture(params=["bulk", "pulls"])
def protocol(request: pytest.FixtureRequest, broker: Martlet) -> Iterator[str]:
    """How tasks read: by bulk reads, or by pulls as from RocketMQ."""
    if request.param == "pulls":
        pull_only.add(broker.address)
    yield request.param
    pull_only.discard(broker.address)


@pytest.mark.parametrize("rows", [batch_of, stream_of])
@pytest.mark.parametrize("kind", KINDS)
def test_each_message_is_read_or_reported(
    kind: str,
    rows: Callable[..., Iterator[bytes]],
    protocol: str,
    damaged: dict[str, Topic],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = damaged[kind]
    found: list[bytes] = []
    if topic.lost:
        with pytest.raises((DataLost, ReadError)) as failed:
            found += rows(topic.messages)
        text = str(failed.value)
        assert REPORTS.search(text) or "'martlet store verify'" in text
        assert set(found) <= set(topic.left(""))
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        assert sorted(rows(topic.messages, failOnDataLoss="false")) == topic.left("")
    assert reported(caplog) == topic.lost


@pytest.mark.parametrize("filtered", [{"tags": "T1"}, {"sql": "TAGS = 'T1'"}], ids=["tag", "sql"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_hides_no_damage(
    kind: str, filtered: dict[str, str], damaged: dict[str, Topic], caplog: pytest.LogCaptureFixture
) -> None:
    topic = damaged[kind]
    wanted = {number for number in topic.lost if tag_of(number) == "T1"}
    if wanted:
        with pytest.raises((DataLost, ReadError)):
            list(batch_of(topic.messages, **filtered))
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        assert sorted(batch_of(topic.messages, failOnDataLoss="false", **filtered)) == topic.left("T1")
    assert wanted <= reported(caplog) <= topic.lost


def reported(caplog: pytest.LogCaptureFixture) -> set[int]:
    """The numbers of the messages that warnings name."""
    found: set[int] = set()
    for first, last, queue in REPORTS.findall(caplog.text):
        found |= {2 * offset + int(queue) for offset in range(int(first), int(last) + 1)}
    return found
