"""The table of one broker: ranges in order, one owner, and files that other programs can read."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from martlet_tiered import delta as delta_log
from martlet_tiered.delta import TableLog
from martlet_tiered.errors import Fenced, RangeRefused, TableRefused
from martlet_tiered.files import DataFile
from martlet_tiered.names import DataName, commit_name
from martlet_tiered.table import ColdTable

from .cold import DAY_MS, SCHEMA, Tier, append, now_ms, rows, upload


def delta(tier: Tier) -> DeltaTable:
    """The table as another program sees it."""
    location = tier.location()
    options = location.options | {"allow_http": "true"} if location.bucket else None
    return DeltaTable(f"{tier.url}/table", storage_options=options)


def positions(tier: Tier) -> list[int]:
    """The positions of all messages, as another program reads them."""
    return sorted(delta(tier).to_pyarrow_table().column("position").to_pylist())


def actions(tier: Tier, version: int) -> list[dict[str, dict[str, object]]]:
    """The lines of a commit."""
    return [json.loads(line) for line in tier.objects().read(commit_name(version)).splitlines()]


def paths(files: Sequence[DataFile]) -> list[str]:
    return sorted(file.path for file in files)


def test_a_new_table_has_the_oldest_protocol_and_these_properties(tier: Tier) -> None:
    table = tier.table("broker-a")
    assert (table.version, table.end, table.epoch, table.files()) == (0, None, 0, [])
    found = delta(tier)
    assert (found.protocol().min_reader_version, found.protocol().min_writer_version) == (1, 2)
    assert found.metadata().partition_columns == ["date", "kind"]
    assert found.metadata().name == "martlet:broker-a"
    assert found.metadata().configuration == {
        "delta.checkpointInterval": "50",
        "delta.logRetentionDuration": "interval 7 days",
        "delta.deletedFileRetentionDuration": "interval 7 days",
    }


def test_ranges_are_committed_in_order_and_found_again(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    first, second = append(table, objects, 0, 5), append(table, objects, 5, 9)
    table.append(9, 12, [])
    assert (table.end, table.epoch, table.version) == (12, 1, 4)
    found = tier.table()
    assert (found.end, found.version, paths(found.files())) == (12, 4, paths([first, second]))
    file = next(each for each in found.files() if each.path == first.path)
    assert file == first
    assert file.name == DataName("2026-11-28", "topic", 1, 0, 5)
    assert positions(tier) == list(range(9))


def test_each_commit_names_the_epoch_and_its_range(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    append(table, objects, 0, 5)
    lines = actions(tier, table.version)
    numbers = {line["txn"]["appId"]: line["txn"]["version"] for line in lines if "txn" in line}
    assert numbers == {"martlet-owner": 1, "martlet-log": 5}
    info = next(line["commitInfo"] for line in lines if "commitInfo" in line)
    assert isinstance(info["martlet"], dict)
    assert info["martlet"]["epoch"] == 1


def test_a_range_counts_once(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    file = append(table, objects, 0, 5)
    version = table.version
    table.append(0, 5, [file])
    assert table.version == version


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (3, 9), (6, 9), (0, 4)])
def test_a_range_with_a_gap_or_an_overlap_is_refused(tier: Tier, begin: int, end: int) -> None:
    objects, table = tier.objects(), tier.owned()
    append(table, objects, 0, 5)
    with pytest.raises(RangeRefused, match="does not continue the table, which ends at 5") as caught:
        append(table, objects, begin, end)
    assert caught.value.end == 5
    append(table, objects, 5, 7)
    assert positions(tier) == list(range(7))


def test_the_first_range_begins_anywhere(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    append(table, objects, 1 << 40, (1 << 40) + 3)
    assert table.end == (1 << 40) + 3


def test_files_with_wrong_names_are_refused(local_tier: Tier) -> None:
    objects, table = local_tier.objects(), local_tier.owned()
    for name in (DataName("2026-11-28", "topic", 2, 0, 5), DataName("2026-11-28", "topic", 1, 0, 4)):
        with pytest.raises(ValueError, match="is not named after its epoch"):
            table.append(0, 5, [upload(objects, name)])
    with pytest.raises(ValueError, match="is empty"):
        table.append(5, 5, [])
    assert table.end is None


def test_the_owner_before_is_fenced(tier: Tier) -> None:
    objects, old = tier.objects(), tier.owned()
    append(old, objects, 0, 5)
    new = tier.owned()
    assert (old.epoch, new.epoch, new.end) == (1, 2, 5)
    with pytest.raises(Fenced, match="has an owner of epoch 2 now, and this broker is of 1") as caught:
        append(old, objects, 5, 9)
    assert caught.value.epoch == 2
    for call in (old.refresh, lambda: old.collect(now_ms())):
        with pytest.raises(Fenced):
            call()
    append(new, objects, 5, 7)
    assert positions(tier) == list(range(7))


def test_a_broker_that_was_fenced_may_take_over_again(tier: Tier) -> None:
    objects, old = tier.objects(), tier.owned()
    tier.owned()
    assert old.take_over("once more") == 3
    append(old, objects, 0, 5)


def test_files_are_replaced(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    old = [append(table, objects, 0, 5), append(table, objects, 5, 9)]
    kept = append(table, objects, 9, 12)
    merged = upload(objects, DataName("2026-11-28", "topic", 1, 0, 9, 1))
    table.rewrite(old, [merged], now_ms(), changes_data=False)
    version = table.version
    table.rewrite(old, [merged], now_ms(), changes_data=False)  # as after a lost answer
    assert table.version == version
    assert paths(table.files()) == paths([merged, kept])
    assert (table.end, positions(tier)) == (12, list(range(12)))
    found = [line.get("add") or line.get("remove") for line in actions(tier, version)]
    assert [each["dataChange"] for each in found if each] == [False, False, False]


def test_files_expire(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    old, kept = append(table, objects, 0, 5), append(table, objects, 5, 9)
    table.rewrite([old], [], now_ms(), changes_data=True)
    assert paths(table.files()) == [kept.path]
    found = [line["remove"] for line in actions(tier, table.version) if "remove" in line]
    assert [(each["path"], each["dataChange"]) for each in found] == [(old.path, True)]
    again = upload(objects, DataName("2026-11-28", "topic", 1, 0, 9, 2))
    with pytest.raises(RangeRefused, match="is not part of the table any more"):
        table.rewrite([old, kept], [again], now_ms(), changes_data=False)
    with pytest.raises(ValueError, match="removes files"):
        table.rewrite([], [again], now_ms(), changes_data=False)


def test_the_optimize_of_another_program_is_noticed_and_survived(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    old = [append(table, objects, begin, begin + 5) for begin in (0, 5, 10)]
    other = delta(tier)
    other.optimize.compact()
    file = append(table, objects, 15, 20)
    assert [(note.epoch, note.operation) for note in table.foreign] == [(0, "OPTIMIZE")]
    assert sorted(each.name is None for each in table.files()) == [False, True]
    assert file.path in paths(table.files())
    assert positions(tier) == list(range(20))
    with pytest.raises(RangeRefused, match="is not part of the table any more"):
        table.rewrite(old, [], now_ms(), changes_data=True)


def test_the_vacuum_of_another_program_is_noticed(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    old = append(table, objects, 0, 5)
    append(table, objects, 5, 9)
    table.rewrite([old], [], now_ms(), changes_data=True)
    delta(tier).vacuum(0, dry_run=False, enforce_retention_duration=False)
    append(table, objects, 9, 12)
    assert {note.operation for note in table.foreign} == {"VACUUM START", "VACUUM END"}
    assert positions(tier) == list(range(5, 12))


def test_the_table_of_another_broker_is_refused(tier: Tier) -> None:
    tier.owned("broker-a")
    with pytest.raises(TableRefused, match="belongs to broker 'broker-a'; set tiered"):
        tier.table("broker-b")


def test_a_table_of_something_else_is_refused(tier: Tier) -> None:
    location = tier.location()
    options = location.options | {"allow_http": "true"} if location.bucket else None
    write_deltalake(f"{tier.url}/table", rows(0, 5), storage_options=options)
    with pytest.raises(TableRefused, match="is not of a cold tier"):
        tier.table()


def test_a_place_with_something_else_is_refused(tier: Tier) -> None:
    tier.objects().create("table/photos/cat.jpg", b"")
    with pytest.raises(TableRefused, match="is not empty and no Delta table: it has 'table/photos/cat"):
        tier.table()


def test_a_table_without_a_column_is_refused(local_tier: Tier) -> None:
    objects, config = local_tier.objects(), local_tier.config()
    log = TableLog(objects, local_tier.location(), config)
    log.create("martlet:a", pa.schema([field for field in SCHEMA if field.name != "position"]))
    with pytest.raises(TableRefused, match="has no columns position"):
        local_tier.table()


NEWER = [
    {"minReaderVersion": 1, "minWriterVersion": 4},
    {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["v2Checkpoint"],
        "writerFeatures": ["v2Checkpoint"],
    },
    {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["later"], "writerFeatures": ["later"]},
]


@pytest.mark.parametrize("protocol", NEWER)
def test_a_newer_protocol_is_refused(tier: Tier, protocol: dict[str, object]) -> None:
    objects, table = tier.objects(), tier.owned()
    append(table, objects, 0, 5)
    objects.create(commit_name(table.version + 1), json.dumps({"protocol": protocol}).encode())
    with pytest.raises(TableRefused, match=r"protocol|needs a newer program"):
        tier.table()
    with pytest.raises(TableRefused, match=r"protocol|needs a newer program"):
        append(table, objects, 5, 9)


def test_a_damaged_log_is_refused(s3_tier: Tier) -> None:
    objects, table = s3_tier.objects(), s3_tier.owned()
    append(table, objects, 0, 5)
    data = objects.read(commit_name(2))
    objects.delete(commit_name(2))
    objects.create(commit_name(2), data[:-20])
    with pytest.raises(TableRefused, match=r"cannot be read: .*; restore it, or set tiered"):
        s3_tier.table()


def test_a_missing_commit_is_noticed(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    for begin in (0, 5, 10):
        append(table, objects, begin, begin + 5)
    objects.delete(commit_name(2))
    with pytest.raises(TableRefused, match="cannot be read"):
        tier.table()


CHECKPOINT_COMMITS = 10


@pytest.fixture
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a checkpoint after ten commits."""
    assert delta_log.CHECKPOINT_COMMITS == 50
    monkeypatch.setattr(delta_log, "CHECKPOINT_COMMITS", CHECKPOINT_COMMITS)


