"""What is known of messages that the broker holds: delayed ones, retries, and half messages.

A held message is in the log twice, with one body: in a topic of the broker's own, and once it is due or committed in
its topic. So this model reads every record of the log at the moment at which it becomes readable, and counts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, final

import trio

from martlet.records.codec import check_record
from martlet.records.layout import BLANK_MAGIC, MAGIC_AT, MAGICS, RECORD_BYTES_MIN, U32, RecordView
from martlet.store.format.notes import OWN_PREFIX
from martlet.tables.topics import BROKER_TOPICS, DLQ_PREFIX, RETRY_PREFIX, TIMER_TOPIC
from martlet.testing.clock import START_MS
from martlet.testing.disk import FakeDisk
from martlet_tx.formats import HALF_TOPIC, PARK_TOPIC

from .bodies import LEVELS_S, Hold, hold_of, key_of

if TYPE_CHECKING:
    from .life import Life

__all__ = ["CHECKS_MAX", "DATA", "HeldMessages", "LogTail", "Skews", "line_of"]

DATA: Final = "/data"
CHECKS_MAX: Final = 4
# Clocks are read to the millisecond.
EARLY_S: Final = 0.003
# The clock of timers follows a jump of the wall clock after 10 s, and looks at it each second.
FOLLOWED_S: Final = 12.0
RECALL: Final = b"TIMER_DEL_UNIQKEY"

Key: TypeAlias = tuple[str, bytes]  # line, body


def line_of(topic: str) -> str:
    """Return what counts the copies of a body: the retry or dead-letter topic, empty for all others together."""
    return topic if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else ""


@final
class LogTail:
    """Reads each record of the log once, from the files as the broker wrote them."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self.position = 0

    def read(self, disk: FakeDisk, end: int) -> Iterator[RecordView]:
        """Yield the records up to log position *end* that were not read yet."""
        while self.position < end:
            start = self.position - self.position % self._segment_bytes
            file = disk.files.get(f"{DATA}/commitlog/{start:020d}")
            at = self.position - start
            found = None if file is None else self._next(file.data, at, min(self._segment_bytes, end - start), start)
            if found is None:
                self.position = start + self._segment_bytes
            else:
                self.position = found.position + found.size
                yield found
        self.position = end

    @staticmethod
    def _next(data: bytearray, at: int, end: int, start: int) -> RecordView | None:
        """Return the first intact record of a segment from *at* on; a crash may have torn those before it."""
        while at + RECORD_BYTES_MIN <= min(end, len(data)):
            size, magic = (U32.unpack_from(data, at + more)[0] for more in (0, MAGIC_AT))
            if magic == BLANK_MAGIC:
                return None
            if magic in MAGICS and check_record(data, at, at + size, start + at):
                return RecordView(bytes(data[at : at + size]))
            at += 1
        return None


