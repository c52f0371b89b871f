"""Record CRCs: a CRC over all of a record, so that no flipped bit of it goes unnoticed."""

import os
import zlib
from random import Random

import pytest
from msgspec.structs import replace
from tests.store.test_damage import ROOT, change, contents, copy_of, open_on, remove

from martlet.app.config import Config
from martlet.errors import CorruptRecord, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record
from martlet.offline.directory import verify
from martlet.records.codec import (
    check_record,
    decode_record,
    encode_record,
    has_record_crc,
    with_room_for_record_crc,
    write_record_crc,
)
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, append_batch, message, small_config

FLIPS = int(os.environ.get("MARTLET_FLIPS", "700"))
WITH_CRCS = small_config(record_crcs=True)
V6 = bytes(range(16)) + b"\x00\x00\x1f\x90"
PREPARED = 0x4
FIELDS = (
    *("topic", "queue_id", "queue_offset", "position", "size", "body", "properties", "flag", "sys_flag", "born_ms"),
    *("born_host", "store_ms", "store_host", "reconsume_times", "prepared_position", "body_crc"),
)


def expected_crc(record: bytes) -> bytes:
    """What RocketMQ's MessageDecoder.createCrc32 writes: the digits of the number from the lowest on."""
    number = zlib.crc32(record[:-20]) & 0x7FFFFFFF
    return b"__CRC32#\x01" + f"{number:010d}"[::-1].encode() + b"\x02"


def record_with_crc(number: int = 0) -> bytearray:
    made = message(b"body %d" % number, "Topic", "tag", "key", "unique")
    made.properties = with_room_for_record_crc(made.properties)
    data = bytearray(encode_record(made, 3, number, 4096, 1700000000000, HOST))
    write_record_crc(data, 0, len(data))
    return data


def test_a_seal_is_that_of_rocketmq() -> None:
    for number in range(50):
        data = bytes(record_with_crc(number))
        assert data[-20:] == expected_crc(data)
        assert check_record(data, 0, len(data), 4096)


def test_every_bit_of_a_record_with_a_crc_is_guarded() -> None:
    data = record_with_crc()
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            assert not check_record(changed, 0, len(data), 4096), f"bit {bit} of byte {at}"
            with pytest.raises(CorruptRecord):
                decode_record(changed, 0, 4096)


KINDS = {
    "usual": Message("T", b"body", b"TAGS\x01a\x02", born_host=HOST),
    "no properties": Message("T", b"body", born_host=HOST),
    "no separator at the end": Message("T", b"body", b"TAGS\x01a", born_host=HOST),
    "another's record CRC": Message("T", b"body", b"__CRC32#\x010123456789\x02TAGS\x01a\x02", born_host=HOST),
    "born behind IPv6": Message("T", b"body", b"TAGS\x01a\x02", born_host=V6),
    "long topic": Message("T" * 200, b"body", b"TAGS\x01a\x02", born_host=HOST),
    "prepared": Message("T", b"body", b"TAGS\x01a\x02", sys_flag=PREPARED, born_host=HOST),
    "over a page's end": Message("T", b"body" * 300, b"TAGS\x01a\x02", born_host=HOST),
}


async def put(store: Store, messages: list[Message], several: bool) -> None:
    """Append *messages*, as a batch if *several*, and stop in order."""
    if several:
        append_batch(store, messages, 0)
    else:
        for each in messages:
            store.writer.append(each, 0)
    store.committer.commit()
    await store.close()


def records_of(disk: FakeDisk) -> list[bytes]:
    found = []
    for path in sorted(p for p in disk.files if "/commitlog/" in p):
        data = bytes(disk.files[path].data)
        at = 0
        while (size := int.from_bytes(data[at : at + 4], "big")) and data[at + 4 : at + 8] != b"\xcb\xd4\x31\x94":
            found.append(data[at : at + size])
            at += size
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("several", [False, True], ids=["one", "batch"])
async def test_whatever_is_appended_gets_a_record_crc(kind: str, several: bool) -> None:
    disk = FakeDisk()
    store = await open_on(disk, WITH_CRCS)
    made = KINDS[kind]
    messages = [Message(made.topic, made.body, made.properties, 0, 0, made.sys_flag, 1, made.born_host) for _ in "ab"]
    await put(store, messages, several)
    found = records_of(disk)
    assert len(found) == 2
    for data in found:
        assert data[-20:] == expected_crc(data)
        assert data.count(b"__CRC32#") == 1


async def test_internal_records_have_a_record_crc() -> None:
    """RocketMQ stops at a record without one, if it wants them."""
    disk = FakeDisk()
    store = await open_on(disk, WITH_CRCS)
    await put(store, [Message("T", b"body", b"", 0)], several=False)
    store.notes.delete("T")
    store.notes.note_offsets([store.writer.open_queue("U", 0)])
    store.notes.note_expiries([("U", 0, 0)])
    found = records_of(disk)
    assert len(found) == 5  # a deletion is noted twice
    for data in found:
        assert data[-20:] == expected_crc(data)


