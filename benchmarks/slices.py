"""The longest piece of work that keeps the event loop, of work that is done in slices or should take no time at all.

    python benchmarks/slices.py [WORK ...] [--rounds 9]

Everything runs in this process, without sockets and without a disk. Of each piece the least processor time of all
rounds counts, which other work on the machine hardly lengthens; printed is the longest piece of each work, in ms, with
its place in the order and how many there are. Work after "rendered" is done in a worker thread, which lets the event
loop run only between two pieces.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

from martlet.delivery.cursor import Cursor, CursorPlace
from martlet.delivery.fanout import Encoding
from martlet.delivery.listeners import Listeners, Wakes
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.routing.selection import EVERYTHING
from martlet.delivery.subscriptions import TopicSubscription, from_tail
from martlet.delivery.tail_reader import TailReader
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.runtime.steps import Budget, Steps
from martlet.state import Pages, pack_rows, unpack_rows
from martlet.tables.groups import Group, Groups
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock
from martlet_remoting.consumers.long_poll import ParkedPulls, PendingPulls, Pull
from martlet_remoting.consumers.timeouts import Timeouts

GROUPS: Final = 40_000
QUEUES: Final = 8
ENTRIES: Final = 100_000
PULLS: Final = 100_000
SUBSCRIPTIONS: Final = 100_000
CURSORS: Final = 100_000

# Yields after each piece; what comes before the first yield is not measured.
Work = Callable[[], Iterator[None]]


def groups() -> Groups:
    table = Groups(ManualClock(1), auto_create=True, offsets_max=GROUPS * QUEUES)
    for number in range(GROUPS - len(table.names())):
        table.update(Group(f"group-{number}"))
        for queue_id in range(QUEUES):
            table.commit(f"group-{number}", "T", queue_id, number)
    return table


TABLE: Final = groups()


def freeze_offsets() -> Iterator[None]:
    yield
    TABLE.offsets_in_steps(0)
    yield


def freeze_groups() -> Iterator[None]:
    yield
    TABLE.json_in_steps(0)
    yield


def render_offsets() -> Iterator[None]:
    yield
    yield from TABLE.offsets_in_steps(0)
    yield


STATE: Final[Pages[str, tuple[Any, ...]]] = Pages()
for number in range(ENTRIES):
    STATE[f"session-{number}"] = number, "owner", [number] * 3


def freeze_state() -> Steps[Sequence[bytes]]:
    return pack_rows(1, ((name, *row) for name, row in STATE.freeze()))


def freeze_projection() -> Iterator[None]:
    yield
    next(freeze_state())
    yield


def render_projection() -> Iterator[None]:
    steps = freeze_state()
    yield
    yield from steps
    yield


SNAPSHOT: Final[list[bytes]] = []


def snapshot() -> bytes:
    if not SNAPSHOT:
        steps = freeze_state()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                SNAPSHOT.append(b"".join(done.value))
                break
    return SNAPSHOT[0]


def restore_projection() -> Iterator[None]:
    data, restored, budget = snapshot(), {}, Budget()
    yield
    for name, *row in unpack_rows(1, data):
        restored[name] = row
        if budget.is_over():
            yield
    yield


class FakeQueue:
    """A queue whose records nobody reads."""

    topic = "T"
    queue_id = first_offset = next_offset = last_end = 0
    watchers: list[Any] | None = None

    def end_offset(self, queue: object) -> int:
        return 0


def parked(pulls: int, connections: int) -> tuple[ParkedPulls, list[PendingPulls]]:
    """So many held pulls of one queue."""
    queue: Any = FakeQueue()
    held = ParkedPulls(queue, Timeouts(), pulls)
    pendings = [PendingPulls(RecordingPeer(), pulls, queue) for _ in range(connections)]
    nothing: Any = None
    for number in range(pulls):
        pending = pendings[number % connections]
        pull = Pull(pending, number, "G", queue, 0, 32, 1 << 18, EVERYTHING, nothing, nothing)
        pull.suspend_until = 15.0
        held.admit(pull)
        held.park(pull)
    return held, pendings


def release_pulls() -> Iterator[None]:
    held, _ = parked(PULLS, 25)
    yield
    held.wake_topic("T")
    yield
    while held.is_releasing:
        held.release_some()
        yield


def expire_pulls() -> Iterator[None]:
    held, _ = parked(PULLS, 25)
    timeouts = held._timeouts
    yield
    while len(timeouts):
        timeouts.expire_some(20.0)
        yield


def drop_pulls() -> Iterator[None]:
    held, pendings = parked(4096, 1)
    yield
    held.drop(pendings[0])
    yield


def wake_subscriptions() -> Iterator[None]:
    queue: Any = FakeQueue()
    topic: Any = SimpleNamespace(read_queues=1, queue=lambda queue_id: queue)
    nothing: Any = SimpleNamespace(of=lambda topic: None, join=lambda *arguments: None)
    owner: Any = SimpleNamespace(store=None, tails=nothing, encodings=nothing)
    encoding = Encoding("none", lambda piece: [])
    listeners, wakes = Listeners(), Wakes()
    for _ in range(SUBSCRIPTIONS):
        subscription = TopicSubscription(owner, RecordingPeer(), topic, encoding, EVERYTHING, from_tail, 1, None)
        subscription.follow(topic, new=True)
        listeners.add(subscription)
    yield
    wakes.wake(queue, listeners, set())
    yield
    while wakes.is_waking:
        wakes.wake_some()
        yield


def deliver_to_cursors() -> Iterator[None]:
    """A message for very many cursors with one filter; for the first, their route is new."""
    routes: RouteCache[Any] = RouteCache()
    queue: Any = FakeQueue()
    topic: Any = SimpleNamespace(name="T", read_queues=1, queue=lambda queue_id: queue)
    readers: Any = SimpleNamespace(readable=0, end_offset=lambda queue: 0)
    committer: Any = SimpleNamespace(undone=0)
    store: Any = SimpleNamespace(readers=readers, want_durable=lambda position: None, committer=committer)
    tails: Any = SimpleNamespace(store=store)
    reader = TailReader(tails, ("T",), [topic])
    feed: Any = SimpleNamespace(pending_bytes=0)
    for _ in range(CURSORS):
        cursor = Cursor(feed, RecordingPeer().wake, {"#": None}, 0, 1 << 18, None, None)
        cursor.place = CursorPlace.TAIL
        routes.add("#", cursor)
    reader.attach(routes)
    message = Message("T", b"x", b"TAGS\x01a/b\x02")
    record = bytes(encode_record(message, 0, 0, 0, 1, bytes(8)))
    found = [(0, record, 0, len(record), "a/b", queue)]
    yield
    reader._routing = reader._route_all(found, 0)
    while reader._route_some():
        yield
    yield


WORKS: Final[dict[str, Work]] = {
    f"freezing the offsets of {GROUPS:,} groups": freeze_offsets,
    "the same, rendered": render_offsets,
    f"freezing {GROUPS:,} groups": freeze_groups,
    f"freezing a projection of {ENTRIES:,} entries": freeze_projection,
    "the same projection, rendered": render_projection,
    "the same projection, restored": restore_projection,
    f"a record that {SUBSCRIPTIONS:,} subscriptions wait for": wake_subscriptions,
    f"a record that {CURSORS:,} cursors with one filter get": deliver_to_cursors,
    f"a record that {PULLS:,} held pulls wait for": release_pulls,
    f"{PULLS:,} held pulls whose time is over": expire_pulls,
    "a connection with 4,096 held pulls that closes": drop_pulls,
}


def measure(work: Work, rounds: int) -> list[float]:
    """Return the least time of each piece, in ms."""
    least: list[float] = []
    for _ in range(rounds):
        pieces = work()
        next(pieces)
        gc.collect()
        gc.disable()
        for number in range(1 << 30):
            began = time.thread_time()
            ended = next(pieces, work) is work
            took = (time.thread_time() - began) * 1000
            if ended:
                break
            if number == len(least):
                least.append(took)
            least[number] = min(least[number], took)
        gc.enable()
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"words of: {', '.join(WORKS)}; all without")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"{'work':52} longest, ms   piece  of")
    for name, work in WORKS.items():
        if not options.works or any(word in name for word in options.works):
            least = measure(work, options.rounds)
            longest = max(range(len(least)), key=least.__getitem__)
            print(f"{name:52}{least[longest]:12.2f}{longest + 1:8}{len(least):4}", flush=True)


if __name__ == "__main__":
    main()
