"""Queries read old messages from the cold tier's table, the others from brokers, and each once."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from tests.cli.conftest import Process
from tests.columns.kinds import messages
from tests.interop.process import eventually
from tests.tiered.cold import Tier, new_prefix, now_ms
from tests.tiered.histories import DAY, DAY_MS, HOST, History, make_history
from tests.tiered.stores import ENVIRON, make_bucket, s3_process
from tests.tiered.test_plugin import SETTINGS, first_segment

from martlet.message import Message as StoredMessage
from martlet.records.codec import encode_record
from martlet.records.compression import COMPRESSED
from martlet.store.format.notes import deletion, expiry_notes
from martlet_client import Message
from martlet_client.blocking import Producer
from martlet_columns.decode import Decoder
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_spark import read_arrow
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import DataLost, OptionError, ReadError
from martlet_spark.options import BATCH, parse
from martlet_spark.read.planner import Range, plan
from martlet_spark.read.seam import plan_batch
from martlet_spark.source import MartletDataSource
from martlet_tiered.format.writing import write_file
from martlet_tiered.names import DataName, Kind
from martlet_tiered.table import ColdTable

from .conftest import Topic

ALL: Final = list(COLUMNS)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return make_history(tmp_path / "cold")


def place(history: History) -> str:
    return history.url.removesuffix("/table")


def cold(history: History, topic: str = "Orders", **options: object) -> Any:
    return read_arrow("", topic, tier="cold", tierUrl=place(history), **options)


def in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in ("topic", "broker", "queue", "offset")]).combine_chunks()


def expected(history: History, topic: str = "Orders") -> list[tuple[int, int, bytes]]:
    found = [(each.record.queue_id, each.record.queue_offset, each.body) for each in history.of(topic)]
    return sorted(found)


def told(table: pa.Table) -> list[tuple[int, int, bytes]]:
    return sorted(zip(*(table.column(name).to_pylist() for name in ("queue", "offset", "body")), strict=True))


# ---- the table alone


def test_the_table_alone_gives_each_message_once_and_in_order(history: History) -> None:
    table = cold(history, columns=ALL).read_all()
    assert told(table) == expected(history)
    for queue in range(4):
        assert table.filter(pc.equal(table.column("queue"), queue)).column("offset").to_pylist() == list(range(375))
    row = in_order(table).slice(0, 1).to_pylist()[0]
    assert (row["topic"], row["broker"], row["key"], row["tag"]) == ("Orders", "broker-a", "order-0", "paid")
    assert row["store_ts"].timestamp() * 1000 == DAY_MS


def test_filters_and_bounds_select_in_the_table(history: History) -> None:
    assert told(cold(history, key="order-8").read_all()) == [each for each in expected(history) if each[:2] == (0, 1)]
    assert cold(history, tags="sent").read_all().num_rows == 0
    assert cold(history, tags="sent || paid", columns="body").read_all().num_rows == 1500
    window: dict[str, Any] = {"startingTimestamp": DAY_MS + 1600, "endingTimestamp": DAY_MS + 1700}
    times = cold(history, columns="store_ts", **window).read_all().column("store_ts").cast(pa.int64()).to_pylist()
    assert sorted(ms // 1000 - DAY_MS for ms in times) == list(range(1600, 1700, 2))
    starts = {"Orders": {"0": 370, "1": -1, "2": -1, "3": -1}}
    ends = {"Orders": {"0": 373, "1": -1, "2": -1, "3": -1}}
    found = cold(history, startingOffsets=starts, endingOffsets=ends).read_all()
    assert [each[:2] for each in told(found)] == [(0, 370), (0, 371), (0, 372)]
    assert read_arrow(
        "", tier="cold", tierUrl=place(history), assign={"Bills": [1, 3]}, columns="queue"
    ).read_all().column("queue").unique().to_pylist() == [1, 3]
    assert read_arrow("", tier="cold", tierUrl=place(history), subscribePattern=".*").read_all().num_rows == 3000


def test_tasks_divide_row_groups_and_give_each_message_once(history: History) -> None:
    given = {"tier": "cold", "tierUrl": place(history), "subscribe": "Orders", "minPartitions": "7"}
    source = MartletDataSource(given)
    reader = source.reader(source.schema())
    partitions = reader.partitions()
    assert len(partitions) == 7
    found = [each for partition in partitions for batch in reader.read(partition) for each in told(batch)]
    assert sorted(found) == expected(history)


def test_a_row_group_is_divided_only_if_it_must_be(history: History) -> None:
    options = parse({"tier": "cold", "tierUrl": place(history), "subscribe": "Orders"}, BATCH)
    ranges = plan_batch(None, options, with_sizes=True)  # type: ignore[arg-type]
    size = ranges[0].bytes
    whole = plan(ranges, target_bytes=int(size * 1.5))
    assert [each for part in whole for each in part] == ranges
    small = plan(ranges, target_bytes=1 << 30, records_max=50)
    assert max(sum(map(len, part)) for part in small) <= 50
    parts = [each for part in small for each in part]
    assert sum(map(len, parts)) == 1500
    rows = {each.queue: each.rows for each in ranges if not each.start}
    assert all(each.rows.row == rows[each.queue].row + each.start for each in parts if each.end < 187)  # type: ignore[union-attr]


def test_spark_reads_the_table_alone(history: History, spark: SparkSession) -> None:
    options = {"tier": "cold", "tierUrl": place(history), "subscribe": "Orders", "minPartitions": "3"}
    frame = spark.read.format("martlet").options(**options, columns=",".join(ALL)).load()
    rows = [(row.queue, row.offset, bytes(row.body)) for row in frame.select("queue", "offset", "body").collect()]
    assert sorted(rows) == expected(history)
    assert frame.where("properties['KEYS'] = 'order-8'").count() == 1


def written(tier: Tier, parts: Mapping[Kind, list[bytes]], table: ColdTable, begin: int, end: int) -> None:
    """Commit files with the records in *parts* as the range of the log from *begin* to *end*."""
    files = []
    for kind, found in parts.items():
        name = DataName(DAY, kind, table.epoch, begin, end)
        made = write_file(name, "broker-a", Records(bytearray().join(found)), now_ms())
        tier.objects().create(f"table/{name.path}", bytes(made.data))
        files.append(made.file)
    table.append(begin, end, files)


def record(topic: str, offset: int, position: int, body: bytes) -> bytes:
    return bytes(encode_record(StoredMessage(topic, body, b"", 0), 0, offset, position, DAY_MS, HOST))


def owned(tier: Tier) -> ColdTable:
    table = tier.exact_table("broker-a")
    table.take_over("owner")
    return table


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    found=st.lists(messages().filter(lambda each: each.sys_flag & INNER_BATCH != INNER_BATCH), min_size=1, max_size=12),
    treatment=st.sampled_from(["raw", "null"]),
    names=st.sampled_from([ALL, ["queue", "offset", "properties"], ["body", "key"], ["store_ts"]]),
)
def test_records_of_every_kind_give_the_rows_that_brokers_give(
    tmp_path_factory: pytest.TempPathFactory, found: list[StoredMessage], treatment: str, names: list[str]
) -> None:
    tier = Tier(str(tmp_path_factory.mktemp("kinds")))
    table, position = owned(tier), 0
    stored = []
    for offset, message in enumerate(found):
        message.topic = "Orders"
        stored.append(bytes(encode_record(message, 5, offset, position, DAY_MS, HOST)))
        position += len(stored[-1])
    written(tier, {"topic": stored}, table, 0, position)
    rows = read_arrow("", "Orders", tier="cold", tierUrl=tier.url, columns=names, undecodableBody=treatment).read_all()
    wanted = Decoder(names, treatment).decode(Records(bytearray().join(stored)), "broker-a")
    assert rows.to_pylist() == pa.Table.from_batches([wanted]).to_pylist()
    assert rows.schema == wanted.schema


def test_a_body_that_cannot_be_decompressed_fails_as_from_a_broker(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path))
    bad = StoredMessage("Orders", b"no zlib", b"", 0, 0, COMPRESSED, DAY_MS, HOST)
    data = bytes(encode_record(bad, 0, 0, 0, DAY_MS, HOST))
    written(tier, {"topic": [data, record("Orders", 1, len(data), b"fine")]}, owned(tier), 0, 1000)
    with pytest.raises(ReadError, match=r"cannot be decompressed.*set the option undecodableBody"):
        read_arrow("", "Orders", tier="cold", tierUrl=tier.url).read_all()
    assert read_arrow("", "Orders", tier="cold", tierUrl=tier.url, columns="offset").read_all().num_rows == 2


def test_deleted_and_expired_messages_do_not_come_back(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path))
    table = owned(tier)

    def note(made: StoredMessage, position: int) -> bytes:
        return bytes(encode_record(made, 0, 0, position, DAY_MS, HOST))

    written(tier, {"topic": [record("Orders", n, n * 1000, b"old") for n in range(9)]}, table, 0, 10_000)
    [expired] = expiry_notes([("Orders", 0, 2)], 1 << 20, HOST, DAY_MS)
    parts: dict[Kind, list[bytes]] = {
        "internal": [note(deletion("Orders", HOST, DAY_MS), 10_000), note(expired, 16_000)],
        "topic": [record("Orders", n, 11_000 + n * 1000, b"new") for n in range(4)],
    }
    written(tier, parts, table, 10_000, 20_000)
    found = read_arrow("", "Orders", tier="cold", tierUrl=tier.url, columns="offset,body").read_all().to_pylist()
    assert found == [{"offset": 2, "body": b"new"}, {"offset": 3, "body": b"new"}]


def test_what_the_table_lacks_fails_the_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(str(tmp_path))
    written(tier, {"topic": [record("Orders", n, n * 1000, b"x") for n in (3, 4, 7, 8)]}, owned(tier), 0, 10_000)
    text = "lacks messages 5 to 6 of queue broker-a/0 of topic 'Orders'; set failOnDataLoss to false"
    with pytest.raises(DataLost, match=text):
        read_arrow("", "Orders", tier="cold", tierUrl=tier.url)
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        table = read_arrow("", "Orders", tier="cold", tierUrl=tier.url, failOnDataLoss=False).read_all()
    assert table.column("offset").to_pylist() == [3, 4, 7, 8]
    assert "lacks messages 5 to 6" in caplog.text


def damage(history: History) -> Path:
    file = min(Path(history.url).rglob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    return file


def test_damage_fails_the_query_and_nothing_else_is_lost(history: History, caplog: pytest.LogCaptureFixture) -> None:
    damage(history)
    with pytest.raises(DataLost, match=r"messages 0 to \d+ of queue broker-a/0 of topic 'Bills' are damaged in the"):
        cold(history, "Bills", columns=ALL).read_all()
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        left = cold(history, "Bills", columns=ALL, failOnDataLoss=False).read_all()
    assert told(left) == [each for each in expected(history, "Bills") if each in set(told(left))]
    assert 0 < left.num_rows < 1500
    assert "are damaged in the cold tier" in caplog.text


# ---- the table changes meanwhile


def replace_files(history: History) -> None:
    """Let Delta's OPTIMIZE replace all files, and VACUUM remove the old ones."""
    table = DeltaTable(history.url)
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)


