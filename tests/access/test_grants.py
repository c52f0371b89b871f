"""A grant permits what was asked for, and nothing else."""

import inspect
from collections.abc import Callable

import pytest
from tests.cold_disk import cold_disk
from tests.delivery.pushing import broker_in_memory, publish

from martlet.access import (
    ANONYMOUS,
    BrokerAdminGrant,
    BrokerGrant,
    ConsumeGrant,
    Gate,
    GroupAdminGrant,
    GroupDeletionGrant,
    GroupGrant,
    PublishGrant,
    TopicAdminGrant,
    TopicDeletionGrant,
    TopicGrant,
    TopicOffsets,
)
from martlet.broker import Broker
from martlet.contracts import Identity
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.records.layout import RecordView
from martlet.runtime.turns import Turns
from martlet.store import Store
from martlet.store.format.notes import OWN_PREFIX
from martlet.tables.groups import Group, Groups
from martlet.tables.topics import BROKER_TOPICS, EVENT_TOPIC, Topics

GRANTS: dict[type, Callable[[Gate], object]] = {
    TopicGrant: lambda gate: gate.queries.topic("T"),
    TopicAdminGrant: lambda gate: gate.admin.topic("T"),
    TopicDeletionGrant: lambda gate: gate.admin.topic_deletion("T"),
    TopicOffsets: lambda gate: gate.queries.group("G").topic_offsets("T"),
    GroupGrant: lambda gate: gate.queries.group("G"),
    GroupAdminGrant: lambda gate: gate.admin.group("G"),
    GroupDeletionGrant: lambda gate: gate.admin.group_deletion("G"),
    ConsumeGrant: lambda gate: gate.consume("G", "T"),
    PublishGrant: lambda gate: gate.check_publish("T"),
    BrokerGrant: lambda gate: gate.queries.broker(),
    BrokerAdminGrant: lambda gate: gate.admin.broker(),
}
CASES = [pytest.param(kind, make, id=kind.__name__) for kind, make in GRANTS.items()]
# The topic argument of a group's grant names which of the group's offsets are meant.
OF_GROUP = {"committed", "offset", "is_forbidden", "topic_offsets", "set_forbidden", "commit", "reset"}


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


@pytest.mark.parametrize(("kind", "make"), CASES)
async def test_a_grant_shows_neither_the_store_nor_a_table(kind: type, make: Callable[[Gate], object]) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("T", 1)
        grant = make(broker.gate(ANONYMOUS))
        assert type(grant) is kind
        for name in public(kind):
            assert not isinstance(getattr(grant, name), Store | Topics | Groups), name


@pytest.mark.parametrize(
    "kind", [TopicGrant, TopicAdminGrant, TopicOffsets, ConsumeGrant, PublishGrant, GroupAdminGrant]
)
def test_no_method_of_a_bound_grant_takes_the_name_of_another(kind: type) -> None:
    for name in public(kind):
        method = getattr(kind, name)
        if inspect.isroutine(method) and not (issubclass(kind, GroupGrant) and name in OF_GROUP):
            assert {"topic", "name"}.isdisjoint(inspect.signature(method).parameters), name


async def test_a_grant_for_one_topic_changes_no_other() -> None:
    async with broker_in_memory() as broker:
        for name in ("T", "U"):
            broker.topics.ensure(name, 2)
            broker.groups.offsets.commit("G", name, 0, 1)
        grant = broker.gate(ANONYMOUS).admin.topic("T")
        assert grant.update(4, 4).read_queues == 4
        deletion = broker.gate(ANONYMOUS).admin.topic_deletion("T")
        assert deletion.delete()
        assert not deletion.delete()
        assert [topic.name for topic in broker.topics if topic.name in "TU"] == ["U"]
        assert broker.groups.offsets.topics_of("G") == ["U"]


