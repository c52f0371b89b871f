"""Pools: what users and groups of users have used of their quotas; no clock, time is an argument.

A rate is one number: the time at which everything counted so far will be paid for, if each message takes its share of a
second (the virtual scheduling algorithm of ITU-T I.371, also known as a leaky bucket). Who is not more than a second
ahead may go on. A connection that goes too far waits until its own last message is due, so the connections of a user
take turns: each pays for what it has sent before it sends again.
"""

from collections.abc import Hashable, Sequence
from typing import Final, final

from msgspec import Struct

from martlet.contracts import Quota
from martlet.errors import Reason, Refused

__all__ = ["ANY", "BURST_S", "QUANTUM_S", "Pool", "Rate", "Used"]

BURST_S: Final = 1.0  # unused messages and bytes of this time may be sent at once
# A connection that was slowed gets messages or bytes of this time at once: for fewer of them, the pauses would cost
# more than the messages.
QUANTUM_S: Final = 0.25
ANY: Final = 1 << 62
ROUNDING_S: Final = 1e-6


@final
class Rate:
    """One rate of a quota, with *per_s* messages or bytes a second; 0 for no limit."""

    __slots__ = ("_burst_s", "_paid_at", "per_s")

    def __init__(self) -> None:
        self.per_s = 0
        self._burst_s = 0.0  # how far ahead the next one may be
        self._paid_at = 0.0

    def set(self, per_s: int, now: float) -> None:
        """Change the rate at *now*; what was counted before is paid for by the higher of both rates."""
        if not per_s:
            self._paid_at = 0.0
        elif self._paid_at > now and per_s > self.per_s > 0:
            self._paid_at = now + (self._paid_at - now) * self.per_s / per_s
        self.per_s = per_s
        self._burst_s = ROUNDING_S + (BURST_S - min(1 / per_s, BURST_S) if per_s else 0.0)

    def count(self, now: float, amount: int) -> float:
        """Count *amount*; return when the next one is due: not after *now* if it may come at once."""
        if not self.per_s:
            return 0.0
        self._paid_at = max(self._paid_at, now) + amount / self.per_s
        return self._paid_at - self._burst_s

    @property
    def due(self) -> float:
        """When the next one may come; 0 if always."""
        return self._paid_at - self._burst_s if self.per_s else 0.0

    def room(self, now: float) -> int:
        """Return how many may come now."""
        if not self.per_s:
            return ANY
        ahead_s = max(self._paid_at, now) - now
        return int((self._burst_s - ahead_s) * self.per_s) + 1 if ahead_s <= self._burst_s else 0

    def quantum(self) -> int:
        """Return how many a connection may get at once whose turn it is."""
        return max(int(self.per_s * QUANTUM_S), 1) if self.per_s else ANY

    def is_paid(self, now: float) -> bool:
        """Whether everything is paid for, so that a new `Rate` is the same."""
        return self._paid_at <= now


class Used(Struct):
    """What became of the quotas of one name since the start: pauses in ms, and what was refused."""

    slowed_ms: float = 0.0
    refused: int = 0


