"""A plugin with users: authenticates them by password, SCRAM, signature or certificate, with rules and quotas."""

import hashlib
import hmac
import re
import secrets
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from getpass import getpass
from pathlib import Path
from typing import Any, ClassVar, Final, final

import trio
from msgspec import ValidationError, convert

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import (
    AccessKey,
    Authenticator,
    Authorizer,
    Certificate,
    Credentials,
    Identity,
    LoginOrigin,
    Mechanism,
    Nobody,
    Password,
    PasswordCheck,
    Quota,
    QuotaSource,
    SignedRequest,
    SigningSecret,
    Subcommand,
)
from martlet.errors import ConfigError, Reason, Refused
from martlet.plugins.hooks import Hooks

from .patterns import compile_pattern
from .scram import NAME, SALT_BYTES, ScramSecret, begin_scram, make_secret, read_secret

__all__ = ["User", "UsersConfig", "UsersPlugin", "hash_password", "read_users"]

ACTIONS: Final = ("publish", "read", "manage")
KEYS: Final = frozenset(("password", "scram", "signing_key", "certificate", "rules", "quota"))
PROOFS: Final = ("password", "scram", "signing_key", "certificate")
GROUP_KEYS: Final = frozenset(("members", "quota"))
USER: Final = "{user}"  # in a rule
ANONYMOUS: Final = ""  # the user name for the section [anonymous]
ANONYMOUS_SECTION: Final = "anonymous"
# hashlib.scrypt with these takes about 50 ms and 16 MiB (RFC 7914 2 recommends r = 8 and p = 1).
SCRYPT_N: Final = 1 << 14
SCRYPT_R: Final = 8
SCRYPT_P: Final = 1
SCHEME: Final = "scrypt"
ENDED: Final = "the user is gone, or proves itself in another way now; log in again"


def hash_password(password: bytes, salt: bytes) -> str:
    """Return the hash of *password* for the file of users."""
    digest = hashlib.scrypt(password, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P)
    return "$".join((SCHEME, b64encode(salt).decode(), b64encode(digest).decode()))


def check_password(name: str, password: bytes, stored: str) -> None:
    """Raise `Refused` unless *stored* is the hash of *password*; takes the same time for yes and no."""
    salt = b64decode((stored or NOBODY).split("$")[1])
    if not hmac.compare_digest(hash_password(password, salt), stored):
        raise Refused(Reason.CREDENTIALS, f"user {name!r} or the password is wrong")


# Compared with if the user does not exist, so that the answer takes the same time.
NOBODY: Final = f"{SCHEME}${b64encode(bytes(16)).decode()}${b64encode(bytes(64)).decode()}"


@final
@dataclass(frozen=True, slots=True)
class User:
    """One user of the file; ``rules`` are (action, pattern of names), ``quotas`` its own and those of its groups."""

    password: str = ""
    scram: ScramSecret | None = None
    signing_key: str = ""
    certificate: bool = False
    rules: tuple[tuple[str, re.Pattern[str]], ...] = ()
    quotas: tuple[Quota, ...] = ()

    def still_proves(self, after: "User") -> bool:
        """Whether *after* accepts every proof that this user has accepted."""
        pairs = [(getattr(self, name), getattr(after, name)) for name in PROOFS]
        return all(not before or before == now for before, now in pairs)

    def may(self, action: str, name: str) -> bool:
        return any(action == wanted and pattern.match(name) for wanted, pattern in self.rules)


NO_USER: Final = User()