async def test_a_grant_for_one_group_changes_no_other() -> None:
    async with broker_in_memory() as broker:
        for name in ("G", "H"):
            broker.groups.ensure(name)
            broker.groups.offsets.commit(name, "T", 0, 1)
        grant = broker.gate(ANONYMOUS).admin.group("G")
        with pytest.raises(Refused, match="permission is for group 'G'") as caught:
            grant.update(Group("H", consume_enable=False))
        assert caught.value.reason is Reason.NO_PERMISSION
        grant.commit("T", {0: 5})
        grant.reset("T", {1: 7})
        grant.set_forbidden("T", readable=False)
        assert (broker.groups.offsets.committed("G", "T"), broker.groups.offsets.committed("H", "T")) == (
            {0: 5, 1: 7},
            {0: 1},
        )
        assert not broker.groups.is_forbidden("H", "T")
        broker.gate(ANONYMOUS).admin.group_deletion("G").delete(clean_offsets=True)
        held = broker.groups.get("H")
        assert (broker.groups.get("G"), held is not None and held.consume_enable) == (None, True)


@pytest.mark.parametrize("topic", sorted({*BROKER_TOPICS, f"{OWN_PREFIX}journal.mqtt"}))
async def test_nobody_changes_a_topic_of_the_broker_itself(topic: str) -> None:
    async with broker_in_memory() as broker:
        if topic in BROKER_TOPICS:
            broker.topics.ensure(topic, 3)
        admin = broker.gate(ANONYMOUS).admin
        grant, deletion = admin.topic(topic), admin.topic_deletion(topic)
        for attempt in (lambda: grant.update(1, 1), deletion.delete):
            with pytest.raises(Refused, match="it is internal to the broker"):
                attempt()
        held = broker.topics.get(topic)
        assert held is None or held.read_queues == 3


async def test_grants_that_are_kept_do_not_outlive_a_change_of_rules() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("T", 1)
        gate = broker.gate(ANONYMOUS)
        grant = gate.consume("G", "T")
        assert gate.consume("G", "T") is grant
        broker.authorizers = (lambda identity, action, name: (action, name) != ("read", "T"),)
        for attempt, verb in (lambda: gate.consume("G", "T"), "subscribe to"), (lambda: gate.queries.topic("T"), "get"):
            with pytest.raises(Refused, match=f"may not {verb} topic"):
                attempt()


# records by position


def forged(position: int, topic: str, properties: bytes = b"") -> bytes:
    """Bytes that are a whole record for *position*, which a client may send as the body of a message."""
    return encode_record(Message(topic, b"", properties), 0, 0, position, 0, bytes(8))


async def position_of_body(broker: Broker, body: bytes) -> int:
    """Where *body* lies in the log once it is stored."""
    placed = broker.publish(Message("T", body, b"", 0))
    broker.store.committer.commit()
    data = broker.store.lookup.record_at(placed.position)
    assert data is not None
    return placed.position + data.index(body)


async def test_bytes_in_a_body_that_look_like_a_record_are_none() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("T", 1)
        gate = broker.gate(ANONYMOUS)
        body_at = await position_of_body(broker, b"x")  # from the start of each record
        real = broker.store.appended
        position = real + body_at
        assert await position_of_body(broker, forged(position, "T")) == position
        assert broker.store.lookup.record_at(position) is not None
        assert await gate.queries.record_at(position) is None
        found = await gate.queries.record_at(real)
        assert found is not None
        assert RecordView(found).queue_offset == 1


async def test_a_forged_record_does_not_show_the_messages_after_it() -> None:
    async with broker_in_memory() as broker:
        for topic in ("T", "secret"):
            broker.topics.ensure(topic, 1)
        body_at = await position_of_body(broker, b"x")
        # It has no body, so no checksum covers it, and its properties reach into what is stored after it.
        whole = forged(broker.store.appended + body_at, "T", b"p" * 300)
        position = await position_of_body(broker, whole[:-300])
        publish(broker, "secret", 0, b"the secret" * 40)
        data = broker.store.lookup.record_at(position)
        assert data is not None
        assert b"the secret" in data  # that is what the store alone takes for a record
        assert await broker.gate(ANONYMOUS).queries.record_at(position) is None


