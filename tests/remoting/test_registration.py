"""Our broker at name servers: the one in its process, and others over a wire in memory."""

from collections.abc import Callable

import orjson
import pytest
import trio
import trio.testing

from martlet.errors import RemoteProtocolError
from martlet.runtime.steps import Steps, finish_now
from martlet_remoting.cluster.registrar import Registrar, create_standard_topics
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.requests import answer
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.answers.errors import BadAnswer
from martlet_remoting.wire.codec import FrameBuffer, encode_response
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import TopicQueues, decode_route

from .conftest import Harness, OpenHarness, joined, keep_nothing

ADDRESS = "127.0.0.1:10911"


def queues_of(server: NameServer, topic: str) -> dict[str, tuple[int, int]]:
    """Read and write queues by broker, as routes say."""
    route = server.table.route(topic)
    return {} if route is None else {q.broker_name: (q.read_queues, q.write_queues) for q in route.queues}


class Elsewhere:
    """A name server at the other end of streams in memory; it can be away, or refuse."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.server = NameServer(NameServerConfig(), keep_nothing)
        self.asked: list[Command] = []
        self.times: list[float] = []
        self.away = False
        self.refuses = False
        self.connects = 0
        self._nursery = nursery
        self.streams: list[trio.abc.Stream] = []

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.connects += 1
        if self.away:
            raise OSError(f"{host}:{port} is away")
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(theirs)
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: trio.abc.Stream) -> None:
        frames = FrameBuffer()
        try:
            while data := await stream.receive_some(65536):
                frames.receive_data(bytes(data))
                for command in frames.commands():
                    self.asked.append(command)
                    self.times.append(trio.current_time())
                    await stream.send_all(self._answer(stream, command))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        self.server.table.drop_connection(stream)

    def _answer(self, stream: trio.abc.Stream, command: Command) -> bytes:
        if self.refuses:
            return encode_response(command.opaque, 1, remark="register broker failed")
        return joined(finish_now(answer(self.server, stream, command)))

    def codes(self) -> list[int]:
        return [command.code for command in self.asked]

    def topics(self, index: int) -> set[str]:
        """The topics that a registration named."""
        return set(orjson.loads(self.asked[index].body)["topicConfigSerializeWrapper"]["topicConfigTable"])


@pytest.fixture
def elsewhere(nursery: trio.Nursery) -> Elsewhere:
    return Elsewhere(nursery)


async def settle() -> None:
    """Run all tasks until they wait for time; data in a memory stream passes several tasks."""
    for _ in range(10):
        await trio.testing.wait_all_tasks_blocked()


async def until(condition: Callable[[], bool]) -> None:
    """Let (virtual) time pass until *condition* holds."""
    with trio.fail_after(300):
        while not condition():  # noqa: ASYNC110 - the time is virtual
            await trio.sleep(0.5)


# in this process


def inside(harness: Harness) -> tuple[NameServer, Registrar]:
    server = NameServer(NameServerConfig(), keep_nothing)
    harness.broker.capabilities[NameServer] = server
    create_standard_topics(harness.broker)
    return server, Registrar(harness.broker)


async def test_standard_topics_have_routes_as_soon_as_the_port_is_bound(harness: Harness) -> None:
    server, registrar = inside(harness)
    assert finish_now(server.table.index.names()) == []
    registrar.bound(ADDRESS)
    for name, count in {
        "TBW102": 8,
        "SELF_TEST_TOPIC": 1,
        "BenchmarkTest": 1024,
        "DefaultCluster": 16,
        "martlet": 1,
        "OFFSET_MOVED_EVENT": 1,
        "SCHEDULE_TOPIC_XXXX": 18,
        "RMQ_SYS_TRACE_TOPIC": 1,
        "DefaultCluster_REPLY_TOPIC": 1,
    }.items():
        assert queues_of(server, name) == {"martlet": (count, count)}
    route = server.table.route("TBW102")
    assert route is not None
    assert route.queues[0].perm == 7
    assert route.brokers["martlet"].addresses == {0: ADDRESS}


async def test_template_is_not_made_where_topics_are_not_made_by_themselves(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, broker={"auto_create_topics": False})
    harness.broker.topics.delete("TBW102")
    create_standard_topics(harness.broker)
    assert harness.broker.topics.get("TBW102") is None
    assert harness.broker.topics.get("SELF_TEST_TOPIC") is not None


async def test_a_broker_may_be_named_after_its_host(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"name": "node-1.example.org", "cluster": "example.org"})
    server, registrar = inside(harness)
    registrar.bound(ADDRESS)
    assert queues_of(server, "TBW102") == {"node-1.example.org": (8, 8)}
    assert queues_of(server, "node-1.example.org") == {}, "a topic's name has no dot"


async def test_changes_are_in_the_route_before_the_request_is_answered(harness: Harness) -> None:
    server, registrar = inside(harness)
    harness.topic("Early")
    registrar.bound(ADDRESS)
    assert queues_of(server, "Early") == {"martlet": (4, 4)}
    harness.topic("Late", 2)
    assert queues_of(server, "Late") == {"martlet": (2, 2)}
    harness.topic("Late", 5)
    assert queues_of(server, "Late") == {"martlet": (5, 5)}


async def test_deleted_topics_leave_the_route_and_the_end_leaves_nothing(
    harness: Harness, autojump_clock: trio.testing.MockClock
) -> None:
    server, registrar = inside(harness)
    registrar.bound(ADDRESS)
    harness.topic("T")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await settle()
        harness.broker.topics.delete("T")
        await settle()
        assert queues_of(server, "T") == {}
        assert queues_of(server, "TBW102")
        nursery.start_soon(server.scan)
        await trio.sleep(1000)
        assert queues_of(server, "TBW102"), "registered again and again"
        nursery.cancel_scope.cancel()
    finish_now(server.table.index.sweep())
    assert server.table.statistics() == {"brokers": 0, "clusters": 0, "topics": 0, "topics_of_all_brokers": 0}


async def test_topics_that_are_deleted_one_by_one_leave_the_routes_together(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    server, registrar = inside(harness)
    whole: list[float] = []
    register = registrar._register_inside

    def counted() -> Steps[None]:
        whole.append(trio.current_time())
        mock_clock.jump(0.05)  # so long it takes with many topics
        yield from register()

    monkeypatch.setattr(registrar, "_register_inside", counted)
    registrar.bound(ADDRESS)
    for number in range(20):
        harness.topic(f"T{number}")
    whole.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        for number in range(20):
            harness.broker.topics.delete(f"T{number}")
            await settle()
            mock_clock.jump(0.05)
            await settle()
        mock_clock.jump(1)
        await settle()
        assert 2 <= len(whole) <= 5
        assert not any(queues_of(server, f"T{number}") for number in range(20))
        nursery.cancel_scope.cancel()


async def test_the_route_contains_the_advertised_host(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, broker={"advertise": "mq.example.org"})
    server, registrar = inside(harness)
    registrar.bound("0.0.0.0:10911")
    assert registrar.address == "mq.example.org:10911"
    assert server.table.group("martlet").addresses == {0: "mq.example.org:10911"}


async def test_full_name_server_has_room_for_every_topic_of_its_own_process(harness: Harness) -> None:
    create_standard_topics(harness.broker)
    server = NameServer(NameServerConfig(topics_max=1), keep_nothing)
    harness.broker.capabilities[NameServer] = server
    Registrar(harness.broker).bound(ADDRESS)
    assert queues_of(server, "TBW102")
    harness.topic("T")
    assert queues_of(server, "T") == {"martlet": (4, 4)}


async def test_several_brokers_share_a_topic(open_harness: OpenHarness, harness: Harness, tmp_path: object) -> None:
    server, registrar = inside(harness)
    registrar.bound(ADDRESS)
    harness.topic("T", 4)
    await harness.store.close()
    other = await open_harness(store={"flush": "async"}, broker={"name": "second"})
    other.broker.capabilities[NameServer] = server
    Registrar(other.broker).bound("127.0.0.1:20911")
    other.topic("T", 2)
    assert queues_of(server, "T") == {"martlet": (4, 4), "second": (2, 2)}


# over a wire


def remote(harness: Harness, elsewhere: Elsewhere) -> Registrar:
    create_standard_topics(harness.broker)
    registrar = Registrar(harness.broker, ["127.0.0.1:9876"], connect=elsewhere.connect)
    registrar.bound(ADDRESS)
    return registrar


async def test_a_broker_registers_all_topics_then_changes_and_all_again_every_30_s(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) == 1)
        assert elsewhere.topics(0) >= {"TBW102", "martlet", "DefaultCluster"}
        assert elsewhere.asked[0].text("heartbeatTimeoutMillis") == "120000"
        assert elsewhere.asked[0].text("brokerId") == "0"
        harness.topic("T")
        harness.topic("U")
        await until(lambda: len(elsewhere.asked) == 2)
        assert elsewhere.topics(1) == {"T", "U"}
        assert queues_of(elsewhere.server, "U") == {"martlet": (4, 4)}
        await trio.sleep(95)
        assert elsewhere.codes() == [RequestCode.REGISTER_BROKER] * 5
        assert [b - a for a, b in zip(elsewhere.times[1:], elsewhere.times[2:], strict=False)] == [30.0, 30.0, 30.0]
        assert elsewhere.topics(4) == elsewhere.topics(0) | {"T", "U"}
        nursery.cancel_scope.cancel()
    assert elsewhere.codes()[-1] == RequestCode.UNREGISTER_BROKER
    assert finish_now(elsewhere.server.table.index.names()) == []


def register(server: NameServer, steps: Steps[tuple[Command, list[bytes]]]) -> None:
    """Send the request that *steps* encode to *server*."""
    command, body = finish_now(steps)
    finish_now(answer(server, None, Command(command.code, command.ext, b"".join(body))))


async def test_a_change_between_a_registration_and_its_encoding_reaches_the_name_server(harness: Harness) -> None:
    server, topics = NameServer(NameServerConfig(), keep_nothing), harness.broker.topics
    registrar = Registrar(harness.broker)
    registrar.bound(ADDRESS)
    create_standard_topics(harness.broker)
    topics.ensure("T", 4)
    steps = registrar.encode(registrar.all_topics())
    topics.update("T", 9, 8)
    register(server, steps)
    assert queues_of(server, "T") == {"martlet": (4, 4)}
    register(server, registrar.encode([topic for topic in registrar.all_topics() if topic.name == "T"]))
    assert queues_of(server, "T") == {"martlet": (9, 8)}


async def test_broker_with_many_topics_mostly_sends_heartbeats(
    autojump_clock: trio.testing.MockClock,
    harness: Harness,
    elsewhere: Elsewhere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("martlet_remoting.cluster.registrar.FEW_TOPICS", 5)
    server, registrar = inside(harness)
    registrar = Registrar(harness.broker, ["127.0.0.1:9876"], connect=elsewhere.connect)
    registrar.bound(ADDRESS)
    register, ask = RequestCode.REGISTER_BROKER, RequestCode.QUERY_DATA_VERSION
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.scan)
        nursery.start_soon(registrar.run)
        await trio.sleep(10 * 30 + 5)
        assert elsewhere.codes() == [register, *[ask] * 9, register]
        assert queues_of(server, "TBW102")
        server.table.delete_topic("TBW102")
        elsewhere.server.table.unregister("DefaultCluster", "martlet", ADDRESS)
        await trio.sleep(30)
        assert elsewhere.codes()[-2:] == [ask, register]
        assert queues_of(elsewhere.server, "TBW102")
        harness.broker.topics.delete("SELF_TEST_TOPIC")
        await trio.sleep(30)
        assert elsewhere.codes()[-2:] == [ask, register]
        assert queues_of(server, "SELF_TEST_TOPIC") == {}
        assert queues_of(server, "TBW102"), "what somebody took away comes back with the whole table"
        nursery.cancel_scope.cancel()


async def test_stopping_broker_unregisters_before_anything_else_ends(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    server, _ = inside(harness)
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) == 1)
        registrar.stop()
        assert finish_now(server.table.index.names()) == []
        harness.topic("T")
        assert finish_now(server.table.index.names()) == []
    assert elsewhere.codes() == [RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER]
    await registrar.run()
    assert len(elsewhere.asked) == 2


async def test_name_server_that_is_away_is_tried_again_and_does_not_hold_others_up(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere, nursery: trio.Nursery
) -> None:
    gone = Elsewhere(nursery)
    gone.away = True
    create_standard_topics(harness.broker)

    async def connect(host: str, port: int) -> trio.abc.Stream:
        return await (gone if port == 1 else elsewhere).connect(host, port)

    registrar = Registrar(harness.broker, ["127.0.0.1:1", "127.0.0.1:2"], connect=connect)
    registrar.bound(ADDRESS)
    async with trio.open_nursery() as inner:
        inner.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) == 1)
        await trio.sleep(60)
        assert 5 <= gone.connects <= 12
        states = registrar.statistics()["nameservers"]
        assert states == {"127.0.0.1:1": "failed: 127.0.0.1:1 is away", "127.0.0.1:2": "registered"}
        gone.away = False
        await until(lambda: bool(gone.asked))
        assert queues_of(gone.server, "TBW102")
        inner.cancel_scope.cancel()


async def test_closed_connection_is_reopened_and_everything_registered(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) == 1)
        before = trio.current_time()
        await elsewhere.streams[0].aclose()
        await until(lambda: len(elsewhere.asked) == 2)
        assert trio.current_time() - before < 5, "the closing is noticed without waiting for the next round"
        assert elsewhere.topics(1) == elsewhere.topics(0)
        nursery.cancel_scope.cancel()


async def test_refused_registration_is_retried_and_not_unregistered(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    elsewhere.refuses = True
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) >= 2)
        assert set(elsewhere.codes()) == {RequestCode.REGISTER_BROKER}
        nursery.cancel_scope.cancel()
    assert RequestCode.UNREGISTER_BROKER not in elsewhere.codes()


async def test_silent_name_server_does_not_hang_the_end(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) == 1)
        elsewhere._answer = lambda stream, command: b""  # type: ignore[method-assign]
        before = trio.current_time()
        nursery.cancel_scope.cancel()
    assert elsewhere.codes()[-1] == RequestCode.UNREGISTER_BROKER
    assert trio.current_time() - before <= 3


async def test_topics_are_ordered_if_a_name_server_says_so(
    autojump_clock: trio.testing.MockClock, harness: Harness, elsewhere: Elsewhere
) -> None:
    await elsewhere.server.kv.put("ORDER_TOPIC_CONFIG", "T", "martlet:4")
    harness.topic("T")
    harness.topic("U")
    registrar = remote(harness, elsewhere)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registrar.run)
        await until(lambda: len(elsewhere.asked) >= 2)
        nursery.cancel_scope.cancel()
    found = {name: topic.order for name in "TU" if (topic := harness.broker.topics.get(name))}
    assert found == {"T": True, "U": False}


# what name servers say of other brokers


async def test_the_internal_name_server_returns_the_route_of_a_topic(harness: Harness) -> None:
    _, registrar = inside(harness)
    assert (list(registrar.queues_inside("T")), registrar.asks_elsewhere) == ([], False)
    registrar.bound(ADDRESS)
    harness.topic("T", 4)
    assert [(found.broker_name, found.read_queues) for found in registrar.queues_inside("T")] == [("martlet", 4)]
    assert list(registrar.queues_inside("Nowhere")) == []


async def test_an_external_name_server_returns_the_route_of_a_topic(harness: Harness, elsewhere: Elsewhere) -> None:
    registrar = remote(harness, elsewhere)
    assert registrar.asks_elsewhere
    elsewhere.server.table.register_topic("T", [TopicQueues("second", 3, 2, 6)])
    assert list(await registrar.queues_elsewhere("T")) == []  # no broker of that name is registered
    other = Registrar(harness.broker)
    other.bound(ADDRESS)
    finish_now(elsewhere.server.table.register(other.registration(complete=True), 0.0))
    elsewhere.server.table.register_topic("T", [TopicQueues("martlet", 3, 2, 6)])
    assert list(await registrar.queues_elsewhere("T")) == [TopicQueues("martlet", 3, 2, 6)]
    assert list(await registrar.queues_elsewhere("Nowhere")) == []
    for stream in elsewhere.streams:
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await stream.send_all(b"x")


async def test_a_name_server_that_fails_is_not_the_last_word(harness: Harness, elsewhere: Elsewhere) -> None:
    connect = elsewhere.connect

    async def only_there(host: str, port: int) -> trio.abc.Stream:
        elsewhere.away = host == "away"
        return await connect(host, port)

    registrar = Registrar(harness.broker, ["away:9876", "there:9876"], connect=only_there)
    registrar.bound(ADDRESS)
    assert list(await registrar.queues_elsewhere("Nowhere")) == []
    elsewhere.refuses = True
    with pytest.raises(RemoteProtocolError, match="was answered 1"):
        await registrar.queues_elsewhere("T")


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"queueDatas":3}', b'{"queueDatas":[1]}', b'{"queueDatas":[{}]}'])
def test_a_route_that_is_none_is_no_answer(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        decode_route(body)
