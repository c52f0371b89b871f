"""The leases with which a group begins on a queue: none, or those that are stored."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from martlet.delivery.subscriptions import Start
from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.groups.journal.state import Lane
from martlet.groups.leases.leases import Leases
from martlet.groups.queues.share_context import ShareContext
from martlet.store import Queue

__all__ = ["first_leases"]

LAPSED_AT_START: Final = 512
RESTORED: Final = "an earlier run"  # the holder of messages leased before the broker started


def first_leases(
    context: ShareContext, queue: Queue, key: Key, start: Start | None, first: int, reached: int
) -> Leases:
    """Return the leases of a group on *queue*, and note that it begins if nothing is stored.

    Args:
      start: where to begin in a queue that the group has never consumed; None for the beginning of the queue.
      first: the offset of the first message that was found by its name; -1 if the group reads the queue.
      reached: the log position to note with the beginning, or -1.
    """
    owner = context.owner
    known, offset = owner.notes.stored(key), first
    if context.policy is None:
        groups = owner.groups
        if groups.take_reset(context.group, key.topic, queue.queue_id) >= 0:
            known = None
        offset = groups.offset(context.group, key.topic, queue.queue_id)
    if known is not None and known.next > queue.next_offset:
        known = None  # the state is of a deleted topic
    if known is not None:
        offset = known.low if first >= 0 else max(offset, known.low)
    elif offset < 0:
        offset = start(queue) if start is not None else context.topic.beginning_of(queue)
    # A power cut can lose messages whose offsets were committed; later messages get these offsets again.
    offset = min(offset, queue.next_offset)
    leases = Leases(
        offset,
        window=owner.config.lease_window,
        deliveries_max=context.deliveries_max(),
        lapses_count=context.leaving_counts,
    )
    if known is not None:
        restore(context, leases, known, offset)
    else:
        owner.notes.begin(key, offset, reached, context.marks_of(queue.queue_id))
    context.commit_offset(queue.queue_id, leases.table.low)
    return leases


def restore(context: ShareContext, leases: Leases, known: Lane, offset: int) -> None:
    """Restore the stored leases from *offset* on."""
    now, now_ms = context.times()
    for state, offsets in _alike(known.leases, offset):
        # A clock that was set back must not extend a lease.
        left_ms = min(max(state.generation + state.duration_ms - now_ms, 0), state.duration_ms)
        leases.restore(
            RESTORED, offsets, now + left_ms / 1000, state.deliveries, state.generation, state.duration_ms / 1000
        )
    leases.skip_to(known.next)
    context.owner.unsettled += leases.table.size
    leases.lapse(now, most=LAPSED_AT_START)
    context.owner.alarm(context, -math.inf)


def _alike(leases: Mapping[int, LeaseState], first: int) -> Iterator[tuple[LeaseState, list[int]]]:
    """Yield leases from offset *first* on in ascending order, those together that follow each other and are alike."""
    found: list[int] = []
    state: LeaseState | None = None
    for offset in sorted(leases):
        if offset < first:
            continue
        each = leases[offset]
        if each is not state:
            if state is not None:
                yield state, found
            state, found = each, []
        found.append(offset)
    if state is not None:
        yield state, found
