"""ACK and NACK of one client, outside of transactions."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import final

from martlet.contracts import Peer
from martlet.state.journal import NEXT_COMMIT
from martlet_stomp.inbound.subscriptions import ClientSubscriptions
from martlet_stomp.outbound.unacknowledged import SentPart, Unacknowledged
from martlet_stomp.shared.context import Context
from martlet_stomp.wire.codec import encode_receipts
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import AckRun, Nack

__all__ = ["ClientAcknowledgements"]


@final
class ClientAcknowledgements:
    """Handles ACK and NACK for the *subscriptions* of one client."""

    __slots__ = ("_context", "_peer", "_subscriptions")

    def __init__(self, peer: Peer, context: Context, subscriptions: ClientSubscriptions) -> None:
        self._peer = peer
        self._context = context
        self._subscriptions = subscriptions

    def acknowledge(self, run: AckRun) -> None:
        """Settle messages, and answer receipts. Raises `StompError` if the client does not hold one of them."""
        subscriptions, queue_ids, offsets = run.subscriptions, run.queue_ids, run.offsets
        number, queue_id, count = subscriptions[0], queue_ids[0], len(offsets)
        if subscriptions.count(number) == queue_ids.count(queue_id) == count:
            settled = self._acknowledge(run, 0, number, queue_id, offsets)
        else:
            settled = 0
            for (number, queue_id), group in groupby(
                zip(subscriptions, queue_ids, offsets, strict=True), key=lambda place: place[:2]
            ):
                group_offsets = [offset for _, _, offset in group]
                group_settled = self._acknowledge(run, settled, number, queue_id, group_offsets)
                settled += group_settled
                if group_settled < len(group_offsets):
                    break
        if settled < count:
            self._answer(run.receipts_before(settled))
            text = self._not_held("ACK", subscriptions[settled], queue_ids[settled], offsets[settled])
            raise StompError(text, run.receipt_of(settled))
        self._answer(run.receipts)

    def _acknowledge(self, run: AckRun, first_index: int, number: int, queue_id: int, offsets: Sequence[int]) -> int:
        """Settle *offsets* of a queue, the ACKs of *run* from *first_index* on; return how many precede a failure.

        ACKs for a subscription that has ended are ignored, and count as held, unless one asks for a receipt.
        """
        subscription = self._subscriptions.find(number)
        if subscription is not None:
            return subscription.unacknowledged.acknowledge(queue_id, offsets)
        if not self._subscriptions.has_ended(number):
            return 0
        asking_at = bisect_left(run.asking, first_index)
        return min(run.asking[asking_at] - first_index, len(offsets)) if asking_at < len(run.asking) else len(offsets)

    def refuse(self, nack: Nack) -> None:
        """Handle NACK. Raises `StompError` if the client does not hold the message.

        Without a receipt, NACK for a subscription that has ended is ignored.
        """
        number, queue_id, offset = nack.place
        subscription = self._subscriptions.find(number)
        if subscription is not None and subscription.unacknowledged.refuse(queue_id, offset, requeue=nack.requeue):
            return
        if nack.receipt is not None or not self._subscriptions.has_ended(number):
            raise StompError(self._not_held("NACK", number, queue_id, offset))

    def reserve(self, command: str, number: int, queue_id: int, offset: int) -> tuple[Unacknowledged, list[SentPart]]:
        """Return the messages that ACK or NACK in a transaction is for. Raises `StompError` if they are not held."""
        subscription = self._subscriptions.find(number)
        parts = subscription.unacknowledged.reserve(queue_id, offset) if subscription is not None else []
        if subscription is None or not parts:
            raise StompError(self._not_held(command, number, queue_id, offset))
        return subscription.unacknowledged, parts

    def _not_held(self, command: str, number: int, queue_id: int, offset: int) -> str:
        text = f"{command} is for message {number}-{queue_id}-{offset}, which the client does not hold"
        if self._subscriptions.has_ended(number):
            return (
                f"{text}: its subscription has ended, and others have its messages; send {command} before UNSUBSCRIBE"
            )
        return f"{text}; acknowledge each message once, with ack:client or ack:client-individual"

    def _answer(self, receipts: Sequence[bytes]) -> None:
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.hold_until(NEXT_COMMIT)
            self._peer.send(encode_receipts(receipts))
