"""The capability of access control: users and rules, for requests of administrators."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from martlet.contracts.access import Identity
from martlet.runtime.steps import Steps

__all__ = ["AccessControl", "AccessPolicy", "AccessRule", "AccessUser", "RuleLevel", "UserChange", "UserKey"]

# Rules of the default level count only where no custom rule matches.
RuleLevel: TypeAlias = Literal["custom", "default"]


class UserKey(Struct, frozen=True):
    """An access key of a user, without its secret."""

    name: str
    disabled: bool = False


class AccessUser(Struct, frozen=True):
    """A user, without secrets.

    Args:
      administrator: may do everything.
      disabled: may do nothing, and cannot log in.
      groups: the groups of users that the user is in.
    """

    name: str
    administrator: bool = False
    disabled: bool = False
    groups: tuple[str, ...] = ()
    has_password: bool = False
    keys: tuple[UserKey, ...] = ()


class UserChange(Struct, frozen=True):
    """What to change of a user; None leaves it as it is.

    Args:
      password: for logins with user name and password; stored as a slow hash.
      secret: of the access key with the user's own name, as RocketMQ's clients sign; made if there is none.
    """

    administrator: bool | None = None
    disabled: bool | None = None
    groups: tuple[str, ...] | None = None
    password: bytes | None = None
    secret: bytes | None = None

    def __repr__(self) -> str:
        shown = f"administrator={self.administrator!r}, disabled={self.disabled!r}, groups={self.groups!r}"
        return f"UserChange({shown})"


class AccessRule(Struct, frozen=True):
    """A rule as people write it (docs/acl.md).

    Args:
      resource: such as ``topic:orders*``.
      actions: of `Action`, or ``all``.
      networks: addresses and networks of clients; empty for all.
    """

    resource: str
    actions: tuple[str, ...]
    decision: Literal["allow", "deny"]
    networks: tuple[str, ...] = ()


class AccessPolicy(Struct, frozen=True):
    """The rules of one subject, such as ``user:alice``; at most one for a resource at each level."""

    subject: str
    custom: tuple[AccessRule, ...] = ()
    default: tuple[AccessRule, ...] = ()


class AccessControl(ABC):
    """A capability: users and rules can be listed and changed.

    A change is in effect when the method returns, and on the disk. The caller checks that *by* may change the cluster;
    only an administrator may make, change or delete an administrator. Each method that changes something raises
    `Refused`:

    - PARAMETER: a name, a rule or a secret is invalid, or exceeds a limit
    - ILLEGAL: it exists already
    - NOT_FOUND: there is no such user
    - NO_PERMISSION: *by* is no administrator
    - UNAVAILABLE: it is in effect, but could not be written yet; the broker tries again
    """

    @abstractmethod
    async def create_user(self, name: str, change: UserChange, by: Identity) -> None:
        """Add the user *name*: normal, enabled, without groups and secrets, other than *change* says."""

    @abstractmethod
    async def update_user(self, name: str, change: UserChange, by: Identity) -> None:
        """Change the user *name*. Connections that used a changed secret end, and those of a disabled user."""

    @abstractmethod
    async def delete_user(self, name: str, by: Identity) -> bool:
        """Delete the user *name*, its secrets and its rules, and end its connections; return False if there is none."""

    @abstractmethod
    def user(self, name: str) -> AccessUser | None:
        """Return the user *name*; None if there is none."""

    @abstractmethod
    def user_names(self) -> list[str]:
        """Return the names of all users, up to 100,000."""

    @abstractmethod
    async def put_rules(self, subject: str, level: RuleLevel, rules: Sequence[AccessRule], by: Identity) -> None:
        """Give *subject* the *rules*, all or none; each replaces the one of its level about the same resource.

        A user need not exist.
        """

    @abstractmethod
    async def delete_rules(self, subject: str, level: RuleLevel | None, resource: str, by: Identity) -> int:
        """Delete the rules of *subject* about *resource*, or all if it is empty; return how many.

        With a *level* only those of this level.
        """

    @abstractmethod
    def policy(self, subject: str) -> AccessPolicy | None:
        """Return the rules of *subject*; None if it has none."""

    def policy_in_steps(self, subject: str) -> Steps[AccessPolicy | None]:
        """As `policy`, in slices: a policy has up to 10,000 rules."""
        yield from ()
        return self.policy(subject)

    @abstractmethod
    def subjects(self) -> list[str]:
        """Return all subjects that have rules."""
