"""The header of the PROXY protocol, in which a proxy names the client whose connection it passes on.

Version 1 is a line of text, version 2 is binary (haproxy, doc/proxy-protocol.txt, sections 2.1 and 2.2). A receiver
needs no configuration to tell them apart: their first bytes differ.
"""

import re
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Final, final

from martlet.errors import RemoteProtocolError

__all__ = ["HEADER_BYTES_MAX", "ProxyHeader"]

TEXT: Final = b"PROXY "
TEXT_BYTES_MAX: Final = 107  # of the line with its CRLF (2.1)
FAMILIES: Final = {b"TCP4": AF_INET, b"TCP6": AF_INET6}
PORT: Final = re.compile(rb"0|[1-9][0-9]{0,4}")

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
FIXED_BYTES: Final = 16  # signature, version and command, family and transport, length of the rest
VERSION: Final = 0x20
LOCAL: Final = 0
PROXY: Final = 1
FAMILY_MAX: Final = 0x30  # unspecified, IPv4, IPv6, UNIX
TRANSPORT_MAX: Final = 2  # unspecified, stream, datagram
ADDRESSES: Final = {0x11: (AF_INET, 4), 0x21: (AF_INET6, 16)}  # TCP over it: family, and bytes of an address
# Fields after the addresses can contain the client's certificate, of a few KiB. The protocol allows 64 KiB.
REST_BYTES_MAX: Final = 16384
HEADER_BYTES_MAX: Final = FIXED_BYTES + REST_BYTES_MAX

SHOWN_BYTES: Final = 16  # of wrong bytes, in an error


@final
class ProxyHeader:
    """Parses the header of one connection, from bytes as they arrive."""

    __slots__ = ("_data", "is_complete", "source")

    def __init__(self) -> None:
        self._data = bytearray()
        self.is_complete = False
        # Address and port of the client; None if the proxy itself is the client (a health check), or names none.
        self.source: tuple[str, int] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any byte has arrived."""
        return bool(self._data)

    def receive_data(self, data: bytes) -> int:
        """Receive *data*; return how many of its bytes belong to the header: all of them until it is complete.

        Raises:
          RemoteProtocolError: it is no valid header.
        """
        received, held = len(self._data), self._data
        held += data
        if held.startswith(SIGNATURE[: len(held)]):
            size = self._binary_size()
        elif held.startswith(TEXT[: len(held)]):
            size = self._text_size()
        else:
            raise RemoteProtocolError(f"no PROXY header begins with {bytes(held[:SHOWN_BYTES])!r}")
        if not 0 < size <= len(held):
            return len(data)
        del held[size:]
        self.source = _source_of_binary(held) if held[0] == SIGNATURE[0] else _source_of_text(bytes(held))
        self.is_complete = True
        return size - received

    def _text_size(self) -> int:
        """Return the size of the line, 0 if its end has not arrived."""
        held = self._data
        end = held.find(b"\n", 0, TEXT_BYTES_MAX)
        if end >= 0:
            return end + 1
        if len(held) >= TEXT_BYTES_MAX:
            raise RemoteProtocolError(f"PROXY line has no end in its first {TEXT_BYTES_MAX} bytes")
        return 0

    def _binary_size(self) -> int:
        """Return the size of the header, 0 if it is not known yet."""
        held = self._data
        if len(held) < FIXED_BYTES:
            return 0
        rest = int.from_bytes(held[14:FIXED_BYTES])
        if rest > REST_BYTES_MAX:
            raise RemoteProtocolError(f"PROXY header announces {rest} more bytes; the limit is {REST_BYTES_MAX}")
        return FIXED_BYTES + rest


def _source_of_text(line: bytes) -> tuple[str, int] | None:
    """Return the client's address in *line*; None if it is unknown."""
    if not line.endswith(b"\r\n") or line.count(b"\r") > 1:
        raise RemoteProtocolError(f"PROXY line {line!r} does not end with the first CR, and one LF")
    words = line[:-2].split(b" ")
    if words[1] == b"UNKNOWN":  # the rest must be ignored (2.1)
        return None
    family = FAMILIES.get(words[1])
    if family is None or len(words) != 6 or not all(map(_is_port, words[4:])):
        raise RemoteProtocolError(f"PROXY line {line!r} is not PROXY TCP4|TCP6 ADDRESS ADDRESS PORT PORT")
    try:
        packed, _ = (inet_pton(family, word.decode("ascii")) for word in words[2:4])
    except (OSError, ValueError) as error:
        raise RemoteProtocolError(f"PROXY line {line!r} has a wrong address") from error
    return inet_ntop(family, packed), int(words[4])


def _is_port(word: bytes) -> bool:
    return PORT.fullmatch(word) is not None and int(word) <= 65535


def _source_of_binary(header: bytearray) -> tuple[str, int] | None:
    """Return the client's address in *header*; None if the proxy is the client, or the address is none of TCP."""
    command, kind = header[12], header[13]
    if command not in (VERSION | LOCAL, VERSION | PROXY):
        raise RemoteProtocolError(f"PROXY header has version and command 0x{command:02x}; only 0x20 and 0x21 exist")
    if command == VERSION | LOCAL:  # the rest must be ignored (2.2)
        return None
    if kind & 0xF0 > FAMILY_MAX or kind & 0x0F > TRANSPORT_MAX:
        raise RemoteProtocolError(f"PROXY header has family and transport 0x{kind:02x}, which do not exist")
    if kind not in ADDRESSES:  # the spec allows to treat it as unknown
        return None
    family, size = ADDRESSES[kind]
    ports_at = FIXED_BYTES + 2 * size
    if len(header) < ports_at + 4:
        raise RemoteProtocolError(f"PROXY header of {len(header)} bytes has no room for its addresses")
    address = inet_ntop(family, bytes(header[FIXED_BYTES : FIXED_BYTES + size]))
    return address, int.from_bytes(header[ports_at : ports_at + 2])
