"""Who a client is, and the unique keys of its messages.

A unique key is RocketMQ's (MessageClientIDSetter): upper-case hexadecimal of the
host's address, an i16 process id, an i32 that tells processes apart, an i32 of
milliseconds since the month began, and an i16 counter.
"""

import os
import socket
import time
from itertools import count
from struct import Struct
from typing import Final, final

from martlet.runtime.clock import Clock

__all__ = ["ClientIdentity", "UniqueKeys", "host_address"]

_PREFIX: Final = Struct(">4sHI")
_SUFFIX: Final = Struct(">IH")
_instances: Final = count()


def host_address() -> str:
    """Return the IPv4 address that this host uses to reach others; loopback if it has no other.

    No packet is sent: connecting a datagram socket only asks the routing table.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@final
class UniqueKeys:
    """Makes the UNIQ_KEY of messages; keys of one object never repeat within a month."""

    def __init__(self, clock: Clock, address: str, process: int, instance: int) -> None:
        self._clock = clock
        self._prefix = _PREFIX.pack(socket.inet_aton(address), process & 0xFFFF, instance & 0xFFFFFFFF).hex().upper()
        self._counter = 0
        self._month_start_ms = 0
        self._month_end_ms = 0

    def next_key(self) -> str:
        """Return the next unique key, 32 characters."""
        now = self._clock.now_ms()
        if now >= self._month_end_ms:
            self._month_start_ms, self._month_end_ms = _month(now)
        span = max(0, now - self._month_start_ms)
        self._counter = (self._counter + 1) & 0xFFFF
        return self._prefix + _SUFFIX.pack(span & 0xFFFFFFFF, self._counter).hex().upper()


def _month(now_ms: int) -> tuple[int, int]:
    """Return the first millisecond of the local month of *now_ms*, and that of the next month."""
    now = time.localtime(now_ms / 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((now.tm_year, now.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))
    return int(start * 1000), int(end * 1000)


@final
class ClientIdentity:
    """One client's id, as brokers list it, and its source of unique keys."""

    def __init__(self, clock: Clock, client_id: str = "") -> None:
        address = host_address()
        instance = (next(_instances) << 20 ^ clock.now_ms()) & 0xFFFFFFFF
        self.client_id = client_id or f"{address}@{os.getpid()}#{instance:x}"
        self.keys = UniqueKeys(clock, address, os.getpid(), instance)
