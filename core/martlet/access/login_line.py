"""The line in which logins wait for a worker thread that checks a password.

A good password hash takes tens of milliseconds by design, so a broker checks some dozens a second, while thousands of
clients come back after a restart, and guessers send as fast as they can. The line is fair: addresses take turns, and at
one address its users do. Whoever guesses from a thousand connections waits behind their own guesses, and delays a
client at another address by one check. A login that has waited for as long as clients do is refused (BUSY), and goes to
its place when it comes again: nobody waits for ever because others come in the right moment. It is not refused before,
however long the line is: a client that is refused at once comes again at once, and thousands of them cost more than the
checks (10,000 MQTT clients, which come again after 1 s, did it 116,000 times).

After some failures of a user at an address, the next check is refused until a pause is over, which doubles each time.
The user's logins from other addresses are not affected, so nobody can lock out somebody else.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, final

import trio

from martlet.contracts import LoginOrigin
from martlet.errors import Reason, Refused
from martlet.runtime.alarms import Alarms

__all__ = ["LoginLine", "network_of"]

# A password hash keeps one core busy, and the event loop needs another; two, so that one slow check is not all.
THREADS: Final = 2
# The longest wait; RocketMQ, MQTT and STOMP clients give up after 3 to 30 s, and the ports after 10 s.
WAIT_S: Final = 8.0
# A refused login that comes again within this time goes to its place in the line; the oldest are forgotten if there are
# too many.
AGAIN_S: Final = 60.0
MISSED_MAX: Final = 20_000
# The first guess of what a check takes; then the mean of the last ones, of which each new one counts a sixteenth.
CHECK_S: Final = 0.05
WEIGHT: Final = 1 / 16
# Failures of one user at one address without a pause; then pauses of 1, 2, 4 ... s.
FAILURES_FREE: Final = 5
PAUSE_S_MAX: Final = 30.0
# Failures are forgotten after this time without another one, the oldest ones when there are too many.
FORGET_S: Final = 900.0
FAILURES_MAX: Final = 10_000
NETWORK_V6_GROUPS: Final = 4  # an IPv6 client usually has a whole /64 network

T = TypeVar("T")


def network_of(address: str) -> str:
    """Return the part of an IP address that identifies a client: an IPv4 address or an IPv6 /64 network."""
    if ":" not in address or "." in address:
        return address
    head, _, tail = address.partition("::")
    groups = head.split(":") if head else []
    if "::" in address:
        tail_groups = tail.split(":") if tail else []
        groups += ["0"] * (8 - len(groups) - len(tail_groups)) + tail_groups
    return ":".join(groups[:NETWORK_V6_GROUPS])


@final
class _Check:
    """A login that waits for a thread, or has one."""

    __slots__ = ("has_begun", "ready")

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.has_begun = False


@final
class _Address:
    """The logins of one address that wait, by user; ``turns`` has the users in the order of their turns."""

    __slots__ = ("turns", "users")

    def __init__(self) -> None:
        self.users: dict[str, deque[_Check]] = {}
        self.turns: Alarms[str] = Alarms()

    def add(self, user: str, check: _Check, came_at: float) -> None:
        """Add a login of *user*, who came at *came_at*."""
        self.users.setdefault(user, deque()).append(check)
        self.turns.ring_by(user, came_at)

    def remove(self, user: str, check: _Check) -> None:
        """Remove a login of *user*."""
        self.users[user].remove(check)
        if not self.users[user]:
            del self.users[user]
            self.turns.cancel(user)

    def take(self, now: float) -> _Check:
        """Remove the next login and return it. The other ones of its user wait for the next turn of the user."""
        while (turn := next(self.turns.take(math.inf), None)) is None:
            pass  # it drops those who have gone, a thousand at a time
        _, user = turn
        check = self.users[user].popleft()
        if self.users[user]:
            self.turns.ring_by(user, now)
        else:
            del self.users[user]
        return check


@final
class _Failures:
    """Failed logins of one user at one address: how many, when the last one was, and until when none is checked."""

    __slots__ = ("count", "last", "until")

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0
        self.until = 0.0


@final
class LoginLine:
    """Runs checks in worker threads, in turns of addresses and of users at an address.

    *in_thread* runs a function in a worker thread; ``refused`` counts logins that were not checked.
    """

    def __init__(self, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = trio.to_thread.run_sync) -> None:
        self._in_thread = in_thread
        self._free = THREADS
        self._waiting: OrderedDict[str, _Address] = OrderedDict()  # by address; the first is the next one
        # When users came first who were refused, and when they were, by address and user.
        self._missed: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self._count = 0
        self._check_s = CHECK_S
        self._failures: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self.refused = 0

    async def run(self, origin: LoginOrigin, user: str, work: Callable[[], T]) -> T:
        """Return the result of *work*, which runs in a worker thread when it is the turn of *origin* and *user*.

        Raises:
          Refused: too many failed before, or it has waited too long (Reason.BUSY), or what *work* raises.
        """
        network = network_of(origin.address)
        self._check_pause(network, user)
        await self._wait_for_thread(network, user)
        self._missed.pop((network, user), None)
        try:
            self._check_pause(network, user)  # others may have failed meanwhile
            result = await self._run_timed(work)
        except Refused as refused:
            if refused.reason is Reason.CREDENTIALS:
                self._note_failure(network, user)
            raise
        finally:
            self._free += 1
            self._start_next()
        self._failures.pop((network, user), None)
        return result

    async def _run_timed(self, work: Callable[[], T]) -> T:
        began = trio.current_time()
        try:
            result: T = await self._in_thread(work)
            return result
        finally:
            self._check_s += (trio.current_time() - began - self._check_s) * WEIGHT

    async def _wait_for_thread(self, network: str, user: str) -> None:
        if self._free and not self._count:
            self._free -= 1
            return
        now, check = trio.current_time(), _Check()
        came_at, refused_at = self._missed.get((network, user), (now, now))
        if now - refused_at > AGAIN_S:
            came_at = now
        self._waiting.setdefault(network, _Address()).add(user, check, came_at)
        self._count += 1
        try:
            with trio.move_on_at(now + WAIT_S):
                await check.ready.wait()
        except trio.Cancelled:
            if check.has_begun:
                self._free += 1
                self._start_next()
            else:
                self._leave_line(network, user, check)
            raise
        if not check.has_begun:
            self._leave_line(network, user, check)
            self._note_missed(network, user, came_at)
            raise Refused(Reason.BUSY, f"{self._count} logins wait for the check of a password; try again later")

    def _leave_line(self, network: str, user: str, check: _Check) -> None:
        address = self._waiting[network]
        address.remove(user, check)
        self._count -= 1
        if not address.users:
            del self._waiting[network]

    def _note_missed(self, network: str, user: str, came_at: float) -> None:
        """Count a refusal of *user*, and let it come to its place if it comes again."""
        self.refused += 1
        if len(self._missed) >= MISSED_MAX:
            self._missed.popitem(last=False)
        self._missed[network, user] = came_at, trio.current_time()
        self._missed.move_to_end((network, user))

    def _start_next(self) -> None:
        """Give a free thread to the next user of the next address."""
        if not self._waiting or not self._free:
            return
        network, address = self._waiting.popitem(last=False)
        check = address.take(trio.current_time())
        self._count -= 1
        if address.users:
            self._waiting[network] = address
        self._free -= 1
        check.has_begun = True
        check.ready.set()

    # failures

    def _check_pause(self, network: str, user: str) -> None:
        failures = self._failures.get((network, user))
        if failures is None:
            return
        now = trio.current_time()
        if now - failures.last > FORGET_S:
            del self._failures[network, user]
        elif now < failures.until:
            self.refused += 1
            text = f"user {user!r} failed to log in {failures.count} times from this address"
            raise Refused(Reason.BUSY, f"{text}; try again in {failures.until - now:.0f} s")

    def _note_failure(self, network: str, user: str) -> None:
        failures = self._failures.get((network, user))
        if failures is None:
            if len(self._failures) >= FAILURES_MAX:
                self._failures.popitem(last=False)
            failures = self._failures[network, user] = _Failures()
        failures.count += 1
        failures.last = trio.current_time()
        if failures.count > FAILURES_FREE:
            failures.until = failures.last + min(2.0 ** min(failures.count - FAILURES_FREE - 1, 5), PAUSE_S_MAX)
        self._failures.move_to_end((network, user))

    def statistics(self) -> dict[str, object]:
        """Return the logins that wait or are checked, the mean time of a check, and the refused ones."""
        return {
            "waiting": self._count,
            "checked": THREADS - self._free,
            "check_ms": round(self._check_s * 1000, 1),
            "pausing": len(self._failures),
            "refused": self.refused,
        }
