"""Limits, expiry, faults of the disk, and topics that go away while an external transaction is under way."""

import errno
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from tests.tx.external_talk import OTHER, QUERY, TOPIC, Sink, numbered, sink

from martlet.contracts import ExternalCommit, ExternalTransaction, Identity, Quota, StagedBatch
from martlet.errors import Reason, Refused
from martlet.runtime.steps import finish_now
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet_tx.config import TxConfig
from martlet_tx.external.staged_records import STAGED_TOPIC
from martlet_tx.external.transactions import DROPPED_AT_ONCE

SMALL = TxConfig(
    staged_part_bytes_max=9000,
    staged_part_messages_max=6,
    staged_transaction_bytes_max=12_000,
    staged_transaction_messages_max=9,
    staged_bytes_max=15_000,
    staged_chunks_max=6,
    staged_parts_max=5,
    producers_max=4,
)


async def refusal(found: Sink, reason: Reason, *arguments: Any, **more: Any) -> str:
    with pytest.raises(Refused) as refused:
        await found.stage(*arguments, **more)
    assert refused.value.reason is reason
    return str(refused.value)


async def test_each_limit_is_named_with_its_setting() -> None:
    found = await sink(config=SMALL)
    await found.stage(0, "a", ["1", "2", "3", "4", "5"])
    text = await refusal(found, Reason.ILLEGAL, 0, "a", ["6", "7"], chunk=1)
    assert text == "part would have 7 messages; tx.staged_part_messages_max is 6; make transactions smaller"
    text = await refusal(found, Reason.ILLEGAL, 0, "b", ["1", "2", "3", "4", "5"])
    assert (
        text
        == "transaction 0 would have 10 messages; tx.staged_transaction_messages_max is 9; make transactions smaller"
    )
    text = await refusal(found, Reason.ILLEGAL, 0, "b", ["x" * 4200])
    assert "tx.staged_part_bytes_max is 9000" in text
    assert "stage smaller batches" in await refusal(found, Reason.ILLEGAL, 0, "b", ["x" * 9000])
    await found.stage(0, "b", ["x" * 3500])
    text = await refusal(found, Reason.ILLEGAL, 0, "c", ["x" * 3500])
    assert "tx.staged_transaction_bytes_max is 12000" in text
    text = await refusal(found, Reason.BUSY, 1, "c", ["x" * 3500])
    assert "bytes would be staged; tx.staged_bytes_max is 15000" in text
    for number in range(3):
        await found.stage(1, f"d{number}", ["x"])
    assert "6 parts would be staged; tx.staged_parts_max is 5" in await refusal(found, Reason.BUSY, 1, "e", ["x"])
    await found.stage(1, "d0", ["x"], chunk=1)
    text = await refusal(found, Reason.BUSY, 1, "d0", ["x"], chunk=2)
    assert "7 chunks would be staged; tx.staged_chunks_max is 6" in text
    assert (await found.commit(0, [("a", 1), ("b", 1)])).messages == 6
    await found.stage(1, "d0", ["x"], chunk=2)


async def test_producers_are_limited_and_unused_ones_are_forgotten() -> None:
    found = await sink(config=replace(SMALL, producer_hours=2))
    for number in range(4):
        await found.commit(number, [], producer=f"p{number}")
    for work in (
        lambda: found.staged.begin("", "p4", "run"),
        lambda: found.staged.commit(ExternalTransaction("p4", 0, 0), [], print),
    ):
        with pytest.raises(Refused, match=r"4 producers .* are known; tx.producers_max is 4") as refused:
            await found.do(work)
        assert refused.value.reason is Reason.BUSY
    assert "producers_max" in await refusal(found, Reason.BUSY, 0, "a", ["x"], producer="p4")
    await found.do(found.staged.expiry.count_hour)
    await found.commit(7, [], producer="p0")
    await found.do(found.staged.expiry.count_hour)
    assert sorted(name for _, name in found.state.producers) == ["p0"]
    await found.do(found.staged.expiry.count_hour)
    assert len(found.state.producers) == 0
    assert found.staged.expiry.forgotten == 4
    await found.begin("run", "p4")


