"""The interface of a projection: state that is computed from records of the log and can be recomputed at any time.

The core drives it (`martlet.state.projections`): it restores the newest valid snapshot, replays the records after it,
and then applies records as they become readable, always in log order.
"""

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps, WaitingSteps

__all__ = ["NOTHING", "HoldsMessages", "Projection"]

# The floor of a projection that needs no record of the log.
NOTHING: Final = 1 << 62


class Projection(Protocol):
    """State computed from the records of some topics, in log order.

    The state changes only in `apply`, `forget` and `restore`, and depends only on their arguments, not on the clock or
    on random numbers. So a replay always leads to the same state. All methods are called on the event loop.
    """

    name: str  # the name of its file, ``config/<name>.snapshot``
    topics: frozenset[str]  # the topics it follows; a snapshot with another set is not used

    def apply(self, records: Sequence[RecordView]) -> None:
        """Apply the next *records* of the followed topics; called in log order, exactly once for each record.

        A view is valid until `apply` returns; copy the parts that the state keeps. Must take less than about a
        millisecond.
        """
        ...

    def freeze(self) -> Steps[Sequence[bytes]]:
        """Render the current state in slices; the result is the pieces of the snapshot (`martlet.state.pack_rows`).

        The call and the first slice run on the event loop. Together they must take less than a millisecond and copy
        everything that can change: a `dict` of 50,000 entries takes a millisecond, and `martlet.state.Pages` is a
        table that need not be copied. The other slices run in a worker thread and should take about a millisecond
        each: C code such as msgpack's holds the interpreter's lock, so the event loop runs only between slices.
        """
        ...

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        """Replace the state with *data*, rendered by `freeze`, in slices; empty bytes mean the empty state.

        Drop the state from records before *first_position*, where the log begins now.

        Raises:
          StoreError: *data* has another format. The projection is then restored from an older snapshot, or empty.
        """
        ...

    def forget(self, topic: str) -> None:
        """Drop the state from records of the deleted *topic*. Must take less than about a millisecond."""
        ...

    def floor(self) -> int:
        """Return the position of the oldest record that the state still needs; `NOTHING` if it needs none."""
        ...

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        """Append again the state from records between *start* and *end* that is still needed, before they are removed;
        in slices.

        These records are the oldest of the log, and rarely in memory: yield a call that reads them in a worker thread.

        The log may already have a later record that is not applied yet and that replaces one of these. Records appended
        here come after it, so if the state depends on their order, append nothing before that record is applied:
        `Projections.may_have_newer` tells.

        The records are removed once the appended ones are durable, regardless of the result of `floor` then.
        """
        ...


@runtime_checkable
class HoldsMessages(Protocol):
    """A projection of messages that nobody receives until its plugin delivers them.

    Their number is kept with the snapshot: a start without the plugin logs it.
    """

    def held(self) -> int:
        """Return the number of these messages."""
        ...
