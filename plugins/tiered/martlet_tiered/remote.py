"""Objects of an object store, through obstore: S3 and what speaks it, Google Cloud Storage, Azure, or memory."""

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, MemoryStore, ObjectStore, S3Store

from martlet_tiered.config import TieredConfig
from martlet_tiered.errors import ObjectChanged, ObjectDamaged, ObjectExists, ObjectMissing, TierError
from martlet_tiered.failures import TRANSIENT, explain, says_no_bucket
from martlet_tiered.location import TierLocation
from martlet_tiered.objects import StoredObject, check_name

__all__ = ["BACKOFF_MAX_S", "BACKOFF_S", "RemoteObjects"]

Result = TypeVar("Result")

BACKOFF_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
# What an object that ends before the first byte of a range answers; memory has words of its own.
NOT_SATISFIABLE: Final = re.compile(r"\b416 Range Not Satisfiable|Range started after|InvalidGetRange|StartTooLarge")


def _open(location: TierLocation, config: TieredConfig, timeout_ms: int) -> ObjectStore:
    if location.scheme == "memory":
        return MemoryStore()
    made: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    client = {
        "timeout": timedelta(milliseconds=timeout_ms),
        "connect_timeout": timedelta(milliseconds=config.connect_timeout_ms),
        "allow_http": config.endpoint.startswith("http://"),
    }
    return made[location.scheme](  # type: ignore[no-any-return]
        location.bucket,
        prefix=location.prefix or None,
        config=location.options,
        client_options=client,
        retry_config={"max_retries": 0},  # `_ask` retries: it knows which answers were lost
    )


@final
class RemoteObjects:
    """The objects below a prefix of a bucket.

    With *unconditional* a store without conditional writes will do: `create` looks first whether the object exists,
    which is right only as long as nobody else writes.
    """

    can_tear = False

    def __init__(self, location: TierLocation, config: TieredConfig, *, unconditional: bool = False) -> None:
        self.url = location.url
        try:
            self._store = _open(location, config, config.request_timeout_ms)
            is_memory = location.scheme == "memory"
            self._bulk = self._store if is_memory else _open(location, config, config.upload_timeout_ms)
            problem = None
        except (BaseError, ValueError) as error:
            problem = explain(error, self.url)
        if problem:
            raise problem
        self._retries_max = config.retries_max
        self._retry_s = config.retry_ms / 1000
        self._unconditional = unconditional

    def __repr__(self) -> str:
        return f"RemoteObjects({self.url!r})"

    def create(self, name: str, data: bytes | memoryview) -> None:
        if self._unconditional:
            self._create_unconditionally(name, data)
            return
        try:
            self._ask(name, lambda: obstore.put(self._bulk, name, obstore.Bytes(data), mode="create"))
        except ObjectExists:
            # It may be ours: the answer to an attempt can get lost, and a proxy can send a request twice.
            if not self._holds(name, data):
                raise

    def read(self, name: str) -> bytes:
        return self._ask(name, lambda: bytes(obstore.get(self._bulk, name).bytes()))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        return self.read_ranges(name, [(begin, end)])[0]

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if not ranges:
            return []
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        found = self._ask(name, lambda: obstore.get_ranges(self._store, name, starts=begins, ends=ends))
        data = [bytes(each) for each in found]
        for piece, begin, end in zip(data, begins, ends, strict=True):
            if len(piece) != end - begin:
                raise ObjectDamaged(f"{self._where(name)!r} ends before byte {end}")
        return data

    def size(self, name: str) -> int:
        return self._ask(name, lambda: obstore.head(self._store, name)["size"])

    def list_folder(self, folder: str) -> list[StoredObject]:
        chunks = self._ask(folder, lambda: list(obstore.list(self._store, folder)))
        found = [
            StoredObject(each["path"], each["size"], int(each["last_modified"].timestamp() * 1000))
            for chunk in chunks
            for each in chunk
        ]
        return sorted(found, key=lambda each: each.name)

    def delete(self, name: str) -> None:
        try:
            self._ask(name, lambda: obstore.delete(self._store, name))
        except ObjectMissing:
            return

    def tag(self, name: str) -> str | None:
        return self._ask(name, lambda: obstore.head(self._store, name)["e_tag"])

    def swap(self, name: str, data: bytes, tag: str) -> None:
        self._ask(name, lambda: obstore.put(self._store, name, data, mode={"e_tag": tag}))

    def sync(self, names: Sequence[str]) -> None:
        """Do nothing: the store has made durable what it has accepted."""

    def _create_unconditionally(self, name: str, data: bytes | memoryview) -> None:
        try:
            self.size(name)
        except ObjectMissing:
            self._ask(
                name, lambda: obstore.put(self._bulk, name, obstore.Bytes(data), mode="overwrite", use_multipart=False)
            )
            return
        if not self._holds(name, data):
            raise ObjectExists(f"{self._where(name)!r} exists already, with other data")

    def _holds(self, name: str, data: bytes | memoryview) -> bool:
        try:
            return self.size(name) == len(data) and self.read(name) == data
        except ObjectMissing:
            return False

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _ask(self, name: str, call: Callable[[], Result]) -> Result:
        """Return the result of *call*, which is repeated while the store is unavailable.

        An error is raised outside of the clause that caught the library's, so that no traceback shows the text of that.
        """
        check_name(name)
        began = time.monotonic()
        pause_s = BACKOFF_S
        for attempt in range(self._retries_max + 1):
            try:
                return call()
            except (BaseError, OSError, ValueError) as error:
                problem = self._problem(error, name)
            is_late = time.monotonic() + pause_s - began > self._retry_s
            if not isinstance(problem, TRANSIENT) or attempt == self._retries_max or is_late:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        raise problem

    def _problem(self, error: Exception, name: str) -> TierError:
        where = self._where(name)
        if isinstance(error, AlreadyExistsError):
            return ObjectExists(f"{where!r} exists already, with other data")
        if isinstance(error, PreconditionError):
            return ObjectChanged(f"{where!r} is another version than the one to replace")
        if isinstance(error, FileNotFoundError) and not says_no_bucket(error):
            return ObjectMissing(f"{where!r} does not exist")
        if NOT_SATISFIABLE.search(str(error)):
            return ObjectDamaged(f"{where!r} ends before the range to read")
        return explain(error, where)
