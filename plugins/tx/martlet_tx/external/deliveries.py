"""Unfinished deliveries of committed transactions; each continues even if no request waits for it."""

import logging
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.errors import Refused, StoreFailed
from martlet_tx.external.delivery import TransactionDelivery
from martlet_tx.external.journal_codec import Key
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.state import UNKNOWN, ExternalState

__all__ = ["Deliveries"]

log = logging.getLogger("martlet.tx")

# Transactions that are delivered at the same time; each keeps a chunk in memory.
DELIVERIES_MAX: Final = 16
# Pause after the store refused a delivery because the disk is full.
RETRY_S: Final = 1.0


@final
class Deliveries:
    """Deliveries by producer.

    Attributes:
      nursery: the nursery of their tasks; None while the service does not run.
      committed, delivered, dropped, lost: transactions, and their messages, since the start; see `TransactionDelivery`.
    """

    def __init__(self, broker: Broker, events: ExternalJournalWriter, state: ExternalState) -> None:
        self._broker = broker
        self._events = events
        self._state = state
        self._by_producer: dict[Key, TransactionDelivery] = {}
        self._slots = trio.Semaphore(DELIVERIES_MAX)
        self.nursery: trio.Nursery | None = None
        self.committed = self.delivered = self.dropped = self.lost = 0

    def __len__(self) -> int:
        return len(self._by_producer)

    def get(self, key: Key) -> TransactionDelivery | None:
        return self._by_producer.get(key)

    async def wait_done(self, key: Key) -> None:
        """Wait until a producer has no unfinished delivery."""
        while (delivery := self._by_producer.get(key)) is not None:
            await delivery.done.wait()

    def add(self, delivery: TransactionDelivery) -> None:
        self._by_producer[delivery.key] = delivery

    def restore(self) -> None:
        """Add the transactions that an earlier run committed and did not deliver completely."""
        for key, left in self._state.deliveries.items():
            producer = self._state.producers.get(key, UNKNOWN)
            self._by_producer[key] = TransactionDelivery(
                self._broker,
                self._events,
                self._state,
                key,
                left.sequence,
                left.epoch,
                left.parts,
                left.place,
                is_decided=True,
                is_last=producer.is_ended,
                content=producer.content,
            )
            log.info("transaction %d of %r was committed; delivering the rest of it", left.sequence, key[1])

    def start(self, nursery: trio.Nursery) -> None:
        """Continue all deliveries in *nursery*, and begin later ones there."""
        self.nursery = nursery
        for delivery in self._by_producer.values():
            nursery.start_soon(self._finish, delivery)

    def follow_up(self, delivery: TransactionDelivery) -> None:
        """Continue *delivery* if it is decided, even if no request waits for it any more."""
        if delivery.is_decided:
            self.committed += 1
        if delivery.is_decided and not delivery.is_finished and self.nursery is not None:
            self.nursery.start_soon(self._finish, delivery)
        else:
            self._end(delivery)

    async def _finish(self, delivery: TransactionDelivery) -> None:
        """Store all messages of *delivery*; retry while the disk is full."""
        is_refused = False
        try:
            async with self._slots:
                while not delivery.is_finished:
                    try:
                        await self._broker.turns.finish(delivery.store_other_groups())
                    except Refused as refused:
                        if not is_refused:
                            is_refused = True
                            text = "transaction %d of %r is committed, and its delivery waits; %s"
                            log.warning(text, delivery.sequence, delivery.key[1], refused)
                        await trio.sleep(RETRY_S)
                if is_refused:
                    log.info("transaction %d of %r is delivered", delivery.sequence, delivery.key[1])
        except StoreFailed as failed:
            log.error(
                "transaction %d of %r is delivered after a restart; %s", *(delivery.sequence, delivery.key[1], failed)
            )
        finally:
            self._end(delivery)

    def _end(self, delivery: TransactionDelivery) -> None:
        if self._by_producer.get(delivery.key) is delivery:
            del self._by_producer[delivery.key]
        self.delivered += delivery.delivered
        self.dropped += delivery.dropped
        self.lost += delivery.lost
        delivery.done.set()
