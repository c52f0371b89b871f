"""External transactions: staged where nobody reads them, committed once, in order, whichever run asks."""

from tests.tx.external_talk import OTHER, TOPIC, numbered, sink

from martlet.contracts import ExternalCommit, Stage
from martlet.message import Message, put_property


async def test_staged_messages_are_invisible_until_their_commit_delivers_all_of_them() -> None:
    found = await sink()
    epoch, committed = await found.begin("run-1")
    assert (epoch, committed) == (1, -1)
    await found.stage(0, "a", ["a1", "a2"], epoch=1)
    await found.stage(0, "a", ["a3"], epoch=1, chunk=1, topic=OTHER)
    await found.stage(0, "b", ["b1"], epoch=1)
    assert found.stored() == []
    assert found.stored(OTHER) == []
    assert await found.commit(0, [("b", 1), ("a", 2)], epoch=1) == ExternalCommit(0, 4, False)
    assert found.stored() == ["b1", "a1", "a2"]
    assert found.stored(OTHER) == ["a3"]
    (first, *_) = found.records(TOPIC)
    assert (first.flag, first.born_ms, first.property("UNIQ_KEY")) == (7, 1_700_000_000_000, "b1")
    assert await found.commit(0, [("b", 1), ("a", 2)], epoch=1) == ExternalCommit(0, 0, True)
    assert found.stored() == ["b1", "a1", "a2"]
    assert not found.state.parts
    assert not found.state.chunks
    assert (found.state.messages, found.state.size) == (0, 0)


async def test_a_large_transaction_is_delivered_in_order() -> None:
    found = await sink(segment_bytes=1 << 20)
    for chunk in range(3):
        await found.stage(5, "a", numbered(chunk * 700, 700), chunk=chunk)
    assert await found.commit(5, [("a", 3)]) == ExternalCommit(5, 2100, False)
    assert found.stored() == numbered(0, 2100)
    assert not found.state.chunks


async def test_stages_of_plugins_change_messages_when_they_are_staged() -> None:
    found = await sink()

    def stamp(message: Message) -> Message:
        message.properties = put_property(message.properties, b"VIA", found.broker.config.name.encode())
        if message.body.startswith(b"bill"):
            message.topic, message.queue_id = OTHER, 0
        return message

    found.broker.set_stages([*found.broker.stages.pairs, ("stamp", Stage(stamp))])
    await found.stage(0, "a", ["one", "bill 1", "two", "bill 2"])
    found.broker.set_stages([])
    assert (await found.commit(0, [("a", 1)])).messages == 4
    assert (found.stored(), found.stored(OTHER)) == (["one", "two"], ["bill 1", "bill 2"])
    assert {record.property("VIA") for record in found.records(TOPIC)} == {found.broker.config.name}
