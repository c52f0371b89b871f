"""The state of a running broker: written to its files after each change, and read again after somebody edited them."""

import logging
import os
import stat
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps, finish_off_loop, per_slice
from martlet.store.disk.files import read_file
from martlet.tables.saved import Table
from martlet_acl.credentials import UserSecrets
from martlet_acl.files import (
    FILES,
    POLICIES,
    SECRET_MODE,
    SECRETS,
    AclFilesError,
    FileVersions,
    LoadedFiles,
    load,
    load_newest,
    policies_in_steps,
    secrets_in_steps,
)
from martlet_acl.policy.members import UserRecord
from martlet_acl.state import AclState, ended_between
from martlet_acl.unproved import Unproved

__all__ = ["SavedState"]

log = logging.getLogger("martlet.acl")

# Old subjects, users and others that are dropped in one turn of the event loop.
DROPPED_AT_ONCE: Final = per_slice(us=10)
DIGEST_BYTES: Final = 16
READ_BYTES: Final = 1 << 20  # of a file whose digest is computed
NOTHING: Final = blake2b(digest_size=DIGEST_BYTES).digest()
ENDED: Final = "the user was disabled, or has other passwords or keys; log in again"
UNPROVED: Final = "rules are enforced now, and the user was not proved, or has changed; log in again"

Stamp = tuple[int, ...] | None


