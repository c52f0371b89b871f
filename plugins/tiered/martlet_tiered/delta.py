"""The log of a Delta table: its state, one commit at a time, and checkpoints, through deltalake.

In a local directory a commit counts once it is durable: deltalake links its file before the data are on the disk. So
what it has written is synced before anything relies on it (`Objects.sync`), and a file that a power cut left
incomplete, on which nothing has relied yet, is set aside before deltalake reads the log.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties, RemoveAction
from msgspec import Struct

from martlet_tiered.config import TieredConfig
from martlet_tiered.errors import AccessRefused, ObjectMissing, StoreUnavailable, TableRefused, TierError
from martlet_tiered.failures import explain
from martlet_tiered.files import DataFile
from martlet_tiered.location import LOCAL, TierLocation
from martlet_tiered.names import DATA_FOLDER, LOG_FOLDER, commit_name, parse_commit
from martlet_tiered.objects import Objects, StoredObject
from martlet_tiered.remote import BACKOFF_MAX_S, BACKOFF_S

__all__ = ["CHECKPOINT_COMMITS", "PARTITIONS", "CommitNote", "TableConflict", "TableLog"]

Result = TypeVar("Result")

PARTITIONS: Final = ("date", "kind")
CHECKPOINT_COMMITS: Final = 50
PROPERTIES: Final[Mapping[str, str]] = {
    "delta.checkpointInterval": str(CHECKPOINT_COMMITS),
    "delta.logRetentionDuration": "interval 7 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
# Ours in commitInfo, where Delta leaves room for the writer.
NOTE: Final = "martlet"
LAST_CHECKPOINT: Final = f"{LOG_FOLDER}/_last_checkpoint"
CHECKPOINT: Final = ".checkpoint.parquet"
PARQUET: Final = b"PAR1"
TORN: Final = "torn"
# Checkpoints are made by `TableLog.checkpoint`: one that fails must not look like a failed commit.
NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
HTTP: Final = re.compile(r"status code|error sending request|HTTP error|Generic (?:S3|GCS|MicrosoftAzure) error")
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")


class TableConflict(TierError):
    """Another commit has the version that this one was to get."""


class CommitNote(Struct, frozen=True):
    """What a commit says about itself; `epoch` is 0 and `owner` empty if another program made it.

    `time_ms` is when it was made, by the clock of its writer; 0 if it does not say.
    """

    version: int
    operation: str
    epoch: int
    owner: str
    time_ms: int = 0


def _explain(error: Exception, where: str) -> TierError:
    text = str(error)
    if HTTP.search(text):
        return explain(error, where)
    if isinstance(error, CommitFailedError):
        return TableConflict(f"table {where!r} has another commit already; try again")
    first = ESCAPES.sub("", text).partition("\n")[0]
    if "Permission denied" in text:
        return AccessRefused(f"table {where!r} cannot be used: permission denied; give it to the broker's user")
    if isinstance(error, OSError):
        return StoreUnavailable(f"table {where!r} cannot be used: {first}; check the disk")
    if "nsupported" in first:
        return TableRefused(f"table {where!r} needs a newer program: {first}; set tiered.url to another place")
    return TableRefused(f"table {where!r} cannot be read: {first}; restore it, or set tiered.url to an empty place")


def _read_note(version: int, data: bytes) -> CommitNote:
    for line in data.splitlines():
        action = json.loads(line)
        info = action.get("commitInfo")
        if isinstance(info, dict):
            note = info.get(NOTE)
            note = note if isinstance(note, dict) else {}
            time_ms = info.get("timestamp")
            return CommitNote(
                *(version, str(info.get("operation")), note.get("epoch", 0), note.get("owner", "")),
                time_ms if isinstance(time_ms, int) else 0,
            )
    return CommitNote(version, "unknown", 0, "")


def _is_whole_commit(data: bytes) -> bool:
    try:
        return bool(data) and all(isinstance(json.loads(line), dict) for line in data.splitlines())
    except ValueError:
        return False


@final
class TableLog:
    """The log of the table at `DATA_FOLDER` of *objects*; not for several threads at once.

    `open` or `create` comes first. All methods raise what `Objects` raises, and `TableRefused` if the log cannot be
    read.
    """

    def __init__(self, objects: Objects, location: TierLocation, config: TieredConfig) -> None:
        self.url: Final = f"{location.prefix if location.scheme == LOCAL else location.url}/{DATA_FOLDER}"
        self._objects = objects
        self._options = {} if location.scheme == LOCAL else location.options | _client_options(config)
        self._table: DeltaTable | None = None

    def __repr__(self) -> str:
        return f"TableLog({self.url!r})"

    @property
    def table(self) -> DeltaTable:
        """The table at the version that was read last."""
        assert self._table is not None, "open or create the log first"
        return self._table

    @property
    def version(self) -> int:
        """The version that was read last."""
        return self.table.version()

    def number(self, app: str) -> int | None:
        """Return the number of the last commit of *app*: the ``txn`` actions of Delta."""
        return self.table.transaction_version(app)

    def open(self) -> bool:
        """Read the log from its last checkpoint on; whether there is one."""
        if self._objects.can_tear:
            self._set_torn_aside()
        try:
            self._table = self._ask(lambda: DeltaTable(self.url, storage_options=self._options))
        except ObjectMissing:
            return False
        return True

    def create(self, name: str, schema: pa.Schema) -> None:
        """Create the table and read it. Raises `TableConflict` if somebody has created it in the meantime."""
        self._ask(
            lambda: DeltaTable.create(
                self.url,
                schema=schema,
                partition_by=list(PARTITIONS),
                name=name,
                configuration=PROPERTIES,
                storage_options=self._options,
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=NO_HOOKS,
            )
        )
        self.open()

    def refresh(self) -> list[CommitNote]:
        """Read what was committed since the log was read last; return the notes of these commits."""
        before = self.version
        try:
            self._ask(self.table.update_incremental)
        except TierError:
            # The handle may be half updated.
            if not self.open():
                raise
        added = range(before + 1, self.version + 1)
        if self._objects.can_tear:
            self._objects.sync([commit_name(version) for version in added])
        return [self.note(version) for version in added]

    def note(self, version: int) -> CommitNote:
        """Return what commit *version* says about itself."""
        try:
            return _read_note(version, self._objects.read(commit_name(version)))
        except ObjectMissing:  # Delta's clean-up of the log has removed it
            return CommitNote(version, "unknown", 0, "")

    def commit(self, actions: Sequence[AddAction | RemoveAction], numbers: Mapping[str, int], note: object) -> None:
        """Write the commit that follows `version`; call `refresh` to read it, whether this raises or not.

        *numbers* become ``txn`` actions. An error says nothing about the commit: its answer may have been lost.

        Raises:
          TableConflict: there is a newer commit.
        """
        properties = CommitProperties(
            custom_metadata={NOTE: note},
            max_commit_retries=0,  # with more, deltalake commits after a newer commit if both only add files
            app_transactions=[Transaction(app, number) for app, number in numbers.items()],
        )
        self._ask(
            lambda: self.table.create_write_transaction(
                list(actions),
                "append",
                self.table.schema(),
                list(PARTITIONS),
                commit_properties=properties,
                post_commithook_properties=NO_HOOKS,
            )
        )

    def files(self) -> list[DataFile]:
        """Return the files of the table at `version`."""
        rows = pa.table(self._ask(self.table.get_add_actions)).to_pylist()
        return [
            DataFile(
                unquote(row["path"]),
                str(row["partition"]["date"]),
                row["partition"]["kind"],
                row["size_bytes"],
                row["modification_time"],
                row.get("num_records"),
                {name: value for name, value in (row.get("min") or {}).items() if value is not None},
                {name: value for name, value in (row.get("max") or {}).items() if value is not None},
            )
            for row in rows
        ]

    def removed(self, hours: int) -> list[str]:
        """Return the paths of files that were removed from the table at least *hours* ago, and may exist.

        Readers of older versions may still need them.
        """
        return [
            unquote(path)
            for path in self._ask(
                lambda: self.table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=False)
            )
        ]

    def checkpoint(self) -> bool:
        """Write a checkpoint and remove old commits, if there are many commits since the last one; whether it did."""
        version = self.version
        if version - self._last_checkpoint() < CHECKPOINT_COMMITS:
            return False
        self._ask(self.table.create_checkpoint)
        self._objects.sync([f"{LOG_FOLDER}/{version:020}{CHECKPOINT}", LAST_CHECKPOINT])
        self._ask(self.table.cleanup_metadata)
        return True

    def _last_checkpoint(self) -> int:
        try:
            return int(json.loads(self._objects.read(LAST_CHECKPOINT))["version"])
        except (ObjectMissing, ValueError, KeyError):
            return 0

    def _set_torn_aside(self) -> None:
        """Set files aside that a power cut left incomplete, and make all others durable."""
        listed = self._objects.list_folder(LOG_FOLDER)
        commits = [each for each in listed if parse_commit(each.name) is not None]
        others = [each for each in listed if each.name == LAST_CHECKPOINT or each.name.endswith(CHECKPOINT)]
        torn = {each.name for each in commits[-1:] + others if not self._is_whole(each)}
        for name in sorted(torn):
            data = self._objects.read(name)
            self._objects.create(f"{TORN}/{name.rpartition('/')[2]}.{zlib.crc32(data):08x}", data)
            self._objects.delete(name)
        self._objects.sync([each.name for each in commits + others if each.name not in torn])

    def _is_whole(self, listed: StoredObject) -> bool:
        name = listed.name
        if not name.endswith(CHECKPOINT):
            return _is_whole_commit(self._objects.read(name))
        if listed.bytes < 2 * len(PARQUET):
            return False
        ends = self._objects.read_ranges(name, [(0, len(PARQUET)), (listed.bytes - len(PARQUET), listed.bytes)])
        return ends == [PARQUET, PARQUET]

    def _ask(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except TableNotFoundError:
            problem: TierError = ObjectMissing(f"table {self.url!r} does not exist")
        except (DeltaError, OSError, ValueError) as error:
            problem = _explain(error, self.url)
        raise problem  # not above, where the traceback would show the text of the library


def _client_options(config: TieredConfig) -> dict[str, str]:
    return {
        "allow_http": "true" if config.endpoint.startswith("http://") else "false",
        "timeout": f"{config.request_timeout_ms}ms",
        "connect_timeout": f"{config.connect_timeout_ms}ms",
        "max_retries": str(config.retries_max),
        "retry_timeout": f"{config.retry_ms}ms",
        "backoff_config.init_backoff": f"{BACKOFF_S * 1000:.0f}ms",
        "backoff_config.max_backoff": f"{BACKOFF_MAX_S * 1000:.0f}ms",
    }
