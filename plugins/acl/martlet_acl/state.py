"""Users, groups, rules and secrets together, and the changes of them."""

from collections.abc import Mapping, Sequence
from typing import Final, final

from msgspec.structs import replace

from martlet.contracts import RuleLevel
from martlet.runtime.steps import Budget, Steps
from martlet_acl.credentials import SecretKey, UserSecrets, check_secrets
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.rules import Rule
from martlet_acl.policy.subjects import group_subject, user_subject

__all__ = ["AclState", "ended_between"]

NO_SECRETS = UserSecrets()
USER_US: Final = 2.0  # to compare a user


@final
class AclState:
    """Everything that the two files say. A change raises `PolicyError` and changes nothing if it is invalid.

    Attributes:
      policies: users, groups, rules and quotas; all but users may be changed there.
      secrets: by user; change them with `put_user` and `put_secrets`.
      keys: the user of each access key.
      version: of the files that were written or read last; the next ones get the next number.
      observe: refuse nothing, and report what the rules would refuse.
      ended: users whose logins have ended by changes since it was emptied last: disabled or removed users, and those
        with another password or less access keys.
    """

    __slots__ = ("ended", "keys", "observe", "policies", "secrets", "version")

    def __init__(self, policies: Policies | None = None, version: int = 0, *, observe: bool = False) -> None:
        self.policies = Policies() if policies is None else policies
        self.secrets: dict[str, UserSecrets] = {}
        self.keys: dict[str, str] = {}
        self.version = version
        self.observe = observe
        self.ended: set[str] = set()

    @property
    def users(self) -> Mapping[str, UserRecord]:
        """The users by name."""
        return self.policies.members.users

    def parts(self) -> list[object]:
        """Return what this consists of, so that its owner can drop it piece by piece, from the end."""
        return [*self.policies.parts(), *self.secrets.values()]

    def secrets_of(self, name: str) -> UserSecrets:
        """Return the secrets of the user *name*; none if he has none."""
        return self.secrets.get(name, NO_SECRETS)

    def is_enabled(self, name: str) -> bool:
        """Whether there is a user *name* who may log in."""
        user = self.users.get(name)
        return user is not None and not user.disabled

    def put_user(self, name: str, user: UserRecord) -> None:
        """Add or replace a user."""
        owner = self.keys.get(name, name)
        if owner != name:
            raise PolicyError(f"user {name!r} would have the name of an access key of user {owner!r}; remove the key")
        self.policies.put_user(name, user)
        if user.disabled:
            self.ended.add(name)

    def put_password(self, name: str, verifier: str) -> None:
        """Let *verifier* be that of the password of *name*; an empty one removes the password."""
        self.put_secrets(name, replace(self.secrets_of(name), password=verifier))

    def put_key(self, name: str, access_key: str, key: SecretKey) -> None:
        """Give the user *name* an access key, or replace one of his."""
        self.put_secrets(name, replace(self.secrets_of(name), keys={**self.secrets_of(name).keys, access_key: key}))

    def remove_key(self, access_key: str) -> str | None:
        """Remove an access key and return its user; None if there is no such key."""
        name = self.keys.get(access_key)
        if name is None:
            return None
        secrets = self.secrets_of(name)
        left = {each: key for each, key in secrets.keys.items() if each != access_key}
        self.put_secrets(name, replace(secrets, keys=left))
        return name

    def put_secrets(self, name: str, secrets: UserSecrets) -> None:
        """Replace all secrets of the user *name*; they get the next version."""
        self.check_secrets(name, secrets)
        if not _still_proves(self.secrets_of(name), secrets):
            self.ended.add(name)
        self._store_secrets(name, replace(secrets, version=self.version + 1))

    def check_secrets(self, name: str, secrets: UserSecrets) -> None:
        """Raise `PolicyError` unless the user *name* may have *secrets*."""
        check_secrets(secrets)
        for access_key in secrets.keys:
            owner = self.keys.get(access_key, name)
            if owner != name:
                raise PolicyError(f"user {owner!r} has the access key {access_key!r} already")
            if access_key != name and access_key in self.users:
                raise PolicyError(f"access key {access_key!r} would have the name of another user")

    def load_secrets(self, name: str, secrets: UserSecrets) -> None:
        """Add the secrets of the user *name* as they were stored."""
        self.check_secrets(name, secrets)
        self._store_secrets(name, secrets)

    def _store_secrets(self, name: str, secrets: UserSecrets) -> None:
        for access_key in self.secrets_of(name).keys:
            del self.keys[access_key]
        self.secrets[name] = secrets
        self.keys.update(dict.fromkeys(secrets.keys, name))

    def put_rules(self, subject: str, level: RuleLevel, rules: Sequence[Rule]) -> None:
        """Add *rules*, each of which replaces the one about the same resource, or raise an error and add none."""
        before = {rule.resource.text: rule for rule in self.policies.rules_of(subject, level)}
        done: list[str] = []
        try:
            for rule in rules:
                self.policies.put_rule(subject, level, rule)
                done.append(rule.resource.text)
        except PolicyError:
            for text in done:
                if text in before:
                    self.policies.put_rule(subject, level, before[text])
                else:
                    self.policies.remove_rule(subject, level, text)
            raise

    def has_group(self, name: str) -> bool:
        """Whether there is a group *name*: somebody is in it, it is in others, or it has rules or a quota."""
        members, subject = self.policies.members, group_subject(name)
        if name in members.groups or subject in self.policies or self.policies.quotas.get(subject) is not None:
            return True
        everything = (*(user.groups for user in self.users.values()), *members.groups.values())
        return any(name in groups for groups in everything)

    def remove_group(self, name: str) -> None:
        """Let the group *name* be in no other group, and nobody and no group be in it; remove its rules and quota."""
        members = self.policies.members
        for user, record in list(members.users.items()):
            if name in record.groups:
                self.policies.put_user(user, replace(record, groups=_without(record.groups, name)))
        inner = {each: _without(above, name) for each, above in members.groups.items() if name in above}
        self.policies.put_groups(inner)
        self.policies.remove_group(name)
        self.policies.remove_subject(group_subject(name))

    def remove_user(self, name: str) -> None:
        """Remove the user *name* with his secrets, his rules and his quota."""
        self.ended.add(name)
        for access_key in self.secrets.pop(name, NO_SECRETS).keys:
            del self.keys[access_key]
        self.policies.remove_user(name)
        self.policies.remove_subject(user_subject(name))


def _without(groups: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(each for each in groups if each != name)


def _still_proves(before: UserSecrets, after: UserSecrets) -> bool:
    """Return whether *after* has all that a login with one of *before* has used."""
    if before.password and before.password != after.password:
        return False
    return all(after.keys.get(name) == key for name, key in before.keys.items() if not key.disabled)


def ended_between(before: AclState, after: AclState) -> Steps[set[str]]:
    """Return the users whose logins end when *after* replaces *before*.

    Who is new and disabled may have logged in before, by a token or a certificate.
    """
    ended, budget = set[str](), Budget(USER_US)
    for name, user in after.users.items():
        if user.disabled and name not in before.users:
            ended.add(name)
        if budget.is_over():
            yield
    for name in before.users:
        if not (after.is_enabled(name) and _still_proves(before.secrets_of(name), after.secrets_of(name))):
            ended.add(name)
        if budget.is_over():
            yield
    return ended