@final
class SavedState:
    """Users, groups, rules and secrets of one broker, and the tables that write them.

    Hold *lock* while you change the state, so that files that somebody edits meanwhile are not read between.

    Raises:
      AclFilesError: the files are missing or invalid.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._disk = broker.store.disk
        self.lock = trio.Lock()
        self.changed: list[Callable[[AclState], None]] = []  # called with the state before
        # Digests by file: what was on the disk when it was looked up last, and what was rendered since.
        self._on_disk: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._seen: dict[str, Stamp] = {}  # stamps of files whose content is one of these
        self._tried: tuple[Stamp, ...] = ()  # stamps of files that have errors
        loaded = _load_newest(broker)
        for text in loaded.warnings:
            log.error("%s", text)
        _warn_if_open(self._path(SECRETS))
        self.state = loaded.state
        self.unproved = Unproved()  # since the rules are observed
        self._observed = self.state.observe
        self._versions = loaded.versions
        for file in FILES:
            if file not in loaded.rejected:
                self._on_disk[file] = _digest(read_file(self._disk, self._path(file)) or b"")
        # The secrets that were rendered last, with their version and their users: the other file has to agree.
        self._rendered: Mapping[str, UserSecrets] = {}
        self._users: Mapping[str, UserRecord] = {}
        self._version = 0
        self._writes_before = 0
        self._secrets = Table(SECRETS, self._freeze_secrets, _load_nothing, urgent=True, mode=SECRET_MODE)
        self._policies = Table(POLICIES, self._freeze_policies, _load_nothing, urgent=True)
        for table in (self._secrets, self._policies):
            broker.tables.register(table)

    # writing

    def note_change(self) -> None:
        """Put a change of the state into effect, and write it soon."""
        self._secrets.change()
        self._policies.change()
        ended, self.state.ended = self.state.ended, set()
        self._put_into_effect(self.state, ended)

    def _put_into_effect(self, before: AclState, ended: set[str]) -> None:
        self._broker.authentication.changed()
        self._broker.rules.changed()
        self._end_logins(ended)
        for tell in self.changed:
            tell(before)

    def _end_logins(self, ended: set[str]) -> None:
        """End the logins of the users *ended*; while rules are observed, note them for the time when they are not."""
        observed, self._observed = self._observed, self.state.observe
        if self._observed:
            if not observed:
                self.unproved = Unproved()  # logins in progress may still ask the old one
            for name in ended:
                self.unproved.add(name)
            return
        if observed:
            self._broker.end_clients(self.unproved.has, UNPROVED)
        if ended:
            self._broker.end_clients(lambda identity: identity.name in ended, ENDED)

    async def wait_saved(self) -> None:
        """Return once all changes are on the disk.

        Raises:
          Refused: they cannot be written now (Reason.UNAVAILABLE).
        """
        problems: list[str] = []
        done = trio.Event()

        def tell(problem: str) -> None:
            problems.append(problem)
            done.set()

        self._broker.call_when_saved(tell)
        await done.wait()
        if problems[0] and (self._secrets.dirty or self._policies.dirty):
            text = "the change is in effect, but not on the disk yet; the broker tries again"
            raise Refused(Reason.UNAVAILABLE, f"{text}: {problems[0]}")

    def _freeze_secrets(self, position: int) -> Steps[list[bytes]]:
        self.state.version += 1
        self._version = self.state.version
        self._rendered = dict(self.state.secrets)
        self._users = dict(self.state.users)
        self._writes_before = self._secrets.writes
        return self._render(SECRETS, secrets_in_steps(self._version, self._rendered))

    def _freeze_policies(self, position: int) -> Steps[list[bytes]]:
        if self._secrets.writes == self._writes_before:
            raise OSError(f"{SECRETS} must be written first")
        if self._secrets.dirty:  # a user who was changed since then, perhaps with his secrets, is written with them
            self._policies.change()
        return self._render(POLICIES, policies_in_steps(self.state, self._version, self._users, self._rendered))

    def _render(self, file: str, steps: Steps[list[bytes]]) -> Steps[list[bytes]]:
        """Render *file*, in a worker thread."""
        if (yield from self._is_edited(file)):
            raise OSError("somebody has edited it; repeat the change once the edited file is in use")
        pieces = yield from steps
        self._written[file] = _digest(*pieces)
        policies, secrets = self._versions.policies, self._versions.secrets
        self._versions = (
            FileVersions(policies, self._version) if file == SECRETS else FileVersions(self._version, secrets)
        )
        return pieces

    # reading

    async def reload(self) -> None:
        """Read the files if somebody has edited them. If they are invalid, log each problem and keep the old state."""
        async with self.lock:
            try:
                await self.take_edits()
            except AclFilesError as error:
                for text in error.problems:
                    log.error("%s", text)
                log.error("the edited files are not used; users and rules stay as they were")

    async def watch(self, interval_s: float) -> None:
        """Call `reload` soon after each change of the files."""
        while True:
            await trio.sleep(interval_s)
            if self._stamps() not in (tuple(map(self._seen.get, FILES)), self._tried):
                await self.reload()

    async def take_edits(self) -> None:
        """Read the files if somebody has edited them; the caller holds the lock.

        Raises:
          AclFilesError: they are invalid.
        """
        self._tried = self._stamps()
        read = await trio.to_thread.run_sync(finish_off_loop, self._read_edits())
        if read is None:
            return
        loaded, ended = read
        before, self.state = self.state, loaded.state
        self.state.version = max(before.version, self.state.version)
        self._users = self.state.users  # those written with the secrets are outdated
        self._versions = loaded.versions
        for text in loaded.warnings:
            log.warning("%s", text)
        _warn_if_open(self._path(SECRETS))
        log.info("took over edited files: %d users, %d rules", len(self.state.users), len(self.state.policies))
        self._put_into_effect(before, ended)
        parts = before.parts()
        del before
        while parts:  # 100,000 rules of 10,000 users take 100 ms
            del parts[-DROPPED_AT_ONCE:]
            await trio.lowlevel.checkpoint()

    def _read_edits(self) -> Steps[tuple[LoadedFiles, set[str]] | None]:
        """Return what the files say and whose logins end, if somebody has edited them; runs in a worker thread."""
        for file in FILES:
            if (yield from self._is_edited(file)):
                break
        else:
            return None
        secrets, policies = (
            next(iter(self._broker.store.data_directory.read_generations(file)), None) for file in FILES
        )
        if policies is None:
            raise AclFilesError([f"{POLICIES} is missing; restore it from a backup"])
        loaded = yield from load(policies, secrets, self._versions)
        ended = yield from ended_between(self.state, loaded.state)
        self._on_disk = {POLICIES: _digest(policies), SECRETS: _digest(secrets or b"")}
        self._written = {}
        return loaded, ended

    def _path(self, file: str) -> str:
        return f"{self._broker.store.data_directory.path}/{file}"

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(self._disk.stamp(self._path(file)) for file in FILES)

    def _digest_of(self, file: str) -> Steps[bytes]:
        """Return the digest of *file*, that of nothing if there is none."""
        found, position = blake2b(digest_size=DIGEST_BYTES), 0
        try:
            fd = self._disk.open(self._path(file), read_only=True)
        except FileNotFoundError:
            return NOTHING
        try:
            while piece := self._disk.read(fd, READ_BYTES, position):
                found.update(piece)
                position += len(piece)
                yield
        finally:
            self._disk.close(fd)
        return found.digest()

    def _is_edited(self, file: str) -> Steps[bool]:
        """Whether *file* has a content that this broker has neither written nor read; runs in a worker thread."""
        stamp = self._disk.stamp(self._path(file))
        if stamp is None or stamp == self._seen.get(file):
            return False
        digest = yield from self._digest_of(file)
        if digest != NOTHING:
            if digest not in (self._on_disk.get(file), self._written.get(file)):
                return True
            self._on_disk[file] = digest
        self._seen[file] = stamp
        return False


def _load_newest(broker: Broker) -> LoadedFiles:
    try:
        return load_newest(broker.store.data_directory.read_generations)
    except AclFilesError as error:
        for text in error.problems[1:]:  # the first one is in the error itself
            log.error("%s", text)
        raise


def _warn_if_open(path: str) -> None:
    """Warn if other users can read the secrets at *path*; the next change writes the file with its own mode."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # there may be none
    if mode & stat.S_IRWXO:
        log.warning("%s is open to every user of this machine; run: chmod o= %s", SECRETS, path)


def _digest(*pieces: bytes) -> bytes:
    found = blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _load_nothing(data: bytes) -> None:
    """`SavedState` reads both files together."""
