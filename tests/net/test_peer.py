"""The states of a peer: which may follow which, and what each one still allows."""

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from tests.broker.toys import Lines, World, toy_server
from trio.testing import MockClock

from martlet.contracts import Buffer
from martlet.errors import Reason, Refused, StoreFailed
from martlet.net.pace import Paces
from martlet.net.peer import TRANSITIONS, PeerState, ServerPeer, Shared
from martlet.net.pending import DELIVERY_TRANSITIONS, DeliveryState, PendingWork, set_delivery
from martlet.net.rounds import Rounds
from martlet.settings import ServerConfig
from martlet.testing.links import Conditions, MemoryLink

END: dict[PeerState, Callable[[ServerPeer], object]] = {
    PeerState.READ_ENDED: lambda peer: peer.end_reading(),
    PeerState.CLOSING: lambda peer: peer.close("bye"),
    PeerState.LOST: lambda peer: peer.lose(OSError("reset")),
    PeerState.CLOSED: lambda peer: peer.end(),
}


def bring_to(peer: ServerPeer, state: PeerState) -> None:
    """Bring an open *peer* to *state* by what the server calls."""
    if state is PeerState.CLOSED:
        peer.end_reading()
    if state is not PeerState.OPEN:
        END[state](peer)
    assert peer.state is state


def test_states_only_grow_and_every_peer_ends() -> None:
    for state, following in TRANSITIONS.items():
        assert all(after > state for after in following)
        assert following or state is PeerState.CLOSED


@asynccontextmanager
async def open_peer(pending: PendingWork[ServerPeer] | None = None) -> AsyncGenerator[ServerPeer]:
    """A peer that no server reads from."""
    async with trio.open_nursery() as nursery:
        pending = pending or PendingWork()
        shared = Shared(pending, ServerConfig(), nursery, Paces(pending))
        yield ServerPeer(World().protocol(), MemoryLink().far, "peer", bytes(8), shared)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PeerState, END)), ids=lambda each: each.name)
async def test_every_event_in_every_state_goes_where_the_table_says(state: PeerState, event: PeerState) -> None:
    """A state that is later than the event's stays; a peer ends only once it is not read from, and only once."""
    async with open_peer() as peer:
        bring_to(peer, state)
        if event is PeerState.CLOSED and event not in TRANSITIONS[state]:
            with pytest.raises(AssertionError, match="cannot go from"):
                END[event](peer)
        else:
            END[event](peer)
            assert peer.state is max(state, event)
            assert event <= state or event in TRANSITIONS[state]


@pytest.mark.parametrize("state", PeerState, ids=lambda state: state.name)
async def test_a_wake_is_ignored_only_by_a_closed_peer(state: PeerState) -> None:
    async with open_peer() as peer:
        bring_to(peer, state)
        peer.wake()
        assert (peer.delivery is DeliveryState.QUEUED) == (state is not PeerState.CLOSED)


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_peer_that_comes_last_still_does_after_it_waited_for_room(hurried: bool) -> None:
    pending = PendingWork[ServerPeer]()
    async with open_peer(pending) as peer:
        peer.wake_last()
        peer.wake_last()
        assert (list(pending.woken), list(pending.woken_last)) == ([], [peer])
        pending.woken_last.clear()
        pending.defer(peer)
        peer.wake_last()
        assert not pending.woken_last
        if hurried:
            peer.wake()
        pending.resume(peer)
        assert (list(pending.woken), list(pending.woken_last)) == (([peer], []) if hurried else ([], [peer]))


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(DeliveryState, repeat=2)), ids=lambda each: each.name
)
async def test_deliveries_follow_their_table(before: DeliveryState, after: DeliveryState) -> None:
    async with open_peer() as peer:
        peer.delivery = before
        if after in DELIVERY_TRANSITIONS[before]:
            set_delivery(peer, after)
            assert peer.delivery is after
        else:
            with pytest.raises(AssertionError):
                set_delivery(peer, after)


