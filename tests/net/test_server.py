"""The server's promises, over links in memory: one send a read, held answers, slow peers, ends, deadlines."""

import contextlib
import re

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, Toy, toy_server
from trio.testing import MockClock

from martlet.contracts import Connection, Handler, Peer
from martlet.errors import ConfigError, MartletError
from martlet.net.addresses import check_listen, pack_host, plain_host, split_address, split_listen
from martlet.settings import ServerConfig
from martlet.state.journal import NEXT_COMMIT
from martlet.testing.links import Caller, Conditions, MemoryLink

SMALL = ServerConfig(unsent_bytes_max=4096, unsent_total_bytes_max=65536, collect_bytes=1024)
MIB = 1 << 20


async def test_answers_of_one_read_leave_in_one_send(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, link = world.dial()
        sends: list[int] = []
        send = link.far.send

        await caller.send(b"echo a\n")
        assert await caller.receive_line() == b"a"
        wire = next(iter(world.server._peers.values())).transport
        assert wire is link.far

        class Counting:
            def __getattr__(self, name: str) -> object:
                return getattr(link.far, name)

            def send(self, pieces: list[bytes]) -> int:
                sends.append(len(pieces))
                return send(list(pieces))

        next(iter(world.server._peers.values())).transport = Counting()  # type: ignore[assignment]
        commits = world.store.commits
        await caller.send(b"".join(b"hold 0 %d\n" % i for i in range(50)))
        assert [await caller.receive_line() for _ in range(50)] == [b"%d" % i for i in range(50)]
        assert sends == [100], "fifty answers of two pieces each are one send"
        assert world.store.commits == commits + 1, "and what they appended is one commit"


async def test_a_request_cut_anywhere_is_answered(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(latency_s=0.1))
        for byte in b"echo hello\n":
            await caller.send(bytes([byte]))
            await trio.sleep(0.01)
        assert await caller.receive_line() == b"hello"


async def test_a_held_answer_leaves_only_after_the_log_is_flushed_so_far(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"hold 100 stored\n")
        await trio.sleep(1)
        assert caller.end.receive(1000) is None
        world.store.flush_to(99)
        await trio.sleep(1)
        assert caller.end.receive(1000) is None
        world.store.flush_to(100)
        assert caller.end.receive(1000) == b"stored\n", "the flusher's own step sends it, no task in between"


async def test_an_answer_after_a_held_one_does_not_overtake_it(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"hold 100 first\n")
        await trio.sleep(1)
        await caller.send(b"echo second\n")
        await trio.sleep(1)
        await caller.send(b"hold 200 third\n")
        await trio.sleep(1)
        await caller.send(b"echo fourth\n")
        await trio.sleep(1)
        assert caller.end.receive(1000) is None
        world.store.flush_to(150)
        assert caller.end.receive(1000) == b"first\nsecond\n"
        assert caller.end.receive(1000) is None
        world.store.flush_to(200)
        assert caller.end.receive(1000) == b"third\nfourth\n"


async def test_an_answer_whose_records_are_flushed_is_not_held(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.store.readable = 100
        caller, _ = world.dial()
        await caller.send(b"hold 100 stored\n")
        assert await caller.receive_line() == b"stored"


async def test_an_answer_can_wait_for_all_that_its_round_commits(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        world.store.written = 300
        await caller.send(b"hold %d noted\n" % NEXT_COMMIT)
        await trio.sleep(1)
        world.store.written = 400
        world.store.flush_to(299)
        assert caller.end.receive(1000) is None
        world.store.flush_to(300)
        assert caller.end.receive(1000) == b"noted\n"


async def test_a_failed_commit_drops_what_waits_for_it(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        world.store.fail_commit(MartletError("disk full"))
        await caller.send(b"hold %d noted\n" % NEXT_COMMIT)
        await trio.sleep(1)
        world.store.flush_to(10)
        assert world.reasons == ["disk full"]


async def test_one_flush_releases_every_peer(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(20)]
        for number, caller in enumerate(callers):
            await caller.send(b"hold %d ok\n" % (number + 1))
        await trio.sleep(1)
        world.store.flush_to(10)
        assert [caller.end.receive(9) for caller in callers] == [b"ok\n"] * 10 + [None] * 10
        assert len(world.server.pending.held) == 10


async def test_a_peer_that_does_not_read_is_not_read_from(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        greedy, _ = world.dial(Conditions(capacity_bytes=2048))
        polite, _ = world.dial()
        with trio.move_on_after(10):
            for _ in range(1000):
                await greedy.send(b"fill 1000\n")
        assert len(world.handled) < 20, "it was not listened to for long"
        assert world.server.pending.unsent_bytes <= SMALL.unsent_bytes_max + 1000
        await polite.send(b"echo still here\n")
        assert await polite.receive_line() == b"still here"


async def test_many_requests_in_one_read_stop_at_the_limit_and_continue_with_room(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        caller, _ = world.dial(Conditions(capacity_bytes=2048))
        await caller.send(b"fill 1000\n" * 200)
        await trio.sleep(1)
        assert len(world.handled) < 10
        assert world.server.pending.unsent_bytes <= SMALL.unsent_bytes_max + 1000
        got = await caller.receive_exactly(200_000)
        assert len(got) == 200_000
        assert len(world.handled) == 200
        await trio.testing.wait_all_tasks_blocked()
        assert world.server.pending.unsent_bytes == 0


async def test_answers_held_for_a_slow_disk_stay_within_the_peers_limit(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        caller, _ = world.dial()
        with trio.move_on_after(10):
            for number in range(1000):
                await caller.send(b"hold %d %s\n" % (number + 1, b"x" * 100))
        assert len(world.handled) < 700
        peer = next(iter(world.server._peers.values()))
        assert peer.output.held_bytes <= SMALL.unsent_bytes_max + 65536
        world.store.flush_to(1000)
        await trio.sleep(1)
        with trio.move_on_after(10):
            while await caller.receive():
                pass
        assert world.server.pending.unsent_bytes == 0


async def test_held_answers_count_to_the_limit_over_all_peers(autojump_clock: MockClock) -> None:
    config = ServerConfig(unsent_bytes_max=MIB, unsent_total_bytes_max=65536)
    async with toy_server(config) as world:
        callers = [world.dial()[0] for _ in range(20)]
        for _ in range(20):
            for caller in callers:
                with trio.move_on_after(1):
                    await caller.send(b"hold 9 %s\n" % (b"x" * 900))
        assert sum(peer.output.held_bytes for peer in world.server._peers.values()) <= 65536 + 20 * 1000
        world.store.flush_to(9)
        for caller in callers:
            assert await caller.receive_line() == b"x" * 900


async def test_the_limit_over_all_peers_pauses_only_those_with_waiting_answers(autojump_clock: MockClock) -> None:
    config = ServerConfig(unsent_bytes_max=MIB, unsent_total_bytes_max=65536)
    async with toy_server(config) as world:
        slow = [world.dial(Conditions(capacity_bytes=1024))[0] for _ in range(20)]
        polite, _ = world.dial()
        for caller in slow * 10:
            with trio.move_on_after(1):
                await caller.send(b"fill 5000\n")
        assert 65536 < world.server.pending.unsent_bytes < 65536 + 20 * 5000
        for number in range(10):
            await polite.send(b"echo %d\n" % number)
            assert await polite.receive_line() == b"%d" % number
        await polite.send(b"push 5\n")
        assert len(await polite.receive_exactly(5000)) == 5000, "deliveries to who reads go on as well"


async def test_a_full_server_does_not_spin(autojump_clock: MockClock) -> None:
    """When peers that never read have used up the global limit, the server does not busy-loop."""
    config = ServerConfig(unsent_bytes_max=MIB, unsent_total_bytes_max=65536)
    async with toy_server(config) as world:
        stuck, _ = world.dial(Conditions(capacity_bytes=1024))
        other, _ = world.dial(Conditions(capacity_bytes=1024))
        await stuck.send(b"fill 100000\n")
        await other.send(b"push 1000\n")
        for _ in range(1000):
            await trio.lowlevel.checkpoint()
        assert trio.lowlevel.current_statistics().tasks_runnable == 0
        assert world.collects < 10


async def test_deliveries_to_a_peer_stop_while_it_does_not_read(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        caller, _ = world.dial(Conditions(capacity_bytes=1500))
        await caller.send(b"push 100\n")
        await trio.testing.wait_all_tasks_blocked()
        assert world.collects < 10
        assert len(await caller.receive_exactly(100_000)) == 100_000
        assert world.collects == 100


async def test_deliveries_after_a_held_answer_stay_within_the_limit(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        caller, _ = world.dial()
        await caller.send(b"hold 7 x\npush 100\n")
        for _ in range(1000):
            await trio.lowlevel.checkpoint()
        assert trio.lowlevel.current_statistics().tasks_runnable == 0
        peer = next(iter(world.server._peers.values()))
        assert peer.output.held_bytes <= SMALL.unsent_bytes_max + 1024
        world.store.flush_to(7)
        assert len(await caller.receive_exactly(2 + 100_000)) == 100_002


async def test_many_wakes_make_one_collect(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"wake 100\necho done\n")
        assert await caller.receive_line() == b"done"
        await trio.testing.wait_all_tasks_blocked()
        assert world.toys[0].collected == 1


async def test_a_wake_from_outside_of_any_read_is_collected(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await trio.testing.wait_all_tasks_blocked()
        world.toys[0].to_push = 1
        world.toys[0].peer.wake()
        assert len(await caller.receive_exactly(1000)) == 1000


async def test_last_words_leave_before_the_close(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(capacity_bytes=100))
        await caller.send(b"fill 5000\nbye now\n")
        assert await caller.receive_all() == bytes(5000) + b"now\n"
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == ["it said bye"]


async def test_nothing_is_handled_after_a_close(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"bye now\necho more\n")
        assert await caller.receive_all() == b"now\n"
        assert world.handled == ["bye now"]


async def test_last_words_that_are_held_wait_for_the_flush(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"hold 5 stored\nbye now\n")
        await trio.sleep(1)
        world.store.flush_to(5)
        assert await caller.receive_all() == b"stored\nnow\n"


async def test_a_peer_that_never_reads_the_farewell_is_closed_soon(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(capacity_bytes=100))
        await caller.send(b"fill 5000\nbye now\n")
        await trio.sleep(20)
        assert world.statistic("connections") == 0
        assert world.server.pending.unsent_bytes == 0
        assert world.reasons == ["it said bye"]


async def test_a_half_closed_peer_gets_its_answers(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, link = world.dial(Conditions(capacity_bytes=1000, latency_s=0.01))
        await caller.send(b"echo a\nhold 3 b\nslowly c\nfill 3000\n")
        link.near.finish()
        await trio.sleep(2)
        world.store.flush_to(3)
        got = await caller.receive_all()
        assert got == b"a\nb\n" + bytes(3000) + b"c\n"


async def test_an_end_without_a_word_is_an_end(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        caller.close()
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == [""]
        assert world.statistic("connections") == 0


async def test_a_broken_link_frees_everything_at_once(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, link = world.dial(Conditions(capacity_bytes=1000))
        await caller.send(b"fill 100000\nslowly never\n")
        await trio.testing.wait_all_tasks_blocked()
        assert world.server.pending.unsent_bytes > 90_000
        link.cut()
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 0
        assert world.server.pending.unsent_bytes == 0
        assert "the link broke" in world.reasons[0]
        other, _ = world.dial()
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"


async def test_a_broken_link_is_no_half_closed_one(autojump_clock: MockClock) -> None:
    """Nobody receives the rest, so the server waits for nothing."""
    ended: list[str] = []

    async def forever(toy: Toy, text: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(text)

    async with toy_server() as world:
        world.work = forever
        caller, link = world.dial()
        await caller.send(b"slowly x\nhold 9 y\n")
        await trio.testing.wait_all_tasks_blocked()
        link.cut()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["x"]
        assert world.statistic("connections") == 0


async def test_a_peer_that_breaks_the_protocol_hears_why(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"echo first\nbad you speak nonsense\necho never\n")
        assert await caller.receive_all() == b"first\nerror you speak nonsense\n"
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == ["you speak nonsense"]
        assert world.statistic("protocol_errors") == 1
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("WARNING", None)]


@pytest.mark.parametrize("words", [b"break it\n", b"wrong state\n"])
async def test_a_handler_that_raises_closes_only_its_peer(
    autojump_clock: MockClock, words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        other, _ = world.dial()
        await caller.send(b"echo first\n" + words)
        assert await caller.receive_all() == b"first\n"
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
        assert world.statistic("connections") == 1
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "peer-0" in caplog.records[0].getMessage()


async def test_a_collect_that_raises_closes_only_its_peer(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(toy: Toy) -> None:
        raise ZeroDivisionError("in collect")

    async with toy_server() as world:
        caller, _ = world.dial()
        other, _ = world.dial()
        world.on_collect = fail
        await caller.send(b"wake 1\n")
        assert await caller.receive_all() == b""
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_slow_work_that_raises_closes_only_its_peer(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(toy: Toy, text: str) -> None:
        raise ZeroDivisionError(text)

    async with toy_server() as world:
        world.work = fail
        caller, _ = world.dial()
        other, _ = world.dial()
        await caller.send(b"slowly x\n")
        assert await caller.receive_all() == b""
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_a_handler_that_raises_at_the_end_harms_nobody(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(toy: Toy) -> None:
        raise ZeroDivisionError("in closed")

    async with toy_server() as world:
        world.on_closed = fail
        caller, _ = world.dial()
        other, _ = world.dial()
        caller.close()
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 1
        world.on_closed = lambda toy: None
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_a_handler_that_cannot_be_made_harms_nobody(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(peer: Peer, connection: Connection) -> Handler:
        raise ZeroDivisionError("in handle")

    async with toy_server() as world:
        caller, _ = world.dial(protocol=world.protocol(handle=fail))
        assert await caller.receive_all() == b""
        other, _ = world.dial()
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
        assert world.statistic("connections") == 1
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_a_timeout_that_raises_a_defect_closes_only_its_peer(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Lines):  # type: ignore[misc]
        def handle_timeout(self, now: float) -> None:
            raise ZeroDivisionError("in handle_timeout")

    async with toy_server() as world:
        caller, _ = world.dial(protocol=world.protocol(connect=lambda now: Broken(3)))
        assert await caller.receive_all() == b""
        other, _ = world.dial()
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_slow_work_is_bounded_and_is_cancelled_with_its_peer(autojump_clock: MockClock) -> None:
    ended: list[str] = []

    async def forever(toy: Toy, text: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(text)

    async with toy_server(ServerConfig(peer_tasks_max=3)) as world:
        world.work = forever
        caller, link = world.dial()
        await caller.send(b"slowly a\nslowly b\nslowly c\n")
        await trio.testing.wait_all_tasks_blocked()
        assert not ended
        await caller.send(b"slowly d\n")
        await trio.sleep(30)
        assert sorted(ended) == ["a", "b", "c"], "the fourth was refused, the toy let that close it"
        assert "peer_tasks_max is 3" in world.reasons[0]
        assert link.far.closed


async def test_a_long_request_keeps_later_ones_of_its_connection_waiting_and_nobody_else(
    autojump_clock: MockClock,
) -> None:
    async with toy_server() as world:
        first, _ = world.dial()
        other, _ = world.dial()
        await first.send(b"echo before\nlong one\necho after\n")
        assert await first.receive_line() == b"before", "earlier answers leave meanwhile"
        await other.send(b"echo quick\n")
        assert await other.receive_line() == b"quick"
        assert world.handled == ["echo before", "long one", "echo quick"]
        assert await first.receive_line() == b"one"
        assert await first.receive_line() == b"after"


async def test_a_long_request_that_raises_closes_only_its_peer(autojump_clock: MockClock) -> None:
    async def fails(toy: Toy, text: str) -> None:
        await trio.sleep(1)
        raise MartletError(text)

    async with toy_server() as world:
        world.work = fails
        caller, _ = world.dial()
        other, _ = world.dial()
        await caller.send(b"long gone\necho never\n")
        assert await caller.receive() == b""
        assert world.reasons == ["gone"]
        await other.send(b"echo b\n")
        assert await other.receive_line() == b"b"


async def test_a_long_request_ends_when_its_peer_is_lost(autojump_clock: MockClock) -> None:
    ended: list[str] = []

    async def forever(toy: Toy, text: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(text)

    async with toy_server() as world:
        world.work = forever
        caller, _ = world.dial()
        await caller.send(b"long a\n")
        await trio.testing.wait_all_tasks_blocked()
        next(iter(world.server._peers.values())).lose(OSError("reset"))
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["a"]
        assert world.reasons == ["OSError: reset"]


async def test_silence_during_a_long_request_is_judged_after_it(autojump_clock: MockClock) -> None:
    async def three_seconds(toy: Toy, text: str) -> None:
        await trio.sleep(3)
        toy.do_echo(text)

    async with toy_server() as world:
        world.work = three_seconds
        world.connect = lambda: Lines(2.0, moves=False)
        caller, _ = world.dial()
        await caller.send(b"long a\necho b\n")
        assert await caller.receive_line() == b"a"
        assert await caller.receive_line() == b"b"
        assert await caller.receive_line() == b"error silent for too long", "then its time is over"


@pytest.mark.parametrize("moves", [True, False])
async def test_a_silent_peer_is_closed_at_its_deadline(autojump_clock: MockClock, moves: bool) -> None:
    made: list[Lines] = []

    def connect() -> Lines:
        made.append(Lines(30, moves=moves))
        return made[-1]

    async with toy_server() as world:
        world.connect = connect
        start = trio.current_time()
        caller, _ = world.dial()
        talker, _ = world.dial()
        for _ in range(3):
            await trio.sleep(20)
            await talker.send(b"echo x\n")
            await talker.receive_line()
        assert await caller.receive_all() == b"error silent for too long\n"
        assert made[0].timeouts == 1
        assert made[1].timeouts == 0
        assert await talker.receive_all() == b"error silent for too long\n"
        assert trio.current_time() - start == pytest.approx(90)


async def test_dead_peers_are_not_kept_until_their_deadline(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.connect = lambda: Lines(100_000)
        for _ in range(1000):
            caller, _ = world.dial()
            await caller.send(b"echo x\n")
            await caller.receive_line()
            caller.close()
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.server._reader.deadlines) < 200


async def test_cancelling_the_server_closes_every_peer(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        ends = [world.dial()[1].far for _ in range(5)]
        await trio.testing.wait_all_tasks_blocked()
    assert [end.closed for end in ends] == [True] * 5
    assert len(world.reasons) == 5


async def test_an_orderly_stop_lets_answers_leave(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(capacity_bytes=1000))
        idle, _ = world.dial()
        await caller.send(b"fill 5000\necho end\n")
        await trio.testing.wait_all_tasks_blocked()
        world.server.close_peers("the broker stops")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.server.wait_idle)
            assert await caller.receive_all() == bytes(5000) + b"end\n"
        assert await idle.receive_all() == b""
        assert world.reasons == ["the broker stops"] * 2


async def test_a_write_that_cannot_be_is_a_defect_of_its_peer_only(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def nonsense(toy: Toy) -> None:
        toy.peer.send("text")  # type: ignore[arg-type]

    async with toy_server() as world:
        world.on_collect = nonsense
        caller, _ = world.dial()
        await caller.send(b"wake 1\n")
        assert await caller.receive_all() == b""
        world.on_collect = lambda toy: None
        other, _ = world.dial()
        await other.send(b"echo alive\n")
        assert await other.receive_line() == b"alive"
    assert [r.levelname for r in caplog.records] == ["ERROR"]


async def test_statistics_count_what_came_and_went(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"echo abc\n")
        await caller.receive_line()
        statistics = world.server.statistics()
        assert statistics["bytes_in"] == 9
        assert statistics["bytes_out"] == 4
        assert statistics["accepted"] == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:10911", ("127.0.0.1", 10911)),
        ("[::1]:0", ("::1", 0)),
        ("broker.example:1", ("broker.example", 1)),
        (":5", ("", 5)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "127.0.0.1", "127.0.0.1:", "host:65536", "host:-1", "host:1x", "host:²"])
def test_the_error_for_a_wrong_address_names_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:1", [("127.0.0.1", 1)]),
        ("0.0.0.0:1883, [::]:1883,10.0.0.5:2", [("0.0.0.0", 1883), ("::", 1883), ("10.0.0.5", 2)]),
    ],
)
def test_a_port_may_have_several_addresses(text: str, addresses: list[tuple[str, int]]) -> None:
    assert split_listen(text) == addresses
    check_listen("toy.listen", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1:1,", "config key 'toy.listen': address '' is not HOST:PORT"),
        ("x:1, y:1, x:1", "config key 'toy.listen' has x:1 twice; leave one out"),
    ],
)
def test_a_mistake_in_the_addresses_is_told(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_listen("toy.listen", text)


@pytest.mark.parametrize(
    ("shown", "host"),
    [("::ffff:10.0.0.5", "10.0.0.5"), ("fe80::1%eth0", "fe80::1%eth0"), ("::1", "::1"), ("10.0.0.5", "10.0.0.5")],
)
def test_a_client_of_ipv4_has_its_own_address_on_every_socket(shown: str, host: str) -> None:
    assert plain_host(shown) == host


def test_hosts_are_packed_as_records_hold_them() -> None:
    assert pack_host("127.0.0.1", 10911) == bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
    assert pack_host("::1", 1) == bytes(15) + b"\x01" + bytes(3) + b"\x01"


async def test_links_deliver_in_order_and_late(autojump_clock: MockClock) -> None:
    link = MemoryLink(Conditions(latency_s=2))
    caller = Caller(link.near)
    other = Caller(link.far)
    await caller.send(b"one")
    start = trio.current_time()
    assert await other.receive() == b"one"
    assert trio.current_time() - start == pytest.approx(2)
    link.stall(10)
    await caller.send(b"two")
    assert await other.receive() == b"two"
    assert trio.current_time() - start == pytest.approx(12)
    link.cut()
    with pytest.raises(ConnectionResetError):
        await other.receive()


async def test_data_from_others_is_sent_although_the_global_limit_is_reached(autojump_clock: MockClock) -> None:
    config = ServerConfig(unsent_bytes_max=MIB, unsent_total_bytes_max=65536)
    async with toy_server(config) as world:
        deaf, _ = world.dial()
        await deaf.send(b"fill 900000\n")
        caller, _ = world.dial()
        await caller.send(b"echo mine\n")
        assert await caller.receive_line() == b"mine"
        assert world.server.pending.unsent_bytes > config.unsent_total_bytes_max
        toy = world.toys[1]
        toy.do_echo("from another")
        toy.peer.wake()
        assert await caller.receive_line() == b"from another"
        await caller.send(b"echo mine\n")
        assert await caller.receive_line() == b"mine", "and it is read from as before"


async def test_last_words_to_many_peers_leave_before_these_are_closed(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(200)]
        for caller in callers:
            await caller.send(b"echo here\n")
            assert await caller.receive_line() == b"here"
        for toy in world.toys:
            toy.do_echo("goodbye")
            toy.peer.wake()
        world.server.close_peers("the broker stops")
        begin = trio.current_time()
        assert [await caller.receive_line() for caller in callers] == [b"goodbye"] * 200
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 0
        assert trio.current_time() - begin < 1, "nothing was waited for"


async def test_a_peer_that_does_not_read_data_from_others_is_closed(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        deaf, _ = world.dial()
        await deaf.send(b"fill 100000\n")
        await trio.sleep(1)
        toy = world.toys[0]
        for _ in range(100):
            toy.peer.send(bytes(10_000))
            toy.peer.wake()
            await trio.sleep(0.1)
            assert world.server.pending.unsent_bytes < 300_000
        assert len(toy.ended) == 1
        assert "does not read" in toy.ended[0]


async def test_data_that_waits_for_room_keeps_no_views(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        deaf, _ = world.dial()
        await deaf.send(b"fill 200000\n")
        await trio.sleep(1)
        chunk = bytearray(1000)
        toy = world.toys[0]
        toy.peer.send(memoryview(chunk)[:10])
        toy.peer.wake()
        await trio.sleep(1)
        assert world.server.pending.unsent_bytes > 0
        chunk.clear()  # raises BufferError while there is a view


INCOMPLETE = ServerConfig(incomplete_total_bytes_max=10_000, incomplete_address_bytes_max=7_000)


async def test_a_good_peer_with_large_messages_survives_slow_hoarders(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """They share its address; half of them never send more, the others a byte now and then."""
    hoarded = b"echo " + b"x" * 95
    async with toy_server(INCOMPLETE) as world:
        hoarders = [world.dial()[0] for _ in range(60)]
        for hoarder in hoarders:
            await hoarder.send(hoarded)
        good = world.dial()[0]
        for number in range(100):
            await trio.sleep(0.1)
            for hoarder in hoarders[::2]:
                with contextlib.suppress(OSError):
                    await hoarder.send(b"x")
            hoarders.append(world.dial()[0])
            await hoarders[-1].send(hoarded)
            for _ in range(4):
                await good.send(b"echo " + b"y" * 800)
                await trio.sleep(0.01)
                await good.send(b"y" * 100 + b"\n")
                assert await good.receive_line() == b"y" * 900, number
            assert world.statistic("incomplete_address_bytes") <= 7_000
        assert world.statistic("incomplete_closed") == 161 - world.statistic("connections") > 80
    assert "server.incomplete_address_bytes_max 7000" in caplog.text


async def test_slow_peers_of_one_address_leave_room_for_other_addresses(autojump_clock: MockClock) -> None:
    async with toy_server(INCOMPLETE) as world:
        other = world.dial(host=bytes((10, 0, 0, 2)))[0]
        await other.send(b"echo " + b"y" * 900)
        for _ in range(500):
            await world.dial(host=bytes((10, 0, 0, 1)))[0].send(b"x" * 500)
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("incomplete_address_bytes") <= 7_000
        await other.send(b"\n")
        assert await other.receive_line() == b"y" * 900


async def test_over_the_limit_of_all_the_slowest_go_whatever_their_address(autojump_clock: MockClock) -> None:
    """Thousands of addresses that hoard a little, and a fleet behind one that sends much and fast."""
    async with toy_server(INCOMPLETE) as world:
        fleet = [world.dial(host=bytes((10, 0, 0, 1)))[0] for _ in range(5)]
        for number in range(250):
            await world.dial(host=bytes((10, 0, 1, number)))[0].send(b"x" * 70)
            await trio.sleep(0.1)
        for caller in fleet:
            await caller.send(b"echo " + b"y" * 900)
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("incomplete_bytes") <= 10_000
        for caller in fleet:
            await caller.send(b"\n")
            assert await caller.receive_line() == b"y" * 900


async def test_a_connection_that_ended_is_not_counted_as_incomplete(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial() for _ in range(3)]
        for caller, _ in callers:
            await caller.send(b"echo " + b"y" * 95)
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("incomplete_bytes") == world.statistic("incomplete_address_bytes") == 300
        callers[0][0].close()
        callers[1][1].cut()
        await callers[2][0].send(b"\n")
        assert await callers[2][0].receive_line() == b"y" * 95
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("incomplete_bytes") == world.statistic("incomplete_address_bytes") == 0


async def test_requests_that_wait_for_room_are_counted(autojump_clock: MockClock) -> None:
    async with toy_server(SMALL) as world:
        greedy, _ = world.dial(Conditions(capacity_bytes=65536))
        await greedy.send(b"fill 100000\n" + b"echo z\n" * 5000)
        await trio.sleep(1)
        assert world.statistic("incomplete_bytes") == 35_000


async def test_many_bad_peers_make_few_log_lines(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with toy_server() as world:
        for second in (1, 2):
            for _ in range(100):
                caller, _ = world.dial()
                await caller.send(b"bad words\n")
                assert await caller.receive_all() == b"error words\n"
            assert len(caplog.records) <= 20 * second + second - 1
            await trio.sleep(1)
        assert (world.statistic("protocol_errors"), world.statistic("warnings_left_out")) == (200, 160)
    assert [text for text in caplog.messages if "closed" not in text] == [
        "80 more warnings about connections were suppressed"
    ]
