"""A connection ends when the login of its client expires, or when somebody ends it; the client gets the reason."""

from collections.abc import Callable

import pytest
import trio
from tests.broker.toys import Toy, World, toy_server
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.contracts import ANONYMOUS, Identity
from martlet.errors import Reason, Refused
from martlet.net.logouts import LAST_ANSWERS_S, LOOK_S
from martlet.testing.links import Conditions

ANN, BOB = Identity("ann"), Identity("bob")
START_MS = 1_700_000_000_000
DISABLED = Refused(Reason.ENDED, "ann was disabled")


class Wall:
    """A wall clock that goes as trio's does; tests set it *ahead*."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_ms(self) -> int:
        return START_MS + round((trio.current_time() + self.ahead_s) * 1000)

    def expiring(self, after_s: float, name: str = "ann") -> Identity:
        return Identity(name, expires_ms=self.now_ms() + round(after_s * 1000))


@pytest.fixture
def wall() -> Wall:
    return Wall()


def world_of(wall: Wall) -> World:
    return World(now_ms=wall.now_ms)


# expiry


async def test_a_login_ends_the_connection_when_it_expires(autojump_clock: MockClock, wall: Wall) -> None:
    async with toy_server(world=world_of(wall)) as world:
        caller, _ = world.dial()
        other, _ = world.dial()
        await caller.send(b"echo a\n")
        assert await caller.receive_line() == b"a"
        world.toys[0].peer.identity = wall.expiring(10)
        world.toys[1].peer.identity = wall.expiring(1000, "bob")
        begun = trio.current_time()
        assert await caller.receive_line() == b"error the login of 'ann' has expired; log in again"
        assert trio.current_time() - begun == pytest.approx(10)
        assert await caller.receive() == b""
        await other.send(b"echo b\n")
        assert await other.receive_line() == b"b"
        assert world.reasons == ["the login of 'ann' has expired; log in again"]
        assert [world.statistic("logins_expired"), world.statistic("logins_ended")] == [1, 0]


@pytest.mark.parametrize(
    ("first_s", "then", "ends_s"),
    [
        (10, lambda wall: wall.expiring(30), 30),
        (30, lambda wall: wall.expiring(10), 10),
        (10, lambda wall: ANN, None),
        (None, lambda wall: wall.expiring(10), 10),
    ],
)
async def test_a_new_proof_has_the_expiry_that_counts(
    autojump_clock: MockClock, wall: Wall, first_s: float | None, then: Callable[[Wall], Identity], ends_s: float | None
) -> None:
    async with toy_server(world=world_of(wall)) as world:
        caller, _ = world.dial()
        await wait_all_tasks_blocked()
        peer = world.toys[0].peer
        peer.identity = wall.expiring(first_s) if first_s is not None else ANN
        await wait_all_tasks_blocked()
        peer.identity = then(wall)
        await trio.sleep(ends_s - 0.1 if ends_s is not None else 500)
        await caller.send(b"echo a\n")
        assert await caller.receive_line() == b"a"
        if ends_s is not None:
            await trio.sleep(0.2)
            assert await caller.receive_line() == b"error the login of 'ann' has expired; log in again"


async def test_a_login_that_has_expired_before_it_begins_ends_at_once(autojump_clock: MockClock, wall: Wall) -> None:
    async with toy_server(world=world_of(wall)) as world:
        caller, _ = world.dial()
        await wait_all_tasks_blocked()
        world.toys[0].peer.identity = wall.expiring(-5)
        assert await caller.receive_line() == b"error the login of 'ann' has expired; log in again"


async def test_the_wall_clock_decides_even_if_it_is_set_meanwhile(autojump_clock: MockClock, wall: Wall) -> None:
    async with toy_server(world=world_of(wall)) as world:
        callers = [world.dial()[0] for _ in range(2)]
        await wait_all_tasks_blocked()
        world.toys[0].peer.identity = wall.expiring(7200)
        wall.ahead_s = 7300
        await trio.sleep(LOOK_S + 1)
        assert world.statistic("connections") == 1
        wall.ahead_s = 0
        world.toys[1].peer.identity = wall.expiring(10, "bob")
        wall.ahead_s = -100
        await trio.sleep(50)
        assert world.statistic("connections") == 1
        await trio.sleep(61)
        assert await callers[1].receive_line() == b"error the login of 'bob' has expired; log in again"


async def test_an_expiry_does_not_wait_for_a_request_and_cancels_it(autojump_clock: MockClock, wall: Wall) -> None:
    ended: list[str] = []

    async def forever(toy: Toy, text: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(text)

    world = world_of(wall)
    world.work = forever
    async with toy_server(world=world):
        caller, _ = world.dial()
        await caller.send(b"long a\nslowly b\n")
        await wait_all_tasks_blocked()
        world.toys[0].peer.identity = wall.expiring(10)
        await trio.sleep(11)
        assert await caller.receive_all() == b"error the login of 'ann' has expired; log in again\n"
        assert ended == ["a"]
        assert world.statistic("connections") == 0


# ends


def end(world: World, identity: Identity, refused: Refused = DISABLED) -> None:
    for found, log_out in world.server.logins():
        if found == identity:
            log_out(refused)


async def test_the_logins_of_an_identity_end_and_no_others(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(3)]
        await wait_all_tasks_blocked()
        for toy, identity in zip(world.toys, (ANN, BOB, ANN), strict=True):
            toy.peer.identity = identity
        assert [identity for identity, _ in world.server.logins()] == [ANN, BOB, ANN]
        end(world, ANN)
        for caller in (callers[0], callers[2]):
            assert await caller.receive_all() == b"error ann was disabled\n"
        await callers[1].send(b"echo b\n")
        assert await callers[1].receive_line() == b"b"
        assert world.reasons == ["ann was disabled"] * 2
        assert world.statistic("logins_ended") == 2


async def test_answers_leave_before_the_farewell_and_no_request_is_handled_after_it(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial()
        await caller.send(b"hold 5 stored\n")
        await wait_all_tasks_blocked()
        end(world, ANONYMOUS)
        await caller.send(b"echo late\n")
        await trio.sleep(LAST_ANSWERS_S / 2)
        world.store.flush_to(5)
        assert await caller.receive_all() == b"stored\nerror ann was disabled\n"
        assert world.handled == ["hold 5 stored"]


async def test_a_client_that_reads_nothing_is_disconnected_soon(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        caller, _ = world.dial(Conditions(capacity_bytes=100))
        await caller.send(b"fill 5000\n")
        await wait_all_tasks_blocked()
        end(world, ANONYMOUS)
        await trio.sleep(LAST_ANSWERS_S + 0.1)
        assert world.statistic("connections") == 0
        assert world.server.pending.unsent_bytes == 0


async def test_an_end_is_noted_once(autojump_clock: MockClock) -> None:
    async with toy_server() as world:
        world.dial()
        await wait_all_tasks_blocked()
        logins = list(world.server.logins())
        for _ in range(2):
            for _, log_out in logins:
                log_out(DISABLED)
        await trio.sleep(1)
        assert world.statistic("logins_ended") == 1
        assert list(world.server.logins()) == []


async def test_a_bug_in_a_farewell_closes_only_its_connection(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with toy_server() as world:
        callers = [world.dial()[0] for _ in range(2)]
        await wait_all_tasks_blocked()
        world.toys[0].connection.farewell = lambda error: 1 // 0  # type: ignore[assignment,return-value]
        end(world, ANONYMOUS)
        assert await callers[0].receive_all() == b""
        assert await callers[1].receive_all() == b"error ann was disabled\n"
        assert "closed because of a bug" in caplog.text
