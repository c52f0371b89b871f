"""`martlet store` reads a directory that no broker has open, and finds what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.clock import SystemClock
from martlet.message import Message, Placed
from martlet.store import Store, StoreConfig

Run = Callable[..., tuple[int, str, str]]

RECORDS = 60
SEGMENT_BYTES = 8192


def config() -> StoreConfig:
    return StoreConfig(segment_bytes=SEGMENT_BYTES, chunk_bytes=4096, index_slots=64, index_entries=1024)


def written(directory: Path) -> list[Placed]:
    """Make a store of some segments, stopped in order, and return where its records are."""

    async def work() -> list[Placed]:
        store = await Store.open(directory, config(), SystemClock())
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            placed = [
                store.append(Message(f"Topic{number % 2}", b"body %d " % number * 20), number % 3)
                for number in range(RECORDS)
            ]
            store.commit()
            await store.wait_flushed(placed[-1].end)
            nursery.cancel_scope.cancel()
        await store.close()
        return placed

    return trio.run(work)


def flip(directory: Path, position: int) -> None:
    """Change one bit of the log."""
    start = max(int(path.name) for path in (directory / "commitlog").iterdir() if int(path.name) <= position)
    path = directory / "commitlog" / f"{start:020d}"
    data = bytearray(path.read_bytes())
    data[position - start] ^= 0x10
    path.write_bytes(data)


def verified(martlet: Run, directory: Path) -> tuple[int, Any]:
    code, out, _ = martlet("store", "verify", str(directory), "--json")
    return code, json.loads(out)


def test_inspect_counts_what_is_there(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    code, out, err = martlet("store", "inspect", str(tmp_path), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["stopped_in_order"]
    assert found["records"] == sum(segment["records"] for segment in found["segments"]) == RECORDS
    assert len(found["segments"]) > 1
    assert (found["log_start"], found["log_end"]) == (0, placed[-1].end)
    queues = {(queue["topic"], queue["queue_id"]): queue for queue in found["queues"]}
    assert len(queues) == 6
    assert all((queue["first_offset"], queue["next_offset"]) == (0, 10) for queue in queues.values())


def test_inspect_is_a_table_for_people(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    code, out, _ = martlet("store", "inspect", str(tmp_path))
    assert code == 0
    assert f"{RECORDS} records" in out
    assert "Topic1" in out
    assert "stopped in order" in out


def test_one_record_is_printed(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    code, out, _ = martlet("store", "inspect", str(tmp_path), "--at", str(placed[7].position), "--json")
    record = json.loads(out)
    assert code == 0
    assert record["body"].startswith("body 7 ")
    assert (record["topic"], record["queue"]) == ("Topic1", 1)


def test_where_no_record_begins_is_said(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    for position in (placed[3].position + 1, placed[-1].end, 1 << 40):
        code, _, err = martlet("store", "inspect", str(tmp_path), "--at", str(position))
        assert code == 3
        assert f"position {position}" in err


def test_a_sound_store_is_verified(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    code, found = verified(martlet, tmp_path)
    assert code == 0
    assert found["sound"]


@pytest.mark.parametrize("within", [0, 5, 32, 95])
def test_one_bit_costs_one_record_and_is_found(within: int, martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    hurt = placed[RECORDS // 2]
    flip(tmp_path, hurt.position + within)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert not found["sound"]
    assert found["records"] == RECORDS - 1
    assert [(damage["start"], damage["end"]) for damage in found["damage"]] == [
        (hurt.position, placed[RECORDS // 2 + 1].position)
    ]


def test_a_queue_offset_that_does_not_follow_is_found(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    flip(tmp_path, placed[RECORDS // 2].position + 24)  # no checksum guards the queue offset
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert [queue["wrong_offsets"] for queue in found["queues"] if queue["wrong_offsets"]] == [1]


def test_a_wrong_queue_entry_is_found(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "consumequeue" / "Topic0" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20 * 4 + 7] ^= 1
    path.write_bytes(data)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert [queue["wrong_entries"] for queue in found["queues"] if queue["wrong_entries"]] == [1]


def test_a_torn_end_is_no_damage(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    last = max((tmp_path / "commitlog").iterdir())
    data = bytearray(last.read_bytes())
    at = placed[-1].end - int(last.name)
    data[at : at + 40] = b"\x00\x00\x01" + b"x" * 37
    last.write_bytes(data)
    (tmp_path / "abort").write_text("1")
    code, found = verified(martlet, tmp_path)
    assert code == 0
    assert not found["stopped_in_order"]
    assert found["torn_bytes"] == 40
    assert found["records"] == RECORDS


def test_nothing_is_changed(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    martlet("store", "inspect", str(tmp_path))
    martlet("store", "verify", str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_directory_in_use_is_refused(martlet: Run, tmp_path: Path) -> None:
    async def work() -> tuple[int, str, str]:
        store = await Store.open(tmp_path, config(), SystemClock())
        try:
            return martlet("store", "verify", str(tmp_path))
        finally:
            await store.close()

    code, _, err = trio.run(work)
    assert code == 3
    assert "locked by another process" in err


def test_what_is_no_data_directory_is_said(martlet: Run, tmp_path: Path) -> None:
    code, _, err = martlet("store", "inspect", str(tmp_path / "absent"))
    assert code == 3
    assert "holds no commitlog" in err