async def test_one_identity_cannot_use_up_the_producers_of_all() -> None:
    found = await sink(config=replace(SMALL, producers_max=20, producers_identity_max=2))
    await found.begin("run", "p0", "alice")
    await found.commit(0, [], producer="p1", identity="alice")
    text = "2 producers of identity 'alice' of external transactions are known; tx.producers_identity_max is 2"
    for is_restored in (False, True):
        if is_restored:
            snapshot = b"".join(finish_now(found.state.freeze()))
            finish_now(found.state.restore(snapshot, 0))
        for work in (
            lambda: found.staged.begin("alice", "p2", "run"),
            lambda: found.staged.commit(ExternalTransaction("p2", 0, 0, "alice"), [], print),
            lambda: found.staged.prepare(ExternalTransaction("p2", 0, 0, "alice"), [], print),
        ):
            with pytest.raises(Refused, match=text) as refused:
                await found.do(work)
            assert refused.value.reason is Reason.BUSY
        assert text in await refusal(found, Reason.BUSY, 0, "a", ["x"], producer="p2", identity="alice")
    await found.begin("newer", "p0", "alice")
    await found.begin("run", "p0", "bob")
    for number in range(4):
        await found.begin("run", f"p{number}")  # without authentication all clients are one identity
    for _ in range(24):
        await found.do(found.staged.expiry.count_hour)
    assert found.state.of_identity == {"alice": 1}
    await found.begin("run", "p2", "alice")


async def test_a_producer_that_has_only_begun_is_forgotten_after_a_day() -> None:
    found = await sink()
    epoch, _ = await found.begin("run")
    await found.begin("run", "staging")
    for _ in range(23):
        await found.do(found.staged.expiry.count_hour)
    assert (await found.begin("run"))[0] == epoch
    await found.stage(0, "a", ["x"], epoch=epoch, producer="staging")
    await found.do(found.staged.expiry.count_hour)
    assert [name for _, name in found.state.producers] == ["staging"]
    assert "it expired" in await refusal(found, Reason.NOT_FOUND, 0, "a", ["x"], epoch=epoch)
    assert (await found.begin("run"))[0] == epoch


async def test_parts_that_nobody_continues_expire(caplog: pytest.LogCaptureFixture) -> None:
    found = await sink(config=TxConfig(staged_timeout_ms=200))
    await found.stage(0, "orphan", ["x", "y"])
    await found.stage(0, "alive", ["z"])
    await found.do(found.staged.expiry.expire)  # seen for the first time
    await trio.sleep(0.25)
    await found.stage(0, "alive", ["z"], chunk=1)
    await found.do(found.staged.expiry.expire)
    assert found.parts() == {(0, "alive"): 2}
    assert "part 'orphan' of transaction 0 of 'query' expired: 2 messages were staged" in caplog.text
    with pytest.raises(Refused, match="it expired") as refused:
        await found.commit(0, [("orphan", 1), ("alive", 2)])
    assert refused.value.reason is Reason.NOT_FOUND
    assert found.stored() == []
    assert (await found.commit(0, [("alive", 2)])).messages == 2
    assert found.staged.statistics()["expired_parts"] == 1


async def test_a_topic_that_is_deleted_before_the_commit_refuses_it() -> None:
    found = await sink()
    await found.stage(0, "a", ["one"])
    await found.stage(0, "a", ["bill"], chunk=1, topic=OTHER)
    found.broker.topics.delete(OTHER)
    with pytest.raises(Refused, match=r"topic\[bills\] was deleted after messages for it were staged") as refused:
        await found.commit(0, [("a", 2)])
    assert refused.value.reason is Reason.NO_TOPIC
    assert found.stored() == []
    found.broker.topics.ensure(OTHER, 1)
    assert (await found.commit(0, [("a", 2)])).messages == 2
    assert found.stored(OTHER) == ["bill"]


async def test_messages_of_a_topic_that_is_deleted_after_the_decision_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = await sink()
    await found.stage(0, "a", numbered(0, 40))
    await found.stage(0, "a", numbered(0, 40), chunk=1, topic=OTHER)
    await found.decide(0, [("a", 2)])
    found.broker.topics.delete(OTHER)
    await found.go_on()
    assert found.stored() == numbered(0, 40)
    assert found.store.queues.find(OTHER, 0) is None
    assert found.staged.statistics()["dropped_without_topic"] == 40
    assert "for topic[bills] are dropped, because the topic was deleted" in caplog.text


async def test_a_closed_topic_and_a_denied_one_refuse_the_commit() -> None:
    found = await sink()
    await found.stage(0, "a", ["one"])
    found.broker.topics.update(TOPIC, perm=4)
    with pytest.raises(Refused, match=r"topic\[orders\] is not writable"):
        await found.commit(0, [("a", 1)])
    found.broker.topics.update(TOPIC, perm=6)

    def deny(topic: str) -> None:
        raise Refused(Reason.NO_PERMISSION, f"no {topic}")

    with pytest.raises(Refused, match="no orders"):
        await found.commit(0, [("a", 1)], check=deny)
    assert found.stored() == []
    assert (await found.commit(0, [("a", 1)])).messages == 1