def read_users(path: str) -> dict[str, User]:
    """Return the users in the TOML file at *path*; the anonymous one has the empty name.

    Raises:
      ConfigError: the file cannot be read, or has an unknown or invalid entry.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"config key 'users.file' is {path!r}, which cannot be read; {error}") from error
    sections = {**table.get("users", {}), ANONYMOUS: table.get(ANONYMOUS_SECTION, {})}
    users = {name: _user(path, name or ANONYMOUS_SECTION, fields) for name, fields in sections.items()}
    for group, fields in table.get("groups", {}).items():
        _add_group(path, group, fields, users)
    return users


def _add_group(path: str, group: str, fields: Mapping[str, Any], users: dict[str, User]) -> None:
    """Add the quota of *group* to its members in *users*."""

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"group {group!r} in {path!r} {what}")

    _check_keys(fields, GROUP_KEYS, wrong)
    quota = _quota(fields, wrong, group)
    for name in dict.fromkeys(fields.get("members", ())):
        if name not in users:
            raise wrong(f"has the member {name!r}, which is no user; add [users.{name}]")
        users[name] = replace(users[name], quotas=users[name].quotas + quota)


def _check_keys(fields: Mapping[str, Any], keys: frozenset[str], wrong: Callable[[str], ConfigError]) -> None:
    if unknown := sorted(set(fields) - keys):
        raise wrong(f"has the unknown key {unknown[0]!r}; keys are {', '.join(sorted(keys))}")


def _quota(fields: Mapping[str, Any], wrong: Callable[[str], ConfigError], group: str = "") -> tuple[Quota, ...]:
    """Return the quota in *fields*, which all members of *group* share; nothing if there is none."""
    limits = fields.get("quota")
    if limits is None:
        return ()
    _check_keys(limits, frozenset(Quota.__struct_fields__) - {"group"}, lambda what: wrong(f"has a quota that {what}"))
    try:
        return (convert({**limits, "group": group}, Quota),)
    except ValidationError as error:
        raise wrong(f"has a quota that cannot be used; {error}") from error


def _user(path: str, name: str, fields: Mapping[str, Any]) -> User:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"user {name!r} in {path!r} {what}")

    _check_keys(fields, KEYS, wrong)
    password = fields.get("password", "")
    if password and (not password.startswith(f"{SCHEME}$") or password.count("$") != 2):
        raise wrong("has a password that is not a hash; make one with martlet hash-password")
    try:
        secret = read_secret(fields["scram"]) if fields.get("scram") else None
    except ValueError as error:
        raise wrong("has a scram secret that is none; make one with martlet hash-password --scram") from error
    rules: list[tuple[str, re.Pattern[str]]] = []
    for rule in fields.get("rules", ()):
        action, _, pattern = rule.partition(" ")
        if action not in ACTIONS:
            raise wrong(f"has the rule {rule!r}; it must begin with {', '.join(ACTIONS)} and a space")
        if USER in pattern and name == ANONYMOUS_SECTION:
            raise wrong(f"has the rule {rule!r}, but there {USER} has no name; write it out")
        rules.append((action, compile_pattern(pattern.strip(), name)))
    key, certificate = fields.get("signing_key", ""), bool(fields.get("certificate"))
    return User(password, secret, key, certificate, tuple(rules), _quota(fields, wrong))


@final
class Users:
    """All users, read again on SIGHUP."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._users = read_users(path)
        self._pepper = secrets.token_bytes(32)
        self._unknown = secrets.token_bytes(32)  # the signing key of users who have none

    def read_again(self) -> frozenset[str]:
        """Read the file again; return the users who are gone, or can no longer prove who they are as before."""
        before, self._users = self._users, read_users(self._path)
        users = self._users
        return frozenset(name for name, user in before.items() if not user.still_proves(users.get(name, NO_USER)))

    def authenticate(
        self, credentials: Credentials, origin: LoginOrigin
    ) -> Identity | PasswordCheck | SigningSecret | None:
        """An `Authenticator` for passwords, signed requests and certificates."""
        match credentials:
            case Password(name, password):
                stored = self._users.get(name, NO_USER).password if name else ""
                return PasswordCheck(Identity(name), stored.encode(), partial(check_password, name, password, stored))
            case AccessKey(name):
                key = self._users.get(name, NO_USER).signing_key if name else ""
                # Nobody has signed with a random key, and refusing takes as long as for a user who exists.
                return SigningSecret(Identity(name), key.encode() or self._unknown)
            case Certificate(name):
                user = self._users.get(name)
                return Identity(name) if name and user is not None and user.certificate else None
            case SignedRequest() | Nobody():
                return None

    def find_secret(self, name: str) -> ScramSecret | None:
        """Return the SCRAM secret of the user *name*, None if there is none."""
        return self._users.get(name, NO_USER).scram if name else None

    def mechanisms(self) -> Mapping[str, Mechanism]:
        """Return the mechanisms, by name."""
        return {NAME: partial(begin_scram, self.find_secret, self._pepper)}

    def authorize(self, identity: Identity, action: str, name: str) -> bool | None:
        """An `Authorizer` that allows what a user's rules allow, and has no opinion on the rest."""
        user = self._users.get(identity.name)
        return True if user is not None and user.may(action, name) else None

    def quotas(self, identity: Identity) -> Sequence[Quota]:
        """A `QuotaSource`: a user's own quota, and those of its groups."""
        user = self._users.get(identity.name)
        return user.quotas if user is not None else ()


class UsersConfig(Settings):
    file: str = setting("users.toml", "TOML file with the users and their rules")


class UsersPlugin(Hooks):
    """Authenticates and authorizes by a file of users."""

    config_class: ClassVar[type[Settings] | None] = UsersConfig
    config: UsersConfig

    def __init__(self, config: UsersConfig) -> None:
        super().__init__(config)
        self._users: Users | None = None
        self._broker: Broker | None = None
        if Path(config.file).exists():  # `martlet check` finds its errors
            self._users = Users(config.file)

    @property
    def users(self) -> Users:
        """The users; without a file a broker does not start, but `hash-password` works. Raises `ConfigError`."""
        if self._users is None:
            self._users = Users(self.config.file)
        return self._users

    def martlet_authenticators(self, broker: Broker) -> Sequence[Authenticator]:
        self._broker = broker
        return (self.users.authenticate,)

    def martlet_mechanisms(self, broker: Broker) -> Mapping[str, Mechanism]:
        return self.users.mechanisms()

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        return (self.users.authorize,)

    def martlet_quotas(self, broker: Broker) -> Sequence[QuotaSource]:
        return (self.users.quotas,)

    def martlet_reload(self) -> None:
        """Read the file again; called in a worker thread."""
        ended = self.users.read_again()
        if ended and self._broker is not None:
            trio.from_thread.run_sync(self._broker.end_clients, lambda identity: identity.name in ended, ENDED)

    def martlet_commands(self) -> Sequence[Subcommand]:
        def configure(parser: ArgumentParser) -> None:
            parser.description = "Read a password and print its hash for the file of users."
            parser.add_argument("--scram", action="store_true", help="print the secret for scram, not for password")

        def run(options: Namespace) -> int:
            password = getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
            salt = secrets.token_bytes(SALT_BYTES)
            if not options.scram:
                print(hash_password(password.encode(), salt))
                return 0
            try:
                print(make_secret(password, salt))
            except ValueError as error:
                print(f"the password {error}; choose another one", file=sys.stderr)
                return 1
            return 0

        return [Subcommand("hash-password", "print the hash of a password for the file of users", configure, run)]
