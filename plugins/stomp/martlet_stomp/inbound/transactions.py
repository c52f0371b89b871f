"""Transactions of one client: BEGIN, COMMIT and ABORT, and the frames in between.

Messages and acknowledgements in a transaction are kept in memory. COMMIT stores all of them in one atomic group, so
a crash leaves all or nothing. ABORT drops them; the client then holds the acknowledged messages as before. A RECEIPT of
a frame in a transaction means that the broker has received the frame, the RECEIPT of COMMIT that the whole transaction
is durable.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.errors import Refused
from martlet.message import Message
from martlet.state.journal import Journal
from martlet_stomp.inbound.acknowledgements import ClientAcknowledgements
from martlet_stomp.inbound.incoming import Incoming
from martlet_stomp.outbound.unacknowledged import SentPart, Unacknowledged
from martlet_stomp.shared.context import Context
from martlet_stomp.wire.codec import encode_receipts
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import AckRun, Nack, SendRun

__all__ = ["ClientTransactions"]

# Memory of a frame in addition to its bytes.
FRAME_BYTES: Final = 256


@final
class _Settling(NamedTuple):
    """ACK, or NACK if ``is_failed``, for ``parts`` of the messages of a subscription."""

    unacknowledged: Unacknowledged
    parts: list[SentPart]
    is_failed: bool = False
    requeue: bool = True


@final
class _Transaction:
    """One open transaction, with the number of its frames and their size in bytes."""

    __slots__ = ("frames", "messages", "settlings", "size")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.settlings: list[_Settling] = []
        self.frames = 0
        self.size = 0


@final
class ClientTransactions:
    """The open transactions of one client."""

    __slots__ = ("_acknowledgements", "_context", "_end_client", "_gate", "_incoming", "_open", "_owner", "_peer")

    def __init__(
        self,
        peer: Peer,
        context: Context,
        gate: Gate,
        incoming: Incoming,
        acknowledgements: ClientAcknowledgements,
        end_client: Callable[[str], None],
    ) -> None:
        """Begin without transactions; *end_client* closes the connection, with the reason."""
        self._peer = peer
        self._context = context
        self._gate = gate
        self._end_client = end_client
        # The owner in the limits of all transactions: the user, or the address of a client without a name.
        self._owner = gate.identity.name or f"at {peer.host[:-4].hex()}"
        self._incoming = incoming
        self._acknowledgements = acknowledgements
        self._open: dict[str, _Transaction] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, name: str) -> None:
        """Begin transaction *name*. Raises `StompError`."""
        if name in self._open:
            raise StompError(f"transaction {shown(name)} has begun already; end it, or use another name")
        limit = self._context.config.transactions_max
        if len(self._open) >= limit:
            raise StompError(f"the connection has {limit} transactions; stomp.transactions_max allows no more")
        transaction = self._open[name] = _Transaction()
        self._context.transactions.begin(transaction, lambda: self._expire(name))

    def _expire(self, name: str) -> None:
        """Abort transaction *name*, whose time limit has passed: send its client an ERROR and close the connection."""
        limit = self._context.config.transaction_s
        text = (
            f"transaction {shown(name)} has not ended within {limit} s and is aborted; stomp.transaction_s is {limit}"
        )
        self._context.complaints.warn(f"client {self._peer.address}: {text}")
        self._end_client(text)

    def _find(self, name: str) -> _Transaction:
        transaction = self._open.get(name)
        if transaction is None:
            raise StompError(f"transaction {shown(name)} is unknown; send BEGIN first")
        return transaction

    # frames in a transaction

    def send(self, run: SendRun, name: str) -> None:
        """Keep the messages of *run* for COMMIT. Raises `StompError`."""
        self._context.counters.received += len(run.bodies)
        for index, (headers, body) in enumerate(zip(run.headers, run.bodies, strict=True)):
            receipt = run.receipt_of(index)
            try:
                transaction = self._find(name)
                messages = self._incoming.messages(headers, body)
                for message in messages:
                    self._count(transaction, len(message.body) + len(message.properties))
                if not messages:
                    self._count(transaction, 0)
            except Refused as refused:
                self._answer(run.receipts_before(index))
                raise StompError(str(refused), receipt) from refused
            except StompError as error:
                self._answer(run.receipts_before(index))
                error.receipt = receipt
                raise
            transaction.messages += messages
        self._answer(run.receipts)

    def acknowledge(self, run: AckRun, name: str) -> None:
        """Keep the acknowledgements of *run* for COMMIT. Raises `StompError`."""
        places = zip(run.subscriptions, run.queue_ids, run.offsets, strict=True)
        for index, (number, queue_id, offset) in enumerate(places):
            receipt = run.receipt_of(index)
            try:
                transaction = self._find(name)
                reserved = self._acknowledgements.reserve("ACK", number, queue_id, offset)
                transaction.settlings.append(_Settling(*reserved))
                self._count(transaction, 0)
            except StompError as error:
                self._answer(run.receipts_before(index))
                error.receipt = receipt
                raise
        self._answer(run.receipts)

    def refuse(self, nack: Nack, name: str) -> None:
        """Keep NACK for COMMIT. Raises `StompError`."""
        transaction = self._find(name)
        reserved = self._acknowledgements.reserve("NACK", *nack.place)
        transaction.settlings.append(_Settling(*reserved, is_failed=True, requeue=nack.requeue))
        self._count(transaction, 0)
        if nack.receipt is not None:
            self._answer((nack.receipt,))

    def _count(self, transaction: _Transaction, size: int) -> None:
        """Count a frame of *size* bytes. Raises `StompError` above a limit."""
        config, all_open = self._context.config, self._context.transactions
        size += FRAME_BYTES
        if transaction.frames >= config.transaction_frames_max:
            limit = f"stomp.transaction_frames_max is {config.transaction_frames_max}"
            raise StompError(f"a transaction has too many frames; {limit}")
        if sum(each.size for each in self._open.values()) + size > config.transaction_bytes_max:
            limit = f"stomp.transaction_bytes_max is {config.transaction_bytes_max}"
            raise StompError(f"the transactions of the connection are too large; {limit}")
        if all_open.size_of(self._owner) + size > config.transactions_user_bytes_max:
            limit = f"stomp.transactions_user_bytes_max is {config.transactions_user_bytes_max}"
            raise StompError(f"the transactions of the user are too large together; {limit}, try again later")
        if all_open.size + size > config.transactions_bytes_max:
            limit = f"stomp.transactions_bytes_max is {config.transactions_bytes_max}"
            raise StompError(f"all transactions are too large together; {limit}, try again later")
        transaction.frames += 1
        transaction.size += size
        all_open.grow(self._owner, size)

    # the end

    def commit(self, name: str) -> None:
        """Store all of transaction *name*, or nothing. Raises `StompError` and `Refused`."""
        transaction = self._end(name)
        noted_settlings: list[_Settling] = []
        notes: list[tuple[Journal, bytes]] = []
        try:
            for each in transaction.settlings:
                if each.is_failed:
                    each.unacknowledged.check_open()
                    continue
                notes += each.unacknowledged.notes(each.parts)
                noted_settlings.append(each)
            if transaction.messages or notes:
                self._gate.publish_all(transaction.messages, atomic=True, notes=notes)
        except Refused:
            for each in noted_settlings:
                each.unacknowledged.withdraw(each.parts)
            raise
        self._context.counters.stored += len(transaction.messages)
        for each in transaction.settlings:
            if each.is_failed:
                each.unacknowledged.failed(each.parts, requeue=each.requeue)
            else:
                each.unacknowledged.committed(each.parts)

    def abort(self, name: str) -> None:
        """Drop transaction *name*. Raises `StompError`."""
        transaction = self._end(name)
        reserved: dict[Unacknowledged, list[SentPart]] = {}
        for each in transaction.settlings:
            reserved.setdefault(each.unacknowledged, []).extend(each.parts)
        for unacknowledged, parts in reserved.items():
            unacknowledged.restore(parts)

    def _end(self, name: str) -> _Transaction:
        transaction = self._find(name)
        del self._open[name]
        self._context.transactions.end(transaction, self._owner)
        return transaction

    def _answer(self, receipts: Sequence[bytes]) -> None:
        """Answer *receipts*, once all earlier frames of the client are durable."""
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.send(encode_receipts(receipts))

    def close(self) -> None:
        """Drop all transactions: the client is gone."""
        for name in list(self._open):
            self._end(name)
