"""Planted bugs: each breaks one promise of the broker, in one small function, for as long as its context lasts.

They are here to show that the simulation finds what it is for. A bug is a pair of a class or module and
a function that replaces one of its own.
"""

import errno
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import trio

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import HalfMessage
from martlet.groups.journal.journal_writer import GroupJournalWriter
from martlet.groups.journal.state import GroupQueueState
from martlet.groups.leases.queue_leases import Leases
from martlet.groups.queues import group_queues
from martlet.groups.queues.group_context import GroupContext
from martlet.message import Message
from martlet.net.output import Output
from martlet.net.peer import ServerPeer
from martlet.net.rounds import Rounds
from martlet.records.layout import GROUP_MASK, RecordView
from martlet.state.driven import Driven
from martlet.state.journal import NEXT_COMMIT
from martlet.state.keeper import RecordKeeper
from martlet.state.restoration import Restoration
from martlet.store import Queue, Store
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.store.disk import data_directory
from martlet.store.disk.files import Disk
from martlet.store.disk.segments import Segment
from martlet.store.disk.syncers import OffLoopSyncer
from martlet.store.format import atomic
from martlet.store.format.atomic import FIRST
from martlet.store.read import reading
from martlet.store.read.readers import Readers
from martlet.store.read.reading import LogReader
from martlet.store.recovery import scan
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.tables.offsets import CommittedOffsets
from martlet.testing.disk import Cut, FakeDisk
from martlet_remoting.consumers.long_poll import ParkedPulls
from martlet_remoting.consumers.pops import Pop, PopGroup
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_timer.levels import state as level_state
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.delivery import LevelDelivery
from martlet_timer.levels.journal_codec import Delivered
from martlet_timer.timers import journal_writer
from martlet_timer.timers.damped_clock import DampedClock
from martlet_timer.timers.recall import Recalls
from martlet_timer.timers.records import due_of
from martlet_tx import checks
from martlet_tx.checks import Checks
from martlet_tx.formats import NAME
from martlet_tx.transactions import HeldTransactions

from .held import DATA, LogTail
from .life import Life
from .world import Script, World

__all__ = ["BUGS", "Bug", "planted"]

LEVELS_JOURNAL: Final = "martlet.journal.delay-levels"
FIRST_FLAG: Final = FIRST << 24
# A record with a longer body has a whole sector in it.
LONG_BYTES: Final = 1536

