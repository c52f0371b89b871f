"""The kernel encodes records as frames of STOMP as Python does."""

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.message import Message
from martlet.records.codec import encode_record
from martlet_stomp.mapping.encoding import HeaderLines
from martlet_stomp.mapping.rests import message_rests
from martlet_stomp.wire.packets import Version

IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
PROPERTIES = st.one_of(
    st.sampled_from([b"", b"CONTENT_TYPE\x01text/plain\x02", b"a:b\x01c\x02", b"a\x01%d %b\x02"]),
    st.sampled_from([b"EXPIRES_MS\x0199\x02", b"timestamp\x011\x02", b"STOMP_BODY_BYTES\x012\x02", b"TAGS\x01t"]),
    st.integers(0, 99).map(b"N\x01%d\x02".__mod__),
    st.binary(max_size=20),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["T", "T", "T", "topic ä", "x" * 127, "x" * 128, "x" * 255]),
    st.one_of(st.binary(max_size=30), st.just(b"%d" * 200)),
    PROPERTIES,
    st.just(0),
    st.just(0),
    st.sampled_from([0, 0, 0, 1, 0x101, 8]),
    st.one_of(st.just(77), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.sampled_from([IPV4, IPV4, IPV4, IPV6]),
)
RECORDS = st.builds(
    lambda message, queue_id, offset, host: encode_record(message, queue_id, offset, 1000, 1, host),
    MESSAGES,
    st.one_of(st.just(3), st.integers(0, (1 << 31) - 1)),
    st.one_of(st.integers(0, 20), st.integers(0, (1 << 63) - 1)),
    st.sampled_from([IPV4, IPV4, IPV6]),
)


def encoded(function: Any, data: bytes, *, with_id: bool) -> list[object]:
    """Return the rests of the records in *data*, twice, and what was learned and encoded alone meanwhile."""
    lines, calls = HeaderLines(Version.V1_2, ""), []

    def alone(*fields: object) -> bytes:
        calls.append(fields)
        return b"%d" % len(calls) if len(calls) % 3 else b""

    def learn(properties: bytes) -> bytes | None:
        calls.append((properties,))
        return lines.learn(properties)

    id_line = b"message-id:100%%-%d-%d\n" if with_id else b""
    template = b"%d-%d\n" + id_line + b"content-length:%d\ntimestamp:%d\n%b\n%b\0"
    terms = template, with_id, lines.table, learn, alone
    return [function(data, terms), function(data, terms), calls, lines.table]


@given(st.one_of(st.lists(RECORDS, max_size=6), RECORDS.map(lambda record: [record] * 4)), st.booleans())
def test_the_kernel_encodes_what_python_encodes(records: list[bytes], with_id: bool) -> None:
    data = b"".join(records)
    python = encoded(message_rests, data, with_id=with_id)
    assert encoded(kernel_of(message_rests), data, with_id=with_id) == python


@given(RECORDS, st.integers(0, 95), st.binary(min_size=1, max_size=8), st.integers(0, 100))
def test_a_damaged_record_is_an_error_of_the_kernel_or_read_as_it_is(
    record: bytes, at: int, piece: bytes, removed: int
) -> None:
    data = record + record[:at] + piece + record[at + len(piece) : len(record) - removed]
    with suppress(ValueError):
        assert kernel_of(message_rests)(data, (b"%d%d%d%d%b%b", False, {}, lambda _: b"", lambda *_: b""))
