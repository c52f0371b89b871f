"""The protocol over a real broker in memory: filters, acknowledgements, sessions that return."""

from errno import ENOSPC
from pathlib import Path

import pytest
from topics_talk import Came, Talk, topics_broker

from martlet.contracts import Identity
from martlet.delivery.routing.route_cache import RouteCache
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.records.layout import RecordView
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, small_config
from martlet_topics.config import TopicsConfig
from martlet_topics.shares import select_names


async def published(talk: Talk, *messages: tuple[str, bytes], first_id: int = 1) -> None:
    await talk.publish(first_id, *messages)
    assert await talk.line() == f"ACK {first_id} {len(messages)}"


async def test_wildcards_choose_the_messages(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        one, rest, exact, talk = [await topics.connect() for _ in range(4)]
        assert await one.ask("SUB site/+/temp") == "OK"
        assert await rest.ask("SUB site/#") == "OK"
        assert await exact.ask("SUB site/a/temp") == "OK"
        names = ("site/a/temp", "site/b/temp", "site/a/door", "site", "other/a/temp")
        await published(talk, *((name, name.encode()) for name in names))
        assert await exact.bodies(1) == [b"site/a/temp"]
        assert await one.bodies(2) == [b"site/a/temp", b"site/b/temp"]
        assert sorted(await rest.bodies(4)) == sorted(name.encode() for name in names[:4])
        assert [await each.rest() for each in (one, rest, exact)] == [[], [], []]


async def test_filters_that_overlap_bring_a_message_once_at_the_higher_qos(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect("me")
        assert await talk.ask("SUB a/#", "SUB a/+ 1", "SUB a/b 0") == "OK"
        await published(talk, ("a/b", b"1"), ("a/b/c", b"2"))
        came = {each.body: each.packet_id for each in await talk.messages(2)}
        assert came == {b"1": 1, b"2": 0}
        assert await talk.ask("UNSUB a/+", "UNSUB a/#") == "OK"
        await published(talk, ("a/b", b"3"), ("a/c", b"4"))
        assert await talk.rest() == [Came("a/b", b"3")]


async def test_a_message_is_handed_on_in_the_bytes_it_came_in(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect()
        assert await talk.ask("SUB #") == "OK"
        for name in ("plain", "with%20space", "a/ü"):
            await published(talk, (name.replace("%20", " "), b"body\n"))
            assert await talk.messages(1) == [Came(name, b"body\n")]


async def test_messages_of_other_protocols_come_under_their_tag(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect()
        assert await talk.ask("SUB #") == "OK"
        topics.broker.publish(Message("topics", b"x", b"TAGS\x01two words\x02", 0))
        topics.broker.publish(Message("topics", b"no tag", b"", 0))
        topics.broker.store.committer.commit()
        assert await talk.messages(2) == [Came("two%20words", b"x"), Came("", b"no tag")]


async def test_qos_1_waits_for_room_in_the_window(tmp_path: Path) -> None:
    async with topics_broker(tmp_path, TopicsConfig(window=3)) as topics:
        talk, other = await topics.connect("me"), await topics.connect()
        assert await talk.ask("SUB a 1") == "OK"
        await published(other, *(("a", b"%d" % n) for n in range(10)))
        assert [(each.packet_id, each.body) for each in await talk.messages(3)] == [(1, b"0"), (2, b"1"), (3, b"2")]
        assert await talk.rest() == []
        await talk.say("ACK 2 1")
        assert await talk.messages(1) == [Came("a", b"3", 4)]
        await talk.say("ACK 1 4")
        assert [each.packet_id for each in await talk.messages(3)] == [5, 6, 7]
        assert await talk.rest() == []


async def test_a_session_gets_what_it_missed_and_what_it_did_not_acknowledge(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk, other = await topics.connect("me", "OK new"), await topics.connect()
        assert await talk.ask("SUB a/# 1", "SUB b 0") == "OK"
        await published(other, *((f"a/{n}", b"%d" % n) for n in range(4)), ("b", b"seen"))
        assert len(await talk.messages(5)) == 5
        await talk.say("ACK 2 2")
        assert await talk.rest() == []
        talk.hang_up()
        await topics.settle()
        await published(other, ("a/9", b"9"), ("b", b"not for who is away"), ("c", b"not wanted"))
        talk = await topics.connect("me", "OK old")
        came = await talk.messages(3)
        assert {(each.packet_id, each.body, each.is_again) for each in came[:2]} <= {
            (n + 1, b"%d" % n, True) for n in range(4)
        }
        assert came[2].body == b"9"
        await topics.settle()
        await published(other, ("b", b"live"))
        assert await talk.messages(1) == [Came("b", b"live")]
        assert await talk.rest() == []


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_new_filter_of_a_session_behind_brings_nothing_older_to_one_that_returns(
    tmp_path: Path, qos: int
) -> None:
    async with topics_broker(tmp_path, TopicsConfig(window=3)) as topics:
        talk, other = await topics.connect("me"), await topics.connect()
        assert await talk.ask("SUB a 1", f"SUB b {qos}") == "OK"
        assert await talk.ask("UNSUB b") == "OK" if qos else await talk.rest() == []
        await published(other, *(("a", b"%d" % number) for number in range(10)), ("b", b"before"))
        assert len(await talk.messages(3)) == 3
        assert await talk.ask("SUB b 1") == "OK"
        await published(other, ("b", b"after"))
        talk.hang_up()
        await topics.settle()
        talk = await topics.connect("me", "OK old")
        assert await talk.bodies(3) == [b"0", b"1", b"2"]
        await talk.say("ACK 1 3")
        assert await talk.bodies(3) == [b"3", b"4", b"5"]
        await talk.say("ACK 4 3")
        assert await talk.bodies(3) == [b"6", b"7", b"8"]
        await talk.say("ACK 7 3")
        assert await talk.bodies(2) == [b"9", b"after"]
        assert await talk.rest() == []


async def test_sessions_survive_a_restart(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect("me")
        assert await talk.ask("SUB a 1") == "OK"
        await published(talk, ("a", b"1"), ("a", b"2"), ("a", b"3"))
        assert await talk.bodies(3) == [b"1", b"2", b"3"]
        await talk.say("ACK 1 1", "ACK 3 1")
        assert await talk.rest() == []
        talk.hang_up()
        await topics.settle()
    (tmp_path / "config" / "sessions.snapshot").unlink()  # it is a short cut and nothing else
    for _ in range(2):
        async with topics_broker(tmp_path) as topics:
            talk = await topics.connect("me", "OK old")
            assert await talk.messages(1) == [Came("a", b"2", 2, True)]
            assert await talk.rest() == []


async def test_a_packet_id_is_not_given_twice_while_it_is_in_flight(tmp_path: Path) -> None:
    async with topics_broker(tmp_path, TopicsConfig(window=5)) as topics:
        talk = await topics.connect("me")
        assert await talk.ask("SUB a 1") == "OK"
        await published(talk, ("a", b"old"))
        assert await talk.bodies(1) == [b"old"]
        talk.hang_up()
        await topics.settle()
        session, _ = topics.broker.gate(Identity()).open_session("topics", "me", 0, lambda reason: None)
        session.hand_out(65533, [0], session.position)
        session.acknowledge(65533)
        session.leave()
        talk = await topics.connect("me", "OK old")
        assert await talk.bodies(1) == [b"old"]
        await published(talk, *(("a", b"%d" % n) for n in range(4)))
        assert [each.packet_id for each in await talk.messages(4)] == [65534, 65535, 2, 3]


async def test_another_connection_takes_the_session_over(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        first, other = await topics.connect("me"), await topics.connect()
        assert await first.ask("SUB a 1") == "OK"
        await published(other, ("a", b"1"))
        assert await first.bodies(1) == [b"1"]
        second = await topics.connect("me", "OK old")
        assert (await first.line()).startswith("ERR 0 0 LOST another connection")
        with pytest.raises(EOFError):
            await first.line()
        assert await second.messages(1) == [Came("a", b"1", 1, True)]
        await published(other, ("a", b"2"))
        assert await second.bodies(1) == [b"2"]


async def test_a_forgotten_session_begins_anew(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect("me")
        assert await talk.ask("SUB a 1", "FORGET") == "OK"
        await topics.settle()
        assert len(topics.sessions) == 0
        talk = await topics.connect("me", "OK new")
        await published(talk, ("a", b"1"))
        assert await talk.rest() == []


async def test_a_session_expires_as_configured(tmp_path: Path) -> None:
    async with topics_broker(tmp_path, TopicsConfig(session_expiry_s=77)) as topics:
        await topics.connect("me")
        state = topics.sessions.table.get("topics me")
        assert state is not None
        assert state.expiry_s == 77


async def test_a_transaction_stores_and_acknowledges_together(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk, out = await topics.connect("me"), await topics.connect()
        assert await talk.ask("SUB in 1") == "OK"
        assert await out.ask("SUB out/#") == "OK"
        await published(out, ("in", b"1"))
        assert await talk.bodies(1) == [b"1"]
        await talk.publish(7, ("out/a", b"A"), ("out/b", b"B"), verb="TX", then=" 1 1")
        assert await talk.line() == "ACK 7 2"
        assert await out.bodies(2) == [b"A", b"B"]
        await talk.publish(7, ("out/a", b"A"), verb="TX", then=" 1 1")
        assert (await talk.line()).startswith("ERR 7 1 NOT_FOUND packet ids 1 to 1 are not in flight")
        talk.hang_up()
        await topics.settle()
        talk = await topics.connect("me", "OK old")
        assert await talk.rest() == []
        await topics.settle()
        assert await out.rest() == []


async def test_names_that_cannot_be_published_to_are_refused(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect()
        for name in ("a/#", "+", "", "x" * 2000):
            await talk.publish(1, (name, b""))
            assert (await talk.line()).startswith("ERR 1 1 ILLEGAL name")
        assert (await talk.ask("SUB a/#/b")).startswith("ERR 0 0 ILLEGAL topic filter")
        assert (await talk.ask("SUB a+ 1")).startswith("ERR 0 0 ILLEGAL topic filter")


async def test_rules_are_asked_when_messages_are_sent(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk, other = await topics.connect(), await topics.connect()
        assert await talk.ask("SUB #") == "OK"
        topics.broker.authorizers = (lambda identity, action, name: action == "publish",)
        await published(other, ("a", b""))
        with pytest.raises(EOFError):
            await talk.line()
        topics.broker.authorizers = (lambda identity, action, name: False,)
        await other.publish(1, ("a", b""))
        assert (await other.line()).startswith("ERR 1 1 NO_PERMISSION")


async def test_a_session_belongs_to_its_owner(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        topics.broker.gate(Identity("somebody")).open_session("topics", "me", 0, lambda reason: None)
        refused = "ERR 0 0 NO_PERMISSION session 'me' belongs to somebody else; choose another name"
        talk = await topics.connect("me", refused)
        with pytest.raises(EOFError):
            await talk.line()


# shared subscriptions


async def test_each_message_of_a_group_goes_to_one_client(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        one, two, alone, talk = [await topics.connect() for _ in range(4)]
        for each in (one, two):
            assert await each.ask("SUB $share/workers/job/+ 1") == "OK"
        assert await alone.ask("SUB $share/other/job/# 0") == "OK"
        numbers = [b"%d" % n for n in range(40)]
        for number in numbers:
            await published(talk, ("job/a", number), ("else", b"not wanted"), ("job", b"one level less"))
        assert sorted(await alone.bodies(80)) == sorted(numbers + [b"one level less"] * 40)
        came = [*await one.rest(), *await two.rest()]
        assert sorted(each.body for each in came) == sorted(numbers)
        assert {each.is_again for each in came} == {False}


async def test_what_a_client_holds_goes_to_others_when_it_leaves(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        one, talk = await topics.connect("one"), await topics.connect()
        assert await one.ask("SUB $share/g/a 1") == "OK"
        await published(talk, *(("a", b"%d" % n) for n in range(4)))
        came = {each.body: each.packet_id for each in await one.messages(4)}
        await one.say(f"ACK {came[b'1']} 1", f"ACK {came[b'3']} 1")
        assert await one.rest() == []
        two = await topics.connect("two")
        assert await two.ask("SUB $share/g/a 1") == "OK"
        assert await two.rest() == []
        one.hang_up()
        again = await two.messages(2)
        assert [(each.body, each.is_again) for each in again] == [(b"0", True), (b"2", True)]


async def test_a_group_remembers_through_a_restart(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        one, talk = await topics.connect("one"), await topics.connect()
        assert await one.ask("SUB $share/g/# 1") == "OK"
        await published(talk, ("a", b"1"), ("a", b"2"), ("a", b"3"))
        (first, _, last) = await one.messages(3)
        await one.say(f"ACK {first.packet_id} 1", f"ACK {last.packet_id} 1")
        assert await one.rest() == []
    async with topics_broker(tmp_path) as topics:
        one = await topics.connect("one", "OK old")
        assert [each.body for each in await one.messages(1)] == [b"2"]
        assert await one.rest() == []


async def test_packet_ids_of_a_group_and_of_a_session_differ(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect("me")
        assert await talk.ask("SUB a 1", "SUB $share/g/a 1") == "OK"
        await published(talk, *(("a", b"%d" % n) for n in range(5)))
        came = await talk.messages(10)
        assert sorted(each.packet_id for each in came) == list(range(1, 11))
        await talk.say("ACK 1 10")
        assert await talk.rest() == []
        talk.hang_up()
        await topics.settle()
        talk = await topics.connect("me", "OK old")
        assert await talk.rest() == []


async def test_a_transaction_acknowledges_for_a_group(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        talk, out = await topics.connect("me"), await topics.connect()
        assert await talk.ask("SUB $share/g/in 1") == "OK"
        assert await out.ask("SUB out") == "OK"
        await published(out, ("in", b"1"), ("in", b"2"))
        one, two = await talk.messages(2)
        await talk.publish(7, ("out/+", b"no name"), verb="TX", then=f" {one.packet_id} 1")
        assert (await talk.line()).startswith("ERR 7 1 ILLEGAL")
        await talk.publish(7, ("out", b"A"), verb="TX", then=f" {one.packet_id} 1")
        assert await talk.line() == "ACK 7 1"
        assert await out.bodies(1) == [b"A"]
        await talk.publish(7, ("out", b"B"), verb="TX", then=f" {one.packet_id} 1")
        assert (await talk.line()).startswith("ERR 7 1 NOT_FOUND")
        talk.hang_up()
        await topics.settle()
        talk = await topics.connect("me", "OK old")
        assert [each.body for each in await talk.messages(1)] == [two.body]
        assert await talk.rest() == []


@pytest.mark.parametrize("wrong", ["$share/g", "$share//a", "$share/+/a", "$share/g/", "$share/g/a#"])
async def test_a_shared_filter_needs_a_group_and_a_filter(tmp_path: Path, wrong: str) -> None:
    async with topics_broker(tmp_path) as topics:
        talk = await topics.connect("me")
        assert (await talk.ask(f"SUB {wrong}")).startswith("ERR 0 0 ILLEGAL")
        assert await talk.ask("UNSUB $share/g/a", "PING") == "PONG"


async def test_there_are_packet_ids_for_all_shared_filters(tmp_path: Path) -> None:
    async with topics_broker(tmp_path, TopicsConfig(window=2000, queues=1)) as topics:
        talk = await topics.connect("me")
        for number in range(31):
            assert await talk.ask(f"SUB $share/{number}/a 1") == "OK"
        assert (await talk.ask("SUB $share/more/a 1")).startswith("ERR 0 0 BUSY the client has 31 shared filters")
        assert await talk.ask("SUB $share/3/a") == "OK"
        state = topics.broker.sessions.table.get("topics me")
        assert state is not None
        assert sorted(state.filters) == sorted(f"$share/{number}/a" for number in range(31))


async def test_unsubscribing_leaves_the_group(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        one, two = await topics.connect("one"), await topics.connect("two")
        for each in (one, two):
            assert await each.ask("SUB $share/g/a 1") == "OK"
        assert await one.ask("UNSUB $share/g/a") == "OK"
        await published(two, ("a", b"1"), ("a", b"2"))
        assert await two.bodies(2) == [b"1", b"2"]
        assert await one.rest() == []
        one.hang_up()
        await topics.settle()
        one = await topics.connect("one", "OK old")
        await published(two, ("a", b"3"))
        assert await two.bodies(1) == [b"3"]


@pytest.mark.parametrize(
    ("topic_filter", "name", "matches"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/c", False),
        ("+", "a", True),
        ("+", "a/b", False),
        ("a/+/c", "a//c", True),
        ("a/+/c", "a/b/d", False),
        ("a.c/+", "abc/d", False),
        ("#", "a/b\nc", True),
        ("a/#", "a", True),
        ("a/#", "ab", False),
        ("+/#", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
    ],
)
async def test_shared_filters_match_as_others_do(topic_filter: str, name: str, matches: bool) -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add(topic_filter, "me")
    assert bool(routes.route(name).grants) is matches
    body = encode_record(Message("t", b"", b"TAGS\x01%b\x02" % name.encode()), 0, 0, 0, 0, HOST)
    selection = select_names(topic_filter)
    assert selection.predicate is not None
    assert selection.predicate(RecordView(body, 0)) is matches


# what gets lost


async def test_a_session_that_slept_while_retention_went_by_is_told_of_the_gap(tmp_path: Path) -> None:
    disk = FakeDisk()
    sizes = {"segment_bytes": 1 << 14, "page_bytes": 1 << 12, "cache_bytes": 1 << 14}
    store = small_config(flush="async", disk_used_ratio_max=0.8, disk_clean_ratio=0.85, **sizes)
    async with topics_broker(Path("/data"), store=store, disk=disk) as topics:
        talk, other = await topics.connect("me"), await topics.connect()
        assert await talk.ask("SUB a 1") == "OK"
        await published(other, ("a", b"unacknowledged"))
        assert await talk.bodies(1) == [b"unacknowledged"]
        talk.hang_up()
        await topics.settle()
        for number in range(40):
            await published(other, ("a", b"%04d" % number + b"x" * 2000))
        broker_store = topics.broker.store
        await topics.settle()
        end = broker_store.segments.items[-2].end
        await topics.broker.projections.keeper.release(end)
        await broker_store.upkeep.checkpointer.checkpoint()
        disk.used_ratio = 0.99
        broker_store.upkeep.retention.look()
        disk.used_ratio = 0.1
        assert broker_store.first_position > 0
        talk = await topics.connect("me", "OK gap")
        came = await talk.messages(1)
        await topics.settle()
        came += await talk.rest()
        assert not any(each.is_again for each in came), "what was in flight is gone, and its packet id is free"
        numbers = [int(each.body[:4]) for each in came]
        assert numbers == list(range(numbers[0], 40))
        assert numbers[0] > 0
        assert 1 not in topics.sessions.live.by_key["topics me"].flight
        await talk.say(f"ACK {came[0].packet_id} {len(came)}")
        assert await talk.rest() == []
        talk.hang_up()
        await topics.settle()
        await topics.connect("me", "OK old")


async def test_a_commit_that_fails_is_told_to_publishers_and_ends_subscribers(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with topics_broker(Path("/data"), store=small_config(flush="sync"), disk=disk) as topics:
        talk, other = await topics.connect("me"), await topics.connect("other")
        assert await talk.ask("SUB a 1") == "OK"
        assert await other.ask("SUB b 1") == "OK"
        disk.fail_next("write", ENOSPC)
        await other.publish(3, ("a", b"lost"), ("c", b"lost"))
        assert (await other.line()).startswith("ERR 3 2 ")
        topics.broker.store.upkeep.retention.look()
        disk.fail_next("write", ENOSPC)
        await talk.say("SUB lost 1")
        assert (await talk.line()).startswith("ERR 0 0 UNAVAILABLE the disk ")
        with pytest.raises(EOFError):
            await talk.line()
        topics.broker.store.upkeep.retention.look()
        await topics.settle()
        talk = await topics.connect("me", "OK old")
        await published(other, ("lost", b"1"), ("a", b"2"), ("b", b"3"))
        assert await talk.bodies(1) == [b"2"]
        assert await talk.rest() == []
        assert await other.bodies(1) == [b"3"]


class Rules:
    """An authorizer that lets everybody have the names in *names*, ask for any filter, and do nothing else."""

    def __init__(self, *names: str) -> None:
        self.names = {f"topics/{name}" for name in names}

    def __call__(self, identity: Identity, action: str, name: str) -> bool | None:
        return True if name in self.names or name.endswith("#") else None


async def test_rules_are_about_the_names_of_messages(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        topics.broker.authorizers = (Rules("a", "b"),)
        talk, other = await topics.connect(), await topics.connect()
        assert await talk.ask("SUB #") == "OK"
        assert (await talk.ask("SUB +")).startswith(
            "ERR 0 0 NO_PERMISSION '' may not subscribe to '+' in topic[topics]"
        )
        await other.publish(1, ("a", b"1"), ("c", b"2"), ("d", b"3"), ("b", b"4"))
        assert await other.line() == "ACK 1 1"
        assert (await other.line()).startswith("ERR 2 2 NO_PERMISSION '' may not publish to 'c' in topic[topics]")
        assert await other.line() == "ACK 4 1"
        await other.publish(5, ("a", b"5"), ("c", b"6"), verb="TX")
        assert (await other.line()).startswith("ERR 5 2 NO_PERMISSION")
        topics.broker.publish(Message("topics", b"7", b"TAGS\x01c\x02", 0))
        topics.broker.publish(Message("topics", b"8", b"TAGS\x01b\x02", 0))
        topics.broker.store.committer.commit()
        assert await talk.bodies(3) == [b"1", b"4", b"8"]
        assert await talk.rest() == []


async def test_a_session_returns_although_one_of_its_filters_may_not_be_followed_any_more(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        rules = Rules("a", "b")
        topics.broker.authorizers = (rules,)
        talk, other = await topics.connect("me", "OK new"), await topics.connect()
        assert await talk.ask("SUB a 1", "SUB b 1") == "OK"
        rules.names.discard("topics/b")
        topics.broker.rules.changed()
        with pytest.raises(EOFError):
            await talk.line()
        talk = await topics.connect("me", "OK old")
        topics.broker.publish(Message("topics", b"1", b"TAGS\x01b\x02", 0))
        await published(other, ("a", b"2"))
        assert await talk.bodies(1) == [b"2"]
        assert (await talk.ask("SUB b 1")).startswith("ERR 0 0 NO_PERMISSION")
        assert await talk.ask("UNSUB b") == "OK"


async def test_a_topic_that_was_deleted_is_followed_again_when_it_is_created(tmp_path: Path) -> None:
    async with topics_broker(tmp_path) as topics:
        first = await topics.connect("first")
        assert await first.ask("SUB a 1") == "OK"
        topics.broker.topics.delete("topics")
        second = await topics.connect("second", "OK new")
        assert await second.ask("SUB a 1") == "OK"
        topics.broker.topics.ensure("topics", 2)
        await published(await topics.connect(), ("a", b"1"))
        for talk in (first, second):
            assert await talk.bodies(1) == [b"1"]
            assert await talk.rest() == []
