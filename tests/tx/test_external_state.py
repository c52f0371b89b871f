"""What the projection of external transactions makes of events, and how long that takes."""

from tests.tx.external_talk import QUERY, numbered, sink

from martlet.runtime.steps import finish_now
from martlet_tx.external.journal_codec import EventKind, encode_event
from martlet_tx.external.state import ExternalState


async def test_a_snapshot_has_the_whole_state_while_a_transaction_is_delivered() -> None:
    found = await sink()
    await found.begin_at("run-1", 5, "a", "b")
    await found.commit(3, [], epoch=1, content="none")
    await found.commit(8, [], producer="other")
    await found.do(found.staged.expiry.count_hour)
    await found.stage(4, "open", ["x"], epoch=1)
    await found.prepare(4, [("open", 1)], epoch=1, content="one")
    for chunk in range(3):
        await found.stage(0, "large", numbered(0, 25), chunk=chunk, producer="third")
    await found.decide(0, [("large", 3)], producer="third")
    before = found.state
    after = ExternalState()
    finish_now(after.restore(b"".join(finish_now(before.freeze())), 0))
    for name in ("producers", "parts", "chunks"):
        assert dict(getattr(after, name).items()) == dict(getattr(before, name).items())
    for name in ("deliveries", "of_producer", "hour", "hour_noted_at", "messages", "size", "totals", "next"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.floor() == before.floor()
    assert after.held() == 76


async def test_chunks_of_dropped_parts_are_removed_a_few_at_a_time() -> None:
    found = await sink(segment_bytes=1 << 20)
    records = [(0, 100, 1)]
    for number in range(1200):
        event = encode_event(EventKind.STAGED, "", QUERY, 0, "a", 0, number, records, ["orders"], False)
        found.staged._events.append(event)
    await found.settle()
    assert len(found.state.chunks) == 1200
    await found.begin("run-1")
    assert len(found.state.parts) == 0
    assert found.state.messages == 0
    assert len(found.state.chunks) == 700
    await found.begin("run-2")
    again = ExternalState()
    finish_now(again.restore(b"".join(finish_now(found.state.freeze())), 0))
    assert len(again.chunks) == 0
    await found.begin("run-3")
    assert len(found.state.chunks) == 0


async def test_events_and_snapshots_of_earlier_versions_do_not_say_what_was_committed() -> None:
    state = ExternalState()
    state._apply(EventKind.STATE, ["", QUERY, 1, ["run-1"], 2, 0, 5, ["a"], [1, 3, [["part", 1]]], False], 10)
    state._apply(EventKind.COMMIT, ["", "other", 4, 0, [], [0, 0, 0], 0, False, True], 20)
    state._apply(EventKind.PREPARED, ["", "third", 4, 1, [["part", 1]], 0, False], 30)
    assert [each.content for each in state.producers.values()] == ["", "", ""]
    assert (state.producers["", QUERY].prepared, state.producers["", "other"].committed) == (3, 4)
