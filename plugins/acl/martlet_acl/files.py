"""The two files of the data directory: ``config/acl.json`` has users, groups, quotas and rules, ``config/acl.secrets``
secrets.

Both have the version of the change with which they were written. The secrets are written first, so after a crash the
rules are of the same version or of the one before. Rules that are older still were put there by somebody: they may
allow what has been denied since, and are refused. ``acl.json`` has for each user the version of his secrets, so older
secrets that somebody puts there do not count: a removed key does not come back with its file.

Who writes ``acl.json`` by hand may leave out all versions; then it counts as it is.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar, final

import msgspec
from msgspec import Struct

from martlet.errors import MartletError
from martlet.runtime.steps import Budget, Steps, finish_now
from martlet_acl.credentials import UserSecrets
from martlet_acl.policy.document import (
    PolicyDocument,
    StoredUser,
    decode_document,
    decode_each,
    fill_policies,
)
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.reading import read_object
from martlet_acl.state import AclState

__all__ = [
    "FILES",
    "POLICIES",
    "SECRETS",
    "SECRET_MODE",
    "AclFilesError",
    "FileVersions",
    "LoadedFiles",
    "load",
    "load_newest",
    "policies_in_steps",
    "secrets_in_steps",
]

POLICIES: Final = "config/acl.json"
SECRETS: Final = "config/acl.secrets"
FILES: Final = (SECRETS, POLICIES)  # in the order in which they are written
SECRET_MODE: Final = 0o600
# Problems of a file that are reported one by one.
PROBLEMS_MAX: Final = 20
ENTRY_US: Final = 4.0
SECRETS_US: Final = 8.0  # to check those of a user, and to add them

T = TypeVar("T")
ReadGenerations = Callable[[str], Iterable[bytes]]  # of a file, the newest first


@final
class AclFilesError(MartletError):
    """The files cannot be used; *problems* has a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        more = f"; and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = problems


