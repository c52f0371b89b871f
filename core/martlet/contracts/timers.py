"""The capability of timers: pending messages, their number, and their recall."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

__all__ = ["PendingTimer", "Timers"]


class PendingTimer(Struct, frozen=True):
    """A message that is held until it is due: its identity, and TIMER_OUT_MS for its recall handle.

    ``repeats`` describes for people how often the message is repeated; empty if it is not.
    """

    due_ms: int
    topic: str
    queue_id: int
    unique: str
    out_ms: int
    store_ms: int
    body_bytes: int
    repeats: str = ""


class Timers(Struct, frozen=True):
    """A capability: delayed messages are held until they are due. Offer one with the stage that holds them.

    Attributes:
      recall: called with (topic, TIMER_OUT_MS, unique key, producer group) for a client that may publish to the topic;
        recalls the message, and returns the log position after which that is durable, 0 if no such message is held.
        Raises `Refused` (Reason.NOT_FOUND) if its time is over. None if messages cannot be recalled.
      count: called with times in ms since 1970; returns the number of held messages that are due before each of these
        times, and the number of all held messages with a time.
      pending: called with (time, number); returns the first *number* messages that are due at this time or later.
      running: returns values for RocketMQ's GET_BROKER_RUNTIME_INFO, by their names there.
      levels: the delays of the levels, as in RocketMQ's messageDelayLevel.
      end_repeated: called with (topic, key) for a client that may publish to the topic; ends the repeated message whose
        copies have the property ``scheduledJobId`` TOPIC:KEY. Returns the log position after which that is durable, 0
        if there is no such message. May raise `Refused`. None if messages cannot be repeated.
    """

    recall: Callable[[str, int, str, str], Awaitable[int]] | None = None
    count: Callable[[Sequence[int]], Awaitable[list[int]]] | None = None
    pending: Callable[[int, int], Awaitable[list[PendingTimer]]] | None = None
    running: Callable[[], Mapping[str, str]] | None = None
    levels: str = ""
    end_repeated: Callable[[str, str], int] | None = None
