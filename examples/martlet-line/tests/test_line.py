"""The whole protocol over a real broker: over memory, and the first promises over sockets as well."""

import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trustme
from line_talk import Room, SocketPeer, Talk, room
from tests.cold_disk import cold_disk

from martlet.config import fill
from martlet.contracts import Identity, Predicate, Stage
from martlet.message import Message
from martlet.net.addresses import split_address
from martlet.plugins.loader import guarded_filter
from martlet.settings import DeliveryConfig
from martlet.store import StoreConfig
from martlet.store.read.readers import Readers
from martlet.tables.groups import Group
from martlet.tables.topics import BROKER_TOPICS, EVENT_TOPIC
from martlet.testing.peers import RecordingPeer, serving
from martlet.testing.stores import small_config
from martlet_line.config import LineConfig
from martlet_line.connection import LineConnection
from martlet_line.filters import compile_properties
from martlet_line.packets import Publish
from martlet_line.plugin import protocol

Connect = Callable[[], Awaitable[Talk]]


@pytest.fixture(params=["memory", "sockets"])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Connections to a broker with sync flush, over wires in memory and over real sockets."""
    addresses: list[str] = []
    config = LineConfig(listen="127.0.0.1:0", idle_s=0)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            serving(tmp_path, ports=lambda broker: [protocol(config, broker, addresses.append)])
        )

        async def over_memory() -> Talk:
            await trio.lowlevel.checkpoint()
            return Talk(running.connect(protocol(config, running.broker)))

        async def over_sockets() -> Talk:
            stream = await stack.enter_async_context(await trio.open_tcp_stream(*split_address(addresses[0])))
            return Talk(SocketPeer(stream))

        yield over_memory if request.param == "memory" else over_sockets


async def test_a_published_message_is_acknowledged_and_pushed(connect: Connect) -> None:
    publisher, subscriber = await connect(), await connect()
    assert await subscriber.ask("SUB news") == "OK 1"
    assert await publisher.ask("PUB news hello world") == "OK 0 0"
    assert await publisher.ask("PUB news k=v l=a%20b : x=y") == "OK 0 1"
    first, second = await subscriber.messages(2)
    assert (first.queue_id, first.offset, first.body) == (0, 0, b"hello world")
    assert (second.offset, second.body, second.properties) == (1, b"x=y", b"k\x01v\x02l\x01a b\x02")


async def test_a_body_with_newlines_is_put_and_comes_back_whole(connect: Connect) -> None:
    talk = await connect()
    body = bytes(range(256)) * 2000
    assert await talk.ask("SUB t") == "OK 1"
    assert await talk.ask(b"PUT t %d k=v\n%b" % (len(body), body)) == "OK 0 0"
    (message,) = await talk.messages(1)
    assert message.body == body


async def test_many_messages_arrive_in_order_at_all_subscribers(connect: Connect) -> None:
    publisher, *subscribers = [await connect() for _ in range(4)]
    for subscriber in subscribers:
        assert await subscriber.ask("SUB t credit 100000") == "OK 1"
    await publisher.say("\n".join(f"PUB t message {n}" for n in range(5000)))
    for offset in range(5000):
        assert await publisher.line() == f"OK 0 {offset}"
    for subscriber in subscribers:
        assert await subscriber.bodies(5000) == [f"message {n}" for n in range(5000)]


async def test_quit_says_bye_and_closes(connect: Connect) -> None:
    talk = await connect()
    await talk.say("PING\nQUIT\nPING")
    assert await talk.end() == "PONG\nBYE"


async def test_a_line_that_is_too_long_closes_the_peer_with_an_error(connect: Connect) -> None:
    talk, other = await connect(), await connect()
    await talk.say(b"x" * 70_000)
    assert await talk.end() == "ERR PROTOCOL a line is longer than 65536 bytes; use PUT for large bodies"
    await other.quiet()


# publishing


async def test_an_acknowledgement_waits_until_the_message_is_durable(tmp_path: Path) -> None:
    async with room(tmp_path, store=StoreConfig(flush="sync")) as made:
        peer, store = RecordingPeer(), made.broker.store
        handler = made.protocol.handle(peer, LineConnection)
        handler.handle(Publish("t", [b"a", b"b"], [b"", b""]))
        assert peer.take_sent() == b"OK 0 0\nOK 0 1\n"
        assert peer.held == store.appended
        assert store.readable < peer.held


async def test_one_publishers_messages_stay_in_one_queue(tmp_path: Path) -> None:
    async with room(tmp_path, LineConfig(idle_s=0, new_topic_queues=8)) as made:
        talk = made.connect()
        answers = [(await talk.ask("PUB t x")).split() for _ in range(20)]
        assert len({queue for _, queue, _ in answers}) == 1
        assert [int(offset) for _, _, offset in answers] == list(range(20))


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("PUB bad/name x", "ERR PARAMETER The specified topic 'bad/name' contains illegal characters"),
        ("PUB sealed x", "ERR NO_PERMISSION topic[sealed] is not writable"),
        ("SUB hidden", "ERR NO_PERMISSION topic[hidden] is not readable"),
        ("SUB t credit 99999999999", "ERR PARAMETER credit would be 99999999999; line.credit_max is 10000000"),
        ("SUB t group G lease 0", "ERR PARAMETER a lease of 0 s is out of range; it is 1 to 3600"),
        ("SUB t group bad/name", "ERR PARAMETER The specified group 'bad/name' contains illegal characters"),
        (f"SUB t as {'n' * 1025}", "ERR ILLEGAL the name of a session has 1025 bytes; shorten it to 1024"),
        ("CREDIT 7 1", "ERR NOT_FOUND subscription 7 does not exist"),
        ("CREDIT 1 99999999", "ERR PARAMETER credit would be 100000999"),
        ("ACK 1 0 0", "ERR ILLEGAL subscription 1 is neither durable nor of a group; there is nothing to ACK"),
        ("ACK 2 0 0", "ERR PARAMETER message 0 of queue 0 was not sent; ACK only messages that were"),
        ("ACK 2 77 0", "ERR PARAMETER message 0 of queue 77 was not sent; ACK only messages that were"),
        ("ACK 3 0 0", "ERR NOT_HELD subscription 3 does not hold message 0 of queue 0"),
        ("ACK 3 0 0 999999", "ERR PARAMETER more than 10000 messages; line.ack_range_max is 10000"),
        ("NACK 1 0 0", "ERR ILLEGAL subscription 1 is not of a group; it holds no leases"),
        ("NACK 3 0 0", "ERR NOT_HELD subscription 3 does not hold message 0 of queue 0"),
        ("NACK 3 0 0 99999999", "ERR PARAMETER delay 99999999 ms; line.nack_delay_max_ms is 3600000"),
        ("EXTEND 3 88 0", "ERR NOT_HELD subscription 3 does not hold message 0 of queue 88"),
        ("UNSUB 1 forget", "ERR ILLEGAL subscription 1 is not durable; there is nothing to forget"),
        ("UNSUB 9", "ERR NOT_FOUND subscription 9 does not exist"),
        ("SUB other as N2 credit 99999999999", "ERR PARAMETER credit would be"),
        ("SUB t as N", "ERR ILLEGAL 'N' is already subscribed to topic[t] on this connection"),
        ("SUB t group G tags A", "ERR ILLEGAL group 'G' selects '' of topic 't'; use the same selection"),
        ("PONG", "ERR SYNTAX PONG: nobody asked"),
        ("nonsense", "ERR SYNTAX 'nonsense' is not a command; try HELP"),
    ],
)
async def test_what_cannot_be_done_is_answered_with_a_code_and_what_is_expected(
    tmp_path: Path, line: str, answer: str
) -> None:
    async with room(tmp_path) as made:
        made.broker.topics.update("sealed", 1, 1, 4)
        made.broker.topics.update("hidden", 1, 1, 2)
        talk = made.connect()
        assert await talk.ask("SUB t") == "OK 1"
        assert await talk.ask("SUB t as N") == "OK 2"
        assert await talk.ask("SUB t group G") == "OK 3"
        assert (await talk.ask(line)).startswith(answer)
        assert await talk.ask("UNSUB 1") == "OK 1"


async def test_each_message_of_a_run_has_its_own_answer(tmp_path: Path) -> None:
    async with room(tmp_path) as made:

        def stage(message: Message) -> Message:
            if message.body == b"bad":
                made.broker.topics.update("t", 1, 1, 4)
            return message

        made.broker.set_stages([("toy", Stage(stage))])
        talk = made.connect()
        await talk.say("PUB t good\nPUB t bad\nPUB t late")
        assert await talk.line() == "OK 0 0"
        assert (await talk.line()).startswith("ERR NO_PERMISSION")
        assert (await talk.line()).startswith("ERR NO_PERMISSION")


async def test_a_topic_must_exist_where_topics_are_not_made_by_themselves(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        made.broker.topics.auto_create_enabled = False
        talk = made.connect()
        for line in ("PUB t x", "SUB t", "SUB t as N", "SUB t group G"):
            assert (await talk.ask(line)).startswith("ERR NO_TOPIC topic[t] does not exist")


async def test_a_durable_subscription_that_is_refused_leaves_no_name_behind(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert (await talk.ask("SUB t as N1 where NOSUCH x")).startswith("ERR NOT_SUPPORTED")
        assert (await talk.ask("SUB t as N2 credit 99999999999")).startswith("ERR PARAMETER")
        assert len(made.broker.sessions) == 0


async def test_who_may_not_publish_or_read_is_refused_on_every_path(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        allowed = {("publish", "open"), ("read", "open")}

        def opinion(identity: Identity, action: str, topic: str) -> bool:
            return (action, topic) in allowed

        made.broker.authorizers = (opinion,)
        talk = made.connect()
        for line in ("PUB t x", "SUB t", "SUB t as N", "SUB t group G"):
            assert (await talk.ask(line)).startswith("ERR NO_PERMISSION '' may not ")
        assert await talk.ask("SUB open") == "OK 1"
        allowed.remove(("read", "open"))
        made.broker.rules.changed()
        await talk.say("PUB open secret")
        assert sorted([await talk.line(), await talk.line()]) == [
            "END 1 '' may not subscribe to topic[open]",
            "OK 0 0",
        ]


async def test_a_group_is_asked_about_by_its_retry_topic(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        denied: set[str] = {"%RETRY%G"}
        made.broker.authorizers = (lambda identity, action, topic: topic not in denied,)
        talk = made.connect()
        assert await talk.ask("SUB t group G") == "ERR NO_PERMISSION '' may not subscribe to consumer group[G]"
        assert made.broker.groups.get("G") is None
        assert await talk.ask("SUB t group H") == "OK 1"
        denied.add("%RETRY%H")
        made.broker.rules.changed()
        assert await made.connect().ask("PUB t x") == "OK 0 0"
        assert await talk.line() == "END 1 '' may not subscribe to consumer group[H]"


@pytest.mark.parametrize("topic", sorted(BROKER_TOPICS - {EVENT_TOPIC}))
async def test_what_only_the_broker_writes_is_not_to_be_had(tmp_path: Path, topic: str) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        for there in (False, True):
            if there:
                made.broker.topics.ensure(topic, 1)
            for line, text in (
                (f"PUB {topic} x", "Sending message to"),
                (f"SUB {topic}", "Reading"),
                (f"SUB {topic} as N", "Reading"),
            ):
                assert (await talk.ask(line)).startswith(f"ERR NO_PERMISSION {text} topic[{topic}] is forbidden; ")
        assert made.broker.store.appended == 0


@pytest.mark.parametrize("topic", ["%RETRY%G", "%DLQ%G", "TBW102", "rmq_sys_x", "BenchmarkTest"])
async def test_topics_of_the_system_and_of_groups_are_not_made_by_naming_them(tmp_path: Path, topic: str) -> None:
    async with room(tmp_path) as made:
        for line in (f"PUB {topic} x", f"SUB {topic}", f"SUB {topic} group N"):
            assert (await made.connect().ask(line)).split()[1] in ("NO_TOPIC", "NO_PERMISSION")
        assert len(made.broker.topics) == 0


async def test_dead_letters_are_read_and_not_written(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert (await talk.ask("SUB %DLQ%G")).startswith("ERR NO_TOPIC topic[%DLQ%G] does not exist")
        made.broker.groups.ensure("G")
        assert (await talk.ask("PUB %DLQ%G x")).startswith("ERR NO_PERMISSION topic[%DLQ%G]: publish is for the broker")
        assert await talk.ask("SUB %DLQ%G") == "OK 1"
        topic = made.broker.topics.get("%DLQ%G")
        assert topic is not None
        assert (topic.read_queues, topic.write_queues) == (1, 1)


# TLS


@pytest.mark.parametrize("mode", ["permissive", "enforcing", "disabled"])
async def test_the_port_takes_tls_as_it_is_told(tmp_path: Path, mode: str) -> None:
    authority, cert = trustme.CA(), tmp_path / "cert.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(cert))
    config = fill(LineConfig, {"listen": "127.0.0.1:0", "tls": mode, "tls_cert": str(cert)}, "line")
    addresses: list[str] = []
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving(tmp_path / "data", ports=lambda broker: [protocol(config, broker, addresses.append)]):
        for wanted in ("plain", "tls"):
            async with await trio.open_tcp_stream(*split_address(addresses[0])) as plain:
                stream = plain if wanted == "plain" else trio.SSLStream(plain, context, server_hostname="localhost")
                talk = Talk(SocketPeer(stream))
                if (mode, wanted) == ("disabled", "tls"):
                    with pytest.raises(trio.BrokenResourceError):
                        await talk.say("PING")
                elif (mode, wanted) == ("enforcing", "plain"):
                    await talk.say("PING")
                    assert "client speaks plain text; this port requires TLS" in await talk.line()
                else:
                    assert await talk.ask("PING x") == "PONG x"


# subscribing


async def test_a_subscription_begins_where_it_says(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        for n in range(5):
            await talk.ask(f"PUB t {n}")
        assert await talk.ask("SUB t from earliest") == "OK 1"
        assert await talk.bodies(5) == ["0", "1", "2", "3", "4"]
        assert await talk.ask("SUB t from offset 3") == "OK 2"
        assert await talk.bodies(2, number=2) == ["3", "4"]
        assert await talk.ask("SUB t from offset 99") == "OK 3"
        assert await talk.ask("SUB t") == "OK 4"
        await talk.quiet()
        await made.connect().ask("PUB t 5")
        numbers = set()
        for _ in range(4):
            _, number, count, size = (await talk.line()).split()
            assert (count, await talk.wire.receive_exactly(int(size))) == ("1", b"MSG 0 5 1\n5\n")
            numbers.add(number)
        assert numbers == {"1", "2", "3", "4"}


async def test_no_more_messages_come_than_there_is_credit(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        for n in range(6):
            await talk.ask(f"PUB t {n}")
        assert await talk.ask("SUB t from earliest credit 2") == "OK 1"
        assert await talk.bodies(2) == ["0", "1"]
        await talk.quiet()
        await talk.say("CREDIT 1 3")
        assert await talk.bodies(3) == ["2", "3", "4"]
        await talk.quiet()
        assert await talk.ask("SUB t from earliest credit 0") == "OK 2"
        await talk.quiet()


async def test_a_subscription_can_want_some_tags_only(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t tags Aa,C") == "OK 1"
        # "BB" has the hash code of "Aa"
        for tag in ("Aa", "BB", "C", "D"):
            await made.connect().ask(f"PUB t TAGS={tag} {tag}")
        assert await talk.bodies(2) == ["Aa", "C"]


async def test_a_subscription_can_use_any_filter_language_that_a_plugin_brings(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        made.broker.filters["PROPERTIES"] = compile_properties
        talk = made.connect()
        assert await talk.ask("SUB t where PROPERTIES colour=red size=9") == "OK 1"
        assert await talk.ask("SUB t tags A where PROPERTIES size=9") == "OK 2"
        for properties in ("colour=red", "colour=red size=9 x=y", "size=9 TAGS=A", "size=8 TAGS=A", ""):
            await made.connect().ask(f"PUB t {properties} : {properties}")
        assert await talk.bodies(1) == ["colour=red size=9 x=y"]
        assert await talk.bodies(1, number=2) == ["size=9 TAGS=A"]
        await talk.quiet()
        assert await talk.ask("SUB t where SQL92 a > 1") == (
            "ERR NOT_SUPPORTED filter language 'SQL92' is not installed; enable its plugin, or select by tags"
        )
        assert (await talk.ask("SUB t where PROPERTIES colour")).startswith("ERR ILLEGAL 'colour' is not a property")


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("group", ["", " group G"])
async def test_a_filter_that_raises_ends_its_subscription_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: bool, group: str
) -> None:
    def compile_short(expression: str) -> Predicate:
        return lambda record: len(record.body) // (len(record.body) - int(expression)) > 0

    async with room(tmp_path) as made:
        made.broker.filters["SHORT"] = guarded_filter("toys", "SHORT", compile_short)
        if not near:
            monkeypatch.setattr(Readers, "read_near", lambda *arguments: None)
        talk, other = made.connect(), made.connect()
        assert await talk.ask(f"SUB t{group} where SHORT 3") == "OK 1"
        assert await talk.ask("SUB u") == "OK 2"
        assert await other.ask("SUB t") == "OK 1"
        assert await made.connect().ask("PUB t long") == "OK 0 0"
        assert await talk.bodies(1) == ["long"]
        assert await made.connect().ask("PUB t abc") == "OK 0 1"
        reason = "plugin 'toys' failed in its filter SHORT; ZeroDivisionError: integer division or modulo by zero"
        assert await talk.line() == f"END 1 {reason}"
        assert await other.bodies(2) == ["long", "abc"]
        assert await made.connect().ask("PUB u x") == "OK 0 0"
        assert await talk.bodies(1, number=2) == ["x"]


async def test_unsub_ends_a_subscription(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t") == "OK 1"
        assert await talk.ask("UNSUB 1") == "OK 1"
        assert await talk.ask("PUB t x") == "OK 0 0"
        await talk.quiet()
        assert made.broker.store.queue("t", 0).watchers is None


async def test_a_deleted_topic_ends_its_subscriptions(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t") == "OK 1"
        assert await talk.ask("SUB t group G") == "OK 2"
        made.broker.topics.delete("t")
        assert {await talk.line(), await talk.line()} == {"END 1 the topic was deleted", "END 2 the topic was deleted"}
        await talk.quiet()


async def test_queues_that_come_later_are_read_from_their_beginning(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t") == "OK 1"
        made.broker.topics.update("t", 4, 4)
        for queue_id in range(4):
            made.broker.publish(Message("t", b"q%d" % queue_id, queue_id=queue_id))
        made.broker.store.committer.commit()
        assert sorted(await talk.bodies(4)) == ["q0", "q1", "q2", "q3"]


async def test_a_limit_of_subscriptions_is_named(tmp_path: Path) -> None:
    async with room(tmp_path, LineConfig(idle_s=0, subscriptions_max=2)) as made:
        talk = made.connect()
        assert [await talk.ask("SUB t") for _ in range(2)] == ["OK 1", "OK 2"]
        answer = await talk.ask("SUB t")
        assert answer == "ERR BUSY 2 subscriptions of this connection; line.subscriptions_max is 2"
        assert await talk.ask("UNSUB 1") == "OK 1"
        assert await talk.ask("SUB t") == "OK 3"


async def test_a_reader_that_does_not_read_holds_bounded_memory_and_nobody_up(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        slow, quick, publisher = made.connect(capacity=4096), made.connect(), made.connect()
        body = "x" * 1000
        assert await slow.ask("SUB t credit 1000000") == "OK 1"
        assert await quick.ask("SUB t credit 1000000") == "OK 1"
        most = 0
        for _ in range(100):
            await publisher.say("\n".join([f"PUB t {body}"] * 100))
            for _ in range(100):
                await publisher.line()
            assert len(await quick.messages(100)) == 100
            most = max(most, made.running.server.pending.unsent_bytes)
        assert most < 2 * made.running.server.config.collect_bytes  # of 10 MB that were published
        offsets = [message.offset for message in await slow.messages(10_000)]
        assert offsets == list(range(10_000))


async def test_a_backlog_on_disk_is_pushed_to_subscribers_and_groups(tmp_path: Path) -> None:
    store = StoreConfig(flush="async", cache_bytes=0, page_bytes=65536, segment_bytes=1 << 20)
    async with room(tmp_path, store=store) as made:
        publisher = made.connect()
        for start in range(0, 4000, 500):
            await publisher.say("\n".join(f"PUB t {n} {'x' * 1000}" for n in range(start, start + 500)))
            for _ in range(500):
                await publisher.line()
        one, member = made.connect(), made.connect()
        assert await one.ask("SUB t from earliest credit 4000") == "OK 1"
        assert await member.ask("SUB t group G from earliest credit 300") == "OK 1"
        assert [message.offset for message in await one.messages(4000)] == list(range(4000))
        got = 0
        while got < 4000:
            offsets = [message.offset for message in await member.batch()]
            assert offsets == list(range(got, got + len(offsets)))
            await member.say(f"ACK 1 0 {offsets[0]} {offsets[-1]}")
            got += len(offsets)
        await member.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 4000


async def test_a_thousand_slow_consumers_cost_numbers_and_hold_nobody_up(tmp_path: Path) -> None:
    async with room(tmp_path, LineConfig(idle_s=0, credit_default=1)) as made:
        slow = [made.connect(capacity=200) for _ in range(1000)]
        for talk in slow:
            assert await talk.ask("SUB t") == "OK 1"
        quick, publisher = made.connect(), made.connect()
        assert await quick.ask("SUB t credit 100000") == "OK 1"
        for _ in range(10):
            await publisher.say("\n".join([f"PUB t {'x' * 500}"] * 100))
            for _ in range(100):
                await publisher.line()
            assert len(await quick.messages(100)) == 100
        # Each has credit for one message, of which its socket takes less than half.
        assert made.running.server.pending.unsent_bytes <= 1000 * 600
        assert made.broker.subscriptions.encodings.kept_bytes <= DeliveryConfig().encoded_bytes
        assert [message.offset for message in await slow[500].messages(1)] == [0]


async def test_garbage_ends_its_own_peer_and_no_other(tmp_path: Path) -> None:
    source = random.Random(7)
    async with room(tmp_path) as made:
        good = made.connect()
        assert await good.ask("SUB t") == "OK 1"
        for round_ in range(60):
            peer = made.memory(capacity=1 << 20)
            data = source.randbytes(source.randint(1, 3000))
            head = source.choice(
                [b"", b"PUB t ", b"PUT t 99\n", b"SUB t ", b"ACK 1 0 ", b"\x00", b"PUT t 9999999999\n"]
            )
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.send(head + data + b"\n" + b"x" * source.choice([0, 70_000]))
            if source.random() < 0.5:
                peer.close()
            publisher = made.connect()
            answer = (await publisher.ask(f"PUB t round {round_}")).split()
            assert answer[0] == "OK"
            publisher.wire.close()
        await good.say("CREDIT 1 100000")
        said: list[bytes] = []
        while not said or said[-1] != b"round 59":
            said += [message.body for message in await good.batch()]
        assert [body for body in said if body.startswith(b"round ")] == [b"round %d" % n for n in range(60)]
        statistics = made.broker.stats.collect()
        assert statistics["line"]["published"] == len(said)
        assert statistics["line"]["delivered"] == len(said)
        assert statistics["line"]["subscriptions"] == statistics["subscriptions"]["subscriptions"]


# durable


async def test_a_durable_subscription_goes_on_where_it_acknowledged(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        first = made.connect()
        assert await first.ask("SUB t as N") == "OK 1"
        for n in range(5):
            await made.connect().ask(f"PUB t {n}")
        assert await first.bodies(5) == ["0", "1", "2", "3", "4"]
        await first.say("ACK 1 0 2")
        await first.quiet()
        first.wire.close()
        await made.connect().ask("PUB t 5")
        second = made.connect()
        assert await second.ask("SUB t as N") == "OK 1"
        assert await second.bodies(3) == ["3", "4", "5"]


async def test_a_durable_subscription_outlives_the_broker(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        for n in range(4):
            await made.connect().ask(f"PUB t {n}")
        await talk.bodies(4)
        await talk.say("ACK 1 0 1")
        await talk.quiet()
    async with room(tmp_path) as made:
        assert made.broker.sessions.table.get("line N") is not None
        await made.connect().ask("PUB t 4")
        talk = made.connect()
        assert await talk.ask("SUB t as N from tail") == "OK 1"
        assert await talk.bodies(3) == ["2", "3", "4"]


async def test_who_comes_with_a_name_that_is_in_use_takes_over(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        first, second = made.connect(), made.connect()
        assert await first.ask("SUB t as N") == "OK 1"
        assert await first.ask("SUB u as N") == "OK 2"
        assert await first.ask("SUB t") == "OK 3"
        assert await second.ask("SUB t as N") == "OK 1"
        assert [await first.line(), await first.line()] == [
            "END 1 another connection uses the name",
            "END 2 another connection uses the name",
        ]
        await made.connect().ask("PUB t x")
        assert await first.bodies(1, number=3) == ["x"]
        assert await second.bodies(1) == ["x"]
        assert await first.ask("SUB t as N") == "OK 4"
        assert await second.line() == "END 1 another connection uses the name"


async def test_forget_drops_a_durable_subscription_with_its_cursor(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        assert await talk.ask("SUB u as N") == "OK 2"
        assert await talk.ask("UNSUB 1 forget") == "OK 1"
        state = made.broker.sessions.table.get("line N")
        assert state is not None
        assert list(state.filters) == ["u"]
        assert await talk.ask("UNSUB 2 forget") == "OK 2"
        assert len(made.broker.sessions) == 0
        assert await talk.ask("PUB t x") == "OK 0 0"
        assert await talk.ask("SUB t as N") == "OK 3"
        await talk.quiet()


async def test_a_topic_that_was_made_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        for n in range(3):
            await made.connect().ask(f"PUB t {n}")
        await talk.bodies(3)
        await talk.say("ACK 1 0 2")
        await talk.quiet()
        made.broker.topics.delete("t")
        assert await talk.line() == "END 1 the topic was deleted"
        for n in range(5):
            await made.connect().ask(f"PUB t again{n}")
        assert await talk.ask("SUB t as N") == "OK 2"
        assert await talk.bodies(5, number=2) == [f"again{n}" for n in range(5)]


async def test_a_queue_that_came_while_the_client_was_away_is_read_from_its_beginning(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        talk.wire.close()
        await made.connect().ask("PUB t 0")
        made.broker.topics.update("t", 2, 2)
        made.broker.publish(Message("t", b"other", queue_id=1))
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        assert sorted(await talk.bodies(2)) == ["0", "other"]


async def test_durable_subscriptions_do_not_make_the_event_loop_wait_for_the_disk(tmp_path: Path) -> None:
    cold, disk = cold_disk()
    store = small_config(flush="async")
    async with room(tmp_path, store=store, disk=disk) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        for n in range(40):
            await made.connect().ask(f"PUB t {n}")
        await talk.bodies(40)
        await talk.say("ACK 1 0 20")
        await talk.quiet()
    async with room(tmp_path, store=store, disk=disk) as made:
        cold.on_loop = cold.off = 0
        talk = made.connect()
        assert await talk.ask("SUB t as N credit 100") == "OK 1"
        assert await talk.bodies(19) == [str(n) for n in range(21, 40)]
        await talk.say("ACK 1 0 25")
        await talk.quiet()
        assert cold.on_loop == 0
        assert cold.off > 0


async def test_a_name_taken_over_while_the_disk_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, disk = cold_disk()
    store = small_config(flush="async")
    async with room(tmp_path, store=store, disk=disk) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        await made.connect().ask("PUB t x\nPUB t y")
        await talk.bodies(2)
        await talk.say("ACK 1 0 0")
        await talk.quiet()
    gates = [trio.Event()]
    gates[0].set()
    off_loop = cold.off_loop

    async def wait(work: Callable[[], object]) -> object:
        await gates[0].wait()
        return await off_loop(work)

    monkeypatch.setattr(cold, "off_loop", wait)
    async with room(tmp_path, store=store, disk=disk) as made:
        gates[0] = may_read = trio.Event()
        first, second = made.connect(), made.connect()
        await first.say("SUB t as N")
        while not made.broker.turns.off_loop:
            await trio.lowlevel.checkpoint()
        assert await second.ask("SUB u as N") == "OK 1"
        may_read.set()
        assert (await first.line()).startswith("ERR BUSY another connection took 'N' over")
        assert await second.ask("SUB t as N") == "OK 2"
        assert await second.bodies(1, number=2) == ["y"]
        assert await first.ask("SUB t as N") == "OK 1"
        assert await first.bodies(1) == ["y"]


async def test_a_durable_name_expires_as_configured(tmp_path: Path) -> None:
    async with room(tmp_path, LineConfig(idle_s=0, session_expiry_s=100)) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N") == "OK 1"
        state = made.broker.sessions.table.get("line N")
        assert state is not None
        assert state.expiry_s == 100


async def test_a_reset_moves_groups(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t group G") == "OK 1"
        await made.connect().ask("PUB t a\nPUB t b\nPUB t c")
        assert len(await talk.batch(1)) == 3
        await talk.say("ACK 1 0 0 2")
        await talk.quiet()
        made.broker.groups.offsets.reset("G", "t", {0: 2})
        assert await talk.bodies(1, number=1) == ["c"]


async def test_acknowledging_the_past_again_changes_nothing(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        assert await talk.ask("SUB t as N from earliest") == "OK 1"
        for n in range(4):
            await made.connect().ask(f"PUB t {n}")
        await talk.bodies(4)
        await talk.say("ACK 1 0 2", "ACK 1 0 0")
        await talk.quiet()
        talk.wire.close()
        talk = made.connect()
        assert await talk.ask("SUB t as N from earliest") == "OK 1"
        assert await talk.bodies(1) == ["3"]
        await talk.quiet()


# groups


async def group_of(made: Room, count: int, options: str = "credit 1") -> list[Talk]:
    members = [made.connect() for _ in range(count)]
    for member in members:
        assert await member.ask(f"SUB t group G {options}") == "OK 1"
    return members


async def test_each_message_of_a_group_goes_to_one_member(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        members = await group_of(made, 3)
        for n in range(3):
            await made.connect().ask(f"PUB t {n}")
        bodies = [(await member.bodies(1))[0] for member in members]
        assert sorted(bodies) == ["0", "1", "2"]
        for member in members:
            await member.quiet()


async def test_an_acknowledged_message_gives_its_credit_back_and_is_committed(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        (member,) = await group_of(made, 1)
        for n in range(3):
            await made.connect().ask(f"PUB t {n}")
        for n in range(3):
            assert await member.bodies(1) == [str(n)]
            await member.quiet()
            await member.say(f"ACK 1 0 {n}")
        await member.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 3
        assert await member.ask("ACK 1 0 2") == (
            "ERR NOT_HELD subscription 1 does not hold message 2 of queue 0; its lease may have ended"
        )


async def test_a_range_is_acknowledged_at_once(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        (member,) = await group_of(made, 1, "credit 100")
        await made.connect().ask("\n".join(["PUB t x"] * 50))
        await member.messages(50)
        await member.say("ACK 1 0 0 49")
        await member.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 50


async def test_when_a_holder_dies_its_messages_go_to_another_at_once(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        dying, other = await group_of(made, 2, "credit 10")
        await made.connect().ask("PUB t a")
        holder = dying if dying.wire.waiting() else other  # type: ignore[attr-defined]
        rest = other if holder is dying else dying
        assert await holder.bodies(1) == ["a"]
        holder.wire.close()
        (message,) = await rest.batch(delivery=2)
        assert message.body == b"a"
        await rest.say("ACK 1 0 0")
        await rest.quiet()


async def test_a_message_of_a_silent_holder_goes_to_another_when_its_lease_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with room(tmp_path) as made:
        (silent,) = await group_of(made, 1, "credit 1 lease 20")
        await made.connect().ask("PUB t a")
        assert await silent.bodies(1) == ["a"]
        began = trio.current_time()
        (other,) = await group_of(made, 1, "credit 1 lease 20")
        (message,) = await other.batch(delivery=2)
        assert 19.9 <= trio.current_time() - began <= 20.1
        assert message.body == b"a"
        assert (await silent.ask("ACK 1 0 0")).startswith("ERR NOT_HELD")
        await other.say("ACK 1 0 0")
        await other.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 1


async def test_extend_keeps_a_lease(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with room(tmp_path) as made:
        busy, other = await group_of(made, 2, "credit 1 lease 20")
        await made.connect().ask("PUB t a")
        holder = busy if busy.wire.waiting() else other  # type: ignore[attr-defined]
        await holder.bodies(1)
        for _ in range(4):
            await trio.sleep(15)
            await holder.say("EXTEND 1 0 0")
            await holder.quiet()
        await (other if holder is busy else busy).quiet()
        await holder.say("ACK 1 0 0")
        await holder.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 1


async def test_a_message_that_is_refused_comes_back_after_its_delay(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with room(tmp_path) as made:
        (member,) = await group_of(made, 1, "credit 1")
        await made.connect().ask("PUB t a")
        await member.bodies(1)
        began = trio.current_time()
        await member.say("NACK 1 0 0 5000")
        await member.batch(delivery=2)
        assert 4.9 <= trio.current_time() - began <= 5.1
        await member.say("NACK 1 0 0")
        await member.batch(delivery=3)
        assert 5.4 <= trio.current_time() - began <= 5.6


async def test_what_is_delivered_in_vain_too_often_goes_to_the_dead_letter_topic(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        made.broker.groups.update(Group("G", retry_max_times=2))
        (member,) = await group_of(made, 1)
        await made.connect().ask("PUB t k=v poison")
        for delivery in (1, 2, 3):
            await member.batch(delivery=delivery)
            await member.say("NACK 1 0 0")
        reader = made.connect()
        assert await reader.ask("SUB %DLQ%G from earliest") == "OK 1"
        (letter,) = await reader.messages(1)
        assert letter.body == b"poison"
        assert letter.properties.startswith(b"k\x01v\x02DLQ_ORIGIN_TOPIC\x01t\x02DLQ_ORIGIN_MESSAGE_ID\x01")
        await member.quiet()
        assert made.broker.groups.offsets.get("G", "t", 0) == 1
        assert made.broker.shared_groups.statistics()["dead_letters"] == 1


async def test_a_group_goes_on_after_a_restart_with_what_was_not_acknowledged(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        (member,) = await group_of(made, 1, "credit 10")
        await made.connect().ask("PUB t a\nPUB t b\nPUB t c")
        assert await member.bodies(3) == ["a", "b", "c"]
        await member.say("ACK 1 0 0")
        await member.quiet()
    async with room(tmp_path) as made:
        (member,) = await group_of(made, 1, "credit 10")
        assert await member.bodies(2, delivery=2) == ["b", "c"]


# time


async def test_a_silent_peer_is_asked_and_closed(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with room(tmp_path, LineConfig(idle_s=30)) as made:
        talk, polite = made.connect(), made.connect()
        assert await talk.line() == "PING"
        assert await polite.line() == "PING"
        await polite.say("PONG")
        assert await talk.end() == "ERR PROTOCOL nothing was received for 60 s"
        assert await polite.line() == "PING"
        await polite.quiet()


async def test_help_is_there(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        talk = made.connect()
        await talk.say("HELP", "QUIT")
        text = await talk.end()
        assert text.startswith("INFO PUB topic")
        assert text.endswith("BYE")


async def test_the_conversation_of_the_readme_is_true(tmp_path: Path) -> None:
    async with room(tmp_path) as made:
        left, right = made.connect(), made.connect()
        said = ["SUB news", await left.ask("SUB news")]
        published = ["PUB news colour=red hello", await right.ask("PUB news colour=red hello")]
        said += [await left.line() for _ in range(3)]
    text = (Path(__file__).parents[1] / "README.md").read_text()
    block = text[text.index("$ nc 127.0.0.1 10920") :].splitlines()[1:6]
    assert [line[:46].strip() for line in block] == said
    assert [line[46:].strip() for line in block if line[46:].strip()] == published
