"""A data directory that is lost is made again from the cold tier, with everything that was uploaded."""

import itertools
import json
import os
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.broker.test_cold_history import pull_all
from tests.remoting.pop_talk import ack_ext, pop_ext, popped
from tests.stomp.all_protocols import Protocols, all_protocols, timer_plugin
from tests.tx.talk import CONFIG, TOPIC, Sellers
from tests.wire_clients.mqtt import leave

from martlet.app import saving
from martlet.broker import Broker
from martlet.cli.main import main
from martlet.message import Message, encode_properties
from martlet.records.codec import decode_records
from martlet.records.layout import RecordView
from martlet.runtime.io_threads import IoThreads
from martlet.state import Projection
from martlet.store import Store
from martlet.store.disk.files import RealDisk
from martlet.store.format.notes import offset_notes
from martlet.testing.peers import serving
from martlet.testing.stores import HOST, ManualClock, small_config
from martlet_remoting.wire.codes import RequestCode
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.owners import Owners, Reach
from martlet_tiered.restore.broker_state import (
    BrokerState,
    QueuePlace,
    decode_state,
    encode_state,
    find_state,
    store_state,
)
from martlet_tiered.restore.capture import StateKeeper
from martlet_tiered.restore.sparse_log import SparseLog
from martlet_tiered.tier import ObjectTier
from martlet_tx.formats import NAME
from martlet_tx.plugin import TxPlugin

from .cold import Tier, append
from .histories import make_history
from .uploads import filled_store, log_records, open_store, until

STORE = small_config(flush="async", segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 14)
DAY_S = 86_400
COUNT = 60
SEEDS = itertools.count()  # of brokers, each of which has other identifiers
BODIES = [b"%03d " % number * 100 for number in range(COUNT)]


class Running:
    """A broker with a tier."""

    def __init__(self, broker: Broker, tier: ObjectTier) -> None:
        self.broker = broker
        self.store = broker.store
        self.tier = tier

    async def publish(self, topic: str, *bodies: bytes, **properties: str) -> None:
        self.broker.topics.ensure(topic, 1)
        for body in bodies:
            values = {"TAGS": "a/b", "KEYS": body[:3].decode(), **properties}
            self.broker.publish(Message(topic, body, encode_properties(values), queue_id=0))
            self.store.committer.commit()

    async def upload(self) -> None:
        """Upload all of the log, and the state of the broker with it."""
        await self.publish("last", b"")
        self.store.flusher.flush_now()
        saving.save(self.broker)  # as the broker does soon after each change
        end = self.store.durable
        await self.tier.release(end)
        await until(partial(self._has_uploaded, end))

    def _has_uploaded(self, end: int) -> bool:
        return self.tier.released >= end


def make_tier(broker: Broker, place: Tier) -> ObjectTier:
    tier = ObjectTier(broker, place.config(range_bytes=1 << 16, range_ms=60_000), place.location())
    broker.store.use_cold_tier(tier)
    return tier


@asynccontextmanager
async def uploading(broker: Broker, tier: ObjectTier) -> AsyncIterator[Running]:
    await tier.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.uploader.run)
        nursery.start_soon(tier.reader.run)
        yield Running(broker, tier)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running(directory: Path, place: Tier, clock: ManualClock) -> AsyncIterator[tuple[Running, Protocols]]:
    tiers: list[ObjectTier] = []

    def ports(broker: Broker) -> list[Any]:
        tiers.append(make_tier(broker, place))
        return []

    async with (
        all_protocols(
            directory, store=STORE, clock=clock, timer=timer_plugin(), ports=ports, seed=next(SEEDS)
        ) as protocols,
        uploading(protocols.broker, tiers[0]) as made,
    ):
        yield made, protocols


