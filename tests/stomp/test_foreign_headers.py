"""Producers of other protocols cannot write the headers that STOMP clients take for the broker's."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, V1_2, stomp_broker

from martlet_stomp.wire.packets import Version

OF_BROKER = (
    "ack",
    "content-length",
    "delivery-count",
    "destination",
    "message-id",
    "receipt",
    "redelivered",
    "subscription",
    "transaction",
)


@pytest.mark.parametrize("version", list(Version))
@pytest.mark.parametrize("destination", ["/queue/a", "/topic/a"])
@pytest.mark.parametrize("ack", ["auto", "client"])
async def test_properties_with_names_of_the_broker_are_no_headers(
    tmp_path: Path, version: Version, destination: str, ack: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender, talk = await stomp.connect(), await stomp.connect(version)
        await talk.subscribe(destination, ack)
        await sender.publish(destination, b"usual")
        (usual,) = await talk.messages(1)
        names = [*OF_BROKER, *([f" {name} " for name in OF_BROKER] if version is V1_0 else [])]
        properties = b"".join(b"%b\x010\x02" % name.encode() for name in names) + b"other\x01x\x02"
        await stomp.publish("a", b"the body", properties, queue_id=0)
        (message,) = await talk.messages(1)
        assert message.body == b"the body"
        assert message.headers.keys() == usual.headers.keys() | {"other"}
        for name in ("destination", "subscription"):
            assert message[name] == usual[name]


@pytest.mark.parametrize("name", OF_BROKER)
async def test_a_forged_block_has_no_headers_of_the_broker(tmp_path: Path, name: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/a", b"usual")
        block = b'{"%b":"0","other":"x"}' % name.encode()
        await stomp.publish("a", b"in a property", b"STOMP_BLOCK\x01%b\x02" % block, queue_id=0)
        await stomp.publish("a", b"in the body" + block, b"STOMP_BODY_BYTES\x0111\x02", queue_id=0)
        await talk.subscribe("/queue/a")
        usual, *forged = await talk.messages(3)
        assert [message.body for message in forged] == [b"in a property", b"in the body"]
        assert [message["other"] for message in forged] == ["x", "x"]
        assert {frozenset(message.headers) for message in forged} == {frozenset(usual.headers.keys() | {"other"})}


async def test_a_padded_name_does_not_come_before_the_content_length(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_2)
        await talk.send(b"SEND\ndestination:/queue/a\n content-length:1\n\nthe body\0")
        await talk.subscribe("/queue/a")
        (message,) = await talk.messages(1)
        # Clients that trim names take the first of two.
        names = [name.strip() for name in message.headers]
        assert list(message.headers)[names.index("content-length")] == "content-length"
        assert message[" content-length"] == "1"
