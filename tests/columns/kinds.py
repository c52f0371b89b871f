"""Stored records of every kind, as a strategy of Hypothesis."""

import zlib
from typing import Any, Final

import lz4.frame
import zstandard
from hypothesis import strategies as st

from martlet.message import PROPERTIES_BYTES_MAX, Message, encode_properties
from martlet.records.codec import encode_record, with_room_for_record_crc, write_record_crc
from martlet.records.compression import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD
from martlet.records.layout import GROUP_MASK, MAGIC_AT, MAGIC_V2, PREPARED, ROLLBACK, SYS_FLAG_AT
from martlet_columns.schema import MS_MAX, MS_MIN

IPV4: Final = b"\x7f\0\0\x01\0\0\x30\x39"
IPV6: Final = bytes(range(20))
I32: Final = st.integers(-(1 << 31), (1 << 31) - 1)
I64: Final = st.integers(-(1 << 63), (1 << 63) - 1)
TIMES: Final = st.one_of(
    st.integers(1_600_000_000_000, 1_800_000_000_000),
    st.sampled_from([0, -1, MS_MIN, MS_MIN - 1, MS_MAX, MS_MAX + 1]),
    I64,
)
TEXTS: Final = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=6)
LIGHT: Final = encode_properties({"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b", "INNER_MULTI_QUEUE_OFFSET": "7,9"})
DELAYS: Final = encode_properties({"DELAY": "3", "REAL_TOPIC": "Orders", "REAL_QID": "1", "TIMER_DELIVER_MS": "17"})
PARTS: Final = st.sampled_from(
    [
        *(b"KEYS\x01k\x02", b"KEYS\x01a b\x02", "KEYS\x01☃\x02".encode(), b"TAGS\x01a\x02", b"TAGS\x01\xff\x02"),
        *(
            b"UNIQ_KEY\x01U\x02",
            b"a\x01b\x02",
            b"a\x01\x02",
            b"\x01b\x02",
            b"a\x01b\x01c\x02",
            b"n\x01\0\x02",
            b"\xfe\x01x\x02",
        ),
        *(b"", b"\x02", b"TAGS", b"COMPRESSED_BODY\x01x\x02", LIGHT, DELAYS),
    ]
)
PROPERTIES: Final = st.one_of(
    st.dictionaries(TEXTS.filter(bool), TEXTS, max_size=5).map(encode_properties),
    st.dictionaries(TEXTS.filter(bool), TEXTS.filter(bool), min_size=1, max_size=5).map(
        lambda found: encode_properties(found)[:-1]  # without the last separator
    ),
    st.lists(PARTS, max_size=6).map(b"".join),
    st.binary(max_size=20),
    st.sampled_from(
        [
            encode_properties({"long": "x" * (PROPERTIES_BYTES_MAX - 6)}),
            bytes((0xFF,)) * PROPERTIES_BYTES_MAX,
            b"".join(b"%d\x01v\x02" % number for number in range(200)),
        ]
    ),
)
BYTES: Final = st.one_of(st.just(b""), st.binary(max_size=60), st.binary(max_size=9).map(lambda part: part * 400))
# Bodies with the bits that name their compression, right and wrong ones.
BODIES: Final = st.one_of(
    st.tuples(BYTES, st.just(0)),
    st.tuples(BYTES, st.just(0)),
    st.tuples(BYTES.map(zlib.compress), st.sampled_from([COMPRESSED, COMPRESSED | COMPRESSION_ZLIB])),
    st.tuples(BYTES.map(zstandard.compress), st.just(COMPRESSED | COMPRESSION_ZSTD)),
    st.tuples(BYTES.map(lz4.frame.compress), st.just(COMPRESSED | COMPRESSION_LZ4)),
    st.tuples(BYTES, st.sampled_from([COMPRESSED, COMPRESSED | COMPRESSION_LZ4, COMPRESSED | 0x700, COMPRESSION_ZSTD])),
)
# Other bits: batch, several tags, prepared, rolled back, inner batch, unknown ones.
FLAGS: Final = st.one_of(
    st.just(0), st.sampled_from([0x2, 0x8, PREPARED, ROLLBACK, 0xC0, 0x80]), st.integers(0, (1 << 31) - 1)
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """A message of any kind; usual ones are the most frequent."""
    body, compression = draw(BODIES)
    topics = st.one_of(st.sampled_from(["Orders"] * 8 + ["☃", "x" * 127, "x" * 128, "ü" * 120, "t" * 255]), TEXTS)
    return Message(
        draw(topics),
        body,
        draw(PROPERTIES),
        flag=draw(st.one_of(st.just(0), I32)),
        sys_flag=(draw(FLAGS) & ~(COMPRESSED | 0x700)) | compression,
        born_ms=draw(TIMES),
        born_host=draw(st.sampled_from([IPV4] * 4 + [IPV6])),
        reconsume_times=draw(st.one_of(st.just(0), I32)),
        prepared_position=draw(st.one_of(st.just(0), I64)),
    )


@st.composite
def stored_records(draw: st.DrawFn) -> bytes:
    """The record of a message of any kind."""
    message = draw(messages())
    has_crc = draw(st.booleans()) and len(message.properties) < PROPERTIES_BYTES_MAX - 30
    if has_crc:
        message.properties = with_room_for_record_crc(message.properties)
    place: tuple[Any, ...] = draw(st.tuples(I32, I64, I64, TIMES, st.sampled_from([IPV4] * 4 + [IPV6])))
    record = bytearray(encode_record(message, *place))
    if draw(st.sampled_from([False, False, True])) and record[MAGIC_AT + 3] != MAGIC_V2 & 0xFF:
        record = _as_v2(record, len(message.topic.encode()), len(message.properties))
    record[SYS_FLAG_AT] |= draw(st.sampled_from([0, 0, 0x20, 0x40, GROUP_MASK >> 24]))
    if has_crc:
        write_record_crc(record, 0, len(record))
    return bytes(record)


def _as_v2(record: bytearray, topic_bytes: int, properties_bytes: int) -> bytearray:
    """Return *record* with a length of the topic in two bytes, which V2 allows for each topic."""
    at = len(record) - properties_bytes - 2 - topic_bytes - 1
    found = record[:at] + b"\0" + record[at:]
    found[:4] = len(found).to_bytes(4, "big")
    found[MAGIC_AT : MAGIC_AT + 4] = MAGIC_V2.to_bytes(4, "big")
    return found