@final
class Pool:
    """A quota in use: that of one user, or of a group of users.

    ``accounts`` is the number of identities that share it, the others are what they have open. ``used`` may be shared
    by several pools.
    """

    __slots__ = (
        "accounts",
        "bytes_in",
        "bytes_out",
        "connections",
        "messages_in",
        "messages_out",
        "name",
        "quota",
        "shared_groups",
        "subscriptions",
        "used",
    )

    def __init__(self, name: str, used: Used) -> None:
        self.name = name
        self.used = used
        self.quota = Quota()
        self.messages_in, self.bytes_in, self.messages_out, self.bytes_out = Rate(), Rate(), Rate(), Rate()
        self.accounts = self.connections = self.subscriptions = 0
        self.shared_groups: dict[Hashable, int] = {}  # with the number of their members

    def set(self, quota: Quota, now: float) -> None:
        """Use *quota* from *now* on."""
        if quota is not self.quota:
            self.quota = quota
            self.messages_in.set(quota.messages_in, now)
            self.bytes_in.set(quota.bytes_in, now)
            self.messages_out.set(quota.messages_out, now)
            self.bytes_out.set(quota.bytes_out, now)

    def is_paid(self, now: float) -> bool:
        """Whether a new pool is the same as this one."""
        rates = self.messages_in, self.bytes_in, self.messages_out, self.bytes_out
        return all(rate.is_paid(now) for rate in rates)

    # what clients send

    def count_in(self, now: float, messages: int, size: int) -> float:
        """Count messages from a client; return when the next one is due."""
        return max(self.messages_in.count(now, messages), self.bytes_in.count(now, size))

    @property
    def due_in(self) -> float:
        """When the next message from a client is due."""
        return max(self.messages_in.due, self.bytes_in.due)

    def accepted(self, now: float, sizes: Sequence[int]) -> int:
        """Return how many messages from a client, with these *sizes*, may come now, counted from the first."""
        messages, bytes_left = self.messages_in.room(now), self.bytes_in.room(now)
        for index, size in enumerate(sizes):
            if index >= messages or bytes_left <= 0:
                return index
            bytes_left -= size
        return len(sizes)

    def receive_bytes(self, message_bytes: int) -> int:
        """Return how much to read at once, if a message has *message_bytes* on average."""
        return min(self.bytes_in.quantum(), self.messages_in.quantum() * message_bytes)

    # what clients receive

    def count_out(self, now: float, messages: int, size: int) -> float:
        """Count messages to a client; return when the next one is due."""
        return max(self.messages_out.count(now, messages), self.bytes_out.count(now, size))

    @property
    def due_out(self) -> float:
        """When the next message to a client is due."""
        return max(self.messages_out.due, self.bytes_out.due)

    # what clients have open

    def count_group(self, key: Hashable, change: int) -> None:
        """Count *change* more members of a shared group."""
        members = self.shared_groups.get(key, 0) + change
        if members:
            self.shared_groups[key] = members
        else:
            del self.shared_groups[key]

    def check_connections(self) -> None:
        """Raise `Refused` (QUOTA) if there may not be one more connection."""
        limit = self.quota.connections
        if limit and self.connections >= limit:
            raise self.refusal(f"{self.connections} connections are open, and the quota is {limit}")

    def check_subscriptions(self, count: int) -> None:
        """Raise `Refused` (QUOTA) if there may not be *count* more subscriptions."""
        limit = self.quota.subscriptions
        if limit and self.subscriptions + count > limit:
            text = f"{self.subscriptions} subscriptions are open and {count} requested, and the quota is {limit}"
            raise self.refusal(text)

    def check_group(self, key: Hashable) -> None:
        """Raise `Refused` (QUOTA) if its members may not take part in one more shared group, *key*."""
        limit = self.quota.shared_groups
        if limit and key not in self.shared_groups and len(self.shared_groups) >= limit:
            raise self.refusal(f"{len(self.shared_groups)} shared groups are in use, and the quota is {limit}")

    def refusal(self, what: str, count: int = 1) -> Refused:
        """Count *count* refusals; return their error."""
        self.used.refused += count
        return Refused(Reason.QUOTA, f"{self.name}: {what}")

    def refusal_in(self, count: int = 1) -> Refused:
        """As `refusal`, for messages from a client above a rate."""
        return self._rate_refusal("send", self.quota.messages_in, self.quota.bytes_in, count)

    def refusal_out(self) -> Refused:
        """As `refusal`, for a request for messages above a rate."""
        return self._rate_refusal("receive", self.quota.messages_out, self.quota.bytes_out, 1)

    def _rate_refusal(self, verb: str, messages: int, size: int, count: int) -> Refused:
        limits = [f"{limit} {unit}" for limit, unit in ((messages, "messages"), (size, "bytes")) if limit]
        return self.refusal(f"may {verb} {' and '.join(limits)} a second, and that is used up; try again later", count)
