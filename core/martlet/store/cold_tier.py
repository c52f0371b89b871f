"""What a plugin provides that keeps the records of the log elsewhere, such as in an object store."""

from typing import Protocol

from martlet.store.read.cold import ColdReader
from martlet.store.upkeep.retention import Keeper

__all__ = ["ColdTier"]


class ColdTier(ColdReader, Keeper, Protocol):
    """Keeps copies of records, so that retention may remove them from the log and consumers still read them.

    Retention removes no record before the tier has released it. The tier tells what it has with `ColdRecords.keep` and
    ``ColdRecords.from_position`` (``Store.cold``). All methods are called on the event loop.
    """

    async def begin(self) -> None:
        """Tell what the tier has; called once, before projections are replayed and ports open.

        If it raises, the broker does not start.
        """
        ...