async def test_data_that_others_send_to_a_closed_peer_is_dropped(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, link = world.dial()
        await caller.send(b"echo here\n")
        assert await caller.receive_line() == b"here"
        toy = world.toys[0]
        link.cut()
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("connections") == 0
        toy.peer.send(bytes(1000))
        toy.peer.wake()
        await trio.testing.wait_all_tasks_blocked()
        assert world.statistic("unsent_bytes") == 0


async def test_data_sent_outside_a_read_leaves_without_a_wake(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await trio.testing.wait_all_tasks_blocked()
        world.toys[0].do_echo("news")
        assert await caller.receive_line() == b"news"


async def test_a_connection_gets_the_time_at_which_it_began(autojump_clock: MockClock) -> None:
    began: list[float] = []

    def make(now: float) -> Lines:
        began.append(now)
        return Lines()

    async with toy_server() as world:
        await trio.sleep(7)
        world.dial(protocol=world.protocol(connect=make))
        assert began == [trio.current_time()]


async def test_answers_of_a_failed_commit_are_dropped_and_their_peer_is_closed(autojump_clock: MockClock) -> None:
    world = World()
    async with toy_server(world=world):
        promised, other = world.dial()[0], world.dial()[0]
        world.store.fail_commit(StoreFailed("the disk failed"))
        await promised.send(b"hold 5 stored\n")
        assert await promised.receive_all() == b""
        await other.send(b"echo unharmed\n")
        assert await other.receive_line() == b"unharmed"
        world.store.flush_to(5)
        await trio.testing.wait_all_tasks_blocked()
        assert world.reasons == ["the disk failed"]


async def test_a_dropped_answer_never_leaves_even_if_others_fill_its_place(autojump_clock: MockClock) -> None:
    world = World()
    async with toy_server(world=world):
        caller, _ = world.dial()
        world.store.fail_commit(StoreFailed("the disk failed"))
        await caller.send(b"hold 5 stored\n")
        await trio.testing.wait_all_tasks_blocked()
        world.store.flush_to(5)
        assert await caller.receive_all() == b""


async def test_answers_of_a_commit_on_a_full_disk_become_refusals(autojump_clock: MockClock) -> None:
    world = World()
    async with toy_server(world=world):
        caller, _ = world.dial()
        world.store.written = world.store.readable = 4
        world.store.fail_commit(Refused(Reason.UNAVAILABLE, "the disk is full"))
        await caller.send(b"echo one\nhold 3 two\nhold 5 three\necho four\nhold 6 five\necho six\n")
        lines = [await caller.receive_line() for _ in range(6)]
        assert lines == [b"one", b"two", b"refused: ", b"four", b"refused: ", b"six"]
        await caller.send(b"echo seven\n")
        assert await caller.receive_line() == b"seven"


async def test_answers_after_one_that_waits_for_more_of_the_log_become_refusals_as_well(
    autojump_clock: MockClock,
) -> None:
    world = World()
    async with toy_server(world=world):
        caller, _ = world.dial()
        world.store.written = world.store.readable = 4
        world.store.fail_commit(Refused(Reason.UNAVAILABLE, "the disk is full"))
        await caller.send(b"hold 9 one\nhold 5 two\necho three\nhold 9 four\nhold 3 five\n")
        lines = [await caller.receive_line() for _ in range(5)]
        assert lines == [b"refused: ", b"refused: ", b"three", b"refused: ", b"five"]


async def test_a_peer_whose_handler_cannot_refuse_is_closed_when_the_disk_is_full(autojump_clock: MockClock) -> None:
    world = World()
    async with toy_server(world=world):
        caller, _ = world.dial()
        world.store.fail_commit(Refused(Reason.UNAVAILABLE, "the disk is full"))
        await caller.send(b"hold 5 stored\nhold 6 lost\n")
        assert await caller.receive_all() == b"error the disk is full\n"
        assert world.reasons == ["the disk is full"]


async def test_output_that_waits_is_not_copied_and_counts_until_all_of_a_piece_is_sent() -> None:
    """Connections that wait with the same object share its memory; views of a log page do not keep that in memory."""
    pending, link = PendingWork[ServerPeer](), MemoryLink(Conditions(capacity_bytes=1000))
    page, payload = memoryview(bytes(100_000)), b"x" * 100_000
    async with trio.open_nursery() as nursery:
        shared = Shared(pending, ServerConfig(), nursery, Paces(pending))
        peer = ServerPeer(World().protocol(), link.far, "peer", bytes(8), shared)
        peer.send(b"head", payload, page[:50_000], page[:49_999])
        Rounds(shared.config, None, pending).queue_output(peer)
        assert peer.output.unsent_bytes == pending.unsent_bytes == 199_999
        head, *copies = peer.output.ready
        assert head is payload
        assert [memory(each) for each in copies] == [100_000, 49_999]
        received = bytearray()
        while len(received) < 200_003:
            await trio.testing.wait_all_tasks_blocked()
            received += link.near.receive(1 << 20) or b""
        assert received == b"head" + payload + bytes(99_999)
        await trio.testing.wait_all_tasks_blocked()
        assert peer.idle
        assert peer.output.unsent_bytes == pending.unsent_bytes == 0
        nursery.cancel_scope.cancel()


def memory(piece: Buffer) -> int:
    """Return the size of what *piece* keeps in memory."""
    return len(memoryview(piece).obj)  # type: ignore[arg-type]
