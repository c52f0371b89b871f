"""Which owners of the table were of a data directory, so that it never continues what another one has continued.

Every process that takes the table over is an owner with a name. The file `OWNER_FILE` has the names of the last ones
and the epoch of the last takeover. A name is noted before it is used, and the epoch after it: the next process knows
its owners also after a crash in between.
"""

from typing import Final, final

import msgspec

from martlet.store.disk.files import Disk, atomic_write, read_file
from martlet_tiered.owners import NOBODY, Owners

__all__ = ["OWNER_FILE", "Ownership", "read_owners", "write_owners"]

OWNER_FILE: Final = "config/tiered.owner"


def read_owners(disk: Disk, folder: str) -> Owners:
    """Return what the data directory *folder* remembers; nothing, if it never had a table."""
    for ending in ("", ".tmp", ".bak"):
        try:
            return msgspec.json.decode(read_file(disk, f"{folder}/{OWNER_FILE}{ending}") or b"", type=Owners)
        except msgspec.MsgspecError:
            continue
    return NOBODY


def write_owners(disk: Disk, folder: str, owners: Owners) -> None:
    """Make *owners* durable in the data directory *folder*. Raises `OSError`."""
    atomic_write(disk, f"{folder}/{OWNER_FILE}", msgspec.json.encode(owners))


@final
class Ownership:
    """The ownership of the table by the data directory *folder*, whose lock this process has; blocking calls.

    *unique* is different for each process of any broker.
    """

    def __init__(self, disk: Disk, folder: str, unique: str) -> None:
        self.owners = NOBODY
        self._disk = disk
        self._folder = folder
        self._unique = unique
        self._name = ""
        self._takeovers = 0

    def next_owner(self) -> str:
        """Return the name for the next takeover, which is noted in the directory. Raises `OSError`."""
        if not self._name:
            known = read_owners(self._disk, self._folder)
            # The second one is of a process that may have taken the table over or not.
            self._name = known.names[1] if len(known.names) > 1 else self._unique
            self.owners = Owners(known.epoch, [*known.names[:1], self._name])
            write_owners(self._disk, self._folder, self.owners)
        self._takeovers += 1
        return f"{self._name}/{self._unique}.{self._takeovers}"

    def take(self, epoch: int) -> None:
        """Remember until `save` that the takeover had *epoch*."""
        self.owners = Owners(epoch, [self._name])

    def save(self) -> None:
        """Note the last takeover in the directory; before the first change of the table. Raises `OSError`."""
        write_owners(self._disk, self._folder, self.owners)
