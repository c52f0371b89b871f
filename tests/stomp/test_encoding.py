"""MESSAGE frames: the head of a subscription, and the rest of each message."""

from tests.wire_clients.stomp import V1_0, V1_1, V1_2

from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.testing.stores import HOST, ManualClock
from martlet_stomp.mapping.destinations import Destination, Kind
from martlet_stomp.mapping.encoding import LINES_KEPT, HeaderLines, SubscriptionEncodings, message_head

ORDERS = Destination(Kind.QUEUE, "/queue/or:ders", "or%3Aders")


def record(offset: int, body: bytes, properties: bytes = b"") -> bytes:
    message = Message("T", body, properties, born_ms=77, born_host=HOST)
    return encode_record(message, 3, offset, 1000, 1, HOST)


def test_a_head_ends_where_the_place_of_a_message_follows() -> None:
    acked = {"is_acknowledged": True}
    assert message_head("s:1", 7, "t", V1_2, **acked) == b"MESSAGE\nsubscription:s\\c1\nack:7-"
    assert message_head("s:1", 7, "t", V1_2, is_acknowledged=False) == b"MESSAGE\nsubscription:s\\c1\nmessage-id:t-"
    assert message_head("s:1", 7, "t", V1_1, **acked) == b"MESSAGE\nsubscription:s\\c1\nmessage-id:7-"
    assert message_head(None, 7, "t", V1_0, **acked) == b"MESSAGE\nmessage-id:7-"
    assert message_head(None, 7, "t", V1_0, is_acknowledged=False) == b"MESSAGE\nmessage-id:t-"
    assert message_head("s", 7, "t", V1_2, **acked, delivery=3) == (
        b"MESSAGE\nsubscription:s\nredelivered:true\ndelivery-count:3\nack:7-"
    )


def test_the_rest_of_a_message_is_the_same_for_all_subscribers() -> None:
    encodings = SubscriptionEncodings(ManualClock(), ())
    data = record(4, b"body", b"CONTENT_TYPE\x01text/plain\x02a:b\x01c\x02") + record(5, b"")
    of_1_2 = encodings.of(V1_2, ORDERS, is_acknowledged=True)
    assert of_1_2.encode(data) == [
        b"3-4\nmessage-id:or%3Aders-3-4\ndestination:/queue/or\\cders\ncontent-length:4\ntimestamp:77\n"
        b"a\\cb:c\ncontent-type:text/plain\n\nbody\0",
        b"3-5\nmessage-id:or%3Aders-3-5\ndestination:/queue/or\\cders\ncontent-length:0\ntimestamp:77\n\n\0",
    ]
    others = [encodings.of(version, ORDERS, is_acknowledged=version is not V1_2) for version in (V1_0, V1_1, V1_2)]
    assert others[0].encode(data)[1] == b"3-5\ndestination:/queue/or:ders\ncontent-length:0\ntimestamp:77\n\n\0"
    assert (
        others[1].encode(data)[1]
        == others[2].encode(data)[1]
        == (b"3-5\ndestination:/queue/or\\cders\ncontent-length:0\ntimestamp:77\n\n\0")
    )
    assert len({each.name for each in (of_1_2, *others)}) == 4
    assert encodings.of(V1_1, ORDERS, is_acknowledged=False).name == others[1].name


def test_header_lines_are_remembered_up_to_a_bound() -> None:
    lines = HeaderLines(V1_2, "")
    for number in range(2 * LINES_KEPT):
        assert lines.learn(b"n\x01%d\x02" % number) == b"n:%d\n" % number
        assert lines.table[b"n\x01%d\x02" % number] == b"n:%d\n" % number
        assert len(lines.table) <= LINES_KEPT
    for number in range(100):
        lines.learn(b"n\x01%b\x02" % (b"%d" % number * 10_000))
        assert sum(map(len, lines.table)) < 1 << 20
    assert lines.learn(b"EXPIRES_MS\x015\x02") is None
