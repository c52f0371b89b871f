"""Which files of the log's directory are its segments: neither a stray name nor a damaged head decides alone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.conftest import OpenStore

from martlet.errors import Refused
from martlet.records.layout import BLANK_MAGIC, FILLER, FILLER_BYTES, PREPARED
from martlet.store import Store
from martlet.store.format.notes import OWN_PREFIX
from martlet.testing.stores import append_group, drain, message

SEGMENT_BYTES = 4096
NAME = "{:020d}".format


def fill(store: Store, count: int = 30) -> list[bytes]:
    sent = [b"%d-" % number + bytes(300) for number in range(count)]
    for body in sent:
        store.writer.append(message(body), 0)
        store.committer.commit()
    store.flusher.flush_now()
    return sent


STRAYS = {
    "inside a segment": (NAME(7), b"x"),
    "over a border": (NAME(4000), b"x" * 9000),
    "empty": (NAME(5000), b""),
    "a copy of another size": (NAME(300), b"\x00" * SEGMENT_BYTES),
    "before all others": (NAME(1), b"\x00" * 3),
    "far behind": (NAME(10**12 + 1), b"x" * 100),
    "too far for a position": ("9" * 20, b"x"),
    "too far for the end of a segment": (NAME(2**63 - 5), b"x"),
    "other digits": (chr(0x660) * 20, b"x"),
    "a previous generation": (NAME(0) + ".bak", b"x"),
    "a directory inside": (NAME(9), None),
    "a directory at a border": (NAME(10**6 * SEGMENT_BYTES), None),
    "a directory where the log will go on": ("next", None),
}


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize(("name", "content"), STRAYS.values(), ids=STRAYS)
async def test_a_stray_name_neither_stops_a_start_nor_hides_a_record(
    name: str, content: bytes | None, killed: bool, open_store: OpenStore, tmp_path: Path
) -> None:
    store = await open_store()
    sent = fill(store)
    path = tmp_path / "store" / "commitlog" / (NAME(store.segments.end) if name == "next" else name)
    store.crash() if killed else await store.close()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for _ in range(2):
        store = await open_store()
        assert store.first_position == 0
        assert drain(store, store.queue("T", 0)) == sent
        sent += fill(store)
        assert drain(store, store.queue("T", 0)) == sent
        assert store.readers.damaged_records == 0
        await store.close()
    if content is not None:
        assert path.read_bytes() == content
    else:
        assert path.is_dir() or path.with_name(path.name + ".stray").is_dir()


@pytest.mark.parametrize("without", ["nothing", "the one before", "the one after"])
@pytest.mark.parametrize("number", range(4))
async def test_a_segment_whose_head_is_damaged_is_one(
    number: int, without: str, open_store: OpenStore, tmp_path: Path
) -> None:
    store = await open_store()
    sent = fill(store, 70)
    names = sorted(os.listdir(tmp_path / "store" / "commitlog"))
    placed = {body: store.queues.position_at(store.queue("T", 0), n) for n, body in enumerate(sent)}
    await store.close()
    log = tmp_path / "store" / "commitlog"
    (log / "99999999999999999999").write_bytes(b"x")
    data = bytearray((log / names[number]).read_bytes())
    data[:100] = b"\xff" * 100
    (log / names[number]).write_bytes(data)
    lost = {number * SEGMENT_BYTES}
    for step, which in ((-1, "the one before"), (1, "the one after")):
        if without == which and number + step >= 0:
            (log / names[number + step]).unlink()
            lost |= {at for at in placed.values() if at // SEGMENT_BYTES == number + step}
    store = await open_store()
    left = [body for body in sent if placed[body] not in lost]
    assert drain(store, store.queue("T", 0)) == left
    store.crash()


async def test_a_log_without_a_record_is_its_first_segment(open_store: OpenStore, tmp_path: Path) -> None:
    log = tmp_path / "store" / "commitlog"
    log.mkdir(parents=True)
    (log / NAME(0)).write_bytes(bytes(SEGMENT_BYTES))
    (log / NAME(12)).write_bytes(b"xyz")
    store = await open_store()
    assert (store.first_position, store.appended) == (0, 0)
    sent = fill(store)
    await store.close()
    store = await open_store()
    assert drain(store, store.queue("T", 0)) == sent


@pytest.mark.parametrize(
    "name", ["index/20240101000000000", f"consumequeue/U/0/{NAME(0)}", f"consumequeue/T/0/{NAME(320)}"]
)
async def test_a_directory_with_the_name_of_an_index_file_stops_no_start(
    name: str, open_store: OpenStore, tmp_path: Path
) -> None:
    store = await open_store()
    sent = fill(store, 10)
    await store.close()
    (tmp_path / "store" / name).mkdir(parents=True)
    for gone in ("", "checkpoint"):  # then all of them are rebuilt
        if gone:
            (tmp_path / "store" / gone).unlink()
        store = await open_store()
        assert drain(store, store.queue("T", 0)) == sent
        await store.close()
    assert (tmp_path / "store" / name).is_dir()


async def test_a_first_segment_that_a_crash_left_short_hides_none_after_it(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = await open_store()
    sent = fill(store, 15)
    second = next(n for n in range(15) if store.queues.position_at(store.queue("T", 0), n) == SEGMENT_BYTES)
    store.crash()
    log = tmp_path / "store" / "commitlog"
    os.truncate(log / NAME(0), 1000)
    with (log / NAME(SEGMENT_BYTES)).open("r+b") as file:
        file.write(bytes(100))
    (tmp_path / "store" / "checkpoint").unlink()
    for _ in range(3):
        store = await open_store()
        assert drain(store, store.queue("T", 0)) == sent[:2] + sent[second + 1 :]
        await store.close()


def put_one(store: Store, size: int) -> None:
    store.writer.append(message(b"x" * size), 0)


def put_two(store: Store, size: int) -> None:
    """Append two records, which must be in one segment, with *size* bytes together."""
    bodies = size - store.queue("T", 0).overhead
    group = [message(b"x" * (bodies // 2)), message(b"x" * (bodies - bodies // 2))]
    first, second = append_group(store, group, [0, 0])
    assert first.position // SEGMENT_BYTES == second.position // SEGMENT_BYTES


def put_run(store: Store, size: int) -> None:
    store.writer.append_all([store.writer.item(message(b"x" * size), 0)])


def put_odd(store: Store, size: int) -> None:
    """Not by the short way, which only takes what is usual."""
    one = message(b"x" * size)
    one.sys_flag = PREPARED
    store.writer.append(one, 0)


def put_note(store: Store, size: int) -> None:
    name = OWN_PREFIX + "t"
    more = len(name.encode()) - len("T")
    store.writer.append_together([message(b"x" * (size - more), name)], name)


WAYS = (put_one, put_two, put_run, put_odd, put_note)


@pytest.mark.parametrize("left", range(FILLER_BYTES + 2))
@pytest.mark.parametrize("put", WAYS)
async def test_a_segment_always_has_room_for_its_filler(
    open_store: OpenStore, put: Callable[[Store, int], None], left: int
) -> None:
    """Every reader of the log, RocketMQ included, expects one after the last record."""
    store = await open_store()
    put_one(store, 3300)
    first = store.segments.items[0]
    overhead = store.queue("T", 0).overhead
    put(store, first.end - left - store.appended - overhead)
    store.writer.append(message(b"in the next segment"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    end = 0
    while (head := FILLER.unpack(store.segments.read(end, FILLER_BYTES)))[1] != BLANK_MAGIC:
        end += head[0]
        assert end <= first.end - FILLER_BYTES, "the last record leaves no room for a filler"
    assert (head[0], end) == (first.end - end, first.end - left if left >= FILLER_BYTES else end)
    expected = store.appended
    store.crash()
    again = await open_store()
    assert (again.appended, again.recovered.cut_bytes, again.readers.damaged_records) == (expected, 0, 0)


async def test_a_record_that_would_fill_a_segment_without_its_filler_is_refused(open_store: OpenStore) -> None:
    store = await open_store()
    overhead = store.queue("T", 0).overhead
    store.writer.append(message(b"x" * (4096 - FILLER_BYTES - overhead)), 0)
    with pytest.raises(Refused, match="4096"):
        store.writer.append(message(b"x" * (4096 - FILLER_BYTES - overhead + 1)), 0)