@asynccontextmanager
async def selling(directory: Path, place: Tier) -> AsyncIterator[tuple[Running, Sellers]]:
    """Run a broker that holds transactions."""
    tiers: list[ObjectTier] = []

    def projections(broker: Broker) -> list[Projection]:
        tiers.append(make_tier(broker, place))
        plugin = TxPlugin(CONFIG)
        broker.capabilities.update(plugin.martlet_capabilities(broker))
        broker.set_stages([(NAME, stage) for stage in plugin.martlet_stages(broker)])
        return list(plugin.martlet_projections(broker))

    async with (
        serving(directory, store=STORE, projections=projections) as served,
        uploading(served.broker, tiers[0]) as made,
    ):
        yield made, Sellers(served.broker, CONFIG)


async def martlet(*words: str) -> tuple[int, str, str]:
    """Run a command in a process; return its exit code, what it printed, and its errors."""
    command = [sys.executable, "-m", "martlet", *words]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def restore(place: Tier, target: Path, *words: str) -> tuple[int, str, str]:
    return await martlet("tiered", "restore", "--from", place.url, str(target), *words)


def topics_and_groups(directory: Path) -> list[object]:
    files = [("topics", "topicConfigTable"), ("subscriptionGroup", "subscriptionGroupTable")]
    return [json.loads((directory / f"config/{name}.json").read_text())[key] for name, key in files]


async def leave_sessions(protocols: Protocols) -> None:
    """Leave a session of MQTT with queued and retained messages, and a durable subscription of STOMP."""
    talk = await protocols.mqtt.connect("c", expiry_s=30 * DAY_S)
    await talk.subscribe("a/#", qos=1)
    await leave(protocols.mqtt, talk, "c")
    sender = await protocols.mqtt.connect("sender")
    for body in BODIES[:5]:
        await sender.publish("a/b", body, qos=1)
    await sender.publish("a/kept", b"kept", qos=1, retain=True)
    ann = await protocols.stomp.connect(client_id="ann")
    await ann.subscribe("/topic/news", "auto", **{"activemq.subscriptionName": "news"})
    await ann.disconnect()


async def check_sessions(protocols: Protocols) -> None:
    """Return to both, and get what was left."""
    talk = await protocols.mqtt.connect("c", clean=False, expiry_s=30 * DAY_S, present=True)
    assert await talk.payloads(6) == [*BODIES[:5], b"kept"]
    other = await protocols.mqtt.connect("other")
    await other.subscribe("a/kept", qos=0)
    assert await other.payloads(1) == [b"kept"]

    ann = await protocols.stomp.connect(client_id="ann")
    await ann.subscribe("/topic/news", "auto", **{"activemq.subscriptionName": "news"})
    assert await ann.bodies(10) == BODIES[:10]


async def test_everything_that_was_uploaded_is_there_again(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock()
    async with running(tmp_path / "old", local_tier, clock) as (old, protocols):
        broker = old.broker
        await old.publish("later", b"at last", TIMER_DELAY_SEC="3600")
        await old.publish("T", *BODIES)
        broker.groups.ensure("G")
        broker.groups.offsets.commit("G", "T", 0, 17)
        await old.publish("P", *BODIES[:8])
        client = protocols.remoting()
        taken = popped(await client.ask(RequestCode.POP_MESSAGE, pop_ext("P", invisibleTime="36000000")))
        assert len(taken) == 8
        for message in taken[:3]:
            assert (await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message))).code == 0
        await leave_sessions(protocols)
        await old.publish("news", *BODIES[:10])
        record = old.store.readers.read(old.store.queue("T", 0), 40, 1, 1 << 20)
        position = decode_records(b"".join(record.pieces))[0].position
        assert old.store.queue("later", 0).next_offset == 0
        await old.upload()
        end = old.tier.released
        tables = [topics_and_groups(tmp_path / "old")]

    clock.ms += 3_600_000
    code, text, error = await restore(local_tier, tmp_path / "new")
    assert (code, error) == (0, ""), text + error
    assert f"to {end:,}; " in text
    tables.append(topics_and_groups(tmp_path / "new"))
    assert tables[0] == tables[1]
    code, text, _ = await martlet("store", "verify", str(tmp_path / "new"), "--set", "store.segment_bytes=16384")
    assert code == 0, text

    async with running(tmp_path / "new", local_tier, clock) as (new, protocols):
        broker = new.broker
        client = protocols.remoting()
        queue = new.store.queue("T", 0)
        assert (queue.first_offset, queue.local_from, queue.next_offset) == (0, COUNT, COUNT)
        assert await pull_all(client, "T", 0) == BODIES
        assert broker.groups.offsets.get("G", "T", 0) == 17
        answer = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(position)})
        assert [each.body for each in decode_records(answer.body)] == [BODIES[40]]
        key = {"topic": "T", "key": "005", "maxNum": "8", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
        answer = await client.ask(RequestCode.QUERY_MESSAGE, dict(key))
        assert [each.body for each in decode_records(answer.body)] == [BODIES[5]]

        assert (await client.ask(RequestCode.POP_MESSAGE, pop_ext("P"))).remark == "NO_MESSAGE_IN_QUEUE", (
            "they are leased"
        )
        for message in taken[3:]:
            ext = ack_ext(message, invisibleTime="1")
            answer = await client.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)
            assert answer.code == 0, answer.remark
        clock.ms += 1000
        again: list[bytes] = []
        while len(again) < 5:
            answer = await client.ask(RequestCode.POP_MESSAGE, pop_ext("P", pollTime="15000"))
            again += [message.body for message in popped(answer)]
        assert sorted(again) == BODIES[3:8]
        await check_sessions(protocols)
        await until(lambda: new.store.queue("later", 0).next_offset == 1)

        await new.publish("T", b"new")
        assert await pull_all(client, "T", 0) == [*BODIES, b"new"]
        await new.upload()
        assert new.tier.uploader.progress.failures == 0