@pytest.mark.parametrize("topic", sorted(BROKER_TOPICS))
async def test_records_of_internal_topics_are_shown_to_administrators_only(topic: str) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure(topic, 1)
        placed = broker.publish(Message(topic, b"half", b"KEYS\x01k\x02", 0))
        broker.store.committer.commit()
        gate = broker.gate(ANONYMOUS)
        assert await gate.queries.record_at(placed.position) is not None
        broker.authorizers = (lambda identity, action, name: action == "read",)
        with pytest.raises(Refused, match="may not get the message at position"):
            await gate.queries.record_at(placed.position)
        with pytest.raises(Refused, match="may not update the cluster"):
            gate.queries.keys(topic, b"k", 1, 0, 1 << 62, 1 << 20)


async def test_a_record_of_a_deleted_topic_is_shown_no_more() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("T", 1)
        placed = broker.publish(Message("T", b"x", b"", 0))
        broker.store.committer.commit()
        gate = broker.gate(ANONYMOUS)
        assert await gate.queries.record_at(placed.position) is not None
        broker.topics.delete("T")
        assert await gate.queries.record_at(placed.position) is None


async def test_the_event_loop_does_not_wait_for_a_record_on_the_disk() -> None:
    disk, fake = cold_disk()
    async with broker_in_memory(fake) as broker:
        broker.topics.ensure("T", 1)
        placed = [broker.publish(Message("T", bytes(1000), b"", 0)) for _ in range(40)]
        broker.store.committer.commit()
        gate = broker.gate(ANONYMOUS)
        disk.on_loop = disk.off = 0
        assert await gate.queries.record_at(placed[0].position) is not None
        assert (disk.on_loop, disk.off) == (0, 1)
        assert await gate.queries.record_at(1 << 40) is None
        assert (disk.on_loop, disk.off) == (0, 1)


async def test_the_event_loop_does_not_wait_for_an_entry_on_the_disk() -> None:
    disk, fake = cold_disk()
    async with broker_in_memory(fake) as broker:
        broker.topics.ensure("T", 1)
        placed = [broker.publish(Message("T", b"", b"", 0)) for _ in range(40)]
        broker.store.committer.commit()
        await broker.store.upkeep.checkpointer.checkpoint()
    async with broker_in_memory(fake) as broker:
        topic_offsets = broker.gate(ANONYMOUS).queries.topic("T")
        disk.on_loop = disk.off = 0
        turns = Turns(disk.off_loop)
        assert await turns.finish(topic_offsets.position_at(0, 5)) == placed[5].position
        assert (disk.on_loop, disk.off) == (0, 1)
        assert await turns.finish(topic_offsets.position_at(0, 40)) == -1
        assert await turns.finish(topic_offsets.position_at(1, 0)) == -1
        assert topic_offsets.readable == placed[-1].end


@pytest.mark.parametrize("topic", sorted({*BROKER_TOPICS, f"{OWN_PREFIX}journal.mqtt"} - {EVENT_TOPIC}))
async def test_only_rocketmqs_tools_pull_from_internal_topics(topic: str) -> None:
    """Its dashboard shows half messages, of all topics: so who manages the broker may read them, and nobody else."""
    asked: list[tuple[str, str]] = []

    def allow(identity: Identity, action: str, name: str) -> bool:
        asked.append((action, name))
        return True

    async with broker_in_memory() as broker:
        for identity in (ANONYMOUS, Identity("tool")):
            with pytest.raises(Refused, match="it is internal to the broker"):
                broker.gate(identity).consume("G", topic)
        broker.authorizers = (allow,)
        gate = broker.gate(Identity("tool"))
        if topic in BROKER_TOPICS:
            assert gate.consume("TOOLS_CONSUMER", topic).topic == topic
            assert asked[-2:] == [("read", topic), ("manage", "")]
            broker.authorizers = (lambda identity, action, name: action == "read",)
            gate = broker.gate(Identity("reader"))
        with pytest.raises(Refused):
            gate.consume("TOOLS_CONSUMER", topic)
