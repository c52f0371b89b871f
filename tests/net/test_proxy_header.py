"""Headers of the PROXY protocol (haproxy, doc/proxy-protocol.txt): all forms, cut everywhere, and hostile ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.net.proxy_headers import LOCAL, SIGNATURE, UNKNOWN, binary, field, text

from martlet.errors import RemoteProtocolError
from martlet.net.opening.proxy_header import HEADER_BYTES_MAX, REST_BYTES_MAX, ProxyHeader

LONG = "ffff:" * 7 + "ffff"
UNIX = bytes(216)

VALID = {
    "v1, TCP4": (text("203.0.113.7", 51234), ("203.0.113.7", 51234)),
    "v1, the longest of TCP4": (
        b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n",
        ("255.255.255.255", 65535),
    ),
    "v1, TCP6": (text("2001:db8::7", 51234), ("2001:db8::7", 51234)),
    "v1, the longest of TCP6": (f"PROXY TCP6 {LONG} {LONG} 65535 65535\r\n".encode(), (LONG, 65535)),
    "v1, upper case": (text("2001:DB8::ABCD", 1), ("2001:db8::abcd", 1)),
    "v1, an IPv4 address in IPv6": (text("::FFFF:203.0.113.7", 1), ("::ffff:203.0.113.7", 1)),
    "v1, port 0": (text("203.0.113.7", 0), ("203.0.113.7", 0)),
    "v1, UNKNOWN": (UNKNOWN, None),
    "v1, the longest UNKNOWN": (f"PROXY UNKNOWN {LONG} {LONG} 65535 65535\r\n".encode(), None),
    "v1, UNKNOWN with anything": (b"PROXY UNKNOWN \xff\0 PROXY TCP4\r\n", None),
    "v2, TCP4": (binary("203.0.113.7", 51234), ("203.0.113.7", 51234)),
    "v2, TCP6": (binary("2001:db8::7", 65535), ("2001:db8::7", 65535)),
    "v2, with fields": (
        binary("203.0.113.7", 1, fields=field(0x05, b"id") + field(0x20, bytes(300))),
        ("203.0.113.7", 1),
    ),
    "v2, with bytes that are no fields": (binary("203.0.113.7", 1, fields=b"\1\xff\xffx"), ("203.0.113.7", 1)),
    "v2, the longest": (binary("203.0.113.7", 1, fields=bytes(REST_BYTES_MAX - 12)), ("203.0.113.7", 1)),
    "v2, LOCAL": (LOCAL, None),
    "v2, LOCAL with addresses": (binary("203.0.113.7", 1, command=0x20), None),
    "v2, LOCAL of a family that does not exist": (binary("203.0.113.7", 1, command=0x20, kind=0xFF), None),
    "v2, of an unknown family": (SIGNATURE + b"\x21\0\0\0", None),
    "v2, of an unknown family with bytes": (SIGNATURE + b"\x21\0\0\3abc", None),
    "v2, UDP": (binary("203.0.113.7", 1, kind=0x12), None),
    "v2, UNIX": (SIGNATURE + b"\x21\x31\0\xd8" + UNIX, None),
    "v2, UNIX datagrams": (SIGNATURE + b"\x21\x32\0\xd8" + UNIX, None),
}
WRONG = {
    "v1, the end is LF": text("203.0.113.7", 1, end="\n"),
    "v1, the end is CR, then more": text("203.0.113.7", 1, end="\rhello\r\n"),
    "v1, UNKNOWN ends with LF": b"PROXY UNKNOWN\nCONNECT\r\n",
    "v1, UNKNOWN has a CR": b"PROXY UNKNOWN \r \r\n",
    "v1, no end in 107 bytes": b"PROXY UNKNOWN ".ljust(107, b"x"),
    "v1, the end is the 108th byte": b"PROXY UNKNOWN ".ljust(106, b"x") + b"\r\n",
    "v1, lower case": b"proxy TCP4 203.0.113.7 192.0.2.1 1 1\r\n",
    "v1, UDP": text("203.0.113.7", 1, "UDP4"),
    "v1, another word": text("203.0.113.7", 1, "UNKNOWNS"),
    "v1, no word": b"PROXY \r\n",
    "v1, nothing": b"PROXY\r\n",
    "v1, two spaces": b"PROXY TCP4  203.0.113.7 192.0.2.1 1 1\r\n",
    "v1, a space at the end": text("203.0.113.7", 1, end=" \r\n"),
    "v1, a tab": b"PROXY TCP4 203.0.113.7\t192.0.2.1 1 1\r\n",
    "v1, no ports": b"PROXY TCP4 203.0.113.7 192.0.2.1\r\n",
    "v1, one port": b"PROXY TCP4 203.0.113.7 192.0.2.1 1\r\n",
    "v1, an IPv6 address of TCP4": text("::1", 1, "TCP4"),
    "v1, an IPv4 address of TCP6": text("203.0.113.7", 1, "TCP6"),
    "v1, a zero before a number": text("203.0.113.07", 1),
    "v1, a number over 255": text("203.0.113.256", 1),
    "v1, three numbers": text("203.0.113", 1),
    "v1, an address with a port": text("203.0.113.7:5", 1, "TCP4"),
    "v1, an interface": text("fe80::7%eth0", 1),
    "v1, two double colons": text("2001::db8::1", 1),
    "v1, a zero byte in the address": text("203.0.113.7\0", 1),
    "v1, digits of another script": text("203.0.113.\N{ARABIC-INDIC DIGIT SEVEN}", 1),
    "v1, the other address is wrong": b"PROXY TCP4 203.0.113.7 nobody 1 1\r\n",
    "v1, a port over 65535": text("203.0.113.7", 65536),
    "v1, a negative port": text("203.0.113.7", -1),
    "v1, a zero before the port": b"PROXY TCP4 203.0.113.7 192.0.2.1 01 1\r\n",
    "v1, a name as the port": b"PROXY TCP4 203.0.113.7 192.0.2.1 x 1\r\n",
    "v2, version 1": binary("203.0.113.7", 1, command=0x11),
    "v2, version 3": binary("203.0.113.7", 1, command=0x31),
    "v2, command 2": binary("203.0.113.7", 1, command=0x22),
    "v2, family 4": binary("203.0.113.7", 1, kind=0x41),
    "v2, transport 3": binary("203.0.113.7", 1, kind=0x13),
    "v2, too short for TCP4": SIGNATURE + b"\x21\x11\0\x0b" + bytes(11),
    "v2, too short for TCP6": SIGNATURE + b"\x21\x21\0\x23" + bytes(35),
    "v2, too long": SIGNATURE + b"\x21\x11" + (REST_BYTES_MAX + 1).to_bytes(2),
    "v2, another signature": b"\r\n\r\n\0\r\nQUIT\r\x21\x11\0\0",
    "TLS": b"\x16\x03\x01",
    "MQTT": b"\x10\x0c\0\4MQTT",
    "STOMP": b"CONNECT\n",
    "STOMP after an end of line": b"\r\nCONNECT\n",
    "WebSocket": b"GET / HTTP/1.1\r\n",
    "remoting": b"\0\0\0\x80",
    "another P": b"POST / HTTP/1.1\r\n",
}


def feed(header: ProxyHeader, data: bytes, size: int) -> int:
    """Feed *data* in pieces of *size* bytes to the end of *header*; return how many belong to it."""
    taken = 0
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        used = header.receive_data(piece)
        taken += used
        if header.is_complete:
            break
        assert used == len(piece)
    return taken


@pytest.mark.parametrize("name", VALID)
def test_a_header_names_the_client_and_ends_where_it_ends(name: str) -> None:
    data, source = VALID[name]
    for follows in b"", b"\x10\x0c\0\4MQTT", data:
        header = ProxyHeader()
        assert header.receive_data(data + follows) == len(data)
        assert header.is_complete
        assert header.source == source


@pytest.mark.parametrize("name", VALID)
def test_a_header_may_be_cut_anywhere(name: str) -> None:
    data, source = VALID[name]
    for cut in range(1, len(data)) if len(data) < 1000 else (1, 15, 16, 17, 28, 1000, len(data) - 1):
        header = ProxyHeader()
        assert header.receive_data(data[:cut]) == cut
        assert (header.has_begun, header.is_complete, header.source) == (True, False, None)
        assert header.receive_data(data[cut:] + b"more") == len(data) - cut
        assert (header.is_complete, header.source) == (True, source)


@pytest.mark.parametrize("name", VALID)
def test_a_header_may_come_byte_by_byte(name: str) -> None:
    data, source = VALID[name]
    header = ProxyHeader()
    assert feed(header, data + b"more", 1) == len(data)
    assert (header.is_complete, header.source) == (True, source)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_header_is_an_error(name: str, size: int) -> None:
    header = ProxyHeader()
    with pytest.raises(RemoteProtocolError, match="PROXY"):
        feed(header, WRONG[name].ljust(200, b"\n"), size)
    assert not header.is_complete
    assert header.source is None


def test_other_protocols_are_recognized_by_their_first_bytes() -> None:
    for first in b"\x16", b"\x10", b"\0", b"G", b"CO", b"\r\nC", b"POST":
        with pytest.raises(RemoteProtocolError, match="no PROXY header begins with"):
            ProxyHeader().receive_data(first)


def test_an_error_shows_unprintable_bytes_as_text() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        ProxyHeader().receive_data(b"\x1b[31m\n" * 100)
    assert str(caught.value).isprintable()
    with pytest.raises(RemoteProtocolError) as caught:
        ProxyHeader().receive_data(b"PROXY \x1b[31m\n")
    assert str(caught.value).isprintable()


starts = st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", b"PROXY UNKNOWN", SIGNATURE, SIGNATURE + b"\x21\x11\0"])


@given(starts, st.binary(max_size=300), st.integers(1, 50))
def test_random_bytes_are_a_header_an_error_or_not_enough(start: bytes, rest: bytes, size: int) -> None:
    header, data = ProxyHeader(), start + rest
    try:
        taken = feed(header, data, size)
    except RemoteProtocolError:
        assert not header.is_complete
        assert header.source is None
        return
    if header.is_complete:
        assert taken <= min(len(data), HEADER_BYTES_MAX)
    else:
        assert taken == len(data)
        assert header.source is None


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(addresses, st.integers(0, 65535), st.sampled_from([text, binary]), st.integers(1, 60), st.binary(max_size=50))
def test_every_address_arrives(client: str, port: int, form: object, size: int, follows: bytes) -> None:
    data = (text if form is text else binary)(client, port)
    header = ProxyHeader()
    assert feed(header, data + follows, size) == len(data)
    assert header.source is not None
    found = ProxyHeader()
    feed(found, binary(*header.source), 1000)
    assert found.source == header.source
    assert header.source[1] == port


@given(st.sampled_from(sorted(VALID)), st.integers(0, 60), st.integers(0, 255))
def test_a_changed_byte_is_noticed_or_changes_only_what_it_says(name: str, at: int, byte: int) -> None:
    """Never an exception of another kind, and never an address that the header's own family does not have."""
    data = bytearray(VALID[name][0])
    data[at % len(data)] = byte
    header = ProxyHeader()
    try:
        feed(header, bytes(data), 1000)
    except RemoteProtocolError:
        return
    if header.source is not None:
        address, port = header.source
        assert 0 <= port <= 65535
        assert binary(address, port)  # a valid address
