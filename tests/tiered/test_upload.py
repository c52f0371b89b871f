"""The uploader brings each record of the log into the tier once, byte for byte, and only then lets it go."""

from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.records.layout import PREPARED, RecordView
from martlet.store.format.notes import NOTES_TOPIC
from martlet.testing.stores import HOST, ManualClock, message
from martlet_columns.records import Records
from martlet_tiered.config import TieredConfig, call_deadline_s
from martlet_tiered.delta import CommitNote
from martlet_tiered.format import footer as footers
from martlet_tiered.format.writing import write_file
from martlet_tiered.names import DataName
from martlet_tiered.table import ColdTable
from martlet_tiered.upload import uploader as uploading
from martlet_tiered.upload.storing import check_file, store_file

from .cold import Tier
from .uploads import (
    Followed,
    Place,
    begin_upload,
    check_tier,
    fill,
    filled_store,
    log_records,
    open_store,
    table_of,
    tier_records,
    until,
    upload_all,
    uploader_of,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for long in real time."""
    monkeypatch.setattr(uploading, "POLL_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_MAX_S", 0.02)


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
async def test_a_log_is_uploaded_and_goes_on(tmp_path: Path, tier: Tier, own_process: bool) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        async with begin_upload(store, Place(tier, own_process=own_process)) as held:
            await held.finish()
            check_tier(tier, store)
            filled_store(store, 30, 60)
            await held.finish()
        check_tier(tier, store)
        assert held.uploader.released == store.durable
        assert held.uploader.behind == 0
        assert held.uploader.progress.ranges > 3
        assert held.uploader.progress.records == 90
        assert set(held.followed.files) == {file.path for file in table_of(tier).files()}


async def test_files_are_named_after_date_kind_and_range(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock(1_700_000_000_000)
    async with open_store(tmp_path, clock) as store:
        filled_store(store, 14)
        clock.ms += 86_400_000
        filled_store(store, 1, 14)
        await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        end = store.durable
    paths = sorted(file.path for file in table_of(local_tier).files())
    first = [f"date=2023-11-14/kind={kind}/e1-0-{end}.parquet" for kind in ("dlq", "internal", "retry", "topic")]
    assert paths == [*first, f"date=2023-11-15/kind=topic/e1-0-{end}.parquet"]
    for file in table_of(local_tier).files():
        assert file.minimum["topic"] <= file.maximum["topic"]  # type: ignore[operator]


async def test_a_new_uploader_goes_on_at_the_end_of_the_table(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        first = await upload_all(store, Place(local_tier))
        filled_store(store, 20, 60)
        second = await upload_all(store, Place(local_tier))
        check_tier(local_tier, store)
        assert (first.uploader.progress.records, second.uploader.progress.records) == (60, 20)


async def test_older_messages_are_uploaded_from_the_first_that_the_log_has(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store)
        await store.upkeep.checkpointer.checkpoint()
        for _ in range(2):
            store.segments.remove_first()
        held = await upload_all(store, Place(local_tier))
        check_tier(local_tier, store)
        assert held.followed.footers[0].begin == store.first_position > 0


async def test_a_gap_that_retention_left_while_the_tier_was_off_is_reported(
    tmp_path: Path, local_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        await upload_all(store, Place(local_tier))
        filled_store(store, 60, 10)
        while store.segments.items[1].start < store.durable - 5000:
            store.segments.remove_first()
        gap = store.first_position
        await upload_all(store, Place(local_tier))
        check_tier(local_tier, store)
        assert f"bytes of the log before position {gap}" in caplog.text


async def test_nothing_is_uploaded_that_is_not_durable_or_not_readable(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        confirmed = store.durable
        store.readable_end.confirmed.append(lambda: confirmed)
        filled_store(store, 10, 10)
        async with begin_upload(store, Place(local_tier)) as held:
            await until(lambda: held.uploader.released == confirmed)
            assert (held.uploader.limit, held.uploader.behind) == (confirmed, 0)
            check_tier(local_tier, store, confirmed)
            store.readable_end.confirmed.clear()
            store.readable_end.update()
            await held.finish()
        check_tier(local_tier, store)


async def test_a_range_waits_for_its_size_or_time(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 20)
        size = store.durable
        async with begin_upload(store, Place(local_tier), range_bytes=size + 1, range_ms=86_400_000) as held:
            await until(lambda: not held.uploader._trouble.text)
            await trio.sleep(0.05)
            assert held.uploader.released == 0
            filled_store(store, 1, 20)
            await until(lambda: held.uploader.released > 0)
        assert held.followed.footers[0].end <= size + 1
    async with open_store(tmp_path) as store:
        assert table_of(local_tier).end is not None
        filled_store(store, 1, 21)
        async with begin_upload(store, Place(local_tier), range_bytes=size, range_ms=50) as held:
            await until(lambda: held.uploader.released == store.durable)


async def test_retention_hurries_a_range(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 20)
        async with begin_upload(store, Place(local_tier), range_bytes=1 << 30, range_ms=86_400_000) as held:
            await until(lambda: not held.uploader._trouble.text)
            assert held.uploader.released == 0
            await held.uploader.release(100)
            await until(lambda: held.uploader.released == store.durable)


async def test_an_empty_log_needs_no_commit(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        async with begin_upload(store, Place(local_tier)) as held:
            await until(lambda: not held.uploader._trouble.text)
            await trio.sleep(0.03)
        assert (table_of(local_tier).end, held.uploader.released) == (None, 0)


async def test_a_range_without_messages_is_committed_without_files(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        fill(store, *[(message(b"x" * 100, "gone"), 0)] * 5)
        end = store.durable
        store.queues.forget_topic("gone")
        held = await upload_all(store, Place(local_tier))
        table = table_of(local_tier)
        assert (table.end, table.files(), held.uploader.progress.records) == (end, [], 0)


# ---- what is left out


async def test_a_deleted_topic_is_left_out_and_a_new_one_of_its_name_is_not(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        old = {position for position, data in log_records(store) if b"orders" in data}
        assert old
        store.deletions.delete_topic("orders")
        fill(store, (message(b"new", "orders"), 0), (message(b"new", "orders"), 0))
        store.flusher.flush_now()
        await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        expected = [pair for pair in log_records(store) if pair[0] not in old]
        assert tier_records(local_tier) == expected


async def test_a_topic_that_is_deleted_after_a_range_is_left_out_of_it(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        uploader, _ = uploader_of(store, Place(local_tier), local_tier.config(), Followed())
        filled_store(store, 10)
        end = store.durable
        old = {position for position, data in log_records(store) if b"orders" in data}
        store.deletions.delete_topic("orders")
        fill(store, (message(b"new", "orders"), 0))
        store.flusher.flush_now()
        async with trio.open_nursery() as nursery:
            # The first range ends before the deletion.
            uploader._bytes_max = end
            nursery.start_soon(uploader.run)
            await uploader.release(store.durable)
            await until(lambda: uploader.released == store.durable)
            nursery.cancel_scope.cancel()
        assert uploader.progress.ranges > 1
        assert tier_records(local_tier) == [pair for pair in log_records(store) if pair[0] not in old]


async def test_a_deletion_that_is_not_durable_leaves_nothing_out(tmp_path: Path, local_tier: Tier) -> None:
    """A power cut would undo it, and the topic would lack what an upload has left out."""
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        end = store.durable
        store.deletions.delete_topic("orders")
        store.flusher.wanted = 0
        async with begin_upload(store, Place(local_tier)) as held:
            await held.uploader.release(end)
            await until(lambda: store.flusher.wanted >= store.deletions.end or held.uploader.released > 0)
            assert (held.uploader.released, table_of(local_tier).end) == (0, None)
            store.flusher.flush_now()
            await held.finish()
        topics = {RecordView(data).topic for _, data in tier_records(local_tier)}
        assert topics == {"T", "%RETRY%G", "%DLQ%G", "martlet.x", NOTES_TOPIC}


async def test_expired_messages_and_light_queues_are_left_out(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        light = message(b"light", "T")
        light.properties += b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02"
        fill(
            store,
            *[(message(b"%d" % number, "T"), 0) for number in range(10)],
            (light, 0),
            (message(b"l", "%LMQ%a"), 0),
        )
        store.queue("T", 0).expire_to(4)
        await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        (footer,) = [each for file in table_of(local_tier).files() if (each := _footer(local_tier, file.path))]
        assert [(span.topic, span.first, span.last, span.count) for span in footer.spans] == [("T", 4, 10, 7)]


def _footer(tier: Tier, path: str) -> Any:
    from martlet_tiered.format.footer import read_footer

    objects = tier.objects()
    return read_footer(objects, f"table/{path}", objects.size(f"table/{path}"))


async def test_half_messages_are_internal(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        half = Message("T", b"half", b"", sys_flag=PREPARED, born_ms=1, born_host=bytes(8))
        fill(store, (message(b"whole", "T"), 0), (half, 0))
        await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        kinds = {file.kind: file.rows for file in table_of(local_tier).files()}
        assert kinds == {"topic": 1, "internal": 1}
        check_tier(local_tier, store)


async def test_damaged_records_are_logged_counted_and_left_out(
    tmp_path: Path, local_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 40)
        records = list(log_records(store))
        bad = {records[5][0]: 89, records[12][0]: 5, records[20][0]: 2, records[21][0]: 90}
        for position, at in bad.items():
            segment = store.segments.find(position)
            assert segment is not None
            place = position - segment.start + at
            store.segments.files.write(segment.path, bytes((store.segments.read(position, at + 1)[at] ^ 0x55,)), place)
        held = await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        assert tier_records(local_tier) == [pair for pair in records if pair[0] not in bad]
        assert held.uploader.progress.damaged == 3
        assert f"damaged parts of the log, the first at position {records[5][0]}" in caplog.text


async def test_a_log_that_ends_before_the_table_is_refused(
    tmp_path: Path, local_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(tmp_path / "one") as store:
        filled_store(store)
        await upload_all(store, Place(local_tier))
    async with open_store(tmp_path / "two") as store:
        filled_store(store, 3)
        async with begin_upload(store, Place(local_tier)) as held:
            await until(lambda: held.uploader.progress.failures > 0)
        assert held.uploader.released == 0
        assert "it is the table of another data directory" in caplog.text


# ---- signs of the upload process


def test_requests_of_a_file_have_a_sign_before_each(local_tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footers, "TAIL_BYTES", 100)  # the footer takes two requests
    signs: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            signs.append(name)
            return getattr(objects, name)

    objects: Any = local_tier.objects()
    record = encode_record(message(b"x"), 0, 0, 0, 1, HOST)
    made = write_file(DataName("2026-11-28", "topic", 1, 0, len(record)), "a", Records(bytearray(record)), 1)
    noted: Any = Noted()
    store_file(noted, made, lambda: signs.append("beat"))
    check_file(noted, made.file, made.footer, len(made.keys), lambda: signs.append("beat"))
    requests = ["create", "create", "size", "size", "read_range", "read_range", "read_range"]
    assert signs == [sign for name in requests for sign in ("beat", name)]


@pytest.mark.parametrize("requests", [1, 10])
def test_a_request_may_take_the_time_that_is_configured(requests: int) -> None:
    config = TieredConfig(request_timeout_ms=600_000, upload_timeout_ms=1000, retry_ms=240_000)
    assert call_deadline_s(config, requests) > requests * 600 + 240
    config = TieredConfig(upload_timeout_ms=3_600_000, retry_ms=240_000)
    assert call_deadline_s(config, requests) > 3600 + 240


async def test_commits_of_other_programs_that_a_checkpoint_meets_are_told(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploading, "TIDY_RANGES", 1)

    def wrap(found: Any) -> Any:
        if isinstance(found, ColdTable):
            monkeypatch.setattr(found, "checkpoint", lambda: found.foreign.append(CommitNote(1, "OPTIMIZE", 0, "")))
        return found

    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        async with begin_upload(store, Place(local_tier, wrap=wrap), range_bytes=1 << 20) as held:
            await held.finish()
            await until(lambda: "another program has changed the table" in caplog.text)
        assert held.uploader.progress.ranges == 1


# ---- sizes


async def test_a_thousand_topics_are_one_file(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path, segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20) as store:
        for number in range(3000):
            store.writer.append(message(b"%d" % number, f"topic-{number % 1000}", keys=f"k{number}"), 0)
        store.committer.commit()
        store.flusher.flush_now()
        await upload_all(store, Place(local_tier), range_bytes=1 << 30)
        check_tier(local_tier, store)
        (file,) = table_of(local_tier).files()
        footer = _footer(local_tier, file.path)
        assert len(footer.spans) == 1000
        assert [span.topic for span in footer.spans] == sorted(f"topic-{number}" for number in range(1000))


async def test_a_range_is_halved_until_its_files_fit_into_memory(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(uploading, "FILE_BYTES_MAX", 1500)
    monkeypatch.setattr(uploading, "RANGE_BYTES_MIN", 100)
    async with open_store(tmp_path) as store:
        filled_store(store, 100)
        held = await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        check_tier(local_tier, store)
        assert held.uploader.progress.ranges > 1


async def test_small_windows_give_the_same_file(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    from martlet_tiered.format import writing
    from martlet_tiered.upload import encoding, log_blocks

    async with open_store(tmp_path) as store:
        filled_store(store, 100)
        for name, module in (("GROUP_BYTES", writing), ("WINDOW_BYTES", encoding), ("BLOCK_BYTES", encoding)):
            monkeypatch.setattr(module, name, 700)
        monkeypatch.setattr(writing, "GROUP_BYTES_MIN", 300)
        monkeypatch.setattr(log_blocks, "BLOCK_BYTES", 300)
        await upload_all(store, Place(local_tier), range_bytes=1 << 20)
        check_tier(local_tier, store)
        assert max(len(_footer(local_tier, file.path).groups) for file in table_of(local_tier).files()) > 10
