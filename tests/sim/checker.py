"""The omniscient observer: sees every byte at the broker's edge and every byte on its disk, and knows what may be.

It stands between the server and each link (`Tap`). When an answer begins to leave, that is
the moment of truth: what it says must be on the disk now, not soon.
"""

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias, final
from zlib import crc32

import trio

from martlet.contracts import Buffer
from martlet.errors import CorruptRecord, MartletError
from martlet.message import Message, Placed, Record
from martlet.records.codec import decode_record, decode_records
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.format.light import is_light, places
from martlet.store.format.notes import OWN_PREFIX
from martlet.tables.topics import BROKER_TOPICS, RETRY_PREFIX
from martlet.testing.disk import FakeDisk
from martlet.testing.links import End
from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .bodies import LEVELS_S, hold_of, key_of, tag_of
from .held import DATA, HeldMessages, line_of
from .popped import PoppedMessages

if TYPE_CHECKING:
    from .life import Life

__all__ = ["Checker", "Tap", "Violation"]

Place: TypeAlias = tuple[str, int]  # topic, queue id
Stored: TypeAlias = tuple[bytes, int]  # body, log position
Contents: TypeAlias = dict[Place, dict[int, Stored]]  # by queue offset

# The longest that anything may take that is not held up by a link or a full disk, in virtual seconds.
PATIENCE_S: Final = 5.0
# A pull whose queue has more for it is answered within this.
WAKE_S: Final = 2.0
SENDS: Final = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
EVERYTHING: Final = "*"
COMMIT: Final = 8
# Messages that are looked up by their key after each start.
KEYS_TRIED: Final = 10


def bodies_of(command: Command) -> list[bytes]:
    """What a send wants stored."""
    if command.code == RequestCode.SEND_BATCH_MESSAGE:
        return [member.body for member in decode_batch(command.body)]
    return [command.body]


class Violation(AssertionError):
    """Something happened that must never happen."""


@final
class Asked:
    """A request that the broker has received and not answered."""

    __slots__ = ("command", "late_since", "since")

    def __init__(self, command: Command, since: float) -> None:
        self.command = command
        self.since = since
        self.late_since = -1.0


@final
class Tap:
    """The server's end of a link, watched."""

    def __init__(self, checker: "Checker", life: "Life", end: End, name: str) -> None:
        self.checker = checker
        self.life = life
        self.end = end
        self.name = name
        self.asked: dict[int, Asked] = {}
        self._requests = FrameBuffer()
        self._answers = FrameBuffer()
        self._sent = 0
        self._offered = 0

    def receive(self, limit: int) -> bytes | None:
        data = self.end.receive(limit)
        if data:
            self._requests.receive_data(data)
            for command in self._requests.commands():
                self.checker.on_request(self, command)
        return data

    def send(self, pieces: list[Buffer]) -> int:
        self.end.send([])  # nothing leaves by a link that broke
        data = b"".join(pieces)
        new = data[self._offered - self._sent :]
        if new:
            self._offered += len(new)
            self._answers.receive_data(new)
            for command in self._answers.commands():
                self.checker.on_answer(self, command)
        taken = self.end.send(pieces)
        self._sent += taken
        return taken

    def pending(self) -> bool:
        return False

    async def wait_readable(self) -> None:
        await self.end.wait_readable()

    async def wait_writable(self) -> None:
        await self.end.wait_writable()

    def close(self) -> None:
        self.end.close()

    def linger(self) -> None:
        self.end.linger()

    @property
    def blocked(self) -> bool:
        """Whether the client takes nothing just now, so that it must wait for its answers."""
        return self._offered > self._sent


