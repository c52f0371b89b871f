"""Users and rules as JSON in RocketMQ's form (UserInfo and AclInfo of 5.5.0), with RocketMQ's names.

Martlet has subjects and resources that RocketMQ does not have. Their names have the same form, so RocketMQ's tools
show and change them as well: ``Group:devs`` and ``Everybody`` as subjects, ``Name:mqtt/home/#`` and
``Shared:stomp/queue/a`` as resources. What RocketMQ ignores, such as an unknown action, is refused.
"""

from collections.abc import Iterator, Mapping
from ipaddress import ip_network
from typing import Final, Literal, TypeVar

from martlet.contracts import AccessPolicy, AccessRule, AccessUser, RuleLevel, UserChange
from martlet_remoting.handlers.bodies import items, text
from martlet_remoting.handlers.context import Declined
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.fastjson import dumps

__all__ = [
    "acl_pieces",
    "level_of",
    "parse_policies",
    "parse_resource",
    "parse_subject",
    "parse_user_change",
    "refused",
    "show_resource",
    "show_subject",
    "user_info",
]

T = TypeVar("T")

# RocketMQ's names (auth 5.5.0: Action, Decision, PolicyType, UserType, UserStatus), which are compared without case.
ACTIONS: Final[Mapping[str, str]] = {
    "publish": "Pub",
    "subscribe": "Sub",
    "create": "Create",
    "update": "Update",
    "delete": "Delete",
    "get": "Get",
    "list": "List",
    "all": "All",
}
ACTIONS_BY_NAME: Final = {name.lower(): action for action, name in ACTIONS.items()}
DECISIONS: Final[Mapping[str, Literal["allow", "deny"]]] = {"allow": "allow", "deny": "deny"}
LEVELS: Final[Mapping[str, RuleLevel]] = {"custom": "custom", "default": "default"}
USER_TYPES: Final[Mapping[str, bool]] = {"super": True, "normal": False}
USER_STATUSES: Final[Mapping[str, bool]] = {"disable": True, "enable": False}
# Subjects without a name, and kinds of subjects and resources with one.
SUBJECTS: Final = ("everybody", "anonymous")
SUBJECT_KINDS: Final = ("user", "group")
RESOURCE_KINDS: Final = ("topic", "group", "name", "shared")
ANYTHING: Final = "*"
CLUSTER: Final = "cluster"


def refused(reason: str) -> Declined:
    """Return the refusal of an invalid body, as RocketMQ's AuthorizationException."""
    return Declined(ResponseCode.NO_PERMISSION, reason)


# users


def user_info(user: AccessUser) -> dict[str, object]:
    """Return *user* as a UserInfo; no answer contains a password, so it is empty."""
    return {
        "username": user.name,
        "password": "",
        "userType": "Super" if user.administrator else "Normal",
        "userStatus": "disable" if user.disabled else "enable",
    }


def parse_user_change(body: dict[object, object]) -> UserChange:
    """Return the change that the UserInfo *body* asks for; what it leaves out, or has empty, stays as it is.

    RocketMQ's password is that of a user for everything, so it becomes both the password of logins and the secret of
    the access key.
    """
    password = text(body, "password").encode()
    return UserChange(
        administrator=_word(body, "userType", USER_TYPES),
        disabled=_word(body, "userStatus", USER_STATUSES),
        password=password if password.strip() else None,
        secret=password if password.strip() else None,
    )


def _word(body: dict[object, object], name: str, words: Mapping[str, T]) -> T | None:
    """Return the value of the word in the field *name*; None if it is missing or empty."""
    value = body.get(name)
    if value is None or value == "":
        return None
    found = words.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise refused(f"{name} {value!r:.40} is unknown; write {' or '.join(words)}")
    return found


# subjects and resources


def show_subject(subject: str) -> str:
    """Return *subject* as RocketMQ writes it."""
    return subject[:1].upper() + subject[1:]


def parse_subject(shown: str) -> str:
    """Return the subject that *shown* names."""
    kind, colon, name = shown.partition(":")
    kind = kind.lower()
    if (not colon and kind in SUBJECTS) or (name.strip() and kind in SUBJECT_KINDS):
        return kind + colon + name
    raise refused(f"The subject is null; {shown!r:.80} is none, write User:NAME, Group:NAME, Everybody or Anonymous")


