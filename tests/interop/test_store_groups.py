"""Atomic groups in a store that goes from Martlet to RocketMQ and back: no half one is shown, whole ones are."""

from collections import Counter
from pathlib import Path

import pytest
import trio

from martlet.message import Message
from martlet.runtime.clock import SystemClock
from martlet.state.journal import Journal
from martlet.store import Store, StoreConfig
from martlet.store.disk.files import RealDisk
from martlet.testing.stores import HOST, append_group

from . import rocketmq
from .java import Java, Jvm
from .store_exchange import TOPIC, OurBroker, RealBroker, everything, fill, read


class Killed(BaseException):
    """The process ended within a write."""


def end_in_write(patch: pytest.MonkeyPatch, bytes_max: int) -> None:
    """End the process in its next write: after *bytes_max* bytes, or before the write after it if that is enough."""
    write, writes = RealDisk.write, list[int]()

    def cut(disk: RealDisk, fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
        if writes:
            raise Killed
        writes.append(position)
        write(disk, fd, data[:bytes_max], position)
        if len(data) > bytes_max:
            raise Killed

    patch.setattr(RealDisk, "write", cut)


def group_messages(what: str) -> list[Message]:
    return [Message(TOPIC, f"{what} {i}".encode(), b"TAGS\x01G\x02", born_host=HOST) for i in range(4)]


async def write_groups(data: Path, bytes_max: int) -> None:
    """Add a whole group with a note to the store in *data*, then one whose write is cut, and leave as if killed."""
    store = await Store.open(data, StoreConfig(segment_bytes=64 << 20), SystemClock())
    [note] = Journal(store, "interop").records_of([b"note"])
    append_group(store, [*group_messages("whole"), note], [0, 1, 2, 3, 0])
    store.committer.commit()
    append_group(store, group_messages("half"), range(4))
    with pytest.MonkeyPatch.context() as patch:
        end_in_write(patch, bytes_max)
        with pytest.raises(Killed):
            store.committer.commit()
    store.crash()


@pytest.mark.parametrize("bytes_max", [1 << 20, 400], ids=["before its last byte", "within it"])
def test_rocketmq_shows_no_group_whose_write_a_kill_ended(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, bytes_max: int
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    fill(clients, "ours")
    clients.close()
    assert ours.stop() == 0
    trio.run(write_groups, data, bytes_max)
    expected = everything("ours") + Counter(f"whole {i}".encode() for i in range(4))
    real = real_broker()
    clients = Java(jvm, names.address)
    assert Counter(m.body for m in read(clients, expected.total())) == expected
    fill(clients, "later")
    expected += everything("later")
    assert Counter(m.body for m in read(clients, expected.total())) == expected
    clients.close()
    real.stop()
    ours.start()
    clients = Java(jvm, ours.name_server)
    assert Counter(m.body for m in read(clients, expected.total())) == expected
    clients.close()
