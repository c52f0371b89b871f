"""Topics whose messages have names, such as that of MQTT: subscriptions with topic filters."""

from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stomp.test_selectors import selecting
from tests.wire_clients.stomp import V1_0, StompClient, stomp_broker

from martlet.contracts import Identity
from martlet.delivery.routing.route_cache import RouteCache
from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet.records.layout import RecordView
from martlet_stomp.config import StompConfig
from martlet_stomp.mapping.destinations import is_name, select_names
from martlet_stomp.wire.packets import Version

every_version = pytest.mark.parametrize("version", Version)
NAMES = ["home/door", "home/window", "garden", "home", "home/door/lock", "$SYS/load"]


async def names_of(talk: StompClient, prefix: str = "/topic/mqtt/") -> list[str]:
    """Return the names of the messages that came, without order."""
    return sorted(message["destination"].removeprefix(prefix) for message in await talk.rest())


@every_version
@pytest.mark.parametrize(
    ("topic_filter", "names"),
    [
        ("home/door", ["home/door"]),
        ("home/+", ["home/door", "home/window"]),
        ("home/#", ["home", "home/door", "home/door/lock", "home/window"]),
        ("#", ["garden", "home", "home/door", "home/door/lock", "home/window"]),
        ("+/door/#", ["home/door", "home/door/lock"]),
    ],
)
async def test_a_subscription_has_a_topic_filter(
    tmp_path: Path, version: Version, topic_filter: str, names: list[str]
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(f"/topic/mqtt/{topic_filter}")
        for name in NAMES[:-1]:
            await talk.publish(f"/topic/mqtt/{name}", name.encode(), colour="red")
        await stomp.publish("mqtt", b"", encode_properties({"TAGS": NAMES[-1]}))
        assert await names_of(talk) == names


async def test_a_message_comes_whole(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/mqtt/a/+")
        await talk.publish("/topic/mqtt/a/b c:ä", b"body \0", colour="red", TAGS="mine", KEYS="k", content_length="6")
        (message,) = await talk.messages(1)
        assert message.body == b"body \0"
        headers = {name: value for name, value in message.headers.items() if name != "message-id"}
        assert headers == {
            "subscription": "0",
            "destination": "/topic/mqtt/a/b c:ä",
            "colour": "red",
            "TAGS": "mine",
            "KEYS": "k",
            "content-length": "6",
            "timestamp": message["timestamp"],
        }


async def test_a_topic_filter_must_be_valid(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for destination in ("/topic/mqtt/a#", "/topic/mqtt/#/a", "/queue/mqtt/a+", "/queue/mqtt/#/b"):
            talk = await stomp.connect()
            await talk.publish("/topic/mqtt/a", b"")
            await talk.send(talk.frame("SUBSCRIBE", id="0", destination=destination, receipt="r"))
            error = await talk.error()
            assert "misplaced wildcard" in error["message"]
            assert error["receipt-id"] == "r"


async def test_messages_are_sent_to_names(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for name in ("a/+", "#", "$SYS/a"):
            talk = await stomp.connect()
            await talk.send(talk.frame("SEND", b"x", destination=f"/topic/mqtt/{name}", receipt="r"))
            assert (await talk.error())["receipt-id"] == "r"


async def test_the_whole_topic_can_be_read(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/mqtt")
        await talk.publish("/topic/mqtt/a/b", b"x")
        (message,) = await talk.messages(1)
        assert (message["destination"], message["TAGS"]) == ("/topic/mqtt", "a/b")


@every_version
@pytest.mark.parametrize("ack", ["client", "client-individual"])
async def test_a_client_may_hold_as_many_messages_as_it_says(tmp_path: Path, version: Version, ack: str) -> None:
    if version is V1_0 and ack == "client-individual":
        return
    async with stomp_broker(tmp_path, StompConfig(queues=3)) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe("/topic/mqtt/#", ack, prefetch_count="2")
        await talk.publish("/topic/mqtt/x", b"x")
        for number in range(5):
            await talk.publish(f"/topic/mqtt/{number}", b"%d" % number)
        first = await talk.rest()
        assert len(first) == 2
        await talk.ack(*(first[1:] if ack == "client" else first))
        assert len(await talk.rest()) == 2


async def test_a_selector_chooses_among_them(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/mqtt/home/#", selector="colour = 'red'", name="topic")
        durable = {"durable": "true", "auto_delete": "false"}
        await talk.subscribe("/topic/mqtt/home/#", selector="colour = 'red'", name="durable", **durable)
        for name in ("home/a", "garden"):
            for colour in ("red", "blue"):
                await talk.publish(f"/topic/mqtt/{name}", b"", colour=colour)
        came = sorted((message["subscription"], message["destination"]) for message in await talk.rest())
        assert came == [("durable", "/topic/mqtt/home/a"), ("topic", "/topic/mqtt/home/a")]


async def test_a_queue_has_a_filter_or_selectors(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/mqtt", selector="TAGS = 'home/a'")
        await talk.publish("/topic/mqtt/home/a", b"x")
        assert await talk.bodies(1) == [b"x"]
        await talk.send(talk.frame("SUBSCRIBE", id="1", destination="/queue/mqtt/#", selector="a = 1", receipt="r"))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert b"/queue/mqtt with a selector" in error.body


# queues


async def test_consumers_share_what_a_filter_matches(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two, other = await stomp.connect(), await stomp.connect(), await stomp.connect()
        await one.publish("/topic/mqtt/home/a", b"before")
        await one.subscribe("/queue/mqtt/home/#", "client-individual")
        await two.subscribe("/queue/mqtt/home/#", "client-individual")
        await other.subscribe("/queue/mqtt/#")
        for name in ("home/a", "home/b", "garden"):
            await one.publish(f"/topic/mqtt/{name}", name.encode())
        came = [*await one.rest(), *await two.rest()]
        assert sorted(message["destination"] for message in came) == ["/queue/mqtt/home/a", "/queue/mqtt/home/b"]
        assert len(await other.rest()) == 3
        one.hang_up()
        two.hang_up()
        again = await stomp.connect()
        await again.subscribe("/queue/mqtt/home/#", "client-individual")
        messages = await again.messages(2)
        assert [message["redelivered"] for message in messages] == ["true", "true"]
        await again.ack(*messages)


async def test_durable_subscriptions_can_have_filters(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/mqtt/home/+", durable="true", auto_delete="false")
        await talk.disconnect()
        talk = await stomp.connect()
        for name in NAMES[:4]:
            await talk.publish(f"/topic/mqtt/{name}", b"")
        await talk.subscribe("/topic/mqtt/home/+", durable="true", auto_delete="false")
        came = sorted(message["destination"] for message in await talk.messages(2))
        assert came == ["/topic/mqtt/home/door", "/topic/mqtt/home/window"]
        assert await talk.rest() == []


# permissions


async def test_permissions_are_those_of_the_names(tmp_path: Path) -> None:
    def opinion(identity: Identity, action: str, name: str) -> bool | None:
        if name.startswith("$share"):
            return True
        return name.startswith(("mqtt/home", "probe")) if name != "mqtt" else None

    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("mqtt", 1)
        stomp.broker.topics.ensure("probe", 1)
        stomp.broker.authorizers = (opinion,)
        talk = await stomp.connect()
        await talk.subscribe("/topic/mqtt/home/+", name="topic")
        await talk.subscribe("/queue/mqtt/home/+", name="queue")
        await talk.publish("/topic/mqtt/home/door", b"x")
        assert len(await talk.rest()) == 2
        for refused in (
            talk.frame("SEND", b"", destination="/topic/mqtt/garden", receipt="r"),
            talk.frame("SUBSCRIBE", id="1", destination="/topic/mqtt/#", receipt="r"),
            talk.frame("SUBSCRIBE", id="1", destination="/queue/mqtt/#", receipt="r"),
            talk.frame("SUBSCRIBE", id="1", destination="/topic/mqtt", receipt="r"),
        ):
            talk = await stomp.connect()
            await talk.send(refused)
            error = await talk.error()
            assert "may not" in error["message"]
            assert error["receipt-id"] == "r"


# the selection


def view(name: str) -> RecordView:
    properties = encode_properties({"TAGS": name}) if name else b""
    return RecordView(encode_record(Message("mqtt", b"", properties), 0, 0, 0, 0, bytes(8)))


LEVELS = st.sampled_from(["", "a", "b", "$a", "a.b"])


@given(
    st.lists(LEVELS | st.just("+"), min_size=1, max_size=4),
    st.booleans(),
    st.lists(LEVELS | st.sampled_from(["+", "#"]), min_size=1, max_size=4),
)
def test_a_queue_selects_what_a_topic_filter_matches(levels: list[str], has_rest: bool, name_levels: list[str]) -> None:
    topic_filter = "/".join([*levels, "#"] if has_rest else levels)
    name = "/".join(name_levels)
    routes: RouteCache[str] = RouteCache()
    routes.is_name = is_name
    if not topic_filter:
        return
    routes.add(topic_filter, "s")
    selection = select_names(topic_filter)
    assert selection.predicate is not None
    assert selection.predicate(view(name)) is bool(set(routes.route(name).grants))


@pytest.mark.parametrize("name", ["$SYS/broker/version", "home/+", "#"])
async def test_a_name_in_the_header_tags_has_the_rules_of_one_in_the_destination(tmp_path: Path, name: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for destination in ("/topic/mqtt", "/queue/mqtt", f"/topic/mqtt/{name}"):
            talk = await stomp.connect()
            await talk.send(talk.frame("SEND", b"x", destination=destination, TAGS=name, receipt="r"))
            assert "mqtt" in (await talk.error())["message"]
        talk = await stomp.connect()
        await talk.publish("/topic/mqtt", b"x", TAGS="home/door")
        await talk.publish("/topic/plain", b"x", TAGS=name)


@pytest.mark.parametrize("destination", ["/topic/mqtt/home/door", "/topic/mqtt"])
async def test_messages_of_one_name_are_in_one_queue_whoever_sends_them(tmp_path: Path, destination: str) -> None:
    """The name may be in the destination or in the header TAGS, and the messages in a transaction or not."""
    names = {} if destination.endswith("door") else {"TAGS": "home/door"}
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("mqtt", 16)
        for number in range(10):
            talk = await stomp.connect()
            await talk.publish(destination, b"%d" % number, **names)
            await talk.publish(destination, b"%d expires" % number, **names, expiration="60000")
            await talk.send(talk.frame("BEGIN", transaction="t"))
            await talk.send(talk.frame("SEND", b"%d in t" % number, destination=destination, transaction="t", **names))
            await talk.send(talk.frame("COMMIT", transaction="t", receipt="c"))
            await talk.receipt("c")
        records = stomp.records("mqtt")
        assert len(records) == 30
        assert {record.queue_id for record in records} == {crc32(b"home/door") % 16}