def test_files_that_were_replaced_are_found_again(history: History) -> None:
    reader = cold(history, columns=ALL)
    before = told(cold(history, columns=ALL).read_all())
    replace_files(history)
    assert told(reader.read_all()) == before == expected(history)
    assert told(cold(history, columns=ALL).read_all()) == before


def test_messages_that_were_removed_from_the_table_fail_the_read(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    readers = [cold(history), cold(history, failOnDataLoss=False)]
    table = DeltaTable(history.url)
    table.delete("topic = 'Orders' AND queue = 2")
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataLost, match="messages 0 to 374 of queue broker-a/2 of topic 'Orders' are not in the cold"):
        readers[0].read_all()
    with caplog.at_level(logging.WARNING, "martlet.spark"):
        found = told(readers[1].read_all())
    assert found == [each for each in expected(history) if each[0] != 2]
    assert "are not in the cold tier any more" in caplog.text


# ---- the seam


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(str(tmp_path / "tier"))


@pytest.fixture
def broker(tmp_path: Path, tier: Tier) -> Iterator[tuple[str, Process]]:
    """A name server and a broker whose log is removed as soon as the tier has it."""
    plugins = 'plugins.enabled=["remoting","nameserver","filter_sql92","tiered"]'
    words = [word for each in (*SETTINGS, plugins, f"tiered.url={tier.url}") for word in ("--set", each)]
    process = Process(tmp_path, "run", *words)
    try:
        yield process.addresses()["nameserver"], process
        CONNECTIONS.close()
        assert process.stop() == 0, process.log.read_text()
    finally:
        process.end()


