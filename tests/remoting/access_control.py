"""Users and rules in memory, as a plugin would offer them to protocols."""

from collections.abc import Sequence

import pytest
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
from martlet.runtime.steps import Steps

__all__ = ["FakeAccessControl", "show_in_slices_only"]


class FakeAccessControl(AccessControl):
    """Keeps users and rules in memory; only its administrators may change administrators."""

    def __init__(self, *administrators: str) -> None:
        self.users = {name: AccessUser(name, administrator=True) for name in administrators}
        self.passwords: dict[str, bytes] = {}
        self.secrets: dict[str, bytes] = {}
        self.policies: dict[str, AccessPolicy] = {}

    def _check(self, name: str, change: UserChange | None, by: Identity) -> None:
        actor, old = self.users.get(by.name), self.users.get(name)
        touches = (old is not None and old.administrator) or (change is not None and change.administrator)
        if touches and not (actor is not None and actor.administrator):
            raise Refused(Reason.NO_PERMISSION, f"{by.name!r} is no administrator")

    def _change(self, user: AccessUser, change: UserChange) -> None:
        name = user.name
        if change.secret is not None and len(change.secret) < 4:
            raise Refused(Reason.PARAMETER, "the secret is too short")
        if change.password is not None:
            self.passwords[name] = change.password
            user = replace(user, has_password=True)
        if change.secret is not None:
            self.secrets[name] = change.secret
            user = replace(user, keys=(UserKey(name),))
        if change.administrator is not None:
            user = replace(user, administrator=change.administrator)
        if change.disabled is not None:
            user = replace(user, disabled=change.disabled)
        self.users[name] = user

    async def create_user(self, name: str, change: UserChange, by: Identity) -> None:
        self._check(name, change, by)
        if name in self.users:
            raise Refused(Reason.ILLEGAL, f"user {name!r} exists already")
        self._change(AccessUser(name), change)

    async def update_user(self, name: str, change: UserChange, by: Identity) -> None:
        self._check(name, change, by)
        if name not in self.users:
            raise Refused(Reason.NOT_FOUND, f"there is no user {name!r}")
        self._change(self.users[name], change)

    async def delete_user(self, name: str, by: Identity) -> bool:
        self._check(name, None, by)
        self.policies.pop(f"user:{name}", None)
        return self.users.pop(name, None) is not None

    def user(self, name: str) -> AccessUser | None:
        return self.users.get(name)

    def user_names(self) -> list[str]:
        return list(self.users)

    async def put_rules(self, subject: str, level: RuleLevel, rules: Sequence[AccessRule], by: Identity) -> None:
        new = {rule.resource: rule for rule in rules}
        self._set(subject, level, list({**self._rules(subject, level), **new}.values()))

    def _rules(self, subject: str, level: RuleLevel) -> dict[str, AccessRule]:
        policy = self.policies.get(subject, AccessPolicy(subject))
        rules = policy.custom if level == "custom" else policy.default
        return {rule.resource: rule for rule in rules}

    def _set(self, subject: str, level: RuleLevel, rules: list[AccessRule]) -> None:
        policy = self.policies.get(subject, AccessPolicy(subject))
        changed = replace(policy, custom=tuple(rules)) if level == "custom" else replace(policy, default=tuple(rules))
        self.policies[subject] = changed
        if not changed.custom and not changed.default:
            del self.policies[subject]

    async def delete_rules(self, subject: str, level: RuleLevel | None, resource: str, by: Identity) -> int:
        levels: tuple[RuleLevel, ...] = ("custom", "default") if level is None else (level,)
        deleted = 0
        for each in levels:
            old = self._rules(subject, each)
            kept = [rule for rule in old.values() if resource and rule.resource != resource]
            deleted += len(old) - len(kept)
            self._set(subject, each, kept)
        return deleted

    def policy(self, subject: str) -> AccessPolicy | None:
        return self.policies.get(subject)

    def subjects(self) -> list[str]:
        return list(self.policies)


def show_in_slices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a `FakeAccessControl` show rules in slices, as if there were very many."""

    def in_steps(control: FakeAccessControl, subject: str) -> Steps[AccessPolicy | None]:
        yield
        return control.policies.get(subject)

    def at_once(control: FakeAccessControl, subject: str) -> AccessPolicy | None:
        raise AssertionError("10,000 rules at once would block the event loop for 40 ms")

    monkeypatch.setattr(FakeAccessControl, "policy_in_steps", in_steps)
    monkeypatch.setattr(FakeAccessControl, "policy", at_once)
