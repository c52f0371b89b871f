"""The decisions in their plainest form: lists of rules, and every name that a filter could select."""

from ipaddress import ip_address, ip_network
from itertools import product
from typing import Final, TypeAlias
from urllib.parse import quote

from martlet.contracts import Identity, Question
from martlet_acl.policy.document import PolicyDocument
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import StoredRule

# Levels of names that filters select: those in the tests, and one that no pattern has.
LEVELS: Final = ("a", "ab", "b", "", "~")
Order: TypeAlias = tuple[float, ...]


def decide(document: PolicyDocument, question: Question) -> bool | None:
    """Whether *question* is allowed; None if no rule matches."""
    name = question.identity.name
    user = document.users.get(name)
    if name and user is not None and (user.disabled or user.administrator):
        return not user.disabled
    subjects = subjects_of(document, question.identity)
    for level in ("custom", "default"):
        matching: list[tuple[Order, bool]] = []
        for subject in subjects:
            stored = document.rules.get(subject)
            for rule in getattr(stored, level) if stored is not None else ():
                matching += [(order, rule.decision == "allow") for order in matches(rule, question)]
        if matching:
            return min(matching)[1]
    return None


def subjects_of(document: PolicyDocument, identity: Identity) -> list[str]:
    """The subjects whose rules count for *identity*."""
    groups = [f"group:{each}" for each in groups_of(document, identity)]
    return [f"user:{identity.name}", *groups, "everybody"] if identity.name else ["anonymous", *groups]


def quotas_of(document: PolicyDocument, identity: Identity) -> dict[str, StoredQuota]:
    """The quotas that count for *identity*, by group; its own has the empty name."""
    found = {each: document.quotas[each] for each in subjects_of(document, identity) if each in document.quotas}
    if f"user:{identity.name}" in found:
        found.pop("everybody", None)
    return {each[6:] if each.startswith("group:") else "": quota for each, quota in found.items()}


def groups_of(document: PolicyDocument, identity: Identity) -> set[str]:
    """All groups of the user, directly or through other groups."""
    user = document.users.get(identity.name)
    found = set(identity.groups) | set(user.groups if user is not None else ())
    while more := {above for group in found for above in document.groups.get(group, ())} - found:
        found |= more
    return found


def matches(rule: StoredRule, question: Question) -> list[Order]:
    """Where the rule stands among those that match; nothing if it does not match."""
    if not {"all", question.action} & set(rule.actions):
        return []
    if rule.networks and not (
        question.address
        and any(ip_address(question.address) in ip_network(network, strict=False) for network in rule.networks)
    ):
        return []
    return [order_of(resource) for resource in spellings(rule.resource, question) if covers(resource, question)]


def spellings(resource: str, question: Question) -> set[str]:
    """The resource for this user, whose name is one level: encoded as in MQTT, or as in STOMP."""
    if "{user}" not in resource:
        return {resource}
    name = question.identity.name
    mqtt = "".join(quote(letter, safe="") if letter in "%/+#*" else letter for letter in name)
    return {resource.replace("{user}", level) for level in (mqtt, quote(name, safe=""))} if name else set()


def covers(resource: str, question: Question) -> bool:
    """Whether the resource has each name that is asked about."""
    if resource == "*" or resource == question.kind == "cluster":
        return True
    kind, _, pattern = resource.partition(":")
    return kind == question.kind and all(has_name(kind, pattern, name) for name in names_of(question))


def has_name(kind: str, pattern: str, name: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    if kind == "name":
        return selects(pattern.split("/"), name.split("/"))
    return name == pattern


def names_of(question: Question) -> list[str]:
    """The names that are asked about: the one, or all that a filter selects."""
    levels = question.name.split("/")
    if question.kind != "name" or question.action == "publish" or not {"+", levels[-1]} & {"+", "#"} & set(levels):
        return [question.name]
    topic, *asked = levels
    found = [name for depth in range(1, len(asked) + 2) for name in product((*LEVELS, *asked), repeat=depth)]
    return ["/".join((topic, *name)) for name in found if selects(asked, list(name))]


def selects(wanted: list[str], name: list[str]) -> bool:
    """Whether a filter selects a name."""
    if not wanted or wanted == ["#"]:
        return bool(wanted) or not name
    return bool(name) and wanted[0] in ("+", name[0]) and selects(wanted[1:], name[1:])


def order_of(resource: str) -> Order:
    """The least comes first."""
    kind, _, pattern = resource.partition(":")
    if resource == "*" or pattern == "*":
        return (3 if resource == "*" else 2,)
    levels = pattern.split("/")
    if kind == "name" and levels[-1] == "#":
        literal = sum(level not in ("+", "#") for level in levels)
        return (1, -literal, 2, -(len(levels) - 1))
    if kind == "name" and "+" in levels:
        return (1, -sum(level != "+" for level in levels), 0)
    if not pattern.endswith("*"):
        return (0,)
    # The last level is not whole; if it is the * alone, this is the same as +/# in its place.
    literal = len(levels) - 1
    return (1, -literal, 2, -len(levels)) if levels[-1] == "*" else (1, -literal, 1, -len(pattern))
