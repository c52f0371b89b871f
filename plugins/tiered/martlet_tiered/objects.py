"""Objects of one store, by name: what the cold tier needs of an object store or of a directory.

Every call blocks until it is done or has failed for good: call it in a thread. Names are relative to the prefix of the
cold tier, with ``/`` between their parts.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

__all__ = ["Objects", "StoredObject", "check_name"]


class StoredObject(Struct, frozen=True):
    """One object of a listing: its name, its size, and when it was written by the store's clock."""

    name: str
    bytes: int
    modified_ms: int


class Objects(Protocol):
    """The objects of one store; threads may share it.

    Any method may raise `StoreUnavailable` or `StoreHung`, which come after all retries, `AccessRefused` or
    `StoreUnusable`.
    """

    url: str
    # A power cut can leave a file incomplete that another program has written without fsync.
    can_tear: bool

    def create(self, name: str, data: bytes | memoryview) -> None:
        """Store the object *name* durably, unless there is one. It appears with all of its data, or not at all.

        If an earlier attempt has stored the same data and its answer was lost, that counts; so does an object with
        this data that somebody else has stored.

        Raises:
          ObjectExists: there is an object with this name and other data.
        """

    def read(self, name: str) -> bytes:
        """Return all data of an object. Raises `ObjectMissing`."""

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes of an object from *begin* on, before *end*.

        Raises:
          ObjectMissing: there is none with this name.
          ObjectDamaged: it ends before *end*.
        """

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of an object, none of them empty; raises as `read_range` does."""

    def size(self, name: str) -> int:
        """Return the size of an object in bytes. Raises `ObjectMissing`."""

    def list_folder(self, folder: str) -> list[StoredObject]:
        """Return all objects whose names begin with *folder* and ``/``, sorted by name."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def tag(self, name: str) -> str | None:
        """Return the tag of an object's version; None if the store cannot `swap`. Raises `ObjectMissing`."""

    def swap(self, name: str, data: bytes, tag: str) -> None:
        """Replace the version *tag* of an object; a lost answer may raise, although it was replaced.

        Raises:
          ObjectChanged: it is another version.
        """

    def sync(self, names: Sequence[str]) -> None:
        """Make objects durable that another program has written. Stores do that themselves; directories do not."""


def check_name(name: str) -> str:
    """Return *name*. Raises `ValueError` if it could be outside of the prefix."""
    parts = name.split("/")
    if not all(parts) or any(part.startswith(".") for part in parts) or "\0" in name:
        raise ValueError(f"{name!r} is no name of an object; write parts with / between them, none with a leading dot")
    return name