async def test_open_transactions_can_be_ended_after_a_restore(tmp_path: Path, local_tier: Tier) -> None:
    async with selling(tmp_path / "old", local_tier) as (old, sellers):
        old.broker.topics.ensure(TOPIC, 1)
        placed = [sellers.prepare(key) for key in ("first", "second", "third")]
        await sellers.settle()
        await sellers.end(placed[0], commit=True)
        await sellers.end(placed[1], commit=False)
        await sellers.settle()
        await old.publish("T", *BODIES)
        await old.upload()
    assert (await restore(local_tier, tmp_path / "new"))[0] == 0
    async with selling(tmp_path / "new", local_tier) as (new, sellers):
        assert sellers.pending() == [placed[2].queue_offset]
        assert new.store.queue(TOPIC, 0).next_offset == 1
        await sellers.end(placed[2], commit=True)
        await sellers.settle()
        assert sellers.stored() == ["third"]
        assert sellers.pending() == []


async def no_state(keeper: StateKeeper, epoch: int, reach: Reach) -> None:
    """Stores nothing."""


async def test_what_was_uploaded_after_the_state_counts(
    tmp_path: Path, local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with running(tmp_path / "old", local_tier, clock) as (old, _):
        await old.publish("A", *BODIES)
        await old.publish("B", *BODIES[:5])
        await old.publish("C", *BODIES[:5])
        await old.upload()
        monkeypatch.setattr(StateKeeper, "store", no_state)
        await old.publish("A", *BODIES[:7])
        await old.publish("new", *BODIES[:3])
        old.broker.topics.delete("B")
        old.broker.topics.delete("C")
        await old.publish("C", *BODIES[:2])
        await old.upload()
        await old.publish("A", b"lost")
    monkeypatch.undo()
    code, text, _ = await restore(local_tier, tmp_path / "new", "--json")
    assert (code, json.loads(text)["problems"]) == (0, [])
    async with running(tmp_path / "new", local_tier, clock) as (new, protocols):
        nexts = {topic: new.store.queue(topic, 0).next_offset for topic in ("A", "C", "new")}
        assert nexts == {"A": COUNT + 7, "C": 2, "new": 3}
        assert new.store.queues.find("B", 0) is None
        client = protocols.remoting()
        assert await pull_all(client, "new", 0) == BODIES[:3]
        assert await pull_all(client, "C", 0) == BODIES[:2]
        assert await pull_all(client, "A", 0) == [*BODIES, *BODIES[:7]]


async def test_a_restore_ends_the_uploads_of_the_old_broker(tmp_path: Path, local_tier: Tier) -> None:
    async with running(tmp_path / "old", local_tier, ManualClock()) as (old, _):
        await old.publish("T", *BODIES)
        await old.upload()
        end = old.tier.released
        assert (await restore(local_tier, tmp_path / "new"))[0] == 0
        await old.publish("T", b"late")
        old.store.flusher.flush_now()
        await old.tier.release(old.store.durable)
        await until(lambda: "has an owner of epoch" in old.tier.reason)
        assert old.tier.released == end


async def test_the_old_broker_does_not_continue_a_restored_tier(tmp_path: Path, local_tier: Tier) -> None:
    clock = ManualClock()
    async with running(tmp_path / "old", local_tier, clock) as (old, _):
        await old.publish("T", *BODIES[:10])
        await old.upload()
        await old.publish("T", *BODIES[10:40])  # its log is longer than that of the new broker
        old.store.flusher.flush_now()
    assert (await restore(local_tier, tmp_path / "new"))[0] == 0
    async with running(tmp_path / "new", local_tier, clock) as (new, _):
        await new.publish("T", b"new")
        await new.upload()
        end = new.tier.released
    async with running(tmp_path / "old", local_tier, clock) as (old, _):
        assert old.store.durable > end
        await old.tier.release(old.store.durable)
        await until(lambda: "another one continues it, such as a restored one" in old.tier.reason)
        assert old.tier.released == 0
    async with running(tmp_path / "new", local_tier, clock) as (new, protocols):
        await new.publish("T", b"newer")
        await new.upload()
        assert new.tier.uploader.progress.failures == 0
        assert await pull_all(protocols.remoting(), "T", 0) == [*BODIES[:10], b"new", b"newer"]


def test_a_restore_that_is_refused_does_not_take_the_table_over(
    tmp_path: Path, local_tier: Tier, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", lambda _: 0)
    make_history(Path(local_tier.url))
    table = local_tier.exact_table("broker-a")
    version = table.version
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    (tmp_path / "taken.unfinished").mkdir()
    (tmp_path / "taken.unfinished/file").touch()
    problems = {"new": "has no state", "link": "is a symbolic link", "file": "is not a directory"}
    for name, problem in {**problems, "taken": "is not an unfinished backup"}.items():
        if name == "taken":
            store_state(local_tier.objects(), 1, state_at(table.end or 0), table.reach)
        assert main(["tiered", "restore", "--from", local_tier.url, str(tmp_path / name)]) != 0
        assert problem in capsys.readouterr().err
        assert local_tier.exact_table("broker-a").version == version


async def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path, local_tier: Tier) -> None:
    make_history(Path(local_tier.url))
    target = tmp_path / "data"
    target.mkdir()
    (target / "file").touch()
    code, _, error = await restore(local_tier, target)
    assert code == 3
    assert "is not empty; choose another directory" in error
    assert json.loads((await martlet("tiered", "status", "--url", local_tier.url, "--json"))[1])["epoch"] == 1
    (target / "file").unlink()
    code, _, error = await restore(local_tier, target)
    assert code == 1
    assert "has no state of its broker" in error


KILLED = """
import os, sys
from martlet.cli.main import main
from martlet_tiered.commands import restoring
restoring._complete = lambda *_: os.kill(os.getpid(), 9)
main(sys.argv[1:])
"""


async def test_a_killed_restore_leaves_nothing_that_a_start_takes_for_data(tmp_path: Path, local_tier: Tier) -> None:
    async with running(tmp_path / "old", local_tier, ManualClock()) as (old, _):
        await old.publish("T", *BODIES)
        await old.upload()
    target = tmp_path / "new"
    words = ["tiered", "restore", "--from", local_tier.url, str(target)]
    done = await trio.run_process([sys.executable, "-c", KILLED, *words], check=False, capture_stderr=True)
    assert done.returncode == -9
    assert not target.exists()
    assert (tmp_path / "new.unfinished").is_dir()
    assert (await restore(local_tier, target))[0] == 0
    assert target.is_dir()
    assert not (tmp_path / "new.unfinished").exists()


# ---- states


def state_at(position: int, **changes: Any) -> BrokerState:
    fields: dict[str, Any] = {"broker": "a", "position": position, "end": position, "log_start": 0}
    fields |= {"segment_bytes": 1 << 14, "time_ms": 1, "queues": [QueuePlace("T", 0, 7, 2)]}
    return BrokerState(**{**fields, "files": {"config/topics.json": b"{}"}, **changes})


def names_of_states(tier: Tier) -> list[str]:
    return [each.name.removeprefix("state/") for each in tier.objects().list_folder("state")]


def test_the_newest_intact_state_that_the_table_has_reached_counts(local_tier: Tier) -> None:
    objects = local_tier.objects()
    assert find_state(objects, Reach(1 << 40)) == (None, [])
    for position in (100, 200, 300):
        store_state(objects, 1, state_at(position), Reach(0))
    assert find_state(objects, Reach(99))[0] is None
    assert find_state(objects, Reach(250))[0] == state_at(200)
    store_state(objects, 2, state_at(150), Reach(150))  # of a later owner
    assert find_state(objects, Reach(250))[0] == state_at(150)
    file = Path(local_tier.url) / "state/e2-150.state"
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-1])
    found, problems = find_state(objects, Reach(250))
    assert found == state_at(200)
    assert problems == ["state/e2-150.state: a state of a broker does not match its CRC"]