@pytest.mark.usefixtures("frequent_checkpoints")
def test_checkpoints_are_made_and_the_state_survives_without_older_commits(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    file = append(table, objects, 0, 5)
    gone = append(table, objects, 5, 6)
    table.rewrite([gone], [], now_ms(), changes_data=True)
    assert not table.checkpoint()
    for begin in range(6, 4 + CHECKPOINT_COMMITS):
        table.append(begin, begin + 1, [])
    assert table.checkpoint()
    assert not table.checkpoint()
    for version in range(table.version):
        objects.delete(commit_name(version))
    found = tier.table()
    assert (found.end, found.version, paths(found.files())) == (table.end, table.version, [file.path])
    assert found.take_over("new") == 2
    append(found, objects, found.end or 0, 1000)
    assert found.garbage(now_ms()) == []
    assert not found.checkpoint()


def test_leftovers_are_collected_when_they_are_old_and_of_no_newer_epoch(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    committed = append(table, objects, 0, 5)
    table.take_over("second")
    leftovers = [upload(objects, DataName("2026-11-28", "topic", epoch, 5, 9)) for epoch in (1, 2)]
    newer = upload(objects, DataName("2026-11-28", "topic", 3, 5, 9))
    objects.create("table/date=2026-11-28/kind=topic/part-0001.parquet", b"of another program")
    assert table.collect(now_ms()) == []
    collected = [f"table/{file.path}" for file in leftovers]
    assert table.collect(now_ms() + 2 * DAY_MS) == collected
    left = [each.name for each in objects.list_folder("table/date=2026-11-28")]
    assert left == sorted(
        [f"table/{committed.path}", f"table/{newer.path}", "table/date=2026-11-28/kind=topic/part-0001.parquet"]
    )


def test_removed_files_stay_for_a_week(tier: Tier) -> None:
    objects, table = tier.objects(), tier.owned()
    old, recent = append(table, objects, 0, 5), append(table, objects, 5, 9)
    table.rewrite([old], [], now_ms() - 8 * DAY_MS, changes_data=True)
    table.rewrite([recent], [], now_ms() - 6 * DAY_MS, changes_data=True)
    assert table.collect(now_ms() + 2 * DAY_MS) == [f"table/{old.path}"]
    assert [each.name for each in objects.list_folder("table/date=2026-11-28")] == [f"table/{recent.path}"]


def test_what_a_power_cut_left_incomplete_is_set_aside(local_tier: Tier, tmp_path: Path) -> None:
    objects, table = local_tier.objects(), local_tier.owned()
    append(table, objects, 0, 5)
    log = tmp_path / "tier" / "table" / "_delta_log"
    whole = (log / f"{table.version:020}.json").read_bytes()
    torn = log / f"{table.version + 1:020}.json"
    for number, data in enumerate((b"", whole[:-10], b"\0" * len(whole), b"1\n"), 1):
        torn.write_bytes(data)
        found = local_tier.table()
        assert (found.end, found.version) == (5, table.version)
        assert not torn.exists()
        assert len(list((tmp_path / "tier" / "torn").iterdir())) == number
    append(local_tier.owned(), objects, 5, 9)
    assert positions(local_tier) == list(range(9))


@pytest.mark.usefixtures("frequent_checkpoints")
def test_an_incomplete_checkpoint_is_set_aside(local_tier: Tier, tmp_path: Path) -> None:
    table = local_tier.owned()
    for begin in range(CHECKPOINT_COMMITS):
        table.append(begin, begin + 1, [])
    assert table.checkpoint()
    log = tmp_path / "tier" / "table" / "_delta_log"
    checkpoint = log / f"{table.version:020}.checkpoint.parquet"
    whole = checkpoint.read_bytes()
    for data, hint in ((b"", b"{"), (whole[:-4], b""), (b"PAR1", b"")):
        checkpoint.write_bytes(data)
        (log / "_last_checkpoint").write_bytes(hint)
        found = local_tier.table()
        assert (found.end, found.version) == (CHECKPOINT_COMMITS, table.version)
        assert not checkpoint.exists()
    assert found.checkpoint()


def test_a_local_commit_is_durable_before_it_counts(local_tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, table = local_tier.objects(), local_tier.owned()
    append(table, objects, 0, 5)
    synced: list[str] = []
    inner = table._objects
    sync = type(inner).sync

    def note(self: object, names: Sequence[str]) -> None:
        sync(inner, names)
        synced.extend(names)

    monkeypatch.setattr(type(inner), "sync", note)
    append(table, objects, 5, 9)
    assert synced == [commit_name(table.version)]

    def fail(self: object, names: Sequence[str]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(inner), "sync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        append(table, objects, 9, 12)


def test_two_handles_create_one_table(tier: Tier) -> None:
    objects, config = tier.objects(), tier.config()
    handles = [ColdTable(objects, TableLog(objects, tier.location(), config), "a") for _ in range(2)]
    for handle in handles:
        handle.open(SCHEMA)
    assert [handle.version for handle in handles] == [0, 0]