async def test_a_gate_keeps_identities_apart_and_asks_for_each_topic() -> None:
    found = await sink()
    allowed = {"publish": {TOPIC}}
    found.broker.authorizers = (lambda identity, action, topic: topic in allowed.get(action, set()),)
    ann, bob = found.broker.gate(Identity("ann")), found.broker.gate(Identity("bob"))
    name = ExternalTransaction("query", 0, 0, "bob")  # what a client says about its identity does not count
    batch = StagedBatch(TOPIC, 0, [(b"x", b"", 0)])
    await found.do(lambda: ann.external.stage(name, "a", 0, batch))
    with pytest.raises(Refused, match="has 0 of 1 chunks"):
        await found.do(lambda: bob.external.commit(name, [("a", 1)]))
    assert await found.do(lambda: bob.external.abort(name)) == 0
    with pytest.raises(Refused) as refused:
        await found.do(lambda: ann.external.stage(name, "b", 0, replace(batch, topic=OTHER)))
    assert refused.value.reason is Reason.NO_PERMISSION
    allowed.clear()
    found.broker.rules.changed()
    with pytest.raises(Refused) as refused:
        await found.do(lambda: ann.external.commit(name, [("a", 1)]))
    assert refused.value.reason is Reason.NO_PERMISSION
    allowed["publish"] = {TOPIC}
    found.broker.rules.changed()
    assert (await found.do(lambda: ann.external.commit(name, [("a", 1)]))).messages == 1


async def test_a_full_disk_refuses_what_is_not_decided_and_delays_the_rest() -> None:
    disk = FakeDisk()
    found = await sink(disk)
    await found.stage(0, "a", numbered(0, 100))
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(Refused) as refused:
        await found.commit(0, [("a", 1)])
    assert refused.value.reason is Reason.UNAVAILABLE
    assert found.stored() == []
    await found.settle()
    disk.fail_next("write", errno.ENOSPC, after=5)
    assert (await found.commit(0, [("a", 1)])).messages == 100
    assert ("write", disk.calls["write"]) not in disk.failures
    assert not disk.failures
    assert found.stored() == numbered(0, 100)


async def test_a_chunk_that_the_disk_refused_is_staged_again() -> None:
    disk = FakeDisk()
    found = await sink(disk)
    await found.stage(0, "a", ["one"])
    disk.fail_next("write", errno.ENOSPC)
    await found.stage(0, "a", ["two"], chunk=1)  # appended, and undone when the round ends
    assert found.parts() == {(0, "a"): 1}
    await found.settle()
    await found.stage(0, "a", ["two"], chunk=1)
    assert (await found.commit(0, [("a", 2)])).messages == 2
    assert found.stored() == ["one", "two"]


async def test_a_commit_whose_client_leaves_is_delivered_completely() -> None:
    found = await sink()
    await found.stage(0, "a", numbered(0, 100))
    name = ExternalTransaction("query", 0, 0)

    async def leave() -> None:
        with trio.CancelScope() as scope:
            found.store.readable_end.on_moved.append(scope.cancel)  # once something of it is durable
            await found.staged.commit(name, [("a", 1)], print)
        found.store.readable_end.on_moved.remove(scope.cancel)
        assert scope.cancelled_caught

    await found.do(leave)
    assert found.stored() == numbered(0, 100)
    assert (await found.commit(0, [("a", 1)])).is_duplicate