def test_a_state_whose_queues_are_newer_counts_later(local_tier: Tier) -> None:
    objects = local_tier.objects()
    state = state_at(100, end=130)
    store_state(objects, 1, state, Reach(0))
    assert find_state(objects, Reach(129))[0] is None
    assert find_state(objects, Reach(130))[0] == state


def test_states_that_nobody_needs_are_removed(local_tier: Tier) -> None:
    objects = local_tier.objects()
    for position in range(0, 1000, 100):
        store_state(objects, 1, state_at(position), Reach(position))
    assert names_of_states(local_tier) == ["e1-800.state", "e1-900.state"]


def test_a_state_of_a_broker_that_was_replaced_never_counts_later(local_tier: Tier) -> None:
    objects, table = local_tier.objects(), local_tier.owned()
    append(table, objects, 0, 800)
    store_state(objects, 1, state_at(700), table.reach)
    store_state(objects, 1, state_at(1000), table.reach)
    new = local_tier.table()
    assert new.take_over("restored/1") == 2
    append(new, objects, 800, 1500)
    store_state(objects, 1, state_at(1200), table.reach)  # it does not know yet that it was replaced
    new.refresh()
    assert new.reach == Reach(1500, 2, 800)
    assert find_state(objects, new.reach)[0] == state_at(700)
    again = local_tier.table()
    assert again.take_over("restored/2", Owners(2, ["restored"])) == 3
    assert again.reach == Reach(1500, 2, 800)
    store_state(objects, 3, state_at(5000), again.reach)
    assert names_of_states(local_tier) == ["e1-700.state", "e3-5000.state"]
    last = local_tier.table()
    last.take_over("restored again/1")
    assert last.reach == Reach(1500, 4, 1500)