# Where, and what makes a wrong function of the right one.
Patch = tuple[Any, str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Bug:
    """What is wrong, how it is made so, and where it shows."""

    name: str
    patches: tuple[Patch, ...]
    first: int  # the search begins at this seed; `python -m tests.sim --find-bug NAME` finds one
    plan: dict[str, Any]  # what is not as the seed has planned it
    script: Script | None  # the faults, if not those of the seed


def bug(name: str, *patches: Patch, first: int = 3, script: Script | None = None, **plan: Any) -> Bug:
    return Bug(name, patches, first, plan, script)


async def later(world: World, least_s: float, most_s: float) -> Life:
    """Return the running broker after a pause of a random length, or after more of them if none runs then."""
    while True:
        await trio.sleep(world.chance.uniform(least_s, most_s))
        if world.life is not None and world.life.alive:
            return world.life


async def written(world: World) -> tuple[int, list[RecordView]]:
    """Return the log position up to which records are written, and those that are not durable yet.

    Return them after a pause, once a broker serves.
    """
    while True:
        await trio.sleep(0.01)
        life = world.life
        if life is not None and life.store is not None and life.serving:
            tail = LogTail(world.plan.segment_bytes)
            tail.position = life.store.durable
            records = list(tail.read(life.disk, life.store.written))
            return tail.position, records


async def power_cuts(world: World) -> None:
    """Cut the power again and again, and do no other harm."""
    while True:
        life = await later(world, 1, 4)
        world.chance.choice([world.crash_now, world.crash_soon])(life)


async def full_disks(world: World) -> None:
    """Refuse a write now and then, because the disk is full, and cut the power later."""
    while True:
        life = await later(world, 0.5, 2)
        life.disk.fail_next("write", errno.ENOSPC, after=world.chance.randint(0, 5))
        world.checker.disturbed_until = trio.current_time() + 10
        if world.chance.random() < 0.2:
            world.crash_now(life)


async def crowded_disks(world: World) -> None:
    """Have the oldest segments removed again and again."""
    while True:
        life = await later(world, 1, 3)
        world.crowd_disk(life)


async def failed_syncs(world: World) -> None:
    """Let a sync fail, and cut the power soon afterwards."""
    while True:
        life = await later(world, 1, 3)
        life.disk.fail_next("sync", errno.EIO)
        world.checker.disturbed_until = trio.current_time() + 10
        await trio.sleep(world.chance.uniform(0, 0.5))
        world.crash(Cut.LOST, "after a failed sync")


async def torn_writes(world: World) -> None:
    """Cut the power when a long record is not durable, of which then only a sector amid its body is missing."""
    while True:
        _, records = await written(world)
        for record in records:
            if len(record.body) > LONG_BYTES:
                world.damage = partial(_tear, record, world.plan.segment_bytes)
                world.crash(Cut.TORN, f"amid the record at {record.position}")
                await trio.sleep(3)
                break


def _tear(record: RecordView, segment_bytes: int, disk: FakeDisk) -> None:
    start = record.position - record.position % segment_bytes
    file = disk.files.get(f"{DATA}/commitlog/{start:020d}")
    if file is not None:
        data = bytearray(record.buffer)
        middle = data.find(bytes(record.body)) + len(record.body) // 2
        data[middle : middle + 512] = bytes(512)
        file.change(record.position - start, bytes(data))
        file.sync()


async def lost_rounds(world: World) -> None:
    """Cut the power when two rounds of the delay levels are not durable, of which then only the first is missing."""
    while True:
        end, records = await written(world)
        notes = [number for number, record in enumerate(records) if record.topic == LEVELS_JOURNAL]
        segment_bytes = world.plan.segment_bytes
        if len(notes) < 2 or records[0].position // segment_bytes != end // segment_bytes:
            continue
        first = last = notes[0]
        while first and records[first].sys_flag & GROUP_MASK != FIRST_FLAG:
            first -= 1
        if records[first].topic != LEVELS_JOURNAL:
            kept = records[:first] + records[last + 1 :]
            world.damage = partial(_keep, kept, segment_bytes)
            world.crash(Cut.LOST, f"amid the rounds from {records[first].position} on")
            await trio.sleep(3)


def _keep(records: list[RecordView], segment_bytes: int, disk: FakeDisk) -> None:
    start = records[0].position - records[0].position % segment_bytes
    file = disk.files.get(f"{DATA}/commitlog/{start:020d}")
    if file is not None:
        for record in records:
            file.change(record.position - start, bytes(record.buffer))
        file.sync()


async def stops(world: World) -> None:
    """Stop the broker in order again and again, each time with a power cut right afterwards."""
    while True:
        life = await later(world, 2, 5)
        world.stop(life)


async def cuts_after_a_save(world: World) -> None:
    """Cut the power once the name of a saved table has not been durable for nearly two seconds."""
    since = -1.0
    while True:
        await trio.sleep(0.05)
        changed = {path for _, path, *_ in world.disk.name_changes}
        if f"{DATA}/config/consumerOffset.json.tmp" not in changed:
            since = -1.0
        elif since < 0:
            since = trio.current_time()
        elif trio.current_time() > since + 1.8:
            world.crash(Cut.LOST, "after a save")


# One queue with long files, and nothing but producers and consumers.
ONE_QUEUE: Final[dict[str, Any]] = {
    **dict.fromkeys(("producers", "topics", "queues"), 1),
    **dict.fromkeys(("delayers", "transactors", "retriers", "poppers", "light"), 0),
    "segment_bytes": 1 << 20,
    "chaos_s": 60.0,
}


@contextmanager
def planted(bug: Bug) -> Generator[None]:
    """Have *bug* in the broker."""
    with ExitStack() as stack:
        for owner, attribute, make in bug.patches:
            right = vars(owner)[attribute]
            setattr(owner, attribute, make(right))
            stack.callback(setattr, owner, attribute, right)
        yield


def _ignored(right: Any) -> Any:
    def nothing(*args: Any, **options: Any) -> None:
        return None

    return nothing


def _leave_name_unsynced(right: Any) -> Any:
    def began_after(self: Flusher, full: Segment) -> None:
        right(self, full)
        self._new_directory = False

    return began_after


def _read_past_durable(right: Any) -> Any:
    """Reads alone: what waits for the readable end of a queue still gets there."""

    def read_near(self: Readers, *args: Any) -> Any:
        readable = self._readable
        position, readable.position = readable.position, 1 << 62
        try:
            return right(self, *args)
        finally:
            readable.position = position

    return read_near


def _lose_wake_up(right: Any) -> Any:
    """Of several pulls that wait for a queue only the first is woken; of one, every third time none."""
    times = [0]

    def arrived(self: ParkedPulls, queue: Queue) -> None:
        times[0] += 1
        if times[0] % 3:
            right(self, queue)

    return arrived


def _reuse_offset(right: Any) -> Any:
    """A start forgets the newest message of a queue, so that the next gets its offset."""

    def begin_at(self: Store, *args: Any) -> None:
        right(self, *args)
        for queue in self.queues.all():
            if queue.tail:
                queue.drop_last()
                return

    return begin_at


def _commit_back(right: Any) -> Any:
    """Committed offsets are saved one too small."""

    def commit(self: CommittedOffsets, group: str, topic: str, queue_id: int, offset: int) -> None:
        right(self, group, topic, queue_id, max(0, offset - 1))

    return commit


def _append_twice(right: Any) -> Any:
    """Now and then a message is stored, and stored again."""
    times = [0]

    def append_all(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        times[0] += 1
        if times[0] % 40 == 0:
            right(self, items, atomic=atomic)
        result: AppendResult = right(self, items, atomic=atomic)
        return result

    return append_all


def _believe_record(right: Any) -> Any:
    """Whatever has the length of a record is one."""

    def check_record(data: Any, start: int, end: int, position: int, topic: bytes | None = None) -> bool:
        return end <= len(data)

    return check_record


@final
class _AnySum:
    """A checksum that is equal to every other."""

    def __and__(self, mask: int) -> "_AnySum":
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _any_sum(right: Any) -> Any:
    def crc32(data: bytes, value: int = 0) -> _AnySum:
        return _AnySum()

    return crc32


def _claim_more(right: Any) -> Any:
    """A checkpoint covers records whose entries are not in any file yet."""

    def take_checkpoint(self: Checkpointer, position: int, *args: Any, **options: Any) -> Callable[[], None]:
        work: Callable[[], None] = right(self, self._tail.written, *args, **options)
        return work

    return take_checkpoint


def _rename_unsynced(right: Any) -> Any:
    """A table's new name is not made durable."""

    def atomic_write(disk: Disk, path: str, *pieces: bytes, **options: Any) -> None:
        right(_NoDirectorySync(disk), path, *pieces, **options)

    return atomic_write


class _NoDirectorySync:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_directory(self, path: str) -> None:
        return None


def _answer_another(right: Any) -> Any:
    """Now and then the answer carries the number of the question before."""
    last = [0, 0]

    def handle(self: RemotingHandler, event: Any) -> Any:
        if not isinstance(event, Command):
            return right(self, event)
        last[0] += 1
        if event.code == RequestCode.PULL_MESSAGE and last[0] % 5 == 0:
            event.opaque = last[1]
        last[1] = event.opaque
        return right(self, event)

    return handle


def _drop_held(right: Any) -> Any:
    """Of several answers that wait for the disk, now and then the last is forgotten."""
    times = [0]

    def release(self: Any, readable: int) -> bool:
        times[0] += 1
        if len(self._held) > 1 and times[0] % 5 == 0:
            _, _, size = self._held.pop()
            self.held_bytes -= size
            self._count_unsent(-size)
        released: bool = right(self, readable)
        return released

    return release


def _release_early(right: Any) -> Any:
    """Held answers leave when their record was written, not when it is durable."""

    def queue(self: Any, peer: ServerPeer, readable: int) -> None:
        right(self, peer, NEXT_COMMIT)

    return queue


def _keep_offsets(right: Any) -> Any:
    """What groups have consumed is never written while the broker runs."""

    def changed(broker: Broker, *, offsets: bool) -> Any:
        return right(broker, offsets=False)

    return changed


def _ignore_sync_error(right: Any) -> Any:
    def sync(self: OffLoopSyncer) -> None:
        try:
            right(self)
        except OSError:
            return

    return sync


def _keep_refused(right: Any) -> Any:
    """What a full disk refused stays in its queues."""

    def take_back(self: Committer) -> None:
        self.pending = []

    return take_back


def _keep_light(right: Any) -> Any:
    """What a full disk refused leaves its own queue, and stays in light ones."""

    def take_back(self: Committer, count: int) -> None:
        self.light = []
        right(self, count)

    return take_back


def _name_nothing(right: Any) -> Any:
    def light_places(topic: bytes, properties: bytes) -> list[tuple[bytes, int]]:
        return []

    return light_places


def _skip_entry(right: Any) -> Any:
    """Now and then a read begins one message too late."""
    times = [0]

    def read(self: LogReader, queue: Queue, offset: int, end: int, *rest: Any, **options: Any) -> Any:
        times[0] += 1
        late = times[0] % 10 == 0 and offset + 1 < end
        return right(self, queue, offset + late, end, *rest, **options)

    return read


def _continue_late(right: Any) -> Any:
    """A projection that was restored from a snapshot misses the next message of each queue."""

    def continue_from(self: Restoration, driven: Driven, *args: Any) -> None:
        right(self, driven, *args)
        for cursor in driven.order.cursors.values():
            cursor.offset += 1

    return continue_from


def _keep_half_groups(right: Any) -> Any:
    """A start takes the records of a group that are there, whether or not it is whole."""

    def whole_group(*args: Any) -> int:
        end: int = right(*args)
        return max(1, end)

    return whole_group


def _always(right: Any) -> Any:
    def yes(*args: Any) -> bool:
        return True

    return yes


def _ahead(right: Any) -> Any:
    """A clock is two seconds ahead."""

    def now_ms(self: Any) -> Any:
        return right(self) + 2000

    return now_ms


def _early_stored(right: Any) -> Any:
    """Records look as if they had been stored earlier."""

    def stored_ms(self: DelayClock, position: int, store_ms: int) -> float:
        before: float = right(self, position, store_ms)
        return before - 500

    return stored_ms


def _note_no_timer(right: Any) -> Any:
    """The note of a delivery does not name what was delivered."""

    def gone(timers: Any) -> bytes:
        note: bytes = right([])
        return note

    return gone


def _forget_offsets(right: Any) -> Any:
    """A start delivers all messages of the delay levels again."""

    def known(self: LevelDelivery) -> Delivered:
        return {}

    return known


def _trust_newest(right: Any) -> Any:
    """The newest note of the delay levels says everything, whatever became of earlier ones."""

    def apply_note(known: Delivered | None, note: bytes) -> Delivered:
        delivered: Delivered = right(None, note)
        return delivered

    return apply_note


def _end_nothing(right: Any) -> Any:
    """A commit stores its message, and nothing says that the transaction has ended."""

    def end_with(
        self: HeldTransactions, half: HalfMessage, messages: list[Message], notes: Sequence[bytes] = ()
    ) -> int:
        if not messages:
            end: int = right(self, half, messages, notes)
            return end
        return self._broker.publish(messages[0], NAME).end

    return end_with


def _commit_always(right: Any) -> Any:
    """What is rolled back is delivered."""

    def end(self: HeldTransactions, half: HalfMessage, *, commit: bool) -> int:
        position: int = right(self, half, commit=True)
        return position

    return end


def _take_all(right: Any) -> Any:
    """Every half message is delivered at once."""

    def hold(self: HeldTransactions, message: Message) -> Message:
        return message

    return hold


async def _no_round(self: Checks) -> None:
    return None


def _never_check(right: Any) -> Any:
    return _no_round


def _forget_checks(right: Any) -> Any:
    """Checks are not counted."""

    def checked(offsets: Sequence[int]) -> bytes:
        note: bytes = right([])
        return note

    return checked


def _short_leases(right: Any) -> Any:
    """Popped messages return after half of their time."""

    def hand_out(self: PopGroup, pop: Pop, count_max: int, budget_bytes: int) -> Any:
        invisible_ms = pop.invisible_ms
        pop.invisible_ms //= 2
        try:
            return right(self, pop, count_max, budget_bytes)
        finally:
            pop.invisible_ms = invisible_ms

    return hand_out


def _skip_popped(right: Any) -> Any:
    """A start takes as settled what was popped and not acknowledged."""

    def restore(context: GroupContext, leases: Leases, known: GroupQueueState, offset: int) -> None:
        known.leases.clear()
        right(context, leases, known, offset)

    return restore


def _recall_nothing(right: Any) -> Any:
    """A recall is acknowledged, and the message stays pending."""

    async def recall(self: Recalls, topic: str, out_ms: int, unique: str, group: str = "") -> int:
        timers = await self._take(topic, due_of(out_ms), unique)
        self._delivery.give_back(timers)
        return self._writer.append(self._records_of(topic, out_ms, unique, group), []) if timers else 0

    return recall


def _no_keeper(right: Any) -> Any:
    """Retention removes what projections need."""

    async def release(self: RecordKeeper, end: int) -> None:
        self.released = end

    return release


BUGS: Final[tuple[Bug, ...]] = (
    bug("ack before flush", (ServerPeer, "hold_until", _ignored)),
    bug("answers released when written", (Rounds, "_send_or_hold", _release_early)),
    bug("read past durable", (Readers, "read_near", _read_past_durable)),
    bug("lost wake-up", (ParkedPulls, "_release_matching", _lose_wake_up)),
    bug("offset given twice", (Store, "_begin_at", _reuse_offset)),
    bug("message skipped", (LogReader, "read", _skip_entry)),
    bug("group offset goes back", (CommittedOffsets, "commit", _commit_back)),
    bug("group offset lost at a crash", (saving, "_tables_to_write", _keep_offsets), first=29),
    bug("appended twice", (Writer, "append_all", _append_twice)),
    bug(
        "torn record served",
        *((scan, "crc32", _any_sum), (scan, "record_crc_holds", _always), (reading, "check_record", _believe_record)),
        cuts=(Cut.TORN,),
        flush="async",
        script=torn_writes,
    ),
    bug(
        "checkpoint claims more than is on disk",
        (Checkpointer, "_prepare_checkpoint", _claim_more),
        cuts=(Cut.LOST,),
        first=5,
        script=power_cuts,
    ),
    bug(
        "rename without directory sync",
        (data_directory, "atomic_write", _rename_unsynced),
        # A new file of a segment or a queue would make the names of all files durable.
        **ONE_QUEUE,
        script=cuts_after_a_save,
    ),
    bug("segment's name is not synced", (Flusher, "began_after", _leave_name_unsynced)),
    bug("failed sync ignored", (OffLoopSyncer, "_sync", _ignore_sync_error), first=1, script=failed_syncs),
    bug("refused records stay in their queue", (Committer, "_undo_pending", _keep_refused), script=full_disks),
    bug("refused records stay in light queues", (Committer, "take_back", _keep_light), light=True, script=full_disks),
    bug("light queues forgotten at a start", (scan, "light_places", _name_nothing)),
    bug(
        "stop without a last flush",
        (Flusher, "flush_now", _ignored),
        flush="async",
        cuts=(Cut.LOST,),
        script=stops,
        first=20,
    ),
    bug("answer to another question", (RemotingHandler, "handle", _answer_another)),
    bug("projection restored and continued too late", (Restoration, "_continue_from", _continue_late)),
    bug(
        "half a group kept",
        *((scan, "whole_group", _keep_half_groups), (atomic, "may_begin_at", _always)),
        cuts=(Cut.TORN,),
        disk_delay_s=0.01,
        chaos_s=60.0,
        first=0,
        script=power_cuts,
    ),
    bug("held answer dropped", (Output, "release", _drop_held)),
    bug("timers early", (DampedClock, "now_ms", _ahead)),
    bug("delay levels early", (DelayClock, "stored_ms", _early_stored)),
    bug("timers delivered again after a start", (journal_writer, "gone", _note_no_timer)),
    bug("delay levels delivered again after a start", (LevelDelivery, "_delivered_before_start", _forget_offsets)),
    bug(
        "lost rounds of the delay levels hidden by later ones",
        (level_state, "apply_note", _trust_newest),
        flush="sync",
        segment_bytes=65536,
        disk_delay_s=0.2,
        delayers=4,
        first=0,
        script=lost_rounds,
    ),
    bug("recall that does nothing", (Recalls, "recall", _recall_nothing)),
    bug("commit that does not end its transaction", (HeldTransactions, "_end_with", _end_nothing)),
    bug("rolled back and delivered", (HeldTransactions, "end", _commit_always)),
    bug("half messages delivered", (HeldTransactions, "hold", _take_all)),
    bug("transactions not checked", (Checks, "round", _never_check)),
    bug("checks not counted", (checks, "checked_note", _forget_checks)),
    bug("popped messages return too early", (PopGroup, "hand_out", _short_leases)),
    bug("popped messages lost at a start", (group_queues, "restore", _skip_popped), poppers=2, script=power_cuts),
    bug("acknowledged messages return after a start", (GroupJournalWriter, "ack", _ignored)),
    bug(
        "retention removes what is needed",
        (RecordKeeper, "release", _no_keeper),
        delayers=2,
        transactors=2,
        script=crowded_disks,
    ),
)
