"""Accounts of RocketMQ's ACL 1.0, for the tools of 4.4 to 5.3.2 (PlainPermissionManager 4.9.8): requests 50 and 51.

An account is a user with an access key of the same name. What an account has and a user has not is refused: addresses
that need no signature.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NoReturn

from martlet.contracts import AccessControl, AccessRule, Identity, UserChange
from martlet.errors import Reason
from martlet_remoting.handlers.admin.acls import access_control, told
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE"]

# Numbers that mean something else in RocketMQ 5 (ResponseCode 4.9.8, UPDATE_AND_CREATE_ACL_CONFIG_FAILED and so on).
NOT_UPDATED: Final = ResponseCode.POLLING_FULL
NOT_DELETED: Final = ResponseCode.POLLING_TIMEOUT
NO_ADMINISTRATOR: Final = "only an administrator may change an administrator"
OF_UPDATE: Final = {
    Reason.NO_PERMISSION: (NOT_UPDATED, NO_ADMINISTRATOR),
    Reason.PARAMETER: (NOT_UPDATED, "the account cannot be a user"),
}
OF_DELETION: Final = {Reason.NO_PERMISSION: (NOT_DELETED, NO_ADMINISTRATOR)}

# Permissions of AclConstants, in any order of the two words: actions and decision.
WORDS: Final[Mapping[frozenset[str], AccessRule]] = {
    frozenset(("PUB",)): AccessRule("", ("publish",), "allow"),
    frozenset(("SUB",)): AccessRule("", ("subscribe",), "allow"),
    frozenset(("PUB", "SUB")): AccessRule("", ("publish", "subscribe"), "allow"),
    frozenset(("DENY",)): AccessRule("", ("all",), "deny"),
}
KINDS: Final = ("topic", "group")
# What a topic or a group can be called in RocketMQ; everything else would mean more in a rule than in an account.
NAME: Final = re.compile(r"[%|\w-]+", re.ASCII)


async def update_account(context: RequestContext, command: Command) -> bytes:
    """Create or change the account of an access key; fields that are missing or empty stay as they are.

    Lists of permissions are replaced as a whole.
    """
    gate = context.gate(command)
    gate.admin.broker()
    control = access_control(context, command)
    name, change = command.text("accessKey", ""), _user_change(command)
    listed = {kind: list(_listed_rules(command, kind)) for kind in KINDS if command.text(f"{kind}Perms", "")}
    defaults = list(_default_rules(command))
    if control.user(name) is not None:
        await told(control.update_user(name, change, gate.identity), OF_UPDATE)
    elif change.secret is None:
        _refuse(f"account {name!r:.80} is new and has no secretKey; send one")
    else:
        await told(control.create_user(name, change, gate.identity), OF_UPDATE)
    policy = await context.state.broker.turns.finish(control.policy_in_steps(f"user:{name}"))
    old = [rule.resource for rule in policy.custom] if policy is not None else []
    await _put_rules(control, f"user:{name}", old, listed, defaults, gate.identity)
    return reply(command)


def _user_change(command: Command) -> UserChange:
    if command.text("whiteRemoteAddress", ""):
        _refuse("whiteRemoteAddress would let addresses in without a signature, which no user can have; leave it out")
    secret = command.text("secretKey", "")
    admin = command.boolean("admin") if command.text("admin", "") else None
    return UserChange(administrator=admin, secret=secret.encode() if secret else None)


def _listed_rules(command: Command, kind: str) -> Iterator[AccessRule]:
    """Yield the rules of a list such as ``topicA=DENY,topicB=PUB|SUB``."""
    for item in command.text(f"{kind}Perms").split(","):
        name, equals, words = (part.strip() for part in item.partition("="))
        if not equals or not NAME.fullmatch(name):
            _refuse(f"{kind}Perms has {item!r:.80}; write NAME=PUB, NAME=SUB, NAME=PUB|SUB or NAME=DENY")
        yield _rule(f"{kind}:{name}", words)


def _default_rules(command: Command) -> Iterator[AccessRule]:
    for kind in KINDS:
        if words := command.text(f"default{kind.capitalize()}Perm", "").strip():
            yield _rule(f"{kind}:*", words)


def _rule(resource: str, words: str) -> AccessRule:
    rule = WORDS.get(frozenset(words.split("|")))
    if rule is None:
        _refuse(f"permission {words!r:.40} of {resource:.80} is unknown; write PUB, SUB, PUB|SUB or DENY")
    return AccessRule(resource, rule.actions, rule.decision)


def _refuse(text: str) -> NoReturn:
    raise Declined(NOT_UPDATED, text)


async def _put_rules(
    control: AccessControl,
    subject: str,
    old: Sequence[str],
    listed: Mapping[str, list[AccessRule]],
    defaults: list[AccessRule],
    by: Identity,
) -> None:
    """Give *subject* the custom rules that are *listed* by kind, and no others of these kinds, and the *defaults*.

    *old* are the resources of its custom rules before.

    A permission for a topic replaces the default one as a whole: with PUB nobody may subscribe. So what an allowing
    rule does not say is denied by default.
    """
    for kind, rules in listed.items():
        rest = [complement for rule in rules if (complement := _complement(rule)) is not None]
        await control.put_rules(subject, "custom", rules, by)
        if rest:
            await control.put_rules(subject, "default", rest, by)
        kept, completed = {rule.resource for rule in rules}, {rule.resource for rule in rest}
        for resource in old:
            if resource.startswith(f"{kind}:") and resource not in kept:
                await control.delete_rules(subject, "custom", resource, by)
            if resource.startswith(f"{kind}:") and resource not in completed:
                await control.delete_rules(subject, "default", resource, by)
    if defaults:
        await control.put_rules(subject, "default", defaults, by)


def _complement(rule: AccessRule) -> AccessRule | None:
    """Return the rule that denies what *rule*, which allows, does not say; None if there is nothing to deny."""
    left = tuple(action for action in ("publish", "subscribe") if action not in rule.actions)
    return AccessRule(rule.resource, left, "deny") if rule.decision == "allow" and left else None


async def delete_account(context: RequestContext, command: Command) -> bytes:
    """Delete the account of an access key."""
    gate = context.gate(command)
    gate.admin.broker()
    control, name = access_control(context, command), command.text("accessKey", "")
    if not await told(control.delete_user(name, gate.identity), OF_DELETION):
        raise Declined(NOT_DELETED, f"The accesskey[{name:.80}] corresponding to accessConfig has been deleted failed.")
    return reply(command)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: update_account,
    RequestCode.DELETE_ACL_CONFIG: delete_account,
}
