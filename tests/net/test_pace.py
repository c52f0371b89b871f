"""Slowed peers: they are read or served later, and nothing else changes for them or for others."""

import math
from collections.abc import Callable

import pytest
import trio
from tests.broker.toys import Lines, Toy, World, toy_server
from tests.wire_clients.streams import dialed
from trio.testing import MockClock

from martlet.net.pace import RECEIVE_BYTES


def peer_of(world: World, number: int = 0) -> Toy:
    return world.toys[number]


async def test_a_paused_peer_is_read_again_at_the_time(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        began = trio.current_time()
        await caller.send(b"pause 7\necho in the same read\n")
        await trio.sleep(1)
        await caller.send(b"echo later\n")
        assert await caller.receive_line() == b"in the same read"
        assert trio.current_time() - began == pytest.approx(7)
        assert await caller.receive_line() == b"later"
        assert world.handled == ["pause 7", "echo in the same read", "echo later"]


async def test_each_event_can_pause_again(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        began = trio.current_time()
        await caller.send(b"pause 3\n" * 5 + b"echo done\n")
        assert await caller.receive_line() == b"done"
        assert trio.current_time() - began == pytest.approx(15)


async def test_a_pause_that_grows_while_it_lasts_counts_whole(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        began = trio.current_time()
        await caller.send(b"pause 3\necho done\n")
        await trio.sleep(1)
        peer_of(world).do_pause("9")
        assert await caller.receive_line() == b"done"
        assert trio.current_time() - began == pytest.approx(10)


async def test_a_long_request_before_the_pause_is_finished_first(autojump_clock: MockClock) -> None:
    async def pause_later(toy: Toy, text: str) -> None:
        await trio.sleep(2)
        toy.do_pause(text)

    async with toy_server() as world:
        world.work = pause_later
        caller, _ = world.dial()
        began = trio.current_time()
        await caller.send(b"long 3\necho done\n")
        assert await caller.receive_line() == b"done"
        assert trio.current_time() - began == pytest.approx(5)


async def test_others_are_read_meanwhile(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        slowed, _ = world.dial()
        other, _ = world.dial()
        await slowed.send(b"pause 60\necho late\n")
        began = trio.current_time()
        for number in range(10):
            await other.send(b"echo %d\n" % number)
            assert await other.receive_line() == b"%d" % number
        assert trio.current_time() - began < 1
        assert slowed.end.receive(100) is None


async def test_a_paused_peer_still_gets_deliveries_and_answers(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.push_bytes = 5
        caller, _ = world.dial()
        await caller.send(b"pause 60\n")
        await trio.sleep(1)
        peer_of(world).do_push("2")
        peer_of(world).do_echo("by the way")
        assert await caller.receive_exactly(21) in (bytes(10) + b"by the way\n", b"by the way\n" + bytes(10))
        assert trio.current_time() < 60


@pytest.mark.parametrize("left_s", [3, 0, -50])
async def test_a_pause_can_be_shortened_while_it_lasts(left_s: float, autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"pause 100\necho done\n")
        await trio.sleep(10)
        pace, now = peer_of(world).peer.pace(), trio.current_time()
        pace.shorten(now + left_s, 0.0)
        pace.shorten(now + 60, 0.0)
        assert await caller.receive_line() == b"done"
        assert trio.current_time() - now == pytest.approx(max(left_s, 0))


async def test_a_pause_can_be_over_before_the_reader_sees_it(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        for number in range(3):
            await caller.send(b"blink\necho %d\n" % number)
            assert await caller.receive_line() == b"%d" % number
        assert trio.current_time() < 1


@pytest.mark.parametrize("left_s", [3, 0, -50])
async def test_deliveries_can_begin_earlier_again(left_s: float, autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.push_bytes = 5
        caller, _ = world.dial()
        await caller.send(b"rest 100\npush 1\n")
        await trio.sleep(10)
        pace, now = peer_of(world).peer.pace(), trio.current_time()
        pace.shorten(0.0, now + left_s)
        assert await caller.receive_exactly(5) == bytes(5)
        assert trio.current_time() - now == pytest.approx(max(left_s, 0))
        pace.shorten(0.0, 0.0)
        assert len(world.server._paces) == 0


async def test_a_slowed_delivery_waits_and_requests_do_not(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.push_bytes = 5
        caller, _ = world.dial()
        began = trio.current_time()
        await caller.send(b"rest 7\npush 1\necho now\n")
        assert await caller.receive_line() == b"now"
        assert trio.current_time() - began < 1
        assert await caller.receive_exactly(5) == bytes(5)
        assert trio.current_time() - began == pytest.approx(7)


async def test_a_delivery_slowed_twice_waits_for_the_later_time(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.push_bytes = 5
        caller, _ = world.dial()
        await caller.send(b"rest 7\nrest 9\nrest 3\npush 1\n")
        assert await caller.receive_exactly(5) == bytes(5)
        assert trio.current_time() == pytest.approx(9)
        assert world.collects == 1


async def test_others_get_their_deliveries_meanwhile(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.push_bytes = 5
        slowed, _ = world.dial()
        other, _ = world.dial()
        await slowed.send(b"rest 60\npush 1\n")
        await other.send(b"push 3\n")
        assert await other.receive_exactly(15) == bytes(15)
        assert trio.current_time() < 1
        assert slowed.end.receive(100) is None


async def test_a_deadline_does_not_come_closer_during_a_pause(autojump_clock: MockClock) -> None:
    """It is due as long after the pause as it was when the pause began."""
    async with toy_server() as world:
        world.connect = lambda: Lines(silence_s=10)
        caller, _ = world.dial()
        await trio.sleep(5)
        await caller.send(b"pause 25\n" * 4 + b"echo done\n")
        assert await caller.receive_line() == b"done"
        assert trio.current_time() == pytest.approx(105)
        assert await caller.receive_all() == b"error silent for too long\n"
        assert trio.current_time() == pytest.approx(115)


async def test_a_deadline_counts_as_usual_once_the_client_is_heard_again(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.connect = lambda: Lines(silence_s=10)
        caller, _ = world.dial()
        await caller.send(b"pause 25\n")
        await trio.sleep(28)
        await caller.send(b"echo here\n")
        assert await caller.receive_line() == b"here"
        assert await caller.receive_all() == b"error silent for too long\n"
        assert trio.current_time() == pytest.approx(38)


async def test_a_peer_that_closes_does_not_wait_for_the_end_of_its_pause(autojump_clock: MockClock) -> None:
    ended: list[float] = []
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"pause 1000\nrest 1000\npush 1\necho never\n")
        await trio.sleep(1)
        toy = peer_of(world)
        toy.peer.pace().on_end(lambda: ended.append(trio.current_time()))
        toy.do_bye("bye")
        assert await caller.receive_all() == b"bye\n"
        assert ended == [pytest.approx(1)]
        await trio.sleep(1)
        assert world.reasons == ["it said bye"]
        assert world.collects == 0
        assert len(world.server._paces) == 0


async def test_a_peer_that_has_closed_is_not_slowed(autojump_clock: MockClock) -> None:
    ended: list[str] = []
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"bye now\n")
        assert await caller.receive_all() == b"now\n"
        peer = peer_of(world).peer
        for pace in (peer.pace(), peer.pace()):
            pace.slow_delivery(math.inf)
            pace.slow_reading(math.inf)
            pace.on_end(lambda: ended.append("told"))
        assert ended == ["told", "told"]
        assert len(world.server._paces) == 0


async def test_a_lost_peer_ends_its_pause(autojump_clock: MockClock) -> None:
    ended: list[str] = []
    async with toy_server() as world:
        caller, link = world.dial()
        await caller.send(b"pause 1000\necho never\n")
        await trio.sleep(1)
        peer_of(world).peer.pace().on_end(lambda: ended.append("told"))
        link.cut()
        peer_of(world).do_echo("nobody hears")
        await trio.sleep(1)
        assert ended == ["told"]
        assert world.statistic("connections") == 0


async def test_a_slowed_peer_can_be_read_in_smaller_pieces(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, link = world.dial()
        await caller.send(b"echo 1\n")
        assert await caller.receive_line() == b"1"
        pace = peer_of(world).peer.pace()
        assert pace.receive_bytes == RECEIVE_BYTES
        pace.receive_bytes = 10
        read_before = link.far.received_bytes
        await caller.send(b"pause 5\n" + b"echo 2\n" * 100)
        await trio.sleep(1)
        assert link.far.received_bytes - read_before == 10, "what is not read stays with the client"
        assert [await caller.receive_line() for _ in range(100)] == [b"2"] * 100


async def test_the_pump_stops_for_a_pause_and_goes_on_after_it() -> None:
    world = World()
    async with (
        toy_server(protocol=world.protocol(), world=world),
        dialed(world.addresses[0]) as slowed,
        dialed(world.addresses[0]) as other,
    ):
        await slowed.send(b"pause 0.05\necho late\necho last\n")
        await until(lambda: len(world.handled) > 0)
        await other.send(b"echo early\n")
        assert await other.receive_exactly(6) == b"early\n"
        assert await slowed.receive_exactly(10) == b"late\nlast\n"
        await slowed.send(b"echo again\n")
        assert await slowed.receive_exactly(6) == b"again\n"
        own = [each for each in world.handled if each != "echo early"]
        assert own == ["pause 0.05", "echo late", "echo last", "echo again"]


async def test_a_socket_that_closes_in_a_pause_is_freed() -> None:
    world = World()
    async with toy_server(protocol=world.protocol(), world=world), dialed(world.addresses[0]) as slowed:
        await slowed.send(b"pause 600\necho never\n")
        await until(lambda: len(world.handled) > 0)
        peer_of(world).peer.close("enough")
        await until(lambda: world.statistic("connections") == 0)
        assert world.reasons == ["enough"]


async def until(is_done: Callable[[], bool]) -> None:
    while not is_done():
        await trio.lowlevel.checkpoint()