@pytest.fixture
async def keeper(tmp_path: Path, local_tier: Tier) -> AsyncIterator[tuple[Running, StateKeeper]]:
    """A broker that uploads nothing, and what stores its states."""
    async with running(tmp_path / "data", local_tier, ManualClock()) as (made, _):
        yield made, StateKeeper(made.broker, local_tier.objects(), IoThreads("states"))


async def test_a_state_has_no_message_after_its_end(keeper: tuple[Running, StateKeeper], local_tier: Tier) -> None:
    made, states = keeper
    await made.publish("T", *BODIES[:10])
    made.store.flusher.flush_now()
    durable = made.store.durable
    await made.publish("T", *BODIES[:5])  # not durable yet
    end = made.store.appended
    await states.store(1, Reach(0))
    (state,) = (decode_state(local_tier.objects().read(f"state/{name}")) for name in names_of_states(local_tier))
    assert [place.next for place in state.queues if place.topic == "T"] == [15]
    assert durable <= state.position <= state.end == end
    assert find_state(local_tier.objects(), Reach(end - 1))[0] is None


async def test_the_log_of_a_state_begins_where_it_did_before_its_tables_were_read(
    keeper: tuple[Running, StateKeeper], local_tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, states = keeper
    await made.publish("T", *BODIES, *BODIES)
    made.store.flusher.flush_now()
    segments = made.store.segments
    first = segments.items[0]
    assert len(segments.items) > 1
    monkeypatch.setattr(type(made.broker.projections), "floor", lambda _: first.start + 1)

    async def off_loop(work: Callable[[], Any]) -> Any:
        monkeypatch.setattr(type(segments), "find", lambda *_: None)  # retention has removed it meanwhile
        return work()

    monkeypatch.setattr(made.store.disk, "off_loop", off_loop)
    await states.store(1, Reach(0))
    (state,) = (decode_state(local_tier.objects().read(f"state/{name}")) for name in names_of_states(local_tier))
    assert state.log_start == first.start


async def test_few_states_wait_while_uploads_are_behind(keeper: tuple[Running, StateKeeper], local_tier: Tier) -> None:
    made, states = keeper
    for number in range(40):
        await made.publish("T", *BODIES[:5])
        made.store.flusher.flush_now()
        await states.store(1, Reach(made.store.durable * 3 // 4 if number % 2 else 1))
    found = [int(name[3:-6]) for name in names_of_states(local_tier)]
    assert len(found) < 30
    assert made.store.durable - max(found) <= made.store.durable // 8 + 1


@pytest.mark.parametrize("damage", [lambda data: data[:10], lambda data: b"X" + data[1:], lambda data: data[:-1]])
def test_damaged_states_are_noticed(damage: Callable[[bytes], bytes]) -> None:
    data = encode_state(state_at(5))
    assert decode_state(data) == state_at(5)
    with pytest.raises(ObjectDamaged):
        decode_state(damage(data))


@pytest.mark.parametrize("path", ["../escaped.json", "/escaped.json", "config/../../x.json", "config/acl.secrets"])
def test_a_state_with_other_files_than_tables_is_damaged(path: str) -> None:
    with pytest.raises(ObjectDamaged, match="which is no table"):
        decode_state(encode_state(state_at(5, files={"config/topics.json": b"{}", path: b"x"})))


def test_the_size_that_a_state_claims_is_limited() -> None:
    data = bytearray(encode_state(state_at(5)))
    struct.pack_into("<Q", data, 8, 1 << 40)
    with pytest.raises(ObjectDamaged, match="is the limit"):
        decode_state(bytes(data))


# ---- the log


@pytest.mark.parametrize("seed", range(4))
async def test_a_start_finds_the_records_of_a_sparse_log_at_their_old_positions(tmp_path: Path, seed: int) -> None:
    source = Random(seed)
    async with open_store(tmp_path) as store:
        filled_store(store, 150)
        whole, start, end = list(log_records(store)), store.first_position, store.durable
        segment_bytes = store.segments.segment_bytes
    topics = source.sample(("T", "orders", "%RETRY%G", "%DLQ%G", "martlet.x"), seed)
    kept = [(position, record) for position, record in whole if RecordView(record).topic in topics]
    log = SparseLog(RealDisk(), str(tmp_path / "new/commitlog"), start, end, segment_bytes)
    for _, record in source.sample(kept, len(kept)):
        log.add(record)
    noted = log.finish(offset_notes([("U", 0, 1 << 20)], 1000, HOST, 1), 1)
    store = await Store.open(tmp_path / "new", small_config(), ManualClock())
    try:
        assert store.statistics().damaged_records == 0
        assert (store.first_position, store.appended) == (start, noted)
        assert store.queue("U", 0).next_offset == 1 << 20
        found = dict(log_records(store))
        assert {position: found[position] for position, _ in kept} == dict(kept)
        others = [RecordView(data).topic for position, data in found.items() if position not in dict(kept)]
        assert set(others) == {"martlet.store"}
    finally:
        store.crash()