def show_resource(resource: str) -> str:
    """Return *resource* as RocketMQ writes it; the broker itself is the cluster, whatever its name is."""
    return "Cluster:*" if resource == CLUSTER else resource[:1].upper() + resource[1:]


def parse_resource(shown: str, cluster: str) -> str:
    """Return the resource that *shown* names on a broker of *cluster*."""
    if shown == ANYTHING:
        return shown
    kind, colon, name = shown.partition(":")
    kind = kind.lower()
    if colon and kind in RESOURCE_KINDS:
        return f"{kind}:{name}"
    if kind != CLUSTER or not colon:
        text = "write Topic:NAME, Group:NAME, Cluster:NAME, Name:TOPIC/NAME, Shared:PROTOCOL/GROUP or *"
        raise refused(f"The resource is null; {shown!r:.80} is none, {text}")
    if name == cluster or (name.endswith("*") and cluster.startswith(name[:-1])):
        return CLUSTER
    raise refused(f"The resource {shown!r:.80} is another cluster; this broker belongs to {cluster!r}")


# rules


def level_of(policy_type: str) -> RuleLevel:
    """Return the level that RocketMQ calls *policy_type*; it is Custom if it is empty."""
    return _word({"policyType": policy_type}, "policyType", LEVELS) or "custom"


def acl_pieces(policy: AccessPolicy, part: str = "") -> Iterator[bytes]:
    """Write an AclInfo with the rules of *policy*, a piece for each; only of resources that contain *part*.

    There are no pieces if it would have no rules.
    """
    before = b'{"subject":%b,"policies":[' % dumps(show_subject(policy.subject))
    for name, rules in ((b"Custom", policy.custom), (b"Default", policy.default)):
        separator = before + b'{"policyType":"%b","entries":[' % name
        for rule in rules:
            if part in show_resource(rule.resource):
                yield separator + dumps(_entry(rule))
                separator = b","
        if separator == b",":
            yield b"]}"
            before = b","
    if before == b",":
        yield b"]}"


def _entry(rule: AccessRule) -> dict[str, object]:
    return {
        "resource": show_resource(rule.resource),
        "actions": [ACTIONS[action] for action in rule.actions],
        # RocketMQ leaves the field out, too, and its tool prints null.
        "sourceIps": list(rule.networks) or None,
        "decision": rule.decision.capitalize(),
    }


def parse_policies(body: dict[object, object], cluster: str) -> dict[RuleLevel, list[AccessRule]]:
    """Return the rules in the AclInfo *body*, by level.

    Raises:
      Declined: there are none, one is invalid, or two are about the same resource.
    """
    found: dict[RuleLevel, list[AccessRule]] = {}
    for policy in items(body, "policies"):
        level = level_of(text(policy, "policyType"))
        for entry in items(policy, "entries"):
            found.setdefault(level, []).append(_parse_entry(entry, cluster))
    if not found:
        raise refused("The policies is empty.")
    for level, rules in found.items():
        resources = {rule.resource for rule in rules}
        if len(resources) < len(rules):
            raise refused(f"The {level} policy has two entries about one resource; send each resource once")
    return found


def _parse_entry(entry: dict[object, object], cluster: str) -> AccessRule:
    resource = parse_resource(text(entry, "resource"), cluster)
    actions = tuple(_parse_actions(entry))
    decision = DECISIONS.get(text(entry, "decision").lower())
    if decision is None:
        raise refused("The decision is null or illegal; write Allow or Deny")
    return AccessRule(resource, actions, decision, tuple(_parse_networks(entry)))


def _parse_actions(entry: dict[object, object]) -> Iterator[str]:
    actions = _texts(entry, "actions")
    if not actions:
        raise refused("The actions is empty.")
    for name in actions:
        action = ACTIONS_BY_NAME.get(name.lower())
        if action is None:
            text = "The actions can not be Any" if name.lower() == "any" else f"The action {name!r:.40} is unknown"
            raise refused(f"{text}; write {', '.join(ACTIONS.values())}")
        yield action


def _parse_networks(entry: dict[object, object]) -> Iterator[str]:
    for network in _texts(entry, "sourceIps"):
        try:
            ip_network(network, strict=False)
        except ValueError as error:
            raise refused(f"The source ip is invalid; {network!r:.60} is no address and no network") from error
        yield network


def _texts(entry: dict[object, object], name: str) -> list[str]:
    """Return the texts in the list *name*; empty if it is missing."""
    found = entry.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise refused(f"{name} is no list of texts")
    return found
