"""Quotas: limits of users, and of groups of users, on what they send, receive and open.

Plugins answer which quotas an identity has. Each identity with connections has an `Account`, which counts in its pools
(`pools.py`): the one of its user, and one of each group that the plugin names. An `Allowance` is the share of one
connection (`allowances.py`). A gate counts with it what the client sends, and what the core delivers; whoever goes too
far is slowed by the pace of its connection, or refused.

A pool outlives its connections until everything is paid for, so nobody gets more by connecting again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Final, Protocol, final

import trio

from martlet.access.allowances import UNLIMITED, Account, Allowance, PoolKey
from martlet.access.pools import Pool, Used
from martlet.contracts import Identity, Pace, Quota, QuotaSource
from martlet.errors import Refused

__all__ = ["Quotas"]

IDENTITIES_MAX: Final = 16  # of one connection: of RocketMQ's requests, each may have a signature of its own
NAMES_MAX: Final = 50  # quotas with statistics of their own
NAME_CHARS_MAX: Final = 80
OTHERS: Final = "others"
DROPPED_AT_ONCE: Final = 2  # unused pools that are examined when an account is opened


class SlowablePeer(Protocol):
    """A peer, as quotas use it."""

    def pace(self) -> Pace: ...


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
            if account.renewed != self.generation:
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
        allowance = of_connection[identity] = Allowance(account, pace)
        account.add(allowance)
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

    def shorten_pauses(self, pace: Pace) -> None:
        """End the pauses of a connection when those of all its identities end, if that is earlier."""
        allowances = self._of_connection[pace].values()
        pace.shorten(max(each.sent_until for each in allowances), max(each.turn_at for each in allowances))

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