@final
class _SecretsDocument(Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 0
    users: dict[str, str] = {}  # their text


@final
class FileVersions(Struct, frozen=True):
    """The versions of the two files; 0 for a file without one."""

    policies: int = 0
    secrets: int = 0


@final
class LoadedFiles(Struct, frozen=True):
    """What the files say, and what an administrator should know about them."""

    state: AclState
    versions: FileVersions
    warnings: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()  # files whose newest generation has errors


@final
class _StoredSecrets(Struct, frozen=True):
    version: int
    users: dict[str, UserSecrets]

    def __repr__(self) -> str:
        return f"_StoredSecrets(version={self.version!r})"


@final
class _Problems:
    """Collects the problems of one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._count = 0
        self.texts: list[str] = []

    def note(self, error: PolicyError) -> None:
        self._count += 1
        if self._count <= PROBLEMS_MAX:
            self.texts.append(f"{self._file}: {error}")

    def check(self) -> None:
        """Raise `AclFilesError` if there are problems."""
        if self._count > PROBLEMS_MAX:
            self.texts.append(f"{self._file}: there are {self._count - PROBLEMS_MAX} more problems")
        if self.texts:
            raise AclFilesError(self.texts)


def load(policies: bytes, secrets: bytes | None, before: FileVersions) -> Steps[LoadedFiles]:
    """Return what the two files say after somebody has edited them; *secrets* is None if there is no such file.

    Raises:
      AclFilesError: one of them is invalid, or older than the one *before*.
    """
    problems: list[str] = []
    parsed_policies = yield from _collect(problems, parse_policies(policies))
    parsed_secrets = (yield from _collect(problems, parse_secrets(secrets))) if secrets is not None else None
    if parsed_policies is None or problems:
        raise AclFilesError(problems)
    return (yield from _join(*parsed_policies, parsed_secrets, before))


def load_newest(read_generations: ReadGenerations) -> LoadedFiles:
    """Return what the newest valid generations of the files say.

    Raises:
      AclFilesError: a file is missing, or no generation of it is valid.
    """
    warnings: dict[str, list[str]] = {}
    policies = _first_valid(POLICIES, parse_policies, read_generations, warnings)
    if policies is None:
        raise AclFilesError([f"{POLICIES} is missing; run `martlet acl init`"])
    secrets = _first_valid(SECRETS, parse_secrets, read_generations, warnings)
    # A crash may have come between the files.
    before = FileVersions(secrets.version - 1) if secrets is not None else FileVersions()
    found = finish_now(_join(*policies, secrets, before))
    texts = [text for problems in warnings.values() for text in problems]
    return LoadedFiles(found.state, found.versions, (*texts, *found.warnings), tuple(warnings))


def _first_valid(
    file: str, parse: Callable[[bytes], Steps[T]], read_generations: ReadGenerations, warnings: dict[str, list[str]]
) -> T | None:
    """Return the newest valid generation of *file*; None if there is none at all."""
    newest: AclFilesError | None = None
    for data in read_generations(file):
        try:
            found = finish_now(parse(data))
        except AclFilesError as error:
            newest = newest or error
            continue
        if newest is not None:
            text = f"{file} has errors; using its previous generation until they are corrected"
            warnings[file] = [*newest.problems, text]
        return found
    if newest is not None:
        raise newest
    return None


def _collect(problems: list[str], steps: Steps[T]) -> Steps[T | None]:
    try:
        return (yield from steps)
    except AclFilesError as error:
        problems += error.problems
        return None


def parse_policies(data: bytes) -> Steps[tuple[PolicyDocument, Policies]]:
    """Return what ``acl.json`` says. Raises `AclFilesError`."""
    problems = _Problems(POLICIES)
    try:
        document = yield from decode_document(data, problems.note)
        policies = yield from fill_policies(document, problems.note)
    except PolicyError as error:
        problems.note(error)
    problems.check()
    budget = Budget(ENTRY_US)
    for subject in list(document.rules):  # all at once would keep the interpreter's lock for 100 ms
        stored = document.rules.pop(subject)
        if budget.is_over(1 + len(stored.custom) + len(stored.default)):
            yield
    return document, policies


def parse_secrets(data: bytes) -> Steps[_StoredSecrets]:
    """Return what ``acl.secrets`` says. Raises `AclFilesError`, without any secret in its text."""
    problems = _Problems(SECRETS)
    users: dict[str, UserSecrets] = {}
    version = 0
    try:
        outer = yield from read_object(data, _SecretsDocument)
        version = outer.version
        users = yield from decode_each(outer.users, UserSecrets, "user {}".format, problems.note)
        holders, budget = AclState(), Budget(SECRETS_US)
        for name, secrets in users.items():
            try:
                holders.load_secrets(name, secrets)
            except PolicyError as error:
                problems.note(error.inside(f"user {name}"))
            if budget.is_over():
                yield
    except PolicyError as error:
        problems.note(error)
    problems.check()
    return _StoredSecrets(version, users)


def _join(
    document: PolicyDocument, policies: Policies, secrets: _StoredSecrets | None, before: FileVersions
) -> Steps[LoadedFiles]:
    """Return the state of both files, which must not be older than those *before*. Raises `AclFilesError`."""
    if secrets is None:
        _check_needs_none(document)
    versions = FileVersions(document.version, secrets.version if secrets is not None else 0)
    _check_age(POLICIES, versions.policies, before.policies, "it may allow what was denied since")
    _check_age(SECRETS, versions.secrets, before.secrets, "it may have keys that were removed since")
    state = AclState(policies, max(versions.policies, versions.secrets), observe=document.observe)
    problems = _Problems(SECRETS)
    outdated: list[str] = []
    budget = Budget(SECRETS_US)
    for name, stored in secrets.users.items() if secrets is not None else ():
        if budget.is_over():
            yield
        user = document.users.get(name)
        if user is None:
            continue
        if stored.version < user.secrets:
            outdated.append(name)
            continue
        try:
            state.load_secrets(name, stored)
        except PolicyError as error:
            problems.note(error.inside(f"user {name}"))
    problems.check()
    return LoadedFiles(state, versions, tuple(_warnings(document.users, state, outdated)))


def _check_needs_none(document: PolicyDocument) -> None:
    """Raise `AclFilesError` if *document* belongs to secrets, which are missing."""
    if document.version or any(user.secrets for user in document.users.values()):
        text = "restore it from a backup, or set all passwords and keys again with `martlet acl user set`"
        raise AclFilesError([f"{SECRETS} is missing, so no user could log in; {text}"])


def _check_age(file: str, version: int, before: int, danger: str) -> None:
    """Raise `AclFilesError` if *file* has a *version* older than *before*."""
    if 0 < version < before:
        text = f"{file} is of version {version}, but version {before} has been in use: {danger}"
        raise AclFilesError([f'{text}; restore the newer file, or remove "version" from this one to use it'])


def _warnings(users: Mapping[str, StoredUser], state: AclState, outdated: list[str]) -> Iterable[str]:
    missing = [name for name, user in users.items() if user.secrets and name not in state.secrets]
    missing += [name for name in outdated if name not in missing]
    if missing:
        names = ", ".join(map(repr, missing[:5])) + (" and others" if len(missing) > 5 else "")
        yield f"{SECRETS} is older than {POLICIES}: passwords and keys of {names} do not count; set them again"


# rendering


@final
class _Pieces:
    """Collects a file in pieces of the entries of a slice: joining all of them at once takes milliseconds."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._parts: list[bytes] = []
        self._budget = Budget(ENTRY_US)
        self._separator = b""

    def add(self, text: bytes) -> None:
        """Add *text*, in which an object may begin."""
        self._parts.append(text)
        self._separator = b""

    def add_entry(self, name: str, value: bytes) -> None:
        """Add an entry of the object that has begun last."""
        self._parts.append(b"%b\n%b: %b" % (self._separator, msgspec.json.encode(name), value))
        self._separator = b","

    def is_over(self) -> bool:
        """Count an entry; return whether the slice is over."""
        if not self._budget.is_over():
            return False
        self._join()
        return True

    def _join(self) -> None:
        self._pieces.append(b"".join(self._parts))
        self._parts.clear()

    def all(self) -> list[bytes]:
        """Return all pieces."""
        self._join()
        return self._pieces


def secrets_in_steps(version: int, secrets: Mapping[str, UserSecrets]) -> Steps[list[bytes]]:
    """Render ``acl.secrets`` in slices."""
    pieces = _Pieces()
    pieces.add(b'{\n"version": %d,\n"users": {' % version)
    for name in list(secrets):
        found = secrets.get(name)
        if found is not None:
            pieces.add_entry(name, _one_line(found))
        if pieces.is_over():
            yield
    pieces.add(b"\n}\n}\n")
    return pieces.all()


def policies_in_steps(
    state: AclState, version: int, users: Mapping[str, UserRecord], secrets: Mapping[str, UserSecrets]
) -> Steps[list[bytes]]:
    """Render ``acl.json`` of *state* in slices, with those of *users* who still exist.

    *secrets* are those that were written with *version*, and *users* are of that moment: nobody is written before his
    secrets.
    """
    policies, pieces = state.policies, _Pieces()
    pieces.add(b'{\n"version": %d,\n"observe": %b,\n"users": {' % (version, b"true" if state.observe else b"false"))
    for name, user in list(users.items()):
        if name in state.users:
            known = secrets[name].version if name in secrets else 0
            pieces.add_entry(name, _one_line(StoredUser(user.groups, user.administrator, user.disabled, known)))
        if pieces.is_over():
            yield
    pieces.add(b'\n},\n"groups": {')
    for name, groups in list(policies.members.groups.items()):
        pieces.add_entry(name, _one_line(groups))
        if pieces.is_over():
            yield
    pieces.add(b'\n},\n"quotas": {')
    for subject in list(policies.quotas):
        quota = policies.quotas.get(subject)
        if quota is not None:
            pieces.add_entry(subject, _one_line(quota))
        if pieces.is_over():
            yield
    pieces.add(b'\n},\n"rules": {')
    for subject in list(policies):
        levels: list[bytes] = []
        for level in LEVELS:
            lines: list[bytes] = []
            for rule in policies.rules_of(subject, level):
                lines.append(b"\n    " + _one_line(rule.stored()))
                if pieces.is_over():
                    yield
            if lines:
                levels.append(b'\n  "%b": [%b\n  ]' % (level.encode(), b",".join(lines)))
        if levels:
            pieces.add_entry(subject, b"{%b}" % b",".join(levels))
    pieces.add(b"\n}\n}\n")
    return pieces.all()


def _one_line(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=0)
