"""Quotas: limits of users, and of groups of users, on what they send, receive and open.

Plugins answer which quotas an identity has. Each identity with connections has an `Account`, which counts in its pools
(`pools.py`): the one of its user, and one of each group that the plugin names. An `Allowance` is the share of one
connection. A gate counts with it what the client sends, and what the core delivers; whoever goes too far is slowed by
the pace of its connection, or refused.

A pool outlives its connections until everything is paid for, so nobody gets more by connecting again.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet.access.pools import ANY, Pool, Used
from martlet.contracts import Identity, Pace, Quota, QuotaSource
from martlet.errors import Refused

__all__ = ["UNLIMITED", "Account", "Allowance", "Quotas"]

IDENTITIES_MAX: Final = 16  # of one connection: of RocketMQ's requests, each may have a signature of its own
NAMES_MAX: Final = 50  # quotas with statistics of their own
NAME_CHARS_MAX: Final = 80
OTHERS: Final = "others"
DROPPED_AT_ONCE: Final = 2  # unused pools that are examined when an account is opened
# What is read at once: at least the first, until the size of messages is known the second, at most the third.
RECEIVE_LEAST: Final = 1024
RECEIVE_FIRST: Final = 4096
RECEIVE_MOST: Final = 1 << 18
MESSAGE_BYTES: Final = 256  # a guess, until the first message

# The source, the group, and the user if it is the user's own.
PoolKey: TypeAlias = tuple[int, str, str]


class SlowablePeer(Protocol):
    """A peer, as quotas use it."""

    def pace(self) -> Pace: ...


@final
class Account:
    """One identity with connections: what these have open, and the pools in which that counts."""

    __slots__ = ("_pools", "_quotas", "connections", "generation", "identity", "shared_groups", "subscriptions")

    def __init__(self, quotas: "Quotas", identity: Identity) -> None:
        self._quotas = quotas
        self.identity = identity
        self.generation = -1
        self._pools: dict[PoolKey, Pool] = {}
        self.connections = 0
        self.subscriptions = 0
        self.shared_groups: dict[Hashable, int] = {}  # with the number of this identity's members

    def pools(self) -> Iterable[Pool]:
        """Return the pools, after asking the plugins again if something has changed."""
        if self.generation != self._quotas.generation:
            self.recheck()
        return self._pools.values()

    def recheck(self) -> None:
        """Ask the plugins for the quotas again; if one fails, those asked before stay (`revocation.Waiter`)."""
        try:
            self.ask()
        except Refused:
            self.generation = self._quotas.generation  # the plugin's error is in the log

    def ask(self) -> None:
        """Ask the plugins for the quotas. Raises `Refused` if one fails."""
        generation, answers = self._quotas.generation, self._quotas.ask(self.identity)
        pools, before = {key: self._quotas.pool(key) for key in answers}, self._pools
        for key, pool in pools.items():
            pool.set(answers[key])
            if key not in before:
                self._count_all(pool, 1)
        self._pools, self.generation = pools, generation
        for key, pool in before.items():
            if key not in pools:
                self._count_all(pool, -1)
                self._quotas.leave(key, pool)

    def _count_all(self, pool: Pool, sign: int) -> None:
        pool.accounts += sign
        pool.connections += sign * self.connections
        pool.subscriptions += sign * self.subscriptions
        for key, members in self.shared_groups.items():
            pool.count_group(key, sign * members)

    def count_connections(self, change: int) -> None:
        self.connections += change
        for pool in self._pools.values():
            pool.connections += change

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
        if not self.connections and not self.shared_groups:
            self._quotas.forget(self.identity)
            pools, self._pools = self._pools, {}
            for key, pool in pools.items():
                self._count_all(pool, -1)
                self._quotas.leave(key, pool)


@final
class Allowance:
    """What one connection may send and receive by the quotas of its identity; made by `Quotas.admit`.

    ``applies`` is False for `UNLIMITED`, whose methods do nothing.
    """

    __slots__ = ("_account", "_groups", "_pace", "_sent_until", "_subscriptions", "_turn_at", "applies")

    def __init__(self, account: Account | None, pace: Pace | None) -> None:
        self._account = account
        self._pace = pace
        self.applies = account is not None
        self._subscriptions = 0
        self._groups: dict[Hashable, Callable[[], None]] = {}  # those of `note_groups`, each with its end
        self._sent_until = 0.0  # end of the last pause of reading
        self._turn_at = 0.0  # when the connection may receive again, in its turn; 0 if it need not wait

    def _pools(self) -> Iterable[Pool]:
        return self._account.pools() if self._account is not None else ()

    def begin(self) -> None:
        """Let a new connection wait for what others of its user have sent, and read from it in small pieces."""
        now, least, until = trio.current_time(), ANY, 0.0
        for pool in self._pools():
            least = min(least, max(pool.receive_bytes(MESSAGE_BYTES), RECEIVE_FIRST))
            if not pool.quota.refuses:
                until = max(until, pool.due_in)
        assert self._pace is not None
        self._pace.receive_bytes = min(self._pace.receive_bytes, least)
        if until > now:
            self._sent_until = until
            self._pace.slow_reading(until)

    # what the client sends

    def check_in(self) -> None:
        """Raise `Refused` (QUOTA) if a message of the client must be refused now."""
        if not self.applies:
            return
        now = trio.current_time()
        for pool in self._pools():
            if pool.quota.refuses and pool.due_in > now:
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
        if not self.applies or not messages:
            return
        now, slowest, least = trio.current_time(), None, RECEIVE_MOST
        until = max(now, self._sent_until)
        message_bytes = size // messages
        for pool in self._pools():
            due = pool.count_in(now, messages, size)
            least = min(least, max(pool.receive_bytes(message_bytes), RECEIVE_LEAST))
            if due > until and not pool.quota.refuses:
                slowest = pool
                slowest.used.slowed_ms += (due - until) * 1000
                until = due
        assert self._pace is not None
        self._pace.receive_bytes = least
        if slowest is not None:
            self._sent_until = until
            self._pace.slow_reading(until)

    # what it receives

    def check_out(self) -> None:
        """Raise `Refused` (QUOTA) if a request for messages must be refused now."""
        if not self.applies:
            return
        now = trio.current_time()
        for pool in self._pools():
            if pool.quota.refuses and pool.due_out > now:
                raise pool.refusal_out()

    def room(self, messages: int, size: int) -> tuple[int, int]:
        """Return how many messages and bytes the client may receive now, at most *messages* and *size*.

        Both are 0 if it must wait: its pace then holds deliveries until its turn comes.
        """
        if not self.applies:
            return messages, size
        now = trio.current_time()
        is_turn = 0 < self._turn_at <= now
        if self._turn_at > now:
            return self._wait(self._turn_at)
        until, slowest = now, None
        for pool in self._pools():
            if (due := pool.due_out) > until:
                until, slowest = due, pool
            messages = min(messages, max(pool.messages_out.room(now), pool.messages_out.quantum()))
            size = min(size, max(pool.bytes_out.room(now), pool.bytes_out.quantum()))
        if slowest is None or is_turn:
            return messages, size
        slowest.used.slowed_ms += (until - now) * 1000
        return self._wait(until)

    @property
    def must_wait(self) -> bool:
        """Whether the client may receive nothing before its turn comes."""
        return self._turn_at > 0 and self._turn_at > trio.current_time()

    def _wait(self, until: float) -> tuple[int, int]:
        assert self._pace is not None
        self._turn_at = until
        self._pace.slow_delivery(until)
        return 0, 0

    def charge_out(self, messages: int, size: int) -> None:
        """Count *messages* to the client, of *size* bytes together; slow its deliveries if they are too many."""
        if not self.applies:
            return
        now, slowest = trio.current_time(), None
        until = now
        for pool in self._pools():
            due = pool.count_out(now, messages, size)
            if due > until:
                until, slowest = due, pool
        self._turn_at = 0.0
        if slowest is not None:
            slowest.used.slowed_ms += (until - now) * 1000
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
        account, self._account, self.applies = self._account, None, False
        if account is not None:
            for leave in self._groups.values():
                leave()
            account.count_subscriptions(-self._subscriptions)
            account.count_connections(-1)
            account.close_if_unused()


def _do_nothing() -> None:
    """Do nothing."""


UNLIMITED: Final = Allowance(None, None)


@final
class Quotas:
    """The accounts of all identities with connections, and the pools in which they count."""

    def __init__(self) -> None:
        self._sources: tuple[QuotaSource, ...] = ()
        self.generation = 0  # incremented when the plugins may answer differently
        self._accounts: dict[Identity, Account] = {}
        self._pools: dict[PoolKey, Pool] = {}
        self._unused: OrderedDict[PoolKey, None] = OrderedDict()  # pools without accounts, not paid for yet
        self._of_connection: dict[Pace, dict[Identity, Allowance]] = {}
        self._used: dict[str, Used] = {}

    @property
    def sources(self) -> tuple[QuotaSource, ...]:
        """The functions of all plugins that answer quotas."""
        return self._sources

    @sources.setter
    def sources(self, sources: tuple[QuotaSource, ...]) -> None:
        self._sources = sources
        self.changed()

    def changed(self) -> None:
        """Ask the plugins again at the next use of each account; `accounts` visits those that are not used."""
        self.generation += 1

    def accounts(self) -> Iterator[Account]:
        """Yield the accounts, to ask for their quotas again; more may be opened and closed meanwhile."""
        for account in list(self._accounts.values()):
            if account.generation != self.generation:
                yield account

    # for accounts

    def ask(self, identity: Identity) -> dict[PoolKey, Quota]:
        """Ask the plugins for the quotas of *identity*. Raises `Refused` if one fails."""
        return {
            (index, quota.group, "" if quota.group else identity.name): quota
            for index, source in enumerate(self._sources)
            for quota in source(identity)
        }

    def pool(self, key: PoolKey) -> Pool:
        """Return the pool *key*, perhaps a new one."""
        pool = self._pools.get(key)
        if pool is None:
            name = _describe(key)
            pool = self._pools[key] = Pool(name, self._used_by(name))
        self._unused.pop(key, None)
        return pool

    def _used_by(self, name: str) -> Used:
        """Return the statistics for *name*; quotas beyond the first ones share those of `OTHERS`."""
        if name not in self._used and len(self._used) >= NAMES_MAX:
            name = OTHERS
        return self._used.setdefault(name, Used())

    def leave(self, key: PoolKey, pool: Pool) -> None:
        """Drop *pool* unless somebody uses it, or it must be paid for first."""
        if pool.accounts:
            return
        if pool.is_paid(trio.current_time()):
            del self._pools[key]
        else:
            self._unused[key] = None

    def _drop_paid(self) -> None:
        """Drop unused pools whose debt is paid, looking at `DROPPED_AT_ONCE` of them."""
        now = trio.current_time()
        for _ in range(min(DROPPED_AT_ONCE, len(self._unused))):
            key, _ = self._unused.popitem(last=False)
            if self._pools[key].is_paid(now):
                del self._pools[key]
            else:
                self._unused[key] = None

    def forget(self, identity: Identity) -> None:
        """Forget the account of *identity*, which is not used any more."""
        self._accounts.pop(identity, None)

    # for gates

    def admit(self, identity: Identity, peer: SlowablePeer) -> Allowance:
        """Return what *peer* may send and receive as *identity*; counts its connection until that ends.

        Raises:
          Refused: there are too many connections (QUOTA), or a plugin failed.
        """
        if not self._sources:
            return UNLIMITED
        pace = peer.pace()
        of_connection = self._of_connection.get(pace, {})
        allowance = of_connection.get(identity)
        if allowance is not None:
            return allowance
        account = self._accounts.get(identity) or self._open(identity)
        try:
            for pool in account.pools():
                pool.check_connections()
        except Refused:
            account.close_if_unused()
            raise
        if len(of_connection) >= IDENTITIES_MAX:
            of_connection.pop(next(iter(of_connection))).end()
        account.count_connections(1)
        allowance = of_connection[identity] = Allowance(account, pace)
        allowance.begin()
        if pace not in self._of_connection:
            self._of_connection[pace] = of_connection
            pace.on_end(partial(self._end, pace))
        return allowance

    def _open(self, identity: Identity) -> Account:
        self._drop_paid()
        account = Account(self, identity)
        account.ask()
        self._accounts[identity] = account
        return account

    def _end(self, pace: Pace) -> None:
        """Note that the connection with *pace* has ended."""
        for allowance in self._of_connection.pop(pace, {}).values():
            allowance.end()

    def statistics(self) -> dict[str, object]:
        used = self._used
        return {
            "identities": len(self._accounts),
            "quotas": len(self._pools),
            "slowed_ms": round(sum(each.slowed_ms for each in used.values())),
            "refused": sum(each.refused for each in used.values()),
            "slowed_ms_by_name": {name: round(each.slowed_ms) for name, each in used.items() if each.slowed_ms},
            "refused_by_name": {name: each.refused for name, each in used.items() if each.refused},
        }


def _describe(key: PoolKey) -> str:
    _, group, user = key
    if group:
        return f"group {group[:NAME_CHARS_MAX]!r}"
    return f"user {user[:NAME_CHARS_MAX]!r}" if user else "clients without a name"
