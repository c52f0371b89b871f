"""Connections: made secretly where asked, given up when nobody answers, and never the end of the client."""

import ssl

import pytest
import trio
import trustme
from trio.testing import MockClock

from martlet_client import Admin, ClientSettings, Message, NameServerUnreachable, Producer, PushConsumer
from martlet_remoting.wire.codes import RequestCode

from .fake import NAME_SERVER, Cluster, Connection
from .listening import Listener, wait_for
from .test_consumer import GROUP, first


async def test_silent_broker_is_connected_anew(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        await producer.send(Message("T", b"x"))
        cluster.broker.overrides[RequestCode.HEART_BEAT] = lambda command: None
        await trio.sleep(40)
        del cluster.broker.overrides[RequestCode.HEART_BEAT]
        await producer.send(Message("T", b"y"))
    assert cluster.connected.count("a:1") >= 2


async def test_silent_name_server_is_left_for_the_other(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(name_server="mute:9876;names:9876"), "P") as producer:
        await producer.send(Message("T", b"x"))
        start = trio.current_time()
        cluster.topics["U"] = 1
        await producer.send(Message("U", b"x"))
        assert trio.current_time() == start


async def test_broker_that_asks_and_leaves_ends_nothing(cluster: Cluster, autojump_clock: MockClock) -> None:
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}):
        await wait_for(lambda: "me" in cluster.broker.members[GROUP])
        connection = cluster.broker.members[GROUP]["me"]
        ext: dict[str, object] = {"consumerGroup": GROUP}
        for _ in range(100):
            cluster.nursery.start_soon(connection.tell, RequestCode.GET_CONSUMER_RUNNING_INFO, ext, b"")
        await cluster.broker.drop_connections()
        cluster.broker.put("T", 0, b"x")
        await listener.wait_count(1)
    assert [message.body for message in listener.messages] == [b"x"]


async def test_typing_error_in_a_topic_does_not_flood_the_name_server(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    async with PushConsumer(cluster.settings(), GROUP, Listener(), {"Tpyo": "*"}):
        await trio.sleep(600)
    asked = [command for command in cluster.name_requests if command.text("topic") == "Tpyo"]
    assert len(asked) < 60


async def test_topic_that_is_made_later_is_consumed(cluster: Cluster, autojump_clock: MockClock) -> None:
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*", "Later": "*"}):
        await trio.sleep(10)
        cluster.topics["Later"] = 1
        cluster.broker.put("Later", 0, b"x")
        await listener.wait_count(1)
    assert [(message.topic, message.body) for message in listener.messages] == [("Later", b"x")]


@pytest.mark.parametrize("trusted", [True, False])
async def test_connections_are_encrypted_where_asked(
    cluster: Cluster, autojump_clock: MockClock, trusted: bool
) -> None:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("names", "a").configure_cert(server)
    client = ssl.create_default_context()
    if trusted:
        authority.configure_trust(client)

    async def connect(host: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        secret: trio.SSLStream[trio.abc.Stream] = trio.SSLStream(theirs, server, server_side=True)
        answer = cluster.broker.answer if port == 1 else cluster.answer
        cluster.nursery.start_soon(Connection(secret, answer).serve, cluster.nursery)
        return ours

    settings = ClientSettings(NAME_SERVER, tls=client, connect=connect, clock=cluster.clock)
    async with Producer(settings, "P") as producer:
        if trusted:
            assert (await producer.send(Message("T", b"secret"))).queue.broker_name == "broker-a"
        else:
            with pytest.raises(Exception, match="cannot be opened: its certificate was rejected: "):
                await producer.send(Message("T", b"secret"))


async def test_peer_of_another_protocol_is_named_by_its_first_bytes(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def connect(host: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(theirs.send_all, b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return ours

    async with Admin(ClientSettings(NAME_SERVER, connect=connect)) as admin:
        with pytest.raises(
            NameServerUnreachable, match=r"speaks another protocol, its first bytes are b'HTTP/1.1 400 Ba"
        ):
            await admin.cluster()


async def test_peer_that_hangs_up_unanswered_may_require_tls(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def connect(host: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(theirs.aclose)
        return ours

    async with Admin(ClientSettings(NAME_SERVER, connect=connect)) as admin:
        with pytest.raises(NameServerUnreachable, match="without an answer; it may require TLS"):
            await admin.cluster()


async def test_failed_handshake_closes_its_connection(autojump_clock: MockClock) -> None:
    opened: list[trio.abc.Stream] = []

    async def connect(host: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        opened.append(theirs)
        await theirs.send_all(b"this is no TLS")
        return ours

    async with Admin(ClientSettings(NAME_SERVER, connect=connect, tls=ssl.create_default_context())) as admin:
        with pytest.raises(NameServerUnreachable, match="TLS failed: WRONG_VERSION_NUMBER"):
            await admin.cluster()
        (theirs,) = opened
        while await theirs.receive_some():  # its hello; a connection left open would never end
            pass
