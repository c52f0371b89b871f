"""Drops abandoned parts, and forgets unused producers."""

import logging
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.errors import MartletError
from martlet.runtime.steps import Budget, Steps
from martlet_tx.config import TxConfig
from martlet_tx.external.deliveries import Deliveries
from martlet_tx.external.journal_codec import EventKind, Key, encode_event
from martlet_tx.external.runs import ENDED_HOURS, ProducerRuns
from martlet_tx.external.state import UNKNOWN, ExternalState, PartKey, ProducerState

__all__ = ["TransactionExpiry"]

log = logging.getLogger("martlet.tx")

# Hours of operation after which a producer is forgotten that has only begun runs, and so has no commit to repeat.
BEGUN_HOURS: Final = 24
HOUR_S: Final = 3600.0
# Shortest and longest interval between searches for abandoned parts.
LOOK_S: Final = (1.0, 60.0)
# Time to check a part or a producer.
LOOK_US: Final = 2.0


@final
class TransactionExpiry:
    """The expiry of parts and producers; ``expired`` and ``forgotten`` count them."""

    def __init__(
        self, broker: Broker, config: TxConfig, state: ExternalState, runs: ProducerRuns, deliveries: Deliveries
    ) -> None:
        self._broker = broker
        self._config = config
        self._state = state
        self._runs = runs
        self._deliveries = deliveries
        # Number of chunks of each part, and when it was first seen, on trio's clock, which cannot be set.
        self._seen: dict[tuple[Key, PartKey], tuple[int, float]] = {}
        self.expired = self.forgotten = 0

    async def run(self) -> None:
        """Drop abandoned parts and forget unused producers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._count_hours)
            await self._expire()

    async def _expire(self) -> None:
        low, high = LOOK_S
        while True:
            await trio.sleep(min(max(self._config.staged_timeout_ms / 4000, low), high))
            try:
                await self.expire()
            except MartletError as error:
                log.warning("staged parts that nobody commits are not dropped yet; %s", error)

    async def expire(self) -> None:
        """Drop the parts that have got no chunk for ``tx.staged_timeout_ms``."""
        late = await self._broker.turns.finish(self._find_late())
        for key, part_key in late:
            async with self._runs.turn(key):
                part = self._state.parts.get((key, part_key))
                seen = self._seen.get((key, part_key))
                if part is None or seen is None or part.chunks != seen[0]:
                    continue
                await self._runs.note(encode_event(EventKind.DROPPED, *key, part_key[0], [part_key[1]]))
            self.expired += 1
            text = "part %r of transaction %d of %r expired: %d messages were staged, and not committed in %d s"
            log.warning(text, part_key[1], part_key[0], key[1], part.messages, self._config.staged_timeout_ms // 1000)

    def _find_late(self) -> Steps[list[tuple[Key, PartKey]]]:
        now, timeout_s, budget = trio.current_time(), self._config.staged_timeout_ms / 1000, Budget(LOOK_US)
        late: list[tuple[Key, PartKey]] = []
        seen, self._seen = self._seen, {}
        for name, part in self._state.parts.freeze():
            chunks, since = seen.get(name, (-1, now))
            self._seen[name] = (part.chunks, since if chunks == part.chunks else now)
            is_late = chunks == part.chunks and now - since >= timeout_s and self._deliveries.get(name[0]) is None
            if is_late and not self._is_held(*name):
                late.append(name)
            if budget.is_over():
                yield
        return late

    def _is_held(self, key: Key, part_key: PartKey) -> bool:
        """Return whether a part is prepared by a producer that may still return."""
        producer = self._state.producers.get(key, UNKNOWN)
        if part_key[0] != producer.prepared or part_key[1] not in producer.prepared_names():
            return False
        return self._state.hour - producer.hour < self._remembered_hours(producer)

    def _remembered_hours(self, producer: ProducerState) -> int:
        limit = self._config.producer_hours
        if producer.is_ended:
            return min(ENDED_HOURS, limit)
        return min(BEGUN_HOURS, limit) if producer.committed < 0 and producer.prepared < 0 else limit

    async def _count_hours(self) -> None:
        while True:
            await trio.sleep(HOUR_S)
            try:
                await self.count_hour()
            except MartletError as error:
                log.warning("the hour that producers of external transactions were unused is not counted; %s", error)

    async def count_hour(self) -> None:
        """Count another hour of operation, and forget producers that were not used for long."""
        if not len(self._state.producers):
            return
        await self._runs.note(encode_event(EventKind.HOUR, self._state.hour + 1))
        for key in await self._broker.turns.finish(self._find_unused()):
            async with self._runs.turn(key):
                producer = self._state.producers.get(key)
                if producer is not None and self._is_unused(key, producer):
                    await self._runs.note(encode_event(EventKind.FORGOTTEN, *key))
                    self.forgotten += 1
                    log.info("producer %r of external transactions was not used for long and is forgotten", key[1])

    def _is_unused(self, key: Key, producer: ProducerState) -> bool:
        unused = self._state.hour - producer.hour >= self._remembered_hours(producer)
        return unused and key not in self._state.of_producer and key not in self._state.deliveries

    def _find_unused(self) -> Steps[list[Key]]:
        budget, keys = Budget(LOOK_US), list[Key]()
        for key, producer in self._state.producers.freeze():
            if self._is_unused(key, producer):
                keys.append(key)
            if budget.is_over():
                yield
        return keys
