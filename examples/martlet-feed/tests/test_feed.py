"""The feed over a real broker, without a socket."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.config import fill
from martlet.errors import ConfigError, RemoteProtocolError
from martlet.message import Message
from martlet.testing.peers import MemoryPeer, Serving, check_connection, serving
from martlet_feed import Feed, FeedConfig, FeedConnection, FeedPlugin, More


def connect(running: Serving, **settings: Any) -> MemoryPeer:
    (protocol,) = FeedPlugin(FeedConfig(**settings)).martlet_protocols(running.broker)
    return running.connect(protocol)


def publish(running: Serving, *bodies: bytes, sys_flag: int = 0) -> None:
    running.broker.topics.ensure("news", 1)
    for body in bodies:
        running.broker.publish(Message("news", body, sys_flag=sys_flag))
    running.broker.store.committer.commit()


async def received(peer: MemoryPeer) -> bytes:
    return await peer.receive_exactly(int(await peer.receive_line()))


async def test_a_feed_begins_with_the_oldest_message_and_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        publish(running, b"one")
        peer = connect(running)
        await peer.send(b"FEED news\n")
        assert await received(peer) == b"one"
        publish(running, b"two\nlines")
        assert await received(peer) == b"two\nlines"


async def test_credit_bounds_what_comes_until_more_is_asked_for(tmp_path: Path, autojump_clock: Any) -> None:
    async with serving(tmp_path) as running:
        publish(running, b"1", b"2", b"3")
        peer = connect(running, credit=1)
        await peer.send(b"FEED news\n")
        assert await received(peer) == b"1"
        await trio.sleep(1)
        assert peer.waiting() == 0
        await peer.send(b"MORE 2\n")
        assert [await received(peer), await received(peer)] == [b"2", b"3"]


async def test_a_compressed_body_arrives_as_it_was_sent(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        publish(running, zlib.compress(b"x" * 5000), sys_flag=0x301)
        peer = connect(running)
        await peer.send(b"FEED news\n")
        assert await received(peer) == b"x" * 5000


async def test_a_deleted_topic_ends_its_feeds(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        publish(running, b"1")
        peer = connect(running)
        await peer.send(b"FEED news\n")
        assert await received(peer) == b"1"
        running.broker.topics.delete("news")
        assert await peer.receive_some() == b""


async def test_authorizers_are_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        running.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "news"),)
        peer = connect(running)
        await peer.send(b"FEED news\n")
        assert (await peer.receive_line()).startswith(b"ERROR no permission: '' may not subscribe to topic[news]")


async def test_a_feed_creates_its_topic(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        peer = connect(running, new_topic_queues=3)
        await peer.send(b"FEED fresh\n")
        await trio.testing.wait_all_tasks_blocked()
        topic = running.broker.topics.get("fresh")
        assert topic is not None
        assert topic.read_queues == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"FEED bad/name\n", b"ERROR parameter: The specified topic 'bad/name' contains illegal characters"),
        (b"FEED SCHEDULE_TOPIC_XXXX\n", b"ERROR no permission: Reading topic[SCHEDULE_TOPIC_XXXX] is forbidden"),
        (b"FEED %RETRY%g\n", b"ERROR no topic: topic[%RETRY%g] does not exist"),
        (b"FEED a\nFEED b\n", b"ERROR this connection has a feed"),
        (b"EAT a\n", b"ERROR line 'EAT a' is not a command; send FEED TOPIC or MORE NUMBER"),
        (b"x" * 400, b"ERROR line is longer than 300 bytes"),
    ],
)
async def test_a_mistake_closes_the_peer_with_a_reason(tmp_path: Path, line: bytes, text: bytes) -> None:
    async with serving(tmp_path) as running:
        peer = connect(running)
        await peer.send(line)
        assert (await peer.receive_line()).startswith(text)
        assert await peer.receive_some() == b""


def test_commands_are_found_however_the_stream_is_cut() -> None:
    check_connection(FeedConnection, b"FEED news\nMORE 12\nMORE 1\n", [Feed("news"), More(12), More(1)])
    with pytest.raises(RemoteProtocolError):
        check_connection(FeedConnection, b"MORE -1\n", [])


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'feed.credit' is 20; it must be at most feed.credit_max, 10"):
        FeedPlugin(fill(FeedConfig, {"credit": 20, "credit_max": 10}, "feed"))