async def test_properties_that_leave_no_room_for_the_seal_are_refused() -> None:
    store = await open_on(FakeDisk(), small_config(record_crcs=True, segment_bytes=1 << 20))
    filling = b"k\x01" + b"x" * (PROPERTIES_BYTES_MAX - 2 - 21)
    store.writer.append(Message("T", b"body", filling, born_host=HOST), 0)
    with pytest.raises(Refused, match="properties have 32768 bytes"):
        store.writer.append(Message("T", b"body", filling + b"x", born_host=HOST), 0)
    store.committer.commit()
    await store.close()


FOREIGN = [
    b"__CRC32#\x010123456789\x02",
    b"TAGS\x01a\x02__CRC32#\x010000000000\x02",
    b"__CRC33#\x010000000000\x02",
    b"my__CRC32#\x010000000000\x02",
    b"__CRC32#\x03aaaaaaaaaa\x02",
]


@pytest.mark.parametrize("properties", FOREIGN)
@pytest.mark.parametrize("several", [False, True], ids=["one", "batch"])
async def test_a_seal_of_another_record_is_not_taken_for_this_ones(properties: bytes, several: bool) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    messages = [Message("T", b"body", properties, born_host=HOST) for _ in "ab"]
    await put(store, messages, several)
    store = await open_on(disk.after_power_cut(Cut.KILLED, Random(0)))
    assert len(contents(store)) == 2
    assert not store.readers.damaged_records
    for data in records_of(disk):
        assert not has_record_crc(data, len(data))
    store.crash()


async def filled(config_of_old: bool = False) -> tuple[FakeDisk, dict[tuple[str, int, int], Record]]:
    """A disk with 60 records with CRCs in several segments, after records without if *config_of_old*."""
    disk = FakeDisk()
    random = Random(11)
    for config in [small_config()] * config_of_old + [WITH_CRCS]:
        store = await open_on(disk, config)
        for number in range(30):
            for topic in ("A", "B"):
                body = random.randbytes(random.randrange(1, 90))
                store.writer.append(message(body, topic, "tag", "key", f"{topic}-{number}"), 0)
            store.committer.commit()
        await store.close()
    store = await open_on(copy_of(disk), WITH_CRCS)
    found = contents(store)
    assert len(found) == (120 if config_of_old else 60)
    store.crash()
    return disk, found


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
async def test_a_flipped_bit_anywhere_costs_its_record_alone_and_is_reported(clean: bool) -> None:
    disk, wanted = await filled()
    random = Random(clean)
    for _ in range(FLIPS):
        hit = random.choice(list(wanted.values()))
        at = hit.position + random.randrange(hit.size)
        changed = copy_of(disk)
        segment = at - at % 4096
        path = f"{ROOT}/commitlog/{segment:020d}"
        data = bytearray(changed.files[path].data)
        data[at - segment] ^= 1 << random.randrange(8)
        change(changed, path, bytes(data))
        if not clean:
            remove(changed, "consumequeue")
            remove(changed, "checkpoint")
            changed.close(changed.open(f"{ROOT}/abort", create=True))
        store = await open_on(changed, random.choice((WITH_CRCS, small_config())))
        found = contents(store)
        assert {p: fields_of(r) for p, r in found.items()} == {
            p: fields_of(r) for p, r in wanted.items() if r.position != hit.position
        }
        # After a kill the last record may be one whose write was torn.
        torn = not clean and hit.position == max(record.position for record in wanted.values())
        assert (store.readers.damaged_records, store.recovered.cut_bytes > 0) == ((0, True) if torn else (1, False))
        store.crash()


def fields_of(record: Record) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in FIELDS)


async def test_records_with_and_without_a_crc_share_a_log() -> None:
    disk, wanted = await filled(config_of_old=True)
    remove(disk, "consumequeue")
    remove(disk, "index")
    store = await open_on(disk, replace(WITH_CRCS, verify_reads=True))
    assert {p: fields_of(r) for p, r in contents(store).items()} == {p: fields_of(r) for p, r in wanted.items()}
    assert not store.readers.damaged_records
    store.crash()


async def test_verify_reports_a_seal_that_is_wrong() -> None:
    disk, wanted = await filled()
    hit = wanted["B", 0, 7]
    path = f"{ROOT}/commitlog/{hit.position - hit.position % 4096:020d}"
    data = bytearray(disk.files[path].data)
    data[hit.position % 4096 + hit.size - 30] ^= 4
    change(disk, path, bytes(data))
    found = await verify(ROOT, Config(store=WITH_CRCS), disk)
    [damage] = found.inspection.damage
    assert damage.start == hit.position
    assert "record CRC" in damage.text
