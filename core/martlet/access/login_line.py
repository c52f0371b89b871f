"""The line in which logins wait for a worker thread that checks a password.

A good password hash takes tens of milliseconds by design, so a broker checks some dozens a second, while thousands of
clients come back after a restart, and guessers send as fast as they can. The line is fair: addresses take turns, and at
one address its users do. Whoever guesses from a thousand connections waits behind their own guesses, and delays a
client at another address by one check. A login that would wait longer than clients do is refused at once (BUSY).

After some failures of a user at an address, the next check is refused until a pause is over, which doubles each time.
The user's logins from other addresses are not affected, so nobody can lock out somebody else.
"""

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, final

import trio

from martlet.contracts import LoginOrigin
from martlet.errors import Reason, Refused

__all__ = ["LoginLine", "network_of"]

# A password hash keeps one core busy, and the event loop needs another; two, so that one slow check is not all.
THREADS: Final = 2
# The longest wait; RocketMQ, MQTT and STOMP clients give up after 3 to 30 s, and the ports after 10 s.
WAIT_S: Final = 8.0
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
        # By address, then by user; the first of each is the next one.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Check]]] = OrderedDict()
        self._count = 0
        self._check_s = CHECK_S
        self._failures: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self.refused = 0

    async def run(self, origin: LoginOrigin, user: str, work: Callable[[], T]) -> T:
        """Return the result of *work*, which runs in a worker thread when it is the turn of *origin* and *user*.

        Raises:
          Refused: too many failed before or too many wait (Reason.BUSY), or what *work* raises.
        """
        network = network_of(origin.address)
        self._check_pause(network, user)
        await self._wait_for_thread(network, user)
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
        users: Mapping[str, deque[_Check]] = self._waiting.get(network, {})
        turns = (len(users.get(user, ())) + 1) * max(len(users), 1) * max(len(self._waiting), 1)
        if min(turns, self._count + 1) * self._check_s / THREADS > WAIT_S:
            self.refused += 1
            raise Refused(Reason.BUSY, f"{self._count} logins wait for the check of a password; try again later")
        check = _Check()
        self._waiting.setdefault(network, OrderedDict()).setdefault(user, deque()).append(check)
        self._count += 1
        try:
            await check.ready.wait()
        except trio.Cancelled:
            if check.has_begun:
                self._free += 1
                self._start_next()
            else:
                self._leave_line(network, user, check)
            raise

    def _leave_line(self, network: str, user: str, check: _Check) -> None:
        users = self._waiting[network]
        users[user].remove(check)
        self._count -= 1
        if not users[user]:
            del users[user]
        if not users:
            del self._waiting[network]

    def _start_next(self) -> None:
        """Give a free thread to the next user of the next address."""
        if not self._waiting or not self._free:
            return
        network, users = self._waiting.popitem(last=False)
        user, checks = users.popitem(last=False)
        check = checks.popleft()
        self._count -= 1
        if checks:
            users[user] = checks
        if users:
            self._waiting[network] = users
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