def send_odd(topic: Topic, count: int = 60) -> None:
    """Send messages of different kinds, in all queues."""
    with Producer(topic.endpoints, "tiers", compress_over_bytes=2000) as producer:
        queues = producer.queues(topic.name)
        for number in range(count):
            body = b"%06d " % number * (10 if number % 3 else 900)
            properties = {"amount": str(number), "a": "☃"} if number % 4 else {}
            message = Message(topic.name, body, tags="AB"[number % 2], keys=["k1", f"k{number}"], properties=properties)
            producer.send(message, queue=queues[number % len(queues)])
        for number in range(count // 4):
            producer.send_batch([Message(topic.name, b"batch %d/%d" % (number, each)) for each in range(3)])
    topic.send_raw(b"not compressed", COMPRESSED, queue=1)


def stored(topic: Topic, tier: Tier, wanted: int) -> None:
    """Wait until the table has *wanted* messages of *topic* at least."""

    def is_there() -> bool | None:
        try:
            table = read_arrow("", topic.name, tier="cold", tierUrl=tier.url, columns="offset", undecodableBody="raw")
            return True if table.read_all().num_rows >= wanted else None
        except ReadError:
            return None

    eventually(is_there)


def read(topic: Topic, tier: Tier, kind: str, **options: object) -> Any:
    given: dict[str, object] = {"columns": ALL, "undecodableBody": "raw", **options}
    return read_arrow(topic.endpoints, topic.name, tier=kind, tierUrl=tier.url, **given)


def planned(topic: Topic, tier: Tier, **options: str) -> list[Range]:
    given = {"endpoints": topic.endpoints, "subscribe": topic.name, "tierUrl": tier.url, **options}
    source = MartletDataSource(given)
    reader: Any = source.reader(source.schema())
    return [each for partition in reader.partitions() for each in partition.ranges]


def test_rows_from_the_table_and_from_the_broker_are_those_of_the_broker(
    broker: tuple[str, Process], tier: Tier
) -> None:
    topic = Topic(broker[0])
    send_odd(topic)
    stored(topic, tier, 50)
    send_odd(topic)
    ranges = planned(topic, tier)
    assert any(each.rows for each in ranges)
    ends: dict[int, int] = {}
    for each in ranges:  # from the first offset on, without a gap and without an overlap
        assert each.start == ends.get(each.queue.queue_id, 0)
        ends[each.queue.queue_id] = each.end
    hot = in_order(read(topic, tier, "hot").read_all())
    assert hot.num_rows == sum(ends.values()) == 2 * (60 + 45 + 1)
    assert in_order(read(topic, tier, "auto").read_all()) == hot
    for options in ({"tags": "B"}, {"key": "k7"}, {"startingTimestamp": now_ms() - 3_600_000}):
        assert in_order(read(topic, tier, "auto", **options).read_all()) == in_order(
            read(topic, tier, "hot", **options).read_all()
        )
    assert not any(each.rows for each in planned(topic, tier, sql="amount > 10"))  # brokers evaluate it
    stored(topic, tier, 212)
    found = in_order(read(topic, tier, "cold").read_all())
    assert found == hot
    with pytest.raises(OptionError, match="option sql needs brokers, and tier is cold"):
        read(topic, tier, "cold", sql="amount > 10")


def test_uploads_and_retention_change_nothing_in_a_query_that_runs(broker: tuple[str, Process], tier: Tier) -> None:
    address, process = broker
    topic = Topic(address)
    send_odd(topic)
    stored(topic, tier, 50)
    send_odd(topic)
    expected_rows = in_order(read(topic, tier, "hot").read_all())
    reader = read(topic, tier, "auto")
    before = first_segment(process)
    send_odd(topic, 200)
    process.until(lambda: first_segment(process) >= before + 2 * 65536)
    assert in_order(reader.read_all()) == expected_rows


def test_a_topic_that_was_created_again_is_read_from_the_broker(broker: tuple[str, Process], tier: Tier) -> None:
    address, _ = broker
    topic = Topic(address)
    send_odd(topic)
    stored(topic, tier, 50)
    topic.delete()
    topic.create(4)
    topic.send(12)
    assert sorted(read(topic, tier, "auto").read_all().column("body").to_pylist()) == sorted(topic.bodies)


def test_a_table_of_a_broker_that_is_away_fails_the_query(broker: tuple[str, Process], tmp_path: Path) -> None:
    topic = Topic(broker[0])
    topic.send(4)
    other = Tier(str(tmp_path / "other"))
    written(other, {"topic": [record(topic.name, 0, 0, b"x")]}, owned(other), 0, 1000)
    with pytest.raises(ReadError, match="is of broker 'broker-a', which the name servers do not know; start it"):
        read(topic, other, "auto")


# ---- places and options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tier": "cold"}, "option tier is cold, and tierUrl is missing"),
        ({"tier": "warm", "endpoints": "127.0.0.1:1"}, "option tier 'warm' is none of auto, hot, cold"),
        ({"tier": "cold", "tierUrl": "lake"}, "option tierUrl 'lake' has 'lake'; write s3://BUCKET/PREFIX"),
        ({"tier": "cold", "tierUrl": "/nowhere/at/all"}, "there is no table at '/nowhere/at/all'; give the tierUrl of"),
        ({"tierUrl": "/nowhere"}, "option endpoints is missing"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises((OptionError, ReadError), match=text):
        read_arrow(str(options.pop("endpoints", "")), "Orders", **options)


def test_topics_and_queues_that_are_not_there_are_named(history: History) -> None:
    with pytest.raises(ReadError, match="has no message of topic 'Nothing'; see 'martlet tiered ls --topics'"):
        cold(history, "Nothing")
    with pytest.raises(ReadError, match="has no message of '%DLQ%g', the dead letters of group 'g'"):
        cold(history, "%DLQ%g")
    with pytest.raises(OptionError, match="option assign names queue '9' of 'Orders', which has no message there"):
        read_arrow("", tier="cold", tierUrl=place(history), assign={"Orders": [9]})
    with pytest.raises(OptionError, match="names two tables of one broker"):
        read_arrow("", "Orders", tier="cold", tierUrl=[place(history), place(history)])


def test_an_object_store_is_read_with_credentials_that_nothing_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with s3_process() as url:
        make_bucket(url, "lake")
        tier = Tier(f"s3://lake/{new_prefix()}", {"endpoint": url}, ENVIRON)
        found = [record("Orders", n, n * 1000, b"x" * n) for n in range(200)]
        written(tier, {"topic": found}, owned(tier), 0, 200_000)
        options: dict[str, object] = {"tier": "cold", "tierUrl": tier.url, "tierEndpoint": url}
        with caplog.at_level(logging.DEBUG):
            table = read_arrow("", "Orders", **options).read_all()
            assert table.column("offset").to_pylist() == list(range(200))
            with pytest.raises(ReadError) as raised:
                read_arrow("", "Orders", **{**options, "tierUrl": "s3://nothing/here"})
        assert all(secret not in caplog.text + str(raised.value) for secret in ENVIRON.values())


def test_tables_need_their_packages_only_when_they_are_read(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'deltalake'", name="deltalake")

    monkeypatch.setattr("martlet_spark.read.tier_place.TierPlace.open", missing)
    with pytest.raises(OptionError, match="needs the package 'deltalake'; pip install 'martlet\\[tiered\\]'"):
        cold(history)
