"""The kernel finds cheap records, and the places of records, as Python does."""

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.delivery.costly import cheap_records
from martlet.delivery.fanout import record_places
from martlet.message import Message
from martlet.records.codec import encode_record

IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
RECORDS = st.builds(
    lambda body, properties, sys_flag, host, offset, position: encode_record(
        Message("T", body, properties, sys_flag=sys_flag, born_host=host), 3, offset, position, 1, IPV4
    ),
    st.sampled_from([b"", b"body", b"x" * 400]),
    st.one_of(st.binary(max_size=9), st.integers(150, 180).map(lambda size: b"p" * size)),
    st.sampled_from([0, 0, 0, 0, 1, 0x101, 8]),
    st.sampled_from([IPV4, IPV4, IPV4, IPV6]),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1),
)
BUFFERS = st.sampled_from([bytes, bytearray, memoryview])


@given(st.lists(RECORDS, max_size=6), BUFFERS)
def test_the_kernel_finds_the_records_that_python_finds(records: list[bytes], buffer: type[bytes]) -> None:
    data = buffer(b"".join(records))
    assert kernel_of(record_places)(data) == record_places(data)
    for index in range(len(records) + 1):
        start = sum(map(len, records[:index]))
        assert kernel_of(cheap_records)(data, start) == cheap_records(data, start)


@given(RECORDS, st.integers(0, 95), st.binary(min_size=1, max_size=8), st.integers(0, 100))
def test_a_damaged_record_is_an_error_of_the_kernel_or_read_as_it_is(
    record: bytes, at: int, piece: bytes, removed: int
) -> None:
    data = record + record[:at] + piece + record[at + len(piece) : len(record) - removed]
    count, start = kernel_of(cheap_records)(data, 0)
    assert 0 <= count <= 2
    assert start >= 0
    with suppress(ValueError):
        assert kernel_of(record_places)(data)
