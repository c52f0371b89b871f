"""Transactions of one client, after checking its permissions: the parts of a gate for transactions."""

from collections.abc import Mapping, Sequence
from typing import Protocol, final

from msgspec.structs import replace

from martlet.access.allowances import Allowance
from martlet.access.grant import PublishGrant, check_not_closed
from martlet.contracts import (
    Action,
    ExternalCommit,
    ExternalRun,
    ExternalStage,
    ExternalTransaction,
    ExternalTransactions,
    HalfMessage,
    Identity,
    StagedBatch,
    Transactions,
)
from martlet.errors import Reason, Refused
from martlet.message import Message

__all__ = ["ExternalGate", "TransactionGate"]


class Permissions(Protocol):
    """The permissions of one identity; implemented by `martlet.access.Gate`."""

    allowance: Allowance
    identity: Identity
    publishable: Mapping[str, PublishGrant]

    @property
    def has_routers(self) -> bool: ...

    def check(self, action: Action, name: str) -> None: ...

    def check_publish(self, topic: str) -> PublishGrant: ...

    def check_message(self, topic: str, properties: bytes) -> None: ...

    def check_whole(self, message: Message) -> None: ...


@final
class TransactionGate:
    """RocketMQ's transactional messages, for one identity.

    Every method raises `Refused` (NO_PERMISSION) if the identity lacks the permission, and NOT_SUPPORTED if no plugin
    holds transactional messages, in addition to its own errors.
    """

    __slots__ = ("_held", "_permissions")

    def __init__(self, permissions: Permissions, held: Transactions | None) -> None:
        self._permissions = permissions
        self._held = held

    def end(self, half: HalfMessage, *, commit: bool) -> int:
        """Commit the transaction of *half*, or roll it back, like `Transactions.end`.

        Requires ``publish`` on the topic to which the producer sent the message, or on the message's name in it.
        """
        self._permissions.check_message(half.topic, half.record.properties)
        return self._capability().end(half, commit=commit)

    def end_together(self, ends: Sequence[tuple[HalfMessage, bool]]) -> list[int]:
        """End several transactions, like `Transactions.end_together`; requires the same as `end`.

        Returns the indexes of the transactions left for `end`, which may refuse them.
        """
        if self._permissions.publishable.keys() >= {half.topic for half, _ in ends}:
            return self._capability().end_together(ends)
        refused_indexes, allowed_indexes = [], []
        for index, (half, _) in enumerate(ends):
            try:
                self._permissions.check_message(half.topic, half.record.properties)
                allowed_indexes.append(index)
            except Refused:
                refused_indexes.append(index)
        left = self._capability().end_together([ends[index] for index in allowed_indexes])
        return refused_indexes + [allowed_indexes[index] for index in left]

    def force(self, half: HalfMessage, *, commit: bool) -> int:
        """End the transaction of *half* for an administrator, like `Transactions.end`.

        Requires ``update`` on the topic to which its producer sent it.
        """
        self._permissions.check("update", half.topic)
        return self._capability().end(half, commit=commit)

    def resume(self, half: HalfMessage) -> int:
        """Check the transaction of *half* again from the first time, like `Transactions.resume`.

        Requires ``update`` on the topic to which its producer sent it.
        """
        self._permissions.check("update", half.topic)
        return self._capability().resume(half)

    def _capability(self) -> Transactions:
        if self._held is None:
            raise Refused(Reason.NOT_SUPPORTED, "no plugin holds transactional messages; add tx to plugins.enabled")
        return self._held


@final
class ExternalGate:
    """External transactions, for one identity, which owns its producers.

    Every method raises `Refused` (NO_PERMISSION) if the identity lacks the permission, and NOT_SUPPORTED if no plugin
    holds external transactions, in addition to its own errors.
    """

    __slots__ = ("_held", "_permissions")

    def __init__(self, permissions: Permissions, held: ExternalTransactions | None) -> None:
        self._permissions = permissions
        self._held = held

    async def begin(
        self,
        producer: str,
        run: str,
        topic: str,
        began_ms: int = 0,
        brokers: Sequence[str] = (),
        *,
        only_known: bool = False,
    ) -> ExternalRun:
        """Begin a run of *producer*, like `ExternalTransactions.begin`.

        Requires ``publish`` on *topic*, to which the run will write; ``topic/name`` is a name in a topic.
        """
        self._check_writer(topic)
        name = self._permissions.identity.name
        return await self._capability().begin(name, producer, run, began_ms, brokers, only_known=only_known)

    async def stage(self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch) -> ExternalStage:
        """Stage *batch*, like `ExternalTransactions.stage`; requires ``publish`` on its topic, or on its names in the
        topic.
        """
        permissions = self._permissions
        if batch.topic not in permissions.publishable or permissions.has_routers:
            for _, properties, _ in batch.members:
                permissions.check_whole(Message(batch.topic, b"", properties))
        allowance = permissions.allowance
        allowance.check_in()
        staged = await self._capability().stage(self._as_own(transaction), part, chunk, batch)
        allowance.charge_in(len(batch.members), sum(len(body) + len(each) for body, each, _ in batch.members))
        return staged

    async def prepare(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]],
        topic: str = "",
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Prepare *parts*, like `ExternalTransactions.prepare`; requires ``publish`` on their topics, or on *topic*."""
        if not parts:
            self._check_writer(topic)
        owned = self._as_own(transaction)
        return await self._capability().prepare(owned, parts, self._permissions.check_publish, is_last=is_last)

    async def commit(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]] | None,
        topic: str = "",
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Deliver *parts*, like `ExternalTransactions.commit`; requires ``publish`` on their topics.

        In a topic whose messages have names, the permission was checked when they were staged. Without parts it is
        required on *topic*, as for `begin`.
        """
        if parts is not None and not parts:
            self._check_writer(topic)
        owned = self._as_own(transaction)
        return await self._capability().commit(owned, parts, self._permissions.check_publish, is_last=is_last)

    async def abort(self, transaction: ExternalTransaction, parts: Sequence[str] | None = None) -> int:
        """Drop *parts* of a transaction of this identity, like `ExternalTransactions.abort`."""
        return await self._capability().abort(self._as_own(transaction), parts)

    async def abort_prepared(self, transaction: ExternalTransaction) -> int:
        """Drop the parts that an older run has prepared, like `ExternalTransactions.abort_prepared`."""
        return await self._capability().abort_prepared(self._as_own(transaction))

    def _check_writer(self, topic: str) -> None:
        """Raise `Refused` unless the identity may write to *topic*: the request makes a producer known."""
        if not topic:
            text = "request names no topic; name one that the producer writes to and that you may publish to"
            raise Refused(Reason.PARAMETER, text)
        check_not_closed(topic)
        self._permissions.check("publish", topic)

    def _as_own(self, transaction: ExternalTransaction) -> ExternalTransaction:
        """Return *transaction* as one of this identity."""
        return replace(transaction, identity=self._permissions.identity.name)

    def _capability(self) -> ExternalTransactions:
        if self._held is None:
            raise Refused(Reason.NOT_SUPPORTED, "no plugin holds external transactions; add tx to plugins.enabled")
        return self._held
