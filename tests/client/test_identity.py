"""Unique keys have the shape that RocketMQ's tools take apart, and do not repeat."""

import socket
import time

from martlet_client.identity import ClientIdentity, UniqueKeys, host_address

MID_MONTH_MS = int(time.mktime((2024, 5, 17, 13, 0, 0, 0, 0, -1)) * 1000)
MONTH_START_MS = int(time.mktime((2024, 5, 1, 0, 0, 0, 0, 0, -1)) * 1000)
NEXT_MONTH_MS = int(time.mktime((2024, 6, 1, 0, 0, 0, 0, 0, -1)) * 1000)


class Stopped:
    def __init__(self, now_ms: int) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        return self.time_ms


def test_key_holds_address_process_instance_time_and_counter() -> None:
    key = UniqueKeys(Stopped(MID_MONTH_MS), "10.1.2.3", 0x12345, 0xCAFEBABE).next_key()
    assert key == f"0A0102032345CAFEBABE{MID_MONTH_MS - MONTH_START_MS:08X}0001"


def test_time_begins_again_with_each_month() -> None:
    clock = Stopped(NEXT_MONTH_MS - 1)
    keys = UniqueKeys(clock, "127.0.0.1", 1, 1)
    assert int(keys.next_key()[20:28], 16) == NEXT_MONTH_MS - 1 - MONTH_START_MS
    clock.time_ms = NEXT_MONTH_MS + 5
    assert int(keys.next_key()[20:28], 16) == 5


def test_clock_that_jumps_back_breaks_nothing() -> None:
    clock = Stopped(MONTH_START_MS + 10)
    keys = UniqueKeys(clock, "127.0.0.1", 1, 1)
    keys.next_key()
    clock.time_ms = MONTH_START_MS - 5000
    assert keys.next_key()[20:28] == "00000000"


def test_keys_differ_within_a_millisecond_and_between_clients() -> None:
    clock = Stopped(MID_MONTH_MS)
    one, two = ClientIdentity(clock), ClientIdentity(clock)
    assert one.client_id != two.client_id
    assert len({identity.keys.next_key() for identity in (one, two) for _ in range(10_000)}) == 20_000


def test_client_id_may_be_given() -> None:
    assert ClientIdentity(Stopped(0), "billing-1").client_id == "billing-1"


def test_host_has_an_address() -> None:
    assert len(socket.inet_aton(host_address())) == 4
