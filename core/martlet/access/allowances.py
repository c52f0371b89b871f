"""Accounts of identities, and allowances of their connections: how much of its quotas each has used, and what is left.

An `Account` counts what its connections have open, in the pools of its user and of its groups (`pools.py`). An
`Allowance` counts what one connection sends and receives, and slows the pace of the connection if that is too much.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet.access.pools import Pool, Used
from martlet.contracts import Identity, Pace, Quota
from martlet.errors import Refused
from martlet.runtime.steps import Budget, Steps

__all__ = ["UNLIMITED", "Account", "Allowance", "PoolKey"]

# What is read at once: at least the first, until the size of messages is known the second, at most the third.
RECEIVE_LEAST: Final = 1024
RECEIVE_FIRST: Final = 4096
RECEIVE_MOST: Final = 1 << 18
MESSAGE_BYTES: Final = 256  # a guess, until the first message
RENEW_US: Final = 4.0  # for one connection

# The source, the group, and the user if it is the user's own.
PoolKey: TypeAlias = tuple[int, str, str]


class PoolKeeper(Protocol):
    """What has the pools of all accounts; implemented by `martlet.access.quotas.Quotas`."""

    generation: int

    def ask(self, identity: Identity) -> dict[PoolKey, Quota]: ...

    def pool(self, key: PoolKey) -> Pool: ...

    def leave(self, key: PoolKey, pool: Pool) -> None: ...

    def forget(self, identity: Identity) -> None: ...

    def shorten_pauses(self, pace: Pace) -> None: ...


@final
class Account:
    """One identity with connections: what these have open, and the pools in which that counts.

    ``generation`` is that of the rules when the plugins were asked last, ``renewed`` that of the last `recheck`.
    """

    __slots__ = (
        "_allowances",
        "_keeper",
        "_pools",
        "generation",
        "identity",
        "renewed",
        "shared_groups",
        "subscriptions",
    )

    def __init__(self, keeper: PoolKeeper, identity: Identity) -> None:
        self._keeper = keeper
        self.identity = identity
        self.generation = -1
        self.renewed = keeper.generation
        self._pools: dict[PoolKey, Pool] = {}
        self._allowances: dict[Allowance, None] = {}  # of its connections
        self.subscriptions = 0
        self.shared_groups: dict[Hashable, int] = {}  # with the number of this identity's members

    def pools(self) -> Collection[Pool]:
        """Return the pools, after asking the plugins again if something has changed."""
        if self.generation != self._keeper.generation:
            try:
                self.ask()
            except Refused:
                self.generation = self._keeper.generation  # those asked before stay; the error is in the log
        return self._pools.values()

    def recheck(self) -> Steps[None]:
        """Ask the plugins for the quotas again, and end pauses that have become too long (`revocation.Waiter`)."""
        self.renewed = self._keeper.generation
        self.pools()
        return self._renew_all()

    def _renew_all(self) -> Steps[None]:
        budget = Budget(RENEW_US)
        for allowance in list(self._allowances):
            pace = allowance.renew()
            if pace is not None:
                self._keeper.shorten_pauses(pace)
            if budget.is_over():
                yield

    def ask(self) -> None:
        """Ask the plugins for the quotas. Raises `Refused` if one fails."""
        generation, answers = self._keeper.generation, self._keeper.ask(self.identity)
        pools, before = {key: self._keeper.pool(key) for key in answers}, self._pools
        now = trio.current_time()
        for key, pool in pools.items():
            pool.set(answers[key], now)
            if key not in before:
                self._count_all(pool, 1)
        self._pools, self.generation = pools, generation
        for key, pool in before.items():
            if key not in pools:
                self._count_all(pool, -1)
                self._keeper.leave(key, pool)

    def _count_all(self, pool: Pool, sign: int) -> None:
        pool.accounts += sign
        pool.connections += sign * len(self._allowances)
        pool.subscriptions += sign * self.subscriptions
        for key, members in self.shared_groups.items():
            pool.count_group(key, sign * members)

    def add(self, allowance: "Allowance") -> None:
        """Count the connection of *allowance*."""
        self._allowances[allowance] = None
        for pool in self._pools.values():
            pool.connections += 1

    def remove(self, allowance: "Allowance") -> None:
        """Count the connection of *allowance* no more."""
        del self._allowances[allowance]
        for pool in self._pools.values():
            pool.connections -= 1

    def count_subscriptions(self, change: int) -> None:
        self.subscriptions += change
        for pool in self._pools.values():
            pool.subscriptions += change

    def count_group(self, key: Hashable, change: int) -> None:
        members = self.shared_groups.get(key, 0) + change
        if members:
            self.shared_groups[key] = members
        else:
            del self.shared_groups[key]
        for pool in self._pools.values():
            pool.count_group(key, change)

    def leave_group(self, key: Hashable) -> None:
        """Count a member of shared group *key* less."""
        self.count_group(key, -1)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """Close the account unless it has something open."""
        if not self._allowances and not self.shared_groups:
            self._keeper.forget(self.identity)
            pools, self._pools = self._pools, {}
            for key, pool in pools.items():
                self._count_all(pool, -1)
                self._keeper.leave(key, pool)


@final
class Allowance:
    """What one connection may send and receive by the quotas of its identity; made by `Quotas.admit`.

    ``sent_until`` is the end of its last pause of reading. ``turn_at`` is when it may receive again, in its turn; 0 if
    it need not wait. The methods of `UNLIMITED` do nothing.
    """

    __slots__ = (
        "_account",
        "_groups",
        "_pace",
        "_slowed_in",
        "_slowed_out",
        "_subscriptions",
        "sent_until",
        "turn_at",
    )

    def __init__(self, account: Account | None, pace: Pace | None) -> None:
        self._account = account
        self._pace = pace
        self._subscriptions = 0
        self._groups: dict[Hashable, Callable[[], None]] = {}  # those of `note_groups`, each with its end
        self.sent_until = 0.0
        self.turn_at = 0.0
        # What has counted the last pauses, which may be shortened.
        self._slowed_in: Used | None = None
        self._slowed_out: Used | None = None

    def _pools(self) -> Collection[Pool]:
        return self._account.pools() if self._account is not None else ()

    @property
    def applies(self) -> bool:
        """Whether the connection has quotas now; that may change with the rules."""
        return self._account is not None and bool(self._account.pools())

    def begin(self) -> None:
        """Let a new connection wait for what others of its user have sent, and read from it in small pieces."""
        assert self._pace is not None
        until, _, receive_bytes = self._demands()
        self._pace.receive_bytes = min(self._pace.receive_bytes, receive_bytes)
        if until > trio.current_time():
            self.sent_until = until
            self._pace.slow_reading(until)

    def renew(self) -> Pace | None:
        """End pauses of this identity earlier if its quotas, which may have changed, demand less than when the pauses
        began. Return the pace of the connection; None if that has ended.
        """
        if self._account is None or self._pace is None:
            return None
        sent_until, turn_at, self._pace.receive_bytes = self._demands()
        self.sent_until = _shortened(self.sent_until, sent_until, self._slowed_in)
        self.turn_at = _shortened(self.turn_at, turn_at, self._slowed_out)
        return self._pace

    def _demands(self) -> tuple[float, float, int]:
        """Return until when the client must be silent, and may receive nothing; and how much to read at once."""
        sent_until, turn_at, receive_bytes = 0.0, 0.0, RECEIVE_MOST
        for pool in self._pools():
            receive_bytes = min(receive_bytes, max(pool.receive_bytes(MESSAGE_BYTES), RECEIVE_FIRST))
            turn_at = max(turn_at, pool.due_out)
            if not pool.quota.refuses:
                sent_until = max(sent_until, pool.due_in)
        return sent_until, turn_at, receive_bytes

    # what the client sends

    def check_in(self) -> None:
        """Raise `Refused` (QUOTA) if a message of the client must be refused now."""
        for pool in self._pools():
            if pool.quota.refuses and pool.due_in > trio.current_time():
                raise pool.refusal_in()

    def accepts(self, messages: int, size: int) -> bool:
        """Return whether none of several messages of the client must be refused now, of *size* bytes together."""
        now = trio.current_time()
        return not any(
            pool.quota.refuses and (pool.messages_in.room(now) < messages or pool.bytes_in.room(now) < size)
            for pool in self._pools()
        )

    def refuse_excess(self, sizes: Sequence[int]) -> dict[int, Refused]:
        """Return the refusals of those of several messages, with these *sizes*, that must be refused now."""
        now, first_refused, refusing = trio.current_time(), len(sizes), None
        for pool in self._pools():
            if pool.quota.refuses:
                accepted = pool.accepted(now, sizes)
                if accepted < first_refused:
                    first_refused, refusing = accepted, pool
        if refusing is None:
            return {}
        refused = refusing.refusal_in(len(sizes) - first_refused)
        return dict.fromkeys(range(first_refused, len(sizes)), refused)

    def charge_in(self, messages: int, size: int) -> None:
        """Count *messages* of the client, of *size* bytes together; slow it down if they are too many."""
        pools = self._pools()
        if not pools or not messages:
            return
        now, slowest, least = trio.current_time(), None, RECEIVE_MOST
        until = max(now, self.sent_until)
        message_bytes = size // messages
        for pool in pools:
            due = pool.count_in(now, messages, size)
            least = min(least, max(pool.receive_bytes(message_bytes), RECEIVE_LEAST))
            if due > until and not pool.quota.refuses:
                slowest = pool
                slowest.used.slowed_ms += (due - until) * 1000
                until = due
        assert self._pace is not None
        self._pace.receive_bytes = least
        if slowest is not None:
            self.sent_until, self._slowed_in = until, slowest.used
            self._pace.slow_reading(until)

    # what it receives

    def check_out(self) -> None:
        """Raise `Refused` (QUOTA) if a request for messages must be refused now."""
        for pool in self._pools():
            if pool.quota.refuses and pool.due_out > trio.current_time():
                raise pool.refusal_out()

    def room(self, messages: int, size: int) -> tuple[int, int]:
        """Return how many messages and bytes the client may receive now, at most *messages* and *size*.

        Both are 0 if it must wait: its pace then holds deliveries until its turn comes.
        """
        pools = self._pools()
        if not pools:
            return messages, size
        now = trio.current_time()
        is_turn = 0 < self.turn_at <= now
        if self.turn_at > now:
            return self._wait(self.turn_at)
        until, slowest = now, None
        for pool in pools:
            if (due := pool.due_out) > until:
                until, slowest = due, pool
            messages = min(messages, max(pool.messages_out.room(now), pool.messages_out.quantum()))
            size = min(size, max(pool.bytes_out.room(now), pool.bytes_out.quantum()))
        if slowest is None or is_turn:
            return messages, size
        self._slow_out(slowest, until - now)
        return self._wait(until)

    def _slow_out(self, slowest: Pool, pause_s: float) -> None:
        slowest.used.slowed_ms += pause_s * 1000
        self._slowed_out = slowest.used

    @property
    def must_wait(self) -> bool:
        """Whether the client may receive nothing before its turn comes."""
        return self.turn_at > 0 and self.turn_at > trio.current_time()

    def _wait(self, until: float) -> tuple[int, int]:
        assert self._pace is not None
        self.turn_at = until
        self._pace.slow_delivery(until)
        return 0, 0

    def charge_out(self, messages: int, size: int) -> None:
        """Count *messages* to the client, of *size* bytes together; slow its deliveries if they are too many."""
        pools = self._pools()
        if not pools:
            return
        now, slowest = trio.current_time(), None
        until = now
        for pool in pools:
            due = pool.count_out(now, messages, size)
            if due > until:
                until, slowest = due, pool
        self.turn_at = 0.0
        if slowest is not None:
            self._slow_out(slowest, until - now)
            self._wait(until)

    # what it opens

    def check_subscriptions(self, count: int = 1) -> None:
        """Raise `Refused` (QUOTA) if there may not be *count* more subscriptions."""
        for pool in self._pools():
            pool.check_subscriptions(count)

    def note_subscriptions(self, count: int) -> None:
        """Note that the connection has *count* subscriptions now."""
        if self._account is not None:
            self._account.count_subscriptions(count - self._subscriptions)
            self._subscriptions = count

    @property
    def subscriptions(self) -> int:
        """The number of `note_subscriptions`."""
        return self._subscriptions

    def join_group(self, key: Hashable) -> Callable[[], None]:
        """Count a member of shared group *key*; return a function to call when it has left.

        Raises:
          Refused: these would be too many groups (QUOTA).
        """
        for pool in self._pools():
            pool.check_group(key)
        return self._join(key)

    def _join(self, key: Hashable) -> Callable[[], None]:
        if self._account is None:
            return _do_nothing
        self._account.count_group(key, 1)
        return partial(self._account.leave_group, key)

    def note_groups(self, keys: Iterable[Hashable]) -> None:
        """Note that the connection takes part in the shared groups *keys* now, in place of those noted before.

        Raises:
          Refused: these are too many (QUOTA); those before stay.
        """
        before, wanted = self._groups, set(keys)
        groups = {key: leave for key, leave in before.items() if key in wanted}
        for key in before.keys() - wanted:
            before[key]()
        try:
            for key in wanted - before.keys():
                groups[key] = self.join_group(key)
        except Refused:
            for key in groups.keys() - before.keys():
                groups[key]()
            for key in before.keys() - wanted:
                self._join(key)
            raise
        self._groups = groups

    def end(self) -> None:
        """Note that the connection has ended; members of shared groups leave by themselves."""
        account, self._account = self._account, None
        if account is not None:
            for leave in self._groups.values():
                leave()
            account.count_subscriptions(-self._subscriptions)
            account.remove(self)
            account.close_if_unused()


def _shortened(until: float, demanded: float, used: Used | None) -> float:
    """Return the end of a pause that *used* has counted up to *until*, if it need last only until *demanded*."""
    now, earlier = trio.current_time(), min(until, demanded)
    if used is not None and until > now:
        used.slowed_ms = max(used.slowed_ms - (until - max(earlier, now)) * 1000, 0.0)
    return earlier


def _do_nothing() -> None:
    """Do nothing."""


UNLIMITED: Final = Allowance(None, None)