@final
class Checker:
    """What is known to be so, and the first thing that was not."""

    def __init__(self, *, sync: bool, segment_bytes: int, offsets_persist_s: float) -> None:
        self.sync = sync
        self.failure: Violation | None = None
        self.broken = trio.Event()
        self.trace: list[str] = []
        self._segment_bytes = segment_bytes
        self._offsets_persist_s = offsets_persist_s
        self._digest = hashlib.sha256()
        # What somebody was told is stored, or has read.
        self.truth: Contents = defaultdict(dict)
        # What lies before may have been removed by retention.
        self.first_position = 0
        # The queue ends that somebody was told.
        self.ends: dict[Place, int] = defaultdict(int)
        # What groups asked to commit, and what they were told is committed: (time, offset), newest last.
        self.committing: dict[tuple[str, Place], list[tuple[float, int]]] = defaultdict(list)
        self.committed: dict[tuple[str, Place], list[tuple[float, int]]] = defaultdict(list)
        self.acknowledged = 0
        self.delivered = 0
        self.disturbed_until = 0.0  # tables could not be written until then
        # Where the groups of the ledger begin that were acknowledged.
        self.moved: dict[int, int] = {}
        self.held = HeldMessages(self.fail, segment_bytes)
        self.popped = PoppedMessages(self)

    # telling

    def note(self, text: str) -> None:
        """Put an event into the trace."""
        line = f"{trio.current_time():.6f} {text}"
        self.trace.append(line)
        self._digest.update(line.encode() + b"\n")

    @property
    def digest(self) -> str:
        """A hash over the whole trace."""
        return self._digest.hexdigest()

    def fail(self, text: str) -> None:
        """Remember the first violation; the simulation ends."""
        if self.failure is None:
            self.note(f"VIOLATION {text}")
            self.failure = Violation(text)
            self.broken.set()

    # the broker's edge

    def on_request(self, tap: Tap, command: Command) -> None:
        if not tap.life.alive:
            return
        self.note(f"{tap.name} asks {command.code} #{command.opaque} {len(command.body)} B")
        if not command.flag & FLAG_ONEWAY:
            tap.asked[command.opaque] = Asked(command, trio.current_time())
        if command.code in SENDS:
            for body in bodies_of(command):
                self.held.expect(command.text("b"), body)
        elif command.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            self._remember(self.committing, command)
        elif command.code == RequestCode.END_TRANSACTION and command.integer("commitOrRollback") == COMMIT:
            self.held.ask_commit(command.text("msgId"))
        elif command.code == RequestCode.RECALL_MESSAGE:
            self.held.ask_recall(command.body)
        elif command.code == RequestCode.CONSUMER_SEND_MSG_BACK:
            self._expect_back(command)
        elif command.code in (RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME):
            self.popped.on_settle_request(command)

    def on_answer(self, tap: Tap, answer: Command) -> None:
        if not tap.life.alive:
            return
        self.held.look(tap.life)
        if not answer.flag & FLAG_RESPONSE:
            self._on_question(tap, answer)
            return
        self.note(f"{tap.name} is answered {answer.code} #{answer.opaque} {len(answer.body)} B")
        asked = tap.asked.pop(answer.opaque, None)
        if asked is None:
            self.fail(f"answer #{answer.opaque} to {tap.name}, who has no such question open")
            return
        request = asked.command
        if request.code in SENDS:
            self._check_stored_answer(tap, request, answer)
        elif request.code == RequestCode.PULL_MESSAGE:
            self._check_pull_answer(tap, request, answer)
        elif request.code == RequestCode.POP_MESSAGE:
            if answer.code == ResponseCode.SUCCESS:
                self.popped.on_pop_answer(tap, request, answer)
        elif answer.code != ResponseCode.SUCCESS:
            return
        elif request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            self._remember(self.committed, request)
        elif request.code == RequestCode.END_TRANSACTION:
            self.held.end(request.text("msgId"), tap.name)
        elif request.code == RequestCode.RECALL_MESSAGE:
            if answer.remark:
                self.held.recall_nothing(request.body)
            else:
                self.held.recall(request.body)
        elif request.code == RequestCode.CONSUMER_SEND_MSG_BACK:
            self.held.acknowledge(RETRY_PREFIX + request.text("group"), request.body)
        elif request.code in (RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME):
            self.popped.on_settled(tap, request, answer, asked.since)

    def _on_question(self, tap: Tap, command: Command) -> None:
        """The broker asks a client something."""
        self.note(f"{tap.name} is asked {command.code} #{command.opaque}")
        if command.code == RequestCode.CHECK_TRANSACTION_STATE:
            (record,) = decode_records(command.body)
            self.held.check(record.body, tap.name)

    def _expect_back(self, command: Command) -> None:
        """A consumer gives a message back; simulated ones send its body along, which the broker ignores."""
        delay_s = LEVELS_S[command.integer("delayLevel") - 1]
        self.held.expect(RETRY_PREFIX + command.text("group"), command.body, delay_s)

    @staticmethod
    def _remember(table: dict[tuple[str, Place], list[tuple[float, int]]], request: Command) -> None:
        place = request.text("topic"), request.integer("queueId")
        history = table[request.text("consumerGroup"), place]
        history.append((trio.current_time(), request.integer("commitOffset")))

    def _check_stored_answer(self, tap: Tap, request: Command, answer: Command) -> None:
        if answer.code != ResponseCode.SUCCESS:
            return
        place = request.text("b"), answer.integer("queueId")
        offset = answer.integer("queueOffset")
        if hold_of(request.body) is not None:
            self._check_held_answer(tap, request, int(answer.text("msgId")[-16:], 16))
            return
        positions = [int(each[-16:], 16) for each in answer.text("msgId").split(",")]
        bodies = bodies_of(request)
        if len(positions) != len(bodies):
            self.fail(f"{len(bodies)} messages were sent and {len(positions)} are acknowledged")
        for position, body in zip(positions, bodies, strict=False):
            record = self.check_on_disk(tap.life.disk, position, place, offset, body, "acknowledged")
            for topic, queue_id, number in places(record) if record is not None else [(*place, offset)]:
                self.settle((topic, queue_id), number, body, position, "acknowledged")
            self.acknowledged += 1
            self.held.acknowledge(place[0], body)
            offset += 1

    def _check_held_answer(self, tap: Tap, request: Command, position: int) -> None:
        record = self._record_on_disk(tap.life.disk, position, f"{request.body[:40]!r}")
        if record is not None and record.body != request.body:
            self.fail(f"{request.body[:40]!r} is acknowledged, and at {position} stands {record.body[:40]!r}")
        self.acknowledged += 1
        self.held.acknowledge(request.text("b"), request.body)

    def _check_pull_answer(self, tap: Tap, request: Command, answer: Command) -> None:
        place = request.text("topic"), request.integer("queueId")
        wanted = request.integer("queueOffset")
        if answer.code not in (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ):
            return
        following, end = answer.integer("nextBeginOffset"), answer.integer("maxOffset")
        self.ends[place] = max(self.ends[place], end)
        if answer.code == ResponseCode.SUCCESS:
            self._check_records(tap, request, wanted, following, answer.body)
        if following > end:
            self.fail(f"{place} sends a consumer to {following}, behind its end {end}")
        if answer.code in (ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED):
            skipped = self._wanted(request, wanted, max(following, wanted + 1))
            if skipped and not (skipped[0] > wanted and following <= wanted):
                self.fail(f"{place} was asked for {wanted} and leads to {following}, past stored messages {skipped}")

    def _wanted(self, request: Command, first: int, end: int) -> list[int]:
        """The offsets of known messages from *first* to before *end* that a pull asks for and that must be there."""
        table = self.truth[request.text("topic"), request.integer("queueId")]
        expression = request.text("subscription")
        return [
            offset
            for offset in range(first, end)
            if offset in table
            and table[offset][1] >= self.first_position
            and expression in (EVERYTHING, tag_of(table[offset][0]))
        ]

    def _check_records(self, tap: Tap, request: Command, wanted: int, following: int, body: bytes) -> None:
        place = request.text("topic"), request.integer("queueId")
        expression = request.text("subscription")
        try:
            records = decode_records(body)
        except CorruptRecord as error:
            self.fail(f"{place} at {wanted} serves what is no message: {error}")
            return
        for record in records:
            offset = record.queue_offset
            self.check_record(place, record)
            if expression not in (EVERYTHING, tag_of(record.body)):
                self.fail(f"{place} was asked for {expression} and serves {tag_of(record.body)} at {offset}")
            passed = self._wanted(request, wanted, offset)
            if offset < wanted or passed:
                self.fail(f"{place} was asked for {wanted} and serves {offset}, past stored messages {passed}")
            self.check_on_disk(tap.life.disk, record.position, place, offset, record.body, "delivered")
            self.settle(place, offset, record.body, record.position, "delivered")
            self.delivered += 1
            wanted = offset + 1
        if following < wanted:
            self.fail(f"{place} serves up to {wanted} and leads back to {following}")

    def check_record(self, place: Place, record: Record) -> None:
        said = [each for each in places(record) if is_light(each[0])] if is_light(place[0]) else places(record)[:1]
        if (*place, record.queue_offset) not in said:
            self.fail(f"{place} serves a message of {record.topic}/{record.queue_id}")
        if not self.held.received.get((line_of(place[0]), record.body)):
            self.fail(f"{place} serves at {record.queue_offset} a message that nobody sent: {record.body[:40]!r}")

    def check_on_disk(
        self, disk: FakeDisk, position: int, place: Place, offset: int, body: bytes, what: str
    ) -> Record | None:
        """Return the record of what is said to be stored; it must be there at this moment: synced, or if async written.

        None where retention has removed it, or nothing is there.
        """
        record = self._record_on_disk(disk, position, f"{place} {offset} is {what}")
        if record is not None and ((*place, offset) not in places(record) or record.body != body):
            self.fail(
                f"{place} {offset} is {what}, and at {position} stands {record.queue_offset} {record.body[:40]!r}"
            )
        return record

    def _record_on_disk(self, disk: FakeDisk, position: int, what: str) -> Record | None:
        if position < self.first_position:
            return None
        start = position - position % self._segment_bytes
        path = f"{DATA}/commitlog/{start:020d}"
        file = disk.files.get(path)
        if file is None or (self.sync and disk.stable_files.get(path) is not file):
            self.fail(f"{what} and its segment {path} has no durable name")
            return None
        try:
            return decode_record(file.stable if self.sync else file.data, position - start, position)
        except (CorruptRecord, MartletError, ValueError, IndexError) as error:
            self.fail(f"{what} and not on the disk at {position}: {error}")
            return None

    def settle(self, place: Place, offset: int, body: bytes, position: int, what: str) -> None:
        known = self.truth[place].setdefault(offset, (body, position))
        if known != (body, position):
            self.fail(
                f"{place} {offset} is {what} as {body[:40]!r} at {position} and was {known[0][:40]!r}, {known[1]}"
            )
        self.ends[place] = max(self.ends[place], offset + 1)

    # the ledger

    def on_move(self, life: "Life", number: int, stored: list[tuple[Message, Placed]]) -> None:
        """Group *number* is acknowledged."""
        if not life.alive:
            return
        self.note(f"group {number} is stored at {stored[0][1].position}")
        for message, placed in stored:
            place = message.topic, placed.queue_id
            offset, body = placed.queue_offset, message.body
            record = self.check_on_disk(life.disk, placed.position, place, offset, body, "acknowledged")
            for topic, queue_id, number_there in places(record) if record is not None else [(*place, offset)]:
                self.settle((topic, queue_id), number_there, body, placed.position, "acknowledged")
        self.moved[number] = stored[0][1].position

    def check_ledger(self, life: "Life", when: str) -> None:
        """The state of the projection is what the log says, whole groups, and everything that was acknowledged."""
        store = life.store
        assert store is not None
        first = store.first_position
        known = {position: row for position, row in life.ledger.rows.items() if position >= first}
        stored = {position: row for position, row in life.stored_rows().items() if position >= first}
        for position in sorted(known.keys() | stored.keys()):
            if known.get(position) != stored.get(position):
                self.fail(f"{when} the ledger has {known.get(position)} at {position}, the log {stored.get(position)}")
        for (topic, queue_id), table in self.truth.items():
            for offset, (body, position) in table.items():
                row = topic, queue_id, offset, crc32(body), (key_of(body),)
                if position >= first and known.get(position) != row and topic in life.ledger.topics:
                    self.fail(f"{when} the ledger has {known.get(position)} at {position}, {row} was acknowledged")
        keys = {key for *_, of_row in known.values() for key in of_row}
        for number in {int(key.lstrip("ab")) for key in keys if not key.startswith("p")}:
            if not {f"a{number}", f"b{number}", str(number)} <= keys:
                self.fail(f"{when} the ledger has a part of group {number} only")
        for number, position in self.moved.items():
            if position >= first and str(number) not in keys:
                self.fail(f"{when} the ledger lacks group {number}, which was acknowledged at {position}")

    # the broker's inside

    def step(self, life: "Life") -> None:
        """What holds between any two steps of any task."""
        store = life.store
        if store is None or not life.alive:
            return
        limit = store.durable if self.sync else store.written
        if store.readable > limit:
            self.fail(f"readable up to {store.readable}, stored up to {limit}")
        if store.readable < life.readable:
            self.fail(f"readable went back from {life.readable} to {store.readable}")
        life.readable = store.readable
        self.held.look(life)
        if store.first_position > self.first_position:
            self.fail(f"the log begins at {store.first_position}; up to {self.first_position} was removed")

    def on_unlink(self, life: "Life", path: str) -> None:
        """The broker is about to remove a file: of the log only the oldest, and never the one in use."""
        directory, _, name = path.rpartition("/")
        if directory != f"{DATA}/commitlog" or not life.alive:
            return
        start = int(name)
        end = start + self._segment_bytes
        self.note(f"segment {start} goes")
        if start <= self.first_position and (life.store is None or end <= life.store.durable):
            self.first_position = max(self.first_position, end)
        elif self.sync and any(
            start <= position < end for table in self.truth.values() for _, position in table.values()
        ):
            self.fail(f"segment {start} with known messages is removed; the log begins at {self.first_position}")

    def watch(self, life: "Life") -> None:
        """What holds at any time, looked at several times a second: nobody waits for nothing, nothing grows."""
        now = trio.current_time()
        store = life.store
        assert store is not None
        if store.flusher.failed is not None or store.admission.refusal:
            self.disturbed_until = now + PATIENCE_S
        for tap in life.taps:
            if tap.end.closed or tap.end.broken:
                tap.asked.clear()
            for asked in list(tap.asked.values()):
                self._watch_asked(life, store, tap, asked, now)
        self._watch_memory(life)

    def _watch_asked(self, life: "Life", store: Store, tap: Tap, asked: Asked, now: float) -> None:
        request = asked.command
        late_after = PATIENCE_S
        late = True
        if request.code == RequestCode.POP_MESSAGE:
            late = now > asked.since + request.integer("pollTime") / 1000 + PATIENCE_S
        if request.code == RequestCode.PULL_MESSAGE:
            queue = store.queues.find(request.text("topic"), request.integer("queueId"))
            offset = request.integer("queueOffset")
            if request.text("subscription") == EVERYTHING:
                more = queue is not None and store.readers.end_offset(queue) > offset
            else:
                more = bool(self._wanted(request, offset, self.ends[request.text("topic"), request.integer("queueId")]))
            suspend_s = request.integer("suspendTimeoutMillis") / 1000
            late = more or now > asked.since + suspend_s + PATIENCE_S
            late_after = WAKE_S
        if not late or tap.blocked or life.stalled(tap.name) or store.flusher.failed is not None or life.stop.is_set():
            asked.late_since = -1.0
        elif asked.late_since < 0:
            asked.late_since = now
        elif now - asked.late_since > late_after:
            self.fail(f"{tap.name} waits since {asked.since:.3f} for the answer to {request!r}")

    def _watch_memory(self, life: "Life") -> None:
        config = life.server.config
        slack = 65536
        for peer in life.server._peers.values():
            if peer.output.unsent_bytes > config.unsent_bytes_max + slack:
                self.fail(f"{peer.output.unsent_bytes} bytes wait for one peer")
        if life.server.pending.unsent_bytes != sum(peer.output.unsent_bytes for peer in life.server._peers.values()):
            self.fail("the sum of what waits is not what waits")
        waiting = sum(len(tap.asked) for tap in life.taps)
        if len(life.state.parked) > waiting:
            self.fail(f"{len(life.state.parked)} pulls are held, {waiting} questions are open")

    # starts

    def on_start(self, life: "Life", *, lossless: bool, ended_at: float) -> None:
        """The broker has recovered: everything known is there, and nothing else than what was sent.

        *lossless* is false after a power cut with async flush: then what was found is the truth from now on.
        """
        store = life.store
        assert store is not None
        self.held.start(life, lossless=lossless)
        found = self.contents(store)
        if not lossless:
            self.truth = defaultdict(dict, {place: dict(table) for place, table in found.items()})
            self.ends = defaultdict(int)
            self.committed.clear()
            self.committing.clear()
            self.moved.clear()
        self.compare(found, "after a start")
        self.check_keys(store)
        for (topic, queue_id), end in list(self.ends.items()):
            queue = store.queues.find(topic, queue_id)
            if end and (queue is None or store.readers.end_offset(queue) < end):
                self.fail(f"{topic}/{queue_id} ended at {end} and ends at {queue} after a start")
        self._check_copies(found)
        self.popped.start(lossless=lossless, ended_at=ended_at)
        self._check_offsets(life, ended_at)
        self._begin_offsets(life)

    def compare(self, found: Contents, when: str) -> None:
        """Check that *found* has every known message, apart from those that retention removed."""
        for place, table in self.truth.items():
            for offset, stored in table.items():
                if stored[1] >= self.first_position and found.get(place, {}).get(offset) != stored:
                    self.fail(f"{place} {offset} {stored[0][:40]!r} was known and is gone {when}")

    def check_keys(self, store: Store) -> None:
        """Some of what is known is found by its key."""
        known = [
            (topic, stored)
            for (topic, _), table in self.truth.items()
            for stored in table.values()
            if stored[1] >= self.first_position and not is_light(topic)
        ]
        for topic, (body, position) in known[:: max(1, len(known) // KEYS_TRIED)]:
            found = finish_now(store.lookup.query_keys(topic, key_of(body).encode(), 64, 0, 2**62))
            if position not in [decode_record(record).position for record in found.records]:
                self.fail(f"{key_of(body)} of {topic} is stored at {position} and is not found by its key")

    def contents(self, store: Store) -> Contents:
        """Everything that clients may read, by queue and offset."""
        found: Contents = {}
        for topic, queues in store.queues.topics.items():
            if topic.startswith(OWN_PREFIX) or topic in BROKER_TOPICS:
                continue  # a journal: see `check_ledger`; or held messages: see `HeldMessages`
            for queue_id, queue in queues.items():
                table = found[topic, queue_id] = {}
                offset = queue.first_offset
                while offset < store.readers.end_offset(queue):
                    result = store.readers.read(queue, offset, 32, 65536)
                    try:
                        records = decode_records(b"".join(result.pieces))
                    except CorruptRecord as error:
                        self.fail(f"{queue} at {offset} reads what is no message: {error}")
                        return found
                    for record in records:
                        self.check_record((topic, queue_id), record)
                        table[record.queue_offset] = record.body, record.position
                    if result.next_offset <= offset:
                        self.fail(f"{queue} at {offset} leads nowhere: {result.status!r}")
                        return found
                    offset = result.next_offset
        return found

    def _check_copies(self, found: Contents) -> None:
        copies: dict[tuple[str, bytes], int] = defaultdict(int)
        for (topic, _), table in found.items():
            for body, _ in table.values():
                copies[topic if is_light(topic) else line_of(topic), body] += 1
        for (line, body), count in copies.items():
            received = self.held.received["" if is_light(line) else line, body]
            if count > received:
                self.fail(f"{body[:40]!r} was received {received} times and is stored {count} times")

    def _check_offsets(self, life: "Life", ended_at: float) -> None:
        """Committed offsets are not beyond the end, and those older than the interval are still there."""
        store = life.store
        assert store is not None
        sure_until = ended_at - self._offsets_persist_s - 1.0
        for (group, place), history in self.committed.items():
            offset = life.broker.groups.offsets.get(group, *place)
            queue = store.queues.find(*place)
            if self.sync and offset > (store.readers.end_offset(queue) if queue else 0):
                self.fail(f"{group} has committed {offset} of {place}, which ends before")
            sure = [entry for entry in history if entry[0] <= sure_until]
            if sure and ended_at > self.disturbed_until:
                time, last = sure[-1]
                possible = {last, *(at for asked, at in self.committing[group, place] if asked >= time)}
                if offset not in possible:
                    self.fail(f"{group} had committed {last} of {place} long before the end and is at {offset}")

    def _begin_offsets(self, life: "Life") -> None:
        """What a start has found of committed offsets is what is known from now on."""
        now = trio.current_time()
        for table in (self.committed, self.committing):
            for group, place in list(table):
                table[group, place] = [(now, life.broker.groups.offsets.get(group, *place))]
