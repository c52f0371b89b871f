"""Queries of cold tiers whose tables have gaps, damage, or messages that were deleted, expired or replaced."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.tiered.cold import Tier
from tests.tiered.histories import DAY_MS, HOST

from martlet.message import Message as StoredMessage
from martlet.records.codec import encode_record
from martlet.store.format.notes import deletion, expiry_notes
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark import read_arrow
from martlet_spark.errors import DataLost, OptionError
from martlet_spark.options import BATCH, STREAM, Option, Options, parse
from martlet_spark.read.cold_rows import last_identity
from martlet_spark.read.history import TopicSet, read_history
from martlet_spark.read.planner import Range, gaps
from martlet_spark.read.seam import StreamSeam, places_of, plan_batch
from martlet_spark.source import MartletDataSource
from martlet_tiered.table import ColdTable

from .test_tiers import owned, written


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(str(tmp_path / "cold"))


@pytest.fixture
def table(tier: Tier) -> ColdTable:
    return owned(tier)


def record(offset: int, position: int, body: bytes = b"x", ms: int = 0, queue: int = 0) -> bytes:
    return bytes(encode_record(StoredMessage("Orders", body, b"", 0), queue, offset, position, DAY_MS + ms, HOST))


def upload(tier: Tier, table: ColdTable, offsets: range, log: tuple[int, int], body: bytes = b"x", ms: int = 0) -> None:
    """Commit a file with the messages at *offsets*, each 1000 bytes of the *log* between two positions."""
    begin, end = log
    data = [record(offset, begin + each * 1000, body, ms + each) for each, offset in enumerate(offsets)]
    written(tier, {"topic": data}, table, begin, end)


def note(message: StoredMessage, position: int) -> bytes:
    return bytes(encode_record(message, 0, 0, position, DAY_MS, HOST))


def expiry(first: int) -> StoredMessage:
    [message] = expiry_notes([("Orders", 0, first)], 1 << 20, HOST, DAY_MS)
    return message


def cold(tier: Tier, **options: object) -> Any:
    given: dict[str, Any] = {"columns": "offset,body", **options}
    selection = () if "assign" in options else ("Orders",)
    return read_arrow("", *selection, tier="cold", tierUrl=tier.url, **given)


def offsets_of(reader: Any) -> list[int]:
    found: list[int] = reader.read_all().column("offset").to_pylist()
    return found


def vacuum(tier: Tier) -> None:
    DeltaTable(f"{tier.url}/table").vacuum(0, dry_run=False, enforce_retention_duration=False)


def compact(tier: Tier) -> None:
    DeltaTable(f"{tier.url}/table").optimize.compact()
    vacuum(tier)


# ---- files are replaced meanwhile


@pytest.mark.parametrize(
    ("pieces", "ranges", "lacking"),
    [
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (4, 6), (8, 9)], [(0, 2), (6, 8), (9, 10)]),
        ([(0, 3), (5, 9)], [(0, 3), (5, 7)], [(7, 9)]),
        ([(0, 3), (5, 9)], [(1, 3), (6, 9)], [(0, 1), (5, 6)]),
        ([(5, 9)], [(0, 5), (9, 12)], [(5, 9)]),
        ([(4, 4)], [], []),
    ],
)
def test_gaps_are_what_ranges_lack_of_the_wanted_pieces(
    pieces: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]], lacking: Sequence[tuple[int, int]]
) -> None:
    queue = MessageQueue("Orders", "broker-a", 0)
    found = gaps([(queue, piece) for piece in pieces], [Range(queue, *each) for each in ranges])
    assert [(each.start, each.end) for each in found] == list(lacking)


def test_messages_after_a_gap_are_found_again_in_replaced_files(
    tier: Tier, table: ColdTable, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tier, table, range(10), (0, 10_000))
    upload(tier, table, range(12, 20), (10_000, 20_000))
    upload(tier, table, range(20, 30), (20_000, 30_000))
    reader = cold(tier, failOnDataLoss=False)
    compact(tier)
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        assert offsets_of(reader) == [*range(10), *range(12, 30)]
    assert "any more" not in caplog.text


def test_messages_of_a_topic_that_is_created_again_meanwhile_are_not_mixed(
    tier: Tier, table: ColdTable, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tier, table, range(5), (0, 10_000), b"old")
    upload(tier, table, range(5, 10), (10_000, 30_000), b"old")
    readers = [cold(tier), cold(tier, failOnDataLoss=False)]
    new = [record(offset, 40_000 + offset * 1000, b"new") for offset in range(12)]
    deleted = note(deletion("Orders", HOST, DAY_MS), 30_000)
    written(tier, {"topic": new, "internal": [deleted]}, table, 30_000, 70_000)
    DeltaTable(f"{tier.url}/table").delete("_position >= 10000 AND _position < 20000")
    vacuum(tier)
    with pytest.raises(DataLost, match=r"messages 5 to 9 of queue broker-a/0 .* were deleted while the query was read"):
        readers[0].read_all()
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        rows = readers[1].read_all().to_pylist()
    assert [(row["offset"], row["body"]) for row in rows] == [(offset, b"old") for offset in range(5)]
    assert "were deleted while the query was reading" in caplog.text


@pytest.mark.parametrize("is_created", [True, False])
def test_a_deletion_is_noticed_if_nothing_of_the_topic_is_left(tier: Tier, table: ColdTable, is_created: bool) -> None:
    upload(tier, table, range(5), (0, 30_000), b"old")
    reader = cold(tier)
    deleted = note(deletion("Orders", HOST, DAY_MS), 30_000)
    new = [record(0, 40_000, b"new")] if is_created else []
    written(tier, {"topic": new, "internal": [deleted]} if new else {"internal": [deleted]}, table, 30_000, 70_000)
    DeltaTable(f"{tier.url}/table").delete("_position < 10000")
    vacuum(tier)
    with pytest.raises(DataLost, match="messages 0 to 4 of queue broker-a/0 of topic 'Orders' were deleted while"):
        reader.read_all()


# ---- deleted and expired messages


def test_offsets_that_are_there_twice_without_a_deletion_fail_the_query(
    tier: Tier, table: ColdTable, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tier, table, range(10), (0, 10_000), b"first")
    upload(tier, table, range(5, 12), (10_000, 20_000), b"second")
    with pytest.raises(DataLost, match="messages 5 to 9 of queue broker-a/0 of topic 'Orders' are there twice"):
        cold(tier)
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        rows = cold(tier, failOnDataLoss=False).read_all().to_pylist()
    assert [(row["offset"], row["body"]) for row in rows] == [(offset, b"second") for offset in range(5, 12)]
    assert "are there twice" in caplog.text


@pytest.mark.parametrize("is_lost", [True, False])
def test_lost_and_damaged_notes_fail_the_query(
    tier: Tier, table: ColdTable, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tier, table, range(9), (0, 10_000), b"old")
    written(tier, {"internal": [note(deletion("Orders", HOST, DAY_MS), 10_000)]}, table, 10_000, 20_000)
    [file] = [each for each in Path(tier.url).rglob("*.parquet") if "internal" in str(each)]
    if is_lost:
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-12] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    with pytest.raises(DataLost, match=r"notes of deleted and expired messages are lost \(table/.*internal"):
        cold(tier)
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        assert len(offsets_of(cold(tier, failOnDataLoss=False))) == 9
    assert "notes of deleted and expired messages are lost" in caplog.text


def test_expired_messages_do_not_come_back_with_explicit_offsets(
    tier: Tier, table: ColdTable, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tier, table, range(10), (0, 10_000))
    written(tier, {"internal": [note(expiry(5), 10_000)]}, table, 10_000, 20_000)
    assert offsets_of(cold(tier)) == [5, 6, 7, 8, 9]
    starts = {"Orders": {"0": 2}}
    with pytest.raises(DataLost, match="lacks messages 2 to 4 of queue broker-a/0 of topic 'Orders'"):
        cold(tier, startingOffsets=starts)
    assert offsets_of(cold(tier, startingOffsets=starts, failOnDataLoss=False)) == [5, 6, 7, 8, 9]


class FakeBroker:
    """A broker with one queue, whose messages are those of the table at *tier*, and which may be *silent*."""

    def __init__(self, tier: Tier, first: int, end: int) -> None:
        self.queue = MessageQueue("Orders", "broker-a", 0)
        self.is_silent = False
        self.cluster = SimpleNamespace(masters=lambda: {"broker-a"})
        self._tier, self._bounds = tier, (first, end)

    def bounds(self) -> dict[MessageQueue, tuple[int, int]]:
        return {self.queue: self._bounds}

    def routes(self) -> dict[str, object]:
        return {}

    def identities(self, _cluster: object, _routes: object, offsets: dict[MessageQueue, int]) -> dict[Any, str]:
        if self.is_silent:
            return {}
        history = read_history(places_of(options_of(self._tier, STREAM))[0], TopicSet({"Orders"}))
        return {
            queue: last_identity(history.ranges([(queue, (0, offset + 1))])[-1]) for queue, offset in offsets.items()
        }


def options_of(tier: Tier, known: tuple[Option, ...], **given: str) -> Options:
    return parse({"endpoints": "127.0.0.1:1", "subscribe": "Orders", "tierUrl": tier.url, **given}, known)


@pytest.mark.parametrize(("start", "is_cold"), [(40, False), (50, True)])
def test_messages_that_have_expired_at_the_broker_are_not_read_from_the_table(
    tier: Tier, table: ColdTable, monkeypatch: pytest.MonkeyPatch, start: int, is_cold: bool
) -> None:
    upload(tier, table, range(100), (0, 100_000))
    broker: Any = FakeBroker(tier, 50, 100)
    monkeypatch.setattr("martlet_spark.read.seam.identities", broker.identities)
    monkeypatch.setattr("martlet_spark.read.seam.Subscribed", lambda *_: broker)
    options = options_of(tier, BATCH, startingOffsets=json.dumps({"Orders": {"0": start}}))
    ranges = plan_batch(broker.cluster, options, with_sizes=False)
    assert [(each.start, each.end, each.rows is not None) for each in ranges] == [(start, 100, is_cold)]


def test_a_stream_of_the_table_alone_does_not_read_expired_messages_from_a_checkpoint(
    tier: Tier, table: ColdTable
) -> None:
    upload(tier, table, range(10), (0, 10_000))
    given = {"tier": "cold", "tierUrl": tier.url, "subscribe": "Orders", "pollMs": "0", "failOnDataLoss": "false"}
    source = MartletDataSource({**given, "maxOffsetsPerTrigger": "2"})
    reader: Any = source.streamReader(source.schema())
    checkpoint = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    written(tier, {"internal": [note(expiry(5), 10_000)]}, table, 10_000, 20_000)
    again: Any = MartletDataSource(given).streamReader(source.schema())
    end = again.latestOffset(checkpoint, again.getDefaultReadLimit())
    rows = [batch for each in again.partitions(checkpoint, end) for batch in again.read(each)]
    assert [offset for batch in rows for offset in batch.column("offset").to_pylist()] == [5, 6, 7, 8, 9]


def test_a_stream_reads_tables_until_it_has_all_that_they_have(
    tier: Tier, table: ColdTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(tier, table, range(30), (0, 30_000))
    broker: Any = FakeBroker(tier, 0, 50)
    monkeypatch.setattr("martlet_spark.read.seam.identities", broker.identities)
    seam = StreamSeam(options_of(tier, STREAM))
    kinds = []
    for number, is_silent in enumerate((True, False, True, False, False)):
        broker.is_silent = is_silent
        start = number * 8
        cold_ranges, left = seam.divide(broker, {broker.queue: (start, start + 8)}, {broker.queue: start})
        found = [(each.start, each.end) for each in cold_ranges], left[broker.queue]
        kinds.append(found)
    assert kinds == [
        ([], (0, 8)),
        ([(8, 16)], (16, 16)),
        ([], (16, 24)),
        ([(24, 30)], (30, 32)),
        ([], (32, 40)),
    ]
    monkeypatch.setattr("martlet_spark.read.seam.read_history", None)  # the table is not read any more
    assert seam.divide(broker, {broker.queue: (40, 50)}, {broker.queue: 40}) == ([], {broker.queue: (40, 50)})


# ---- times


@pytest.fixture
def turned_back(tier: Tier, table: ColdTable) -> Tier:
    """A tier of a broker whose clock went back: its second file has earlier times than the first."""
    upload(tier, table, range(10), (0, 10_000), ms=100_000)
    upload(tier, table, range(10, 20), (10_000, 20_000), ms=50_000)
    upload(tier, table, range(20, 30), (20_000, 30_000), ms=200_000)
    return tier


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        ({"startingTimestamp": DAY_MS + 100_005}, range(5, 30)),
        ({"startingTimestamp": DAY_MS + 150_000}, range(20, 30)),
        ({"endingTimestamp": DAY_MS + 200_003}, range(23)),
        ({"endingTimestamp": DAY_MS + 60_000}, range(0)),
        ({"startingTimestamp": DAY_MS + 100_005, "endingTimestamp": DAY_MS + 200_000}, range(5, 20)),
    ],
)
def test_times_select_everything_in_between_though_the_clock_went_back(
    turned_back: Tier, window: dict[str, int], wanted: range
) -> None:
    assert offsets_of(cold(turned_back, **window)) == list(wanted)


def test_a_gap_because_of_times_is_filled_from_files_that_were_left_out(tier: Tier, table: ColdTable) -> None:
    odd = [record(offset, offset * 1000, ms=offset) for offset in (*range(10), *range(20, 30))]
    written(tier, {"topic": odd}, table, 0, 10_000)
    upload(tier, table, range(10, 20), (10_000, 20_000), ms=100_000)
    last = [record(offset, offset * 1000, ms=200_000) for offset in range(30, 40)]
    written(tier, {"topic": last}, table, 20_000, 40_000)
    assert offsets_of(cold(tier, startingTimestamp=DAY_MS + 100_000)) == list(range(10, 40))


def test_options_that_name_queues_fit_all_queues_of_the_table(tier: Tier, table: ColdTable) -> None:
    early = [record(offset, offset * 1000, ms=offset) for offset in range(10)]
    early += [record(offset, 20_000 + offset * 1000, ms=offset, queue=1) for offset in range(5)]
    written(tier, {"topic": early}, table, 0, 30_000)
    hour = 3_600_000
    upload(tier, table, range(10, 20), (30_000, 70_000), ms=hour)
    since, until = {"startingTimestamp": DAY_MS + hour}, {"endingTimestamp": DAY_MS + hour - 1}
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    assert offsets_of(cold(tier, assign={"Orders": ["0", "1"]}, **since, **latest)) == list(range(10, 20))
    ends = {"endingOffsets": {"Orders": {"0": 15, "1": 5}}}
    assert offsets_of(cold(tier, **since, **ends, **latest)) == list(range(10, 15))
    starts = {"startingOffsets": {"Orders": {"0": 15, "1": 3}}}
    assert offsets_of(cold(tier, **starts, **until)) == [3, 4]


# ---- secrets


@pytest.mark.parametrize(
    "given",
    [
        {"tierEndpoint": "http://user:hidden@127.0.0.1:1"},
        {"tierUrl": "s3://user:hidden@lake/a"},
        {"tierUrl": "s3://lake/a?key=x@hidden"},
    ],
)
def test_urls_with_credentials_are_refused_and_not_shown(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="credentials") as raised:
        read_arrow("", "Orders", **{"tier": "cold", "tierUrl": "s3://lake/a", **given})
    assert "hidden" not in str(raised.value)


def test_an_endpoint_of_the_environment_with_credentials_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hidden@127.0.0.1:1")
    with pytest.raises(OptionError, match="the environment's AWS_ENDPOINT_URL is no URL of a server") as raised:
        read_arrow("", "Orders", tier="cold", tierUrl="s3://lake/a")
    assert "hidden" not in str(raised.value)
