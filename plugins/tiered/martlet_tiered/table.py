"""The table of one broker's old messages, and who may write to it.

A broker takes the table over with a commit that raises its *epoch*. Each commit names the epoch of its writer and must
become exactly the next version, which the store grants to one writer only. So the broker that was the owner before
fails with its next commit, reads the log, sees a higher epoch and stops. Nobody looks at a clock.

Numbers that survive in the log (``txn`` actions), by application:

- ``martlet-owner``: the epoch. Every commit of ours has it.
- ``martlet-log``: the log position up to which ranges are uploaded.
- ``martlet-rewrite``: how many times files were replaced or removed.
- ``martlet-directory``, ``martlet-directory-log``: the epoch in which a data directory took the table over from another
  one the last time, and the log position at which the table ended then.

The second and third tell whether a commit counts whose answer was lost: all commits of an epoch are made by one broker,
one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

import pyarrow as pa
from deltalake.transaction import AddAction, RemoveAction

from martlet_tiered.delta import PARTITIONS, CommitNote, TableConflict, TableLog
from martlet_tiered.errors import Fenced, RangeRefused, TableRefused, TierError
from martlet_tiered.failures import TRANSIENT
from martlet_tiered.files import DataFile
from martlet_tiered.format.keys import INDEX_FOLDER, file_of_keys
from martlet_tiered.names import DATA_FOLDER, parse_data
from martlet_tiered.objects import Objects
from martlet_tiered.owners import NOBODY, Owners, Reach

__all__ = ["BROKER_PREFIX", "COMMIT_TRIES", "LEFTOVER_AGE_MS", "OWNER", "UPLOAD", "ColdTable", "reach_of"]

OWNER: Final = "martlet-owner"
UPLOAD: Final = "martlet-log"
REWRITE: Final = "martlet-rewrite"
DIRECTORY: Final = "martlet-directory"
DIRECTORY_BEGIN: Final = "martlet-directory-log"
BROKER_PREFIX: Final = "martlet:"  # of the table's name; the broker's follows
READER_MAX: Final = 1
WRITER_MAX: Final = 2
# Of one commit: each follows a foreign commit that came first, or a lost answer.
COMMIT_TRIES: Final = 20
# Commits of other programs between the last one of a broker and a takeover.
FOREIGN_MAX: Final = 100
# An upload of an object and its commit are over long before.
LEFTOVER_AGE_MS: Final = 24 * 3_600_000
# Programs that began to read an older version of the table need files that were removed since.
REMOVED_HOURS: Final = 7 * 24
NEVER_MS: Final = 1 << 62


@final
class ColdTable:
    """The Delta table of *broker*; not for several threads at once.

    `open` comes first, and `take_over` before anything is written. `foreign` has the commits of other programs since
    `open`, such as Delta's OPTIMIZE; take them out when you have read `files` again.
    """

    def __init__(self, objects: Objects, log: TableLog, broker: str) -> None:
        self.foreign: list[CommitNote] = []
        self._objects = objects
        self._log = log
        self._name = BROKER_PREFIX + broker
        self._epoch = 0
        self._owner = ""

    def __repr__(self) -> str:
        return f"ColdTable({self._log.url!r}, {self._name!r}, epoch={self._epoch})"

    @property
    def version(self) -> int:
        """The version of the table that was read last."""
        return self._log.version

    @property
    def epoch(self) -> int:
        """The epoch in which this broker owns the table; 0 if it has not taken it over."""
        return self._epoch

    @property
    def end(self) -> int | None:
        """The log position up to which ranges are in the table; None before the first."""
        return self._log.number(UPLOAD)

    @property
    def reach(self) -> Reach:
        """Which states of the broker count."""
        return reach_of(self._log)

    def open(self, schema: pa.Schema) -> None:
        """Read the table, or create it with the columns *schema*, which include the partition columns.

        Raises:
          TableRefused: there is something else at this place, or a table that this broker must not use.
        """
        if not self._log.open():
            self._create(schema)
        self._check()
        missing = sorted(set(schema.names) - {field.name for field in self._log.table.schema().fields})
        if missing:
            raise TableRefused(f"table {self._log.url!r} has no columns {', '.join(missing)}; set another tiered.url")

    def take_over(self, owner: str, last: Owners = NOBODY) -> int:
        """Become the owner of the table and return the new epoch; *owner* is different at each call of any broker.

        The table may have no other owner after *last*, the last ones of this data directory.

        Raises:
          Fenced: another data directory has taken the table over.
        """
        problem: TierError | None = None
        for _ in range(COMMIT_TRIES):
            self._refresh_log()
            before, epoch = self.version, self._log.number(OWNER) or 0
            numbers = {OWNER: epoch + 1}
            if epoch not in (0, last.epoch):
                newest = self._newest_owner()
                last.check(self._log.url, epoch, newest)
                if not last.have(newest):
                    numbers |= {DIRECTORY: epoch + 1, DIRECTORY_BEGIN: self.end or 0}
            problem = self._try_commit((), numbers, epoch + 1, owner)
            self._refresh_log()
            if self.version > before and self._log.note(before + 1).owner == owner:
                self._epoch, self._owner = epoch + 1, owner
                self._check_fence()
                return self._epoch
            _raise_if_final(problem)
        raise problem or TableConflict(f"table {self._log.url!r} changes all the time; stop its other writers")

    def refresh(self) -> None:
        """Read what was committed since.

        Raises:
          Fenced: another broker has taken the table over.
        """
        self._refresh_log()
        self._check_fence()

    def append(self, begin: int, end: int, files: Sequence[DataFile]) -> None:
        """Add the *files* of the log range from *begin* to *end*; without files, if the range has no messages.

        If it returns, the range is committed, once, also if an earlier call with this range has failed. If it raises
        another error than these, it may be committed or not.

        Raises:
          Fenced: another broker has taken the table over.
          RangeRefused: the table does not end at *begin*.
        """
        if not 0 <= begin < end:
            raise ValueError(f"range {begin} to {end} is empty; give the begin first")
        self._check_owner()
        self._check_names(files, begin, end)

        def check() -> bool:
            if self.end == end:
                return True
            if self.end not in (None, begin):
                raise RangeRefused(
                    f"range {begin} to {end} does not continue the table, which ends at {self.end}", self.end
                )
            return False

        self._commit([_add(file, True) for file in files], {UPLOAD: end}, check)

    def rewrite(
        self, removed: Sequence[DataFile], added: Sequence[DataFile], now_ms: int, *, changes_data: bool
    ) -> None:
        """Replace files: *changes_data* is false if the rows stay the same, and true if messages have expired.

        Errors are those of `append`; `RangeRefused` means that a file is not part of the table.
        """
        self._check_owner()
        self._check_names(added)
        gone = {file.path for file in removed}
        new = {file.path for file in added}
        if not gone or gone & new:
            raise ValueError("a rewrite removes files, and adds none of the same name")

        self.refresh()
        number = (self._log.number(REWRITE) or 0) + 1

        def check() -> bool:
            present = {file.path for file in self._log.files()}
            if self._log.number(REWRITE) == number or (new and new <= present and not gone & present):
                return True
            if not gone <= present:
                missing = min(gone - present)
                raise RangeRefused(
                    f"file {missing!r} is not part of the table any more; read its files again", self.end
                )
            return False

        actions: list[AddAction | RemoveAction] = [_remove(file, changes_data, now_ms) for file in removed]
        actions += [_add(file, changes_data) for file in added]
        self._commit(actions, {REWRITE: number}, check)

    @property
    def rewrites(self) -> int:
        """How many times files were replaced or removed."""
        return self._log.number(REWRITE) or 0

    def files(self) -> list[DataFile]:
        """Return the files of the table at `version`, in no order."""
        return self._log.files()

    def checkpoint(self) -> bool:
        """Write a checkpoint if one is due; whether it did. Call it after commits; a failure changes no commit."""
        return self._log.checkpoint()

    def garbage(self, now_ms: int, removed_hours: int = REMOVED_HOURS) -> list[str]:
        """Return the names of objects that nobody needs any more.

        These are files that were removed from the table *removed_hours* ago, and leftovers: files of this epoch or an
        older one that no commit names, a day after they were written; with 0 hours, those of older epochs at once. A
        file of a newer epoch may be about to be committed. An object with keys goes with its file.
        """
        listed = self._objects.list_folder(DATA_FOLDER)
        listed_keys = self._objects.list_folder(INDEX_FOLDER)
        self.refresh()
        known = {file.path for file in self._log.files()}
        known.update(self._log.removed(0))
        expired = set(self._log.removed(removed_hours))
        old_ms = now_ms - LEFTOVER_AGE_MS
        older_ms = old_ms if removed_hours else NEVER_MS
        found = [each.name for each in listed if each.name.removeprefix(DATA_FOLDER + "/") in expired]
        for each in listed:
            path = each.name.removeprefix(DATA_FOLDER + "/")
            if parse_data(path) is not None and self._is_leftover(path, known, each.modified_ms, old_ms, older_ms):
                found.append(each.name)
        for each in listed_keys:
            path = file_of_keys(each.name)
            if path in expired or self._is_leftover(path, known, each.modified_ms, old_ms, older_ms):
                found.append(each.name)
        return sorted(set(found))

    def _is_leftover(self, path: str, known: set[str], modified_ms: int, old_ms: int, older_ms: int) -> bool:
        """Return whether *path* is a leftover; one of an older epoch was modified before *older_ms*."""
        name = parse_data(path)
        epoch = name.epoch if name is not None else self._epoch
        before_ms = older_ms if epoch < self._epoch else old_ms
        return epoch <= self._epoch and path not in known and modified_ms < before_ms

    def collect(self, now_ms: int, removed_hours: int = REMOVED_HOURS) -> list[str]:
        """Remove `garbage` from the store and return its names; only the owner may."""
        self._check_owner()
        names = self.garbage(now_ms, removed_hours)
        self.remove(names)
        return names

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects from the store that `garbage` has returned; only the owner may."""
        self._check_owner()
        for name in names:
            self._objects.delete(name)

    def _create(self, schema: pa.Schema) -> None:
        found = self._objects.list_folder(DATA_FOLDER)
        if found:
            raise TableRefused(
                f"{self._log.url!r} is not empty and no Delta table: it has {found[0].name!r}; set another tiered.url"
            )
        try:
            self._log.create(self._name, schema)
        except TierError:
            # Its answer may have been lost, or another broker was faster.
            if not self._log.open():
                raise

    def _commit(
        self, actions: Sequence[AddAction | RemoveAction], numbers: dict[str, int], check: Callable[[], bool]
    ) -> None:
        """Commit until *check*, which is called with the newest state, returns true: whatever an attempt raised."""
        problem: TierError | None = None
        for _ in range(COMMIT_TRIES):
            self.refresh()
            if check():
                return
            _raise_if_final(problem)
            problem = self._try_commit(actions, {OWNER: self._epoch, **numbers}, self._epoch, self._owner)
        self.refresh()
        if not check():
            raise problem or TableConflict(f"table {self._log.url!r} changes all the time; stop its other writers")

    def _try_commit(
        self, actions: Sequence[AddAction | RemoveAction], numbers: dict[str, int], epoch: int, owner: str
    ) -> TierError | None:
        try:
            self._log.commit(actions, numbers, {"epoch": epoch, "owner": owner})
        except TierError as problem:
            return problem
        return None

    def _refresh_log(self) -> None:
        self.foreign += [note for note in self._log.refresh() if not note.epoch]
        self._check()

    def _check(self) -> None:
        """Raise `TableRefused` unless this is the table of this broker, in a version of Delta's protocol we know."""
        url, table = self._log.url, self._log.table
        protocol, metadata = table.protocol(), table.metadata()
        if protocol.min_reader_version > READER_MAX or protocol.min_writer_version > WRITER_MAX:
            raise TableRefused(
                f"table {url!r} has version {protocol.min_reader_version}/{protocol.min_writer_version} of Delta's "
                f"protocol; this broker knows {READER_MAX}/{WRITER_MAX}"
            )
        if metadata.name != self._name:
            is_ours = (metadata.name or "").startswith(BROKER_PREFIX)
            what = (
                f"belongs to broker {metadata.name.removeprefix(BROKER_PREFIX)!r}"
                if is_ours
                else "is not of a cold tier"
            )
            raise TableRefused(f"table {url!r} {what}; set tiered.url to a prefix of its own for each broker")
        if metadata.partition_columns != list(PARTITIONS):
            raise TableRefused(f"table {url!r} has other partition columns than date and kind; set another tiered.url")

    def _check_fence(self) -> None:
        epoch = self._log.number(OWNER) or 0
        if epoch > self._epoch > 0:
            raise self._fenced(epoch, self._epoch)
        if epoch < self._epoch:
            raise TableRefused(f"table {self._log.url!r} has lost commits: its owner is of epoch {epoch}; restore it")

    def _fenced(self, epoch: int, own: int) -> Fenced:
        return Fenced(
            f"table {self._log.url!r} has an owner of epoch {epoch} now, and this broker is of {own}; stop one "
            "of them, or give each a prefix of its own",
            epoch,
        )

    def _newest_owner(self) -> str:
        """Return the owner that made the newest commit of a broker; empty if it cannot be found."""
        for version in range(self.version, max(self.version - FOREIGN_MAX, -1), -1):
            note = self._log.note(version)
            if note.epoch:
                return note.owner
        return ""

    def _check_owner(self) -> None:
        assert self._epoch, "take the table over first"

    def _check_names(self, files: Sequence[DataFile], *positions: int) -> None:
        for file in files:
            name = file.name
            if (
                name is None
                or (name.epoch, name.date, name.kind) != (self._epoch, file.date, file.kind)
                or (positions and (name.begin, name.end) != positions)
            ):
                raise ValueError(f"file {file.path!r} is not named after its epoch, range, date and kind")


def reach_of(log: TableLog) -> Reach:
    """Return which states of the broker count with a table whose log is *log*."""
    return Reach(log.number(UPLOAD) or 0, log.number(DIRECTORY) or 0, log.number(DIRECTORY_BEGIN) or 0)


def _raise_if_final(problem: TierError | None) -> None:
    if problem is not None and not isinstance(problem, (*TRANSIENT, TableConflict)):
        raise problem


def _add(file: DataFile, changes_data: bool) -> AddAction:
    return AddAction(file.path, file.bytes, file.partition, file.modified_ms, changes_data, file.statistics)


def _remove(file: DataFile, changes_data: bool, now_ms: int) -> RemoveAction:
    return RemoveAction(file.path, changes_data, now_ms, file.bytes, file.partition)
