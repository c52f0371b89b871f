"""Reads with a filter that must tell of damage: no damaged message that matches is passed over in silence."""

import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from martlet.errors import CorruptRecord
from martlet.message import Message
from martlet.records.codec import decode_records, tags_code
from martlet.records.layout import ENTRY, HEAD_BYTES, Condition, RecordView
from martlet.store import Queue, Store
from martlet.store.read.reading import Care
from martlet.testing.stores import HOST, small_config

from .conftest import OpenStore

COUNT = 400
QUEUES = 2
# Every seventh message of a queue matches, and these three are damaged; of the others, the ones after them.
MATCHING = 7
DAMAGED = (14, 70, 133)


def find(data: bytes | bytearray, begin: int, end: int) -> list[int]:
    found: list[int] = []
    while (begin := data.find(b"colour\x01violet", begin, end)) >= 0:
        found.append(begin)
        begin += 1
    return found


def is_violet(record: RecordView) -> bool:
    return record.property("colour") == "violet"


SEARCHED = Condition(is_violet, find=find)
FILTERS = {
    "none": (None, None),
    "tag": (frozenset((tags_code("violet"),)), None),
    "search": (None, SEARCHED),
    "predicate": (None, Condition(is_violet)),
}


def fill(store: Store) -> None:
    for number in range(COUNT):
        colour = "violet" if number // QUEUES % MATCHING == 0 else "red"
        properties = f"colour\x01{colour}\x02TAGS\x01{colour}\x02".encode()
        store.writer.append(Message("T", b"%d " % number + b"." * (number % 90), properties), number % QUEUES)
    store.committer.commit()


def header(record: bytearray) -> None:
    record[5] ^= 1


def body(record: bytearray) -> None:
    record[HEAD_BYTES] ^= 1


def properties(record: bytearray) -> None:
    """Only a record CRC shows this; the search does not find the colour any more."""
    at = record.index(b"colour")
    record[at + 9] ^= 1


def lost_end(record: bytearray) -> None:
    """The next sector is lost, which begins in the properties."""
    at = record.index(b"colour")
    record[at + 8 :] = bytes(len(record) - at - 8)


def garbage(record: bytearray) -> None:
    """A wrong sector, from the body to the end."""
    record[HEAD_BYTES:] = bytes(range(1, 256))[: len(record) - HEAD_BYTES].ljust(len(record) - HEAD_BYTES, b"?")


def zeros(record: bytearray) -> None:
    record[:] = bytes(len(record))


HARM: dict[str, Callable[[bytearray], None]] = {
    each.__name__: each for each in (header, body, properties, lost_end, garbage, zeros)
}


def damage(log: Path, position: int, size: int, harm: Callable[[bytearray], None]) -> None:
    data = bytearray(log.read_bytes())
    record = data[position : position + size]
    harm(record)
    data[position : position + size] = record
    log.write_bytes(data)


async def damaged_store(open_store: OpenStore, log: Path, kind: str, *, record_crcs: bool) -> Store:
    """Return a store in which the messages `DAMAGED` of each queue, and the ones after them, are damaged."""
    sizes = {"segment_bytes": 1 << 18, "page_bytes": 1 << 14, "cache_bytes": 1 << 20, "queue_file_entries": 4000}
    config = small_config(record_crcs=record_crcs, **sizes)
    store = await open_store(config)
    fill(store)
    await store.close()
    store = await open_store(config)
    for queue_id, offset, more in product(range(QUEUES), DAMAGED, (0, 1)):
        queue = store.queue("T", queue_id)
        position, size, _ = ENTRY.unpack(store.queues.load_entries(queue, offset + more, 1))
        damage(log, position, size, HARM.get(kind, header))
    if kind == "blank":  # as rebuilt queues have it
        await store.close()
        shutil.rmtree(log.parents[1] / "consumequeue")
        store = await open_store(config)
    return store


async def read_all(store: Store, queue: Queue, name: str, care: Care) -> tuple[list[int], set[int]]:
    """Return the offsets of the messages that were read and are intact, and of those that are said to be lost.

    What has a damaged record is read again with `Care.TELL`, as by a client of a bulk read.
    """
    codes, predicate = FILTERS[name]
    found: list[int] = []
    lost: set[int] = set()
    offset = 0
    while offset < store.readers.end_offset(queue):
        for each in (care, Care.TELL):
            limits = 50, 1 << 16
            result = store.readers.read_near(queue, offset, *limits, codes, predicate, each)
            if result is None:
                result = await store.readers.read_far(queue, offset, *limits, codes, predicate, each)
            assert result.next_offset > offset
            try:
                records = [*decode_records(b"".join(result.pieces))]
                if any(record.properties.endswith(b"\x00") for record in records):
                    raise CorruptRecord(0, "has lost the end of its properties")
                found += [record.queue_offset for record in records]
            except CorruptRecord:
                assert each is Care.CALLER_CHECKS
            else:
                lost |= {number for first, end in result.lost for number in range(first, end)}
                offset = result.next_offset
                break
    return found, lost


def cases() -> Iterator[tuple[str, str, bool, Care]]:
    """Yield kinds of damage, filters, whether records have CRCs, and how a read treats damage."""
    for kind, name, record_crcs in product((*HARM, "blank"), FILTERS, (False, True)):
        if kind == "properties" and not record_crcs:
            continue  # nothing covers them
        yield kind, name, record_crcs, Care.TELL
        if name in ("none", "tag"):
            yield kind, name, record_crcs, Care.CALLER_CHECKS


@pytest.mark.parametrize(("kind", "name", "record_crcs", "care"), list(cases()))
async def test_no_damage_is_passed_over(
    kind: str, name: str, record_crcs: bool, care: Care, open_store: OpenStore, tmp_path: Path
) -> None:
    log = tmp_path / "store" / "commitlog" / f"{0:020d}"
    store = await damaged_store(open_store, log, kind, record_crcs=record_crcs)
    damaged = {offset + more for offset in DAMAGED for more in (0, 1)}
    for queue_id in range(QUEUES):
        queue = store.queue("T", queue_id)
        matching = {offset for offset in range(queue.next_offset) if name == "none" or offset % MATCHING == 0}
        found, lost = await read_all(store, queue, name, care)
        assert set(found) == matching - damaged
        assert len(found) == len(set(found))
        assert matching & damaged <= lost <= damaged


@pytest.mark.parametrize("name", FILTERS)
async def test_an_intact_log_has_no_losses(name: str, open_store: OpenStore, tmp_path: Path) -> None:
    """Messages without properties, with long ones, and of IPv6 hosts look odd, and are not."""
    config = small_config(segment_bytes=1 << 18, page_bytes=1 << 16, cache_bytes=1 << 20, queue_file_entries=4000)
    store = await open_store(config)
    for number in range(100):
        properties = (b"", b"a\x01" + b"z" * 900 + b"\x02", b"colour\x01violet\x02")[number % 3]
        host = bytes(16) + (9).to_bytes(4, "big") if number % 5 == 0 else HOST
        store.writer.append(Message("T", b"", properties, born_host=host), 0)
    store.committer.commit()
    await store.close()
    store = await open_store(config)
    result = store.readers.read_near(store.queue("T", 0), 0, 100, 1 << 20, *FILTERS[name], Care.TELL)
    assert result is not None
    assert result.lost == []
