"""Changes of users, rules and quotas: the same for a running broker and for the files of one that does not run."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Protocol, final

import trio
from msgspec.structs import replace

from martlet.contracts import (
    AccessControl,
    AccessPolicy,
    AccessRule,
    AccessUser,
    Identity,
    RuleLevel,
    UserChange,
    UserKey,
)
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet_acl.credentials import SecretKey, UserSecrets
from martlet_acl.files import AclFilesError
from martlet_acl.imports.findings import ImportedRule, ImportedUser
from martlet_acl.passwords import SALT_BYTES, hash_password
from martlet_acl.policy.document import stored_policies
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS
from martlet_acl.policy.quotas import StoredQuota, changed_quota
from martlet_acl.policy.rules import Rule, StoredRule, parse_rule
from martlet_acl.policy.subjects import check_user_name, user_subject
from martlet_acl.state import AclState

__all__ = ["Administration", "StateHolder"]

PASSWORD_BYTES_MAX: Final = 1024
RULE_US: Final = 4.0  # to show one
OWNER: Final = "the owner of the data directory"
OBSERVED: Final = (
    "rules are only observed, but changes of users and rules remain: "
    "only users who have proved it, and whom rules allow it, may make them; or use `martlet acl`"
)


class StateHolder(Protocol):
    """The state of a broker, or of a data directory that no broker uses."""

    state: AclState
    lock: trio.Lock

    async def take_edits(self) -> None:
        """Read the files again if somebody has edited them. Raises `AclFilesError`."""
        ...

    def note_change(self) -> None:
        """Put a change of the state into effect, and begin to write it."""
        ...

    async def wait_saved(self) -> None:
        """Return once all changes are on the disk. Raises `Refused`."""
        ...


@final
class Administration(AccessControl):
    """Changes and lists users, keys, groups and rules; *by* is None for the owner of the data directory.

    Args:
      random: returns 32 random bytes.
      cost: of new passwords.
      note: called after a change with who made it and what it was, for the audit trail.
      may_change: whether a client may make changes, which are permanent, while the plugin observes and refuses nothing.
    """

    def __init__(
        self,
        holder: StateHolder,
        random: Callable[[], bytes],
        cost: int,
        note: Callable[[str, str], None] = lambda by, what: None,
        may_change: Callable[[Identity], bool] = lambda by: True,
    ) -> None:
        self._holder = holder
        self._note = note
        self._may_change = may_change
        self._random = random
        self._cost = cost

    @property
    def state(self) -> AclState:
        """The state of this moment."""
        return self._holder.state

    @asynccontextmanager
    async def _changing(self, what: str, by: Identity | None = None) -> AsyncIterator[AclState]:
        """Yield the state to change, and wait until the change is on the disk. An error must leave it unchanged.

        *what* and *by* are for the audit trail.
        """
        async with self._holder.lock:
            if by is not None and self.state.observe and not self._may_change(by):
                raise Refused(Reason.NO_PERMISSION, OBSERVED)
            try:
                await self._holder.take_edits()
                yield self._holder.state
            except AclFilesError as error:
                text = "somebody has edited the files and made errors; correct them first"
                raise Refused(Reason.UNAVAILABLE, f"{text}: {error}") from error
            except PolicyError as error:
                raise Refused(Reason.PARAMETER, str(error)) from error
            self._holder.note_change()
            self._note(OWNER if by is None else by.name, what)
        await self._holder.wait_saved()

    # users

    async def create_user(self, name: str, change: UserChange, by: Identity | None) -> None:
        verifier = await self._hash(change.password)
        async with self._changing(f"create user {name}{_shown(change)}", by) as state:
            _check_administrator(state, by, UserRecord(), change)
            if name in state.users:
                raise Refused(Reason.ILLEGAL, f"user {name!r} exists already")
            _put_user(state, name, UserRecord(), change, verifier)

    async def update_user(
        self,
        name: str,
        change: UserChange,
        by: Identity | None,
        *,
        join: Sequence[str] = (),
        leave: Sequence[str] = (),
        without_password: bool = False,
    ) -> None:
        verifier = "" if without_password else await self._hash(change.password)
        async with self._changing(f"update user {name}{_shown(change, join, leave)}", by) as state:
            user = _existing(state, name)
            if join or leave:
                joined = dict.fromkeys((*user.groups, *join))
                change = replace(change, groups=tuple(group for group in joined if group not in leave))
            _check_administrator(state, by, user, change)
            _put_user(state, name, user, change, verifier)

    async def delete_user(self, name: str, by: Identity | None) -> bool:
        if name not in self.state.users:
            return False
        async with self._changing(f"delete user {name}", by) as state:
            _check_administrator(state, by, state.users.get(name, UserRecord()), UserChange())
            state.remove_user(name)
        return True

    async def _hash(self, password: bytes | None) -> str | None:
        """Return the verifier of a new password; None if it does not change."""
        if password is None:
            return None
        if not 0 < len(password) <= PASSWORD_BYTES_MAX:
            text = f"the password has {len(password)} bytes; 1 to {PASSWORD_BYTES_MAX} are allowed"
            raise Refused(Reason.PARAMETER, text)
        return await trio.to_thread.run_sync(hash_password, password, self._random()[:SALT_BYTES], self._cost)

    def user(self, name: str) -> AccessUser | None:
        state = self.state
        user = state.users.get(name)
        if user is None:
            return None
        secrets = state.secrets_of(name)
        keys = tuple(UserKey(each, key.disabled) for each, key in secrets.keys.items())
        return AccessUser(name, user.administrator, user.disabled, user.groups, bool(secrets.password), keys)

    def user_names(self) -> list[str]:
        return list(self.state.users)

    # access keys

    async def put_key(self, name: str, access_key: str, key: SecretKey) -> None:
        """Give the user *name* an access key, or replace one of his."""
        async with self._changing(f"put access key {access_key} of user {name}") as state:
            _existing(state, name)
            state.put_key(name, access_key, key)

    async def switch_key(self, access_key: str, *, disabled: bool) -> None:
        """Disable or enable an access key."""
        async with self._changing(f"{'disable' if disabled else 'enable'} access key {access_key}") as state:
            name = _owner(state, access_key)
            state.put_key(name, access_key, replace(state.secrets_of(name).keys[access_key], disabled=disabled))

    async def delete_key(self, access_key: str) -> None:
        """Delete an access key."""
        async with self._changing(f"delete access key {access_key}") as state:
            _owner(state, access_key)
            state.remove_key(access_key)

    # groups

    async def put_group(self, name: str, groups: Sequence[str]) -> None:
        """Let the group *name* be in *groups*, and in no others."""
        async with self._changing(f"put group {name} into {', '.join(groups) or 'no group'}") as state:
            state.policies.put_group(name, groups)

    async def delete_group(self, name: str) -> None:
        """Let the group *name* be in no other group, nobody be in it, and let it have no rules."""
        async with self._changing(f"delete group {name}") as state:
            if not state.has_group(name):
                raise Refused(Reason.NOT_FOUND, f"group {name!r} does not exist")
            state.remove_group(name)

    # rules

    async def put_rules(self, subject: str, level: RuleLevel, rules: Sequence[AccessRule], by: Identity | None) -> None:
        shown = "; ".join(map(_shown_rule, rules))
        async with self._changing(f"put {len(rules)} {level} rules of {subject}: {shown}", by) as state:
            state.put_rules(subject, level, [_parsed(rule) for rule in rules])

    async def delete_rules(self, subject: str, level: RuleLevel | None, resource: str, by: Identity | None) -> int:
        levels = LEVELS if level is None else (level,)
        if not any(_rules_about(self.state, subject, each, resource) for each in levels):
            return 0
        async with self._changing(f"delete rules of {subject} about {resource or 'everything'}", by) as state:
            found = [(each, rule) for each in levels for rule in _rules_about(state, subject, each, resource)]
            if level is None and not resource:
                state.policies.remove_rules(subject)
            else:
                for each, rule in found:
                    state.policies.remove_rule(subject, each, rule.resource.text)
        return len(found)

    def policy(self, subject: str) -> AccessPolicy | None:
        stored = stored_policies(self.state.policies, subject)
        if not (stored.custom or stored.default):
            return None
        custom, default = (tuple(map(_access_rule, rules)) for rules in (stored.custom, stored.default))
        return AccessPolicy(subject, custom, default)

    def policy_in_steps(self, subject: str) -> Steps[AccessPolicy | None]:
        budget = Budget(RULE_US)
        shown: list[tuple[AccessRule, ...]] = []
        for some in [list(self.state.policies.rules_of(subject, level)) for level in LEVELS]:
            rules = []
            for rule in some:
                rules.append(_access_rule(rule.stored()))
                if budget.is_over():
                    yield
            shown.append(tuple(rules))
        custom, default = shown
        return AccessPolicy(subject, custom, default) if custom or default else None

    def subjects(self) -> list[str]:
        return list(self.state.policies)

    # quotas

    async def change_quota(self, subject: str, changes: Mapping[str, int | bool]) -> StoredQuota:
        """Change some limits of the quota of *subject*, or give it one; return the quota."""
        shown = ", ".join(f"{name} {value}".lower() for name, value in changes.items())
        async with self._changing(f"set quota of {subject}: {shown}") as state:
            quota = changed_quota(state.policies.quotas.get(subject), changes)
            state.policies.quotas.put(subject, quota)
        return quota

    async def delete_quota(self, subject: str) -> None:
        """Delete the quota of *subject*."""
        async with self._changing(f"delete quota of {subject}") as state:
            if not state.policies.quotas.remove(subject):
                raise Refused(Reason.NOT_FOUND, f"{subject} has no quota")

    # imports

    async def add_imported(self, users: Sequence[ImportedUser], rules: Sequence[ImportedRule]) -> list[str]:
        """Add what does not exist yet; return a sentence for each user and rule that is left out."""
        left_out: list[str] = []
        async with self._changing(f"import {len(users)} users and {len(rules)} rules") as state:
            for rule in rules:
                _add_imported_rule(state, rule, left_out)
            for user in users:
                _add_imported_user(state, user, left_out)
        return left_out

    async def set_observing(self, *, observe: bool) -> None:
        """Enforce the rules, or only observe them."""
        async with self._changing("observe" if observe else "enforce") as state:
            state.observe = observe


def _shown(change: UserChange, join: Sequence[str] = (), leave: Sequence[str] = ()) -> str:
    """Return what *change* says, in words without secrets."""
    words: list[str] = []
    if change.administrator is not None:
        words.append("administrator" if change.administrator else "normal")
    if change.disabled is not None:
        words.append("disabled" if change.disabled else "enabled")
    if change.groups is not None:
        words.append(f"groups {', '.join(change.groups) or 'none'}")
    words += [f"join {group}" for group in join] + [f"leave {group}" for group in leave]
    words += ["password"] * (change.password is not None) + ["secret"] * (change.secret is not None)
    return f": {', '.join(words)}" if words else ""


def _shown_rule(rule: AccessRule) -> str:
    where = f" from {', '.join(rule.networks)}" if rule.networks else ""
    return f"{rule.decision} {', '.join(rule.actions)} on {rule.resource}{where}"


def _add_imported_rule(state: AclState, imported: ImportedRule, left_out: list[str]) -> None:
    subject, level, resource = imported.subject, imported.level, imported.rule.resource
    if _rules_about(state, subject, level, resource):
        left_out.append(f"{subject} has a {level} rule about {resource} already")
        return
    try:
        state.put_rules(subject, level, [parse_rule(imported.rule)])
    except PolicyError as error:
        left_out.append(f"{level} rule of {subject} about {resource}: {error}")


def _add_imported_user(state: AclState, user: ImportedUser, left_out: list[str]) -> None:
    name = user.name
    if name in state.users:
        left_out.append(f"user {name} exists already")
        return
    secrets = UserSecrets(password=user.password, keys={name: SecretKey(user.secret)} if user.secret else {})
    try:
        state.check_secrets(name, secrets)
        state.put_user(name, UserRecord(administrator=user.administrator))
        _put_imported_quota(state, user)
    except PolicyError as error:
        left_out.append(f"user {name}: {error}")
        return
    if secrets.password or secrets.keys:
        state.put_secrets(name, secrets)


def _put_imported_quota(state: AclState, user: ImportedUser) -> None:
    quotas, subject = state.policies.quotas, user_subject(user.name)
    if user.connections and quotas.get(subject) is None:
        quotas.put(subject, changed_quota(None, {"connections": user.connections}))


def _existing(state: AclState, name: str) -> UserRecord:
    user = state.users.get(name)
    if user is None:
        raise Refused(Reason.NOT_FOUND, f"user {name!r} does not exist")
    return user


def _owner(state: AclState, access_key: str) -> str:
    name = state.keys.get(access_key)
    if name is None:
        raise Refused(Reason.NOT_FOUND, f"access key {access_key!r} does not exist")
    return name


def _check_administrator(state: AclState, by: Identity | None, user: UserRecord, change: UserChange) -> None:
    """Raise `Refused` unless *by* may change *user*: only an administrator may change one, or make one."""
    if by is None or not (user.administrator or change.administrator):
        return
    found = state.users.get(by.name)
    if found is None or found.disabled or not found.administrator:
        raise Refused(Reason.NO_PERMISSION, "only an administrator may make, change or delete an administrator")


def _put_user(state: AclState, name: str, user: UserRecord, change: UserChange, verifier: str | None) -> None:
    """Change the user *name*, or raise an error and change nothing."""
    changed = UserRecord(
        user.groups if change.groups is None else change.groups,
        user.administrator if change.administrator is None else change.administrator,
        user.disabled if change.disabled is None else change.disabled,
    )
    check_user_name(name)
    secrets = _changed_secrets(state.secrets_of(name), name, change, verifier)
    if secrets is not None:
        state.check_secrets(name, secrets)
    state.put_user(name, changed)
    if secrets is not None:
        state.put_secrets(name, secrets)


def _changed_secrets(secrets: UserSecrets, name: str, change: UserChange, verifier: str | None) -> UserSecrets | None:
    """Return the new secrets of the user *name*; None if they do not change."""
    keys = secrets.keys
    if change.secret is not None:
        try:
            keys = {**keys, name: SecretKey(change.secret.decode())}
        except UnicodeDecodeError:
            raise PolicyError("the secret is no text in UTF-8") from None
    if verifier is None and keys is secrets.keys:
        return None
    return replace(secrets, password=secrets.password if verifier is None else verifier, keys=keys)


def _parsed(rule: AccessRule) -> Rule:
    try:
        return parse_rule(StoredRule(rule.resource, rule.actions, rule.decision, rule.networks))
    except PolicyError as error:
        raise PolicyError(error.reason) from error  # its place is a field of the rule, which the reason names


def _access_rule(stored: StoredRule) -> AccessRule:
    decision: Literal["allow", "deny"] = "allow" if stored.decision == "allow" else "deny"
    return AccessRule(stored.resource, stored.actions, decision, stored.networks)


def _rules_about(state: AclState, subject: str, level: RuleLevel, resource: str) -> list[Rule]:
    """Return the rules of one level about *resource*, or all if it is empty."""
    rules = state.policies.rules_of(subject, level)
    return [rule for rule in rules if not resource or rule.resource.text == resource]
