"""Renewal of half messages: pending ones are copied to the end of the log before retention removes them."""

from collections.abc import Sequence
from functools import partial
from typing import Final, final

from martlet.broker import Broker
from martlet.contracts import HalfMessage
from martlet.errors import StoreError
from martlet.runtime.steps import WaitingSteps
from martlet_tx.transactions import HalfMessages, HeldTransactions

__all__ = ["HalfMessageRenewal"]

# Half messages to copy in a slice; each takes about 40 us.
RENEWED: Final = 64
HOUR_MS: Final = 3_600_000


@final
class HalfMessageRenewal:
    """Replaces pending half messages by copies before retention removes their segments."""

    def __init__(self, broker: Broker, held: HeldTransactions) -> None:
        self._broker = broker
        self._store = broker.store
        self._held = held

    def roll(self, end: int) -> WaitingSteps[None]:
        """Replace the pending half messages before log position *end* by copies at the end of the log, in slices.

        Half messages as old as retention allows are parked instead, as in RocketMQ.

        Raises:
          Refused: the disk is full.
          StoreError: the disk failed to read some half messages; all others were replaced.
        """
        self._store.committer.commit_early()  # transactions that end now must not be in doubt
        held, state = self._held, self._held.state.halves
        unreadable = 0
        for number in state.pages():
            offsets = [each for each in state.pending_in(number) if held.is_pending(each)]
            while offsets:
                portions: list[HalfMessages] = []
                yield partial(self._read_into, portions, offsets)
                (portion,) = portions
                offsets = offsets[portion.taken :]
                unreadable += portion.unreadable
                for first in range(0, len(portion.halves), RENEWED):
                    part = portion.halves[first : first + RENEWED]
                    self._renew_all([half for half in part if half.record.position < end])
                    yield None
                if portion.halves and portion.halves[-1].record.position >= end:
                    _check_read(unreadable)
                    return
        _check_read(unreadable)

    async def _read_into(self, portions: list[HalfMessages], offsets: Sequence[int]) -> None:
        portions.append(await self._held.read(offsets))

    def _renew_all(self, halves: Sequence[HalfMessage]) -> None:
        for half in halves:
            if self._held.is_pending(half.record.queue_offset):
                self._renew(half)

    def _renew(self, half: HalfMessage) -> None:
        checks = max(self._held.state.halves.checks(half.record.queue_offset), 0)
        age_ms = self._broker.clock.now_ms() - half.record.store_ms
        if age_ms >= self._store.config.file_reserved_hours * HOUR_MS:
            self._held.park(half, checks)
        else:
            self._held.renew(half, checks)


def _check_read(unreadable: int) -> None:
    if unreadable:
        raise StoreError(f"{unreadable} half messages cannot be read; check the disk")
