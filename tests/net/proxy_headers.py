"""Makes headers of the PROXY protocol, for tests."""

import socket
import struct

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def text(client: str, port: int, kind: str | None = None, end: str = "\r\n") -> bytes:
    """Return a header of version 1."""
    kind = kind or ("TCP6" if ":" in client else "TCP4")
    proxy = "2001:db8::1" if ":" in client else "192.0.2.1"
    return f"PROXY {kind} {client} {proxy} {port} 1883{end}".encode()


def binary(client: str, port: int, command: int = 0x21, kind: int | None = None, fields: bytes = b"") -> bytes:
    """Return a header of version 2; *fields* follow the addresses."""
    family = socket.AF_INET6 if ":" in client else socket.AF_INET
    packed = socket.inet_pton(family, client)
    kind = kind if kind is not None else 0x21 if ":" in client else 0x11
    rest = packed + bytes(len(packed)) + struct.pack(">HH", port, 1883) + fields
    return SIGNATURE + struct.pack(">BBH", command, kind, len(rest)) + rest


def field(kind: int, value: bytes) -> bytes:
    """Return a field that follows the addresses of version 2 (TLV)."""
    return struct.pack(">BH", kind, len(value)) + value


LOCAL = SIGNATURE + struct.pack(">BBH", 0x20, 0, 0)  # a health check, as haproxy sends it
UNKNOWN = b"PROXY UNKNOWN\r\n"