@pytest.mark.parametrize("decided", [False, True])
async def test_a_damaged_staged_record_is_never_delivered(decided: bool, caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    found = await sink(disk)
    await found.stage(0, "a", numbered(0, 40))
    await found.stage(0, "a", numbered(40, 40), chunk=1)
    (first, second) = found.records(STAGED_TOPIC)
    if decided:
        await found.decide(0, [("a", 2)])
    found.broker.projections.save()
    await found.store.close()
    damaged = (second if decided else first).position + 400
    base = max(found.store.segments.items, key=lambda each: each.start if each.start <= damaged else -1)
    disk.files[base.path].data[damaged - base.start] ^= 1
    again = await sink(disk)
    if decided:
        await again.go_on()
        assert again.stored() == numbered(0, 40)
        assert again.staged.statistics()["lost"] == 40
        assert "40 messages of transaction 0 of 'query' are lost: chunk 1 of part 'a'" in caplog.text
    else:
        with pytest.raises(Refused, match="chunk 0 of part 'a' of transaction 0 of 'query' is damaged or was removed"):
            await again.commit(0, [("a", 2)])
        assert again.stored() == []


async def test_very_many_parts_are_aborted_in_several_events() -> None:
    found = await sink(segment_bytes=1 << 20)
    for number in range(2 * DROPPED_AT_ONCE + 1):
        await found.staged.stage(
            ExternalTransaction(QUERY, 0, 0), f"p{number}", 0, StagedBatch(TOPIC, 0, [(b"x", b"", 0)])
        )
    await found.settle()
    assert len(found.state.parts) == 2 * DROPPED_AT_ONCE + 1
    assert await found.abort(0, [f"p{number}" for number in range(5)]) == 5
    assert await found.abort(0) == 2 * DROPPED_AT_ONCE - 4
    assert (len(found.state.parts), found.state.messages, found.state.size) == (0, 0, 0)


async def test_requests_that_race_are_decided_one_after_the_other() -> None:
    """While a large commit is delivered, whatever else is asked about its producer waits, and finds it committed."""
    for asked in ("begin", "abort", "commit", "another commit", "prepare"):
        found = await sink()
        await found.stage(0, "a", numbered(0, 100))
        await found.stage(0, "b", ["no"])
        await found.stage(1, "c", ["later"])
        results: dict[str, object] = {}

        async def commit(name: str, sequence: int, part: str, found: Sink = found, results: Any = results) -> None:
            done = found.staged.commit(ExternalTransaction(QUERY, 0, sequence), [(part, 1)], lambda _: None)
            results[name] = await done

        async def other(asked: str = asked, found: Sink = found, results: Any = results) -> None:
            name = ExternalTransaction(QUERY, 0, 0)
            if asked == "begin":
                results[asked] = (await found.staged.begin("", QUERY, "run")).committed
            elif asked == "abort":
                results[asked] = await found.staged.abort(name)
            elif asked == "prepare":
                results[asked] = (await found.staged.prepare(name, [("b", 1)], lambda _: None)).is_duplicate
            else:
                await commit(asked, 0, "a" if asked == "commit" else "b")

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(commit, "first", 0, "a")
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(other)

        await found.do(both)
        assert found.stored() == numbered(0, 100), asked
        assert results.pop("first") == ExternalCommit(0, 100, False)
        assert results.popitem()[1] in (0, True, ExternalCommit(0, 0, True)), asked
        assert found.parts() == ({} if asked == "begin" else {(1, "c"): 1})


async def test_nothing_is_undone_or_done_twice_after_a_commit() -> None:
    found = await sink()
    await found.stage(0, "a", ["one"])
    await found.stage(0, "b", ["two"])
    await found.commit(0, [("b", 1)])
    assert await found.abort(0) == 0
    assert await found.abort(0, ["b"]) == 0
    for parts in ([("b", 1)], [("a", 1)], [("b", 1), ("a", 1)], [("never", 5)], []):
        assert (await found.commit(0, parts)).is_duplicate
        assert (await found.prepare(0, parts)).is_duplicate
    assert (await found.stage(0, "a", ["again"])).is_committed
    assert found.stored() == ["two"]
    await found.stage(1, "later", ["three"])
    with pytest.raises(Refused, match="has 0 of 1 chunks"):
        await found.commit(1, [("a", 1)])  # a part of another transaction
    await found.commit(2, [])
    assert (await found.commit(1, [("later", 1)])).is_duplicate  # out of order
    assert found.stored() == ["two"]
    assert not len(found.state.parts)


async def test_staged_messages_count_for_the_quota_of_their_writer() -> None:
    found, peer = await sink(), RecordingPeer()
    found.broker.quotas.sources = (lambda identity: [Quota(messages_in=10, refuses=True)],)
    gate = found.broker.gate(Identity("ann"), peer=peer)
    name, batch = ExternalTransaction("query", 0, 0), StagedBatch(TOPIC, 0, [(b"x", b"", 0)] * 6)
    for part in "ab":
        await found.do(lambda part=part: gate.external.stage(name, part, 0, batch))  # type: ignore[misc]
    with pytest.raises(Refused, match="may send 10 messages a second"):
        await found.do(lambda: gate.external.stage(name, "c", 0, batch))
    assert (await found.do(lambda: gate.external.commit(name, [("a", 1), ("b", 1)]))).messages == 12
