"""What is known of popped messages: who has which until when, and what was acknowledged."""

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import trio
from tests.remoting.pop_talk import popped

from martlet.records.codec import decode_records
from martlet.testing.clock import START_MS
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import Handle

if TYPE_CHECKING:
    from .checker import Checker, Tap

__all__ = ["PoppedMessages"]

# Generations of leases are times, and all greater than the one before.
EARLY_S: Final = 0.1
# A delivery is noted in the log with the next commit, for which its answer does not wait.
NOTED_S: Final = 1.0

Message: TypeAlias = tuple[str, str, int, int]  # group, topic, queue id, offset


class Lease(NamedTuple):
    """A message is somebody's *until* a time, if the machine's clock keeps its skew and the broker knows after a crash.

    It does if it could note the lease in the log, which *noted_at* this time it has done.
    """

    until: float
    skew_ms: int
    noted_at: float
    start: int


def _message_of(request: Command) -> Message:
    """Return the message that an acknowledgement is for."""
    return (
        request.text("consumerGroup"),
        request.text("topic"),
        request.integer("queueId"),
        request.integer("offset"),
    )


@final
class PoppedMessages:
    """Checks what consumers pop."""

    def __init__(self, checker: "Checker") -> None:
        self._checker = checker
        self._leases: dict[Message, Lease] = {}
        self._acknowledged: set[Message] = set()
        # Group, position and body: after a power cut with async flush, other messages may get the same offsets.
        self._popped: set[tuple[str, int, bytes]] = set()
        # What was popped and not acknowledged since, with its position.
        self._unsettled: dict[Message, int] = {}
        self._followed: set[tuple[str, str, int]] = set()  # group, topic, queue id
        self._starts = 0
        self._ended_at = 0.0  # of the broker before this one
        self.deliveries = 0
        self.settled = 0

    def on_pop_answer(self, tap: "Tap", request: Command, answer: Command) -> None:
        group = request.text("consumerGroup")
        records = decode_records(answer.body)
        for each, record in zip(popped(answer), records, strict=True):
            place = each.topic, each.queue_id
            message = (group, *place, each.offset)
            self._checker.check_record(place, record)
            self._checker.check_on_disk(tap.life.disk, record.position, place, each.offset, each.body, "popped")
            self._checker.settle(place, each.offset, each.body, record.position, "popped")
            self._popped.add((group, record.position, each.body))
            self._unsettled[message] = record.position
            self._deliver(message, self._until(each.handle))

    def _until(self, handle: Handle) -> float:
        """Return when the lease of *handle* ends, which began when the broker looked and not when it answered."""
        ends_ms = handle.pop_ms + handle.invisible_ms - START_MS - self._checker.held.skews.now_ms
        return min(ends_ms / 1000, trio.current_time() + handle.invisible_ms / 1000)

    def _deliver(self, message: Message, until: float) -> None:
        now = trio.current_time()
        if message in self._acknowledged:
            self._checker.fail(f"{message} was acknowledged and is popped again")
        lease = self._leases.get(message)
        if lease is not None and self._holds(lease) and now < lease.until - EARLY_S:
            self._checker.fail(f"{message} is popped {lease.until - now:.3f} s before its invisible time ends")
        self._leases[message] = self._lease(until)
        self.deliveries += 1

    def on_settle_request(self, request: Command) -> None:
        """A consumer acknowledges a message or changes its time: until the answer nothing is sure."""
        message = _message_of(request)
        self._leases.pop(message, None)
        if request.code == RequestCode.ACK_MESSAGE:
            self._unsettled.pop(message, None)

    def on_settled(self, tap: "Tap", request: Command, answer: Command, asked_at: float) -> None:
        """The broker has answered that; a remark says that the handle was not valid any more.

        While the disk is full an acknowledgement is only in memory.
        """
        message, store = _message_of(request), tap.life.store
        if answer.remark or store is None or store.admission.refusal or store.flusher.failed is not None:
            return
        self.settled += 1
        if request.code == RequestCode.ACK_MESSAGE:
            self._acknowledged.add(message)
        else:
            until = asked_at + request.integer("invisibleTime") / 1000
            self._leases[message] = self._lease(until)

    def _lease(self, until: float) -> Lease:
        noted_at = max(trio.current_time(), self._checker.disturbed_until) + NOTED_S
        return Lease(until, self._checker.held.skews.now_ms, noted_at, self._starts)

    def _holds(self, lease: Lease) -> bool:
        """Return whether the broker must still know *lease*."""
        survives = lease.start == self._starts or lease.noted_at < self._ended_at
        return survives and lease.skew_ms == self._checker.held.skews.now_ms

    # starts, and the end

    def start(self, *, lossless: bool, ended_at: float) -> None:
        """The broker has recovered. If that was not *lossless*, it may know nothing of what was popped before."""
        self._starts += 1
        self._ended_at = ended_at
        if not lossless:
            self._leases.clear()
            self._unsettled.clear()
            self._acknowledged.clear()

    def follow(self, group: str, topic: str, queue_id: int) -> None:
        """Group *group* pops a queue from its beginning."""
        self._followed.add((group, topic, queue_id))

    def check_end(self) -> None:
        """Everything has had the time to be popped and acknowledged."""
        for message, position in self._unsettled.items():
            if position >= self._checker.first_position:
                self._checker.fail(f"{message} was popped, nobody acknowledged it, and it did not return")
        for group, topic, queue_id in sorted(self._followed):
            for offset, (body, position) in self._checker.truth[topic, queue_id].items():
                if position >= self._checker.first_position and (group, position, body) not in self._popped:
                    self._checker.fail(f"{topic}/{queue_id} {offset} {body[:40]!r} was never popped by {group}")
