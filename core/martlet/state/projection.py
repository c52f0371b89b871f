"""What a projection is: state that is computed from records of the log and can be computed again.

The core drives it (`martlet.state.projections`): it restores the newest usable snapshot, replays the records after it,
and from then on applies records as they become readable, always in log order.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from martlet.store.layout import RecordView
from martlet.turns import Steps

__all__ = ["NOTHING", "Projection"]

# The floor of a projection that needs no record of the log.
NOTHING: Final = 1 << 62


class Projection(Protocol):
    """State computed from the records of some topics, in log order.

    The state changes in `apply`, `forget` and `restore` only, and depends on nothing but their arguments: neither the
    clock nor chance. So a replay always leads to the same state. All methods are called on the event loop.
    """

    name: str  # of its file, ``config/<name>.snapshot``
    topics: frozenset[str]  # the topics it follows; with another set a snapshot is not used

    def apply(self, records: Sequence[RecordView]) -> None:
        """Take the next *records* of the followed topics, in log order, each exactly once.

        A view is good until this returns; copy what the state keeps. Must take less than a millisecond or so.
        """
        ...

    def freeze(self) -> Steps[Sequence[bytes]]:
        """Render the present state in slices; the result is the pieces of the snapshot (`martlet.state.pack_rows`).

        The call and the first slice run on the event loop, take less than a millisecond together, and copy what may
        change. `martlet.state.Pages` is a table that need not be copied; a `dict` of 50,000 entries takes a
        millisecond. The other slices run in a worker thread, each for about
        a millisecond: the event loop runs only between them, as C code such as msgpack's keeps the interpreter's lock.
        """
        ...

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        """Replace the state by that of *data*, which `freeze` rendered, in slices; empty bytes mean the empty state.

        What came from records before *first_position*, where the log begins now, is dropped.

        Raises:
          StoreError: *data* is of another format. The projection is then restored from an older snapshot, or empty.
        """
        ...

    def forget(self, topic: str) -> None:
        """Drop what came from records of *topic*, which was deleted. Must take less than a millisecond or so."""
        ...

    def floor(self) -> int:
        """The position of the oldest record that the state still needs in the log; `NOTHING` if it needs none."""
        ...

    def roll(self, start: int, end: int) -> Steps[None]:
        """Append again what is needed of the records from position *start* to *end*, in slices; they are removed next.

        What was appended is made durable before the records go. They go even if `floor` still says otherwise.
        """
        ...