@final
class Skews:
    """By how much the machine's clock was wrong, and when."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int]] = [(0.0, 0)]

    def change(self, skew_ms: int) -> None:
        self._changes.append((trio.current_time(), skew_ms))

    @property
    def now_ms(self) -> int:
        return self._changes[-1][1]

    def between(self, since: float, until: float) -> list[int]:
        """Return each skew by which the broker may have told the time from *since* to *until*."""
        found: list[int] = []
        end = until
        for time, skew_ms in reversed(self._changes):
            if time <= until:
                found.append(skew_ms)
                if time <= since and min(end, since) - time >= FOLLOWED_S:
                    break
                end = time
        return found


@final
@dataclass(eq=False)
class Half:
    """A half message, and what became of its transaction."""

    body: bytes
    hold: Hold
    is_stored: bool = False  # its producer knows that it is
    commit_asked: bool = False
    ended: str = ""  # its producer knows that it is, by an answer over this link
    delivered: int = 0
    parked: int = 0
    checks: int = 0

    @property
    def name(self) -> str:
        return repr(self.body[:40])


@final
class HeldMessages:
    """Counts what was asked for, acknowledged and delivered; *fail* is called with the first violation."""

    def __init__(self, fail: Callable[[str], None], segment_bytes: int) -> None:
        self._fail = fail
        self._tail = LogTail(segment_bytes)
        self.skews = Skews()
        # How often the broker received a request to store a body, and when first.
        self.received: dict[Key, int] = defaultdict(int)
        self._first: dict[Key, float] = {}
        self._delay_s: dict[Key, float] = {}  # the shortest that a consumer asked for
        self.acknowledged: dict[Key, int] = defaultdict(int)
        self._held: set[Key] = set()
        self.seen: dict[Key, int] = defaultdict(int)
        self.halves: dict[str, Half] = {}
        self._recall_asked: set[bytes] = set()
        self._recalled: set[bytes] = set()
        self.delivered = 0
        self.committed = 0
        self.asked_back = 0
        self.recalls = 0

    # requests and answers

    def expect(self, topic: str, body: bytes, delay_s: float = 0.0) -> None:
        """A request to store *body* arrived."""
        key = line_of(topic), body
        self.received[key] += 1
        self._first.setdefault(key, trio.current_time())
        self._delay_s[key] = min(self._delay_s.get(key, delay_s), delay_s)
        hold = hold_of(body)
        if hold is not None and hold.is_half and not key[0]:
            self.halves.setdefault(key_of(body), Half(body, hold))

    def acknowledge(self, topic: str, body: bytes) -> None:
        """The broker says that *body* is stored."""
        key = line_of(topic), body
        self.acknowledged[key] += 1
        if key not in self._held and not self.seen[key]:
            self._fail(f"{body[:40]!r} is acknowledged, and neither held nor delivered")
        half = self.halves.get(key_of(body)) if not key[0] else None
        if half is not None:
            half.is_stored = True

    def ask_recall(self, body: bytes) -> None:
        """A request to recall the message with *body* arrived: from now on it may be delivered or not."""
        self._recall_asked.add(body)

    def recall(self, body: bytes) -> None:
        """The broker says that the message with *body* is recalled."""
        self.recalls += 1
        self._recalled.add(body)
        self._check_recalled(body)

    def recall_nothing(self, body: bytes) -> None:
        """The broker says that the message with *body* is not pending, as it may after its clock was set back."""
        if body not in self._recalled and not self.seen["", body]:
            self._fail(f"{body[:40]!r} is not found by a recall, and was neither delivered nor recalled")

    def _check_recalled(self, body: bytes) -> None:
        if body in self._recalled and self.seen["", body] and self.received["", body] == 1:
            self._fail(f"{body[:40]!r} is recalled and delivered")

    def ask_commit(self, key: str) -> None:
        if key in self.halves:
            self.halves[key].commit_asked = True

    def end(self, key: str, link: str) -> None:
        """The broker says over *link* that this transaction has ended as its producer wanted."""
        half = self.halves[key]
        half.ended = link
        if half.parked:
            self._fail(f"{half.name} was parked and is said to have ended")
        if half.delivered != (half.hold.kind == "C"):
            self._fail(f"the end of {half.name} is acknowledged, and it is delivered {half.delivered} times")

    def check(self, body: bytes, link: str) -> None:
        """The broker asks a producer about the transaction of *body*, perhaps a while ago if *link* was stalled."""
        half = self.halves[key_of(body)]
        half.checks += 1
        self.asked_back += 1
        if half.ended == link:
            self._fail(f"a producer is asked about {half.name}, whose transaction has ended")
        if half.checks > CHECKS_MAX:
            self._fail(f"a producer is asked about {half.name} for the {half.checks}th time")

    # the log

    def look(self, life: "Life", now: float | None = None) -> None:
        """Read what has become readable at time *now*."""
        store = life.store
        if store is not None and store.readable > self._tail.position:
            now = trio.current_time() if now is None else now
            for record in self._tail.read(life.disk, store.readable):
                self._see(record, now)

    def start(self, life: "Life", *, lossless: bool) -> None:
        """The broker has recovered. If that was not *lossless*, what was found is the truth from now on."""
        store = life.store
        assert store is not None
        if not lossless:
            self._tail.position = store.first_position
            self._held.clear()
            self.seen.clear()
            self._recalled.clear()
            for half in self.halves.values():
                half.is_stored, half.ended = False, ""
                half.delivered = half.parked = half.checks = 0
        if store.readable < self._tail.position:
            self._fail(f"the log was readable up to {self._tail.position} and ends at {store.readable} after a start")
        # These may have been stored long ago, but were not before their time then.
        self.look(life, math.inf)
        if not lossless:
            found = {key: min(count, 1) for key, count in self.acknowledged.items()}
            kept = {key: count for key, count in found.items() if self.seen[key] or key in self._held}
            self.acknowledged = defaultdict(int, kept)

    def _see(self, record: RecordView, now: float) -> None:
        topic = record.topic
        if topic.startswith(OWN_PREFIX) or (topic == TIMER_TOPIC and RECALL in record.properties):
            return
        body = bytes(record.body)
        if topic == PARK_TOPIC:
            self._see_parked(self.halves[key_of(body)])
        elif topic in BROKER_TOPICS:
            real = record.property("REAL_TOPIC")
            if real is not None:
                self._held.add((line_of(real), body))
                if topic == HALF_TOPIC and key_of(body) in self.halves:
                    self.halves[key_of(body)].is_stored = True
        else:
            self._see_delivered(line_of(topic), body, now)

    def _see_parked(self, half: Half) -> None:
        half.parked += 1
        if half.parked > 1 or half.ended or half.delivered:
            self._fail(f"{half.name} is parked {half.parked} times, and delivered {half.delivered} times")

    def _see_delivered(self, line: str, body: bytes, now: float) -> None:
        key = line, body
        self.seen[key] += 1
        if self.seen[key] > self.received[key]:
            self._fail(f"{body[:40]!r} was received {self.received[key]} times and is stored {self.seen[key]} times")
            return
        hold = hold_of(body)
        if line:
            self._check_delay(key, now, self._delay_s[key])
        elif hold is not None:
            self.delivered += 1
            self._check_recalled(body)
            if hold.is_half:
                self._see_committed(self.halves[key_of(body)])
            elif hold.kind == "D":
                ahead_ms = max(self.skews.between(now, now))
                self._check_due(body, now, (hold.number - START_MS - ahead_ms) / 1000)
            else:
                self._check_delay(key, now, LEVELS_S[hold.number - 1] if hold.kind == "L" else hold.number / 1000)

    def _check_delay(self, key: Key, now: float, delay_s: float) -> None:
        """Check that the delay is over, unless the clock of the machine was set forward meanwhile."""
        skews = self.skews.between(self._first[key], now)
        self._check_due(key[1], now, self._first[key] + delay_s - (max(skews) - min(skews)) / 1000)

    def _check_due(self, body: bytes, now: float, due: float) -> None:
        if now < due - EARLY_S:
            self._fail(f"{body[:40]!r} is delivered {due - now:.3f} s early")

    def _see_committed(self, half: Half) -> None:
        half.delivered += 1
        self.committed += 1
        if half.hold.kind != "C" or not half.commit_asked:
            self._fail(f"{half.name} is delivered, and its producer has not committed it")
        if half.delivered > 1 or half.parked:
            self._fail(f"{half.name} is delivered {half.delivered} times, and parked {half.parked} times")

    # the end

    def missing(self, prefix: bytes, line: str = "") -> list[bytes]:
        """Return what was acknowledged to the producer *prefix*, or in *line*, and was not delivered yet."""
        return [
            body
            for (of_line, body), count in self.acknowledged.items()
            if of_line == line
            and body.startswith(prefix)
            and self.seen[of_line, body] < count
            and body not in self._recall_asked
            and not self._is_half(of_line, body)
        ]

    @staticmethod
    def _is_half(line: str, body: bytes) -> bool:
        hold = hold_of(body)
        return not line and hold is not None and hold.is_half

    def open_halves(self) -> list[Half]:
        """Return the stored half messages of which nothing became yet; those to be rolled back show no end."""
        return [
            half
            for half in self.halves.values()
            if half.is_stored and half.hold.kind != "R" and not half.delivered + half.parked
        ]

    def check_end(self) -> None:
        """Everything has had the time to be delivered."""
        for line in {line for line, _ in self.acknowledged}:
            for body in self.missing(b"", line):
                self._fail(f"{body[:40]!r} was acknowledged {line and f'for {line} '}and is not delivered")
        for half in self.open_halves():
            self._fail(f"{half.name} is neither delivered nor parked after {half.checks} checks")
