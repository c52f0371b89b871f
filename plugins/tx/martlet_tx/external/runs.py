"""Runs of the producers of external transactions: only the newest run of each continues, one decision at a time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NoReturn, final

import trio

from martlet.contracts import ExternalTransaction
from martlet.errors import Reason, Refused
from martlet_tx.config import TxConfig
from martlet_tx.external.deliveries import Deliveries
from martlet_tx.external.journal_codec import Key
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.state import UNKNOWN, ExternalState, ProducerState

__all__ = ["ENDED_HOURS", "NAME_CHARS_MAX", "PRODUCER_CHARS_MAX", "ProducerRuns", "check_name"]

PRODUCER_CHARS_MAX: Final = 255
NAME_CHARS_MAX: Final = 64
SEQUENCE_MAX: Final = (1 << 63) - 1
# Hours of operation for which a producer is remembered after its last commit, as the commit may be repeated.
ENDED_HOURS: Final = 2


@final
class ProducerRuns:
    """Runs of producers; ``fenced`` counts the requests of replaced runs."""

    def __init__(
        self, config: TxConfig, events: ExternalJournalWriter, state: ExternalState, deliveries: Deliveries
    ) -> None:
        self._config = config
        self._events = events
        self._state = state
        self._deliveries = deliveries
        self._locks: dict[Key, trio.Lock] = {}
        self.fenced = 0

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """Let one caller at a time decide about a producer, with all earlier events applied.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        lock = self._locks.setdefault(key, trio.Lock())
        try:
            async with lock:
                await self._deliveries.wait_done(key)
                await self._events.wait_applied()
                if key in self._state.deliveries:
                    text = f"a transaction of {key[1]!r} is committed; its delivery continues after a restart"
                    raise Refused(Reason.UNAVAILABLE, f"{text}, try again then")
                yield
        finally:
            if not lock.locked() and self._locks.get(key) is lock:
                del self._locks[key]

    async def note(self, event: bytes) -> None:
        """Append *event*, and wait until it is durable and applied."""
        self._events.append(event)
        await self._events.wait_applied()

    def check(self, transaction: ExternalTransaction) -> ProducerState:
        """Return the producer of *transaction*; raise `Refused` unless its run is the newest."""
        check_name("producer", transaction.producer, PRODUCER_CHARS_MAX)
        if not 0 <= transaction.sequence <= SEQUENCE_MAX:
            text = f"sequence {transaction.sequence} is not a number from 0 to {SEQUENCE_MAX}"
            raise Refused(Reason.PARAMETER, f"{text}; number the transactions of a producer upwards")
        if transaction.content:
            check_name("content", transaction.content, NAME_CHARS_MAX)
        producer = self._state.producers.get((transaction.identity, transaction.producer), UNKNOWN)
        if transaction.epoch < producer.epoch:
            self.refuse_old(transaction.producer, f"run with epoch {transaction.epoch}")
        if transaction.epoch > producer.epoch:
            text = (
                f"epoch {transaction.epoch} of producer {transaction.producer!r} is unknown; it expired, or was never"
            )
            raise Refused(Reason.NOT_FOUND, f"{text} given; begin a run")
        return producer

    def refuse_old(self, producer: str, what: str) -> NoReturn:
        """Raise `Refused` (FENCED)."""
        self.fenced += 1
        raise Refused(
            Reason.FENCED, f"{what} of producer {producer!r} was replaced by a newer run; stop, the newer one goes on"
        )

    def check_room(self, identity: str) -> None:
        """Raise `Refused` (BUSY) if *identity* may have no further producer; "" is no single client's identity."""
        count, limit, who, name = len(self._state.producers), self._config.producers_max, "", "producers_max"
        if count < limit and identity:
            count, limit = self._state.of_identity.get(identity, 0), self._config.producers_identity_max
            who, name = f" of identity {identity!r}", "producers_identity_max"
        if count >= limit:
            text = f"{count} producers{who} of external transactions are known; tx.{name} is {limit}"
            when = f"{ENDED_HOURS} h after a commit that says it is the last one, else after tx.producer_hours"
            advice = "set it higher, or wait until some are forgotten"
            raise Refused(Reason.BUSY, f"{text}; {advice}: {when}; `martlet tx producers` lists them")


def check_name(what: str, name: str, chars_max: int) -> None:
    """Raise `Refused` unless *name* has 1 to *chars_max* printable characters."""
    if not 1 <= len(name) <= chars_max or not name.isprintable():
        text = f"{what} {name!r:.80} has {len(name)} characters or unprintable ones"
        raise Refused(Reason.PARAMETER, f"{text}; use 1 to {chars_max} printable characters")
