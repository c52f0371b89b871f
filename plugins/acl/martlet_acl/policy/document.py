"""The stored form of users, groups, quotas and rules, as JSON:

    {"users": {"alice": {"groups": ["shop"]}},
     "groups": {"shop": ["staff"]},
     "quotas": {"group:shop": {"messages_in": 100}},
     "rules": {"user:alice": {"custom": [{"resource": "topic:orders*", "actions": ["publish"], "decision": "allow"}]}}}

An error names its place, such as ``rules of user alice, custom rule 3, networks``. A function *note* is called with
each error, and the entry is left out; by default the first error is raised.
"""

from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, final

import msgspec
from msgspec import Struct

from martlet.contracts import RuleLevel
from martlet.runtime.steps import Budget, Steps
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.reading import MEMBER_CHARACTERS, MEMBER_US, decode_value, read_object
from martlet_acl.policy.rules import StoredRule, parse_rule
from martlet_acl.policy.subjects import show_subject

__all__ = [
    "Note",
    "PolicyDocument",
    "StoredPolicies",
    "StoredUser",
    "decode_document",
    "decode_each",
    "document_of",
    "fill_policies",
    "raise_problem",
    "stored_policies",
]

T = TypeVar("T")
Note: TypeAlias = Callable[[PolicyError], None]

RULE_US: Final = 6.0  # to check a rule, a user or a quota, and to add it


def raise_problem(error: PolicyError) -> None:
    """A `Note` that raises the first error."""
    raise error


@final
class StoredUser(UserRecord, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A user; *secrets* is the version of his secrets, in their own file."""

    secrets: int = 0


@final
class StoredPolicies(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules of one subject."""

    custom: tuple[StoredRule, ...] = ()
    default: tuple[StoredRule, ...] = ()

    def of(self, level: RuleLevel) -> tuple[StoredRule, ...]:
        """Return the rules of *level*."""
        return self.custom if level == "custom" else self.default


@final
class PolicyDocument(Struct, frozen=True, omit_defaults=True):
    """All of it.

    Args:
      users: by name.
      groups: by name, the groups that the group is in.
      quotas: by subject.
      rules: by subject.
      version: increases with each change; 0 if somebody wrote the document by hand.
      observe: report what the rules would refuse, and refuse nothing.
    """

    users: dict[str, StoredUser] = {}
    groups: dict[str, tuple[str, ...]] = {}
    rules: dict[str, StoredPolicies] = {}
    version: int = 0
    observe: bool = False
    quotas: dict[str, StoredQuota] = {}


@final
class _TextDocument(Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 0
    observe: bool = False
    users: dict[str, str] = {}
    groups: dict[str, str] = {}
    quotas: dict[str, str] = {}
    rules: dict[str, str] = {}


def decode_document(data: bytes, note: Note = raise_problem) -> Steps[PolicyDocument]:
    """Return the document that the JSON *data* is; its names, patterns and references are not checked.

    Raises:
      PolicyError: it is no JSON, or has unknown parts; the error says where.
    """
    outer = yield from read_object(data, _TextDocument)
    return PolicyDocument(
        (yield from decode_each(outer.users, StoredUser, "user {}".format, note)),
        (yield from decode_each(outer.groups, tuple[str, ...], "group {}".format, note)),
        (yield from decode_each(outer.rules, StoredPolicies, _place_of_subject, note)),
        outer.version,
        outer.observe,
        (yield from decode_each(outer.quotas, StoredQuota, _place_of_quota, note)),
    )


def fill_policies(document: PolicyDocument, note: Note = raise_problem) -> Steps[Policies]:
    """Return what *document* says."""
    policies, budget = Policies(), Budget(RULE_US)
    for name, user in document.users.items():
        try:
            policies.put_user(name, UserRecord(user.groups, user.administrator, user.disabled))
        except PolicyError as error:
            note(error.inside(f"user {name}"))
        if budget.is_over():
            yield
    try:
        policies.put_groups(document.groups)
    except PolicyError as error:
        note(error)
    for subject, quota in document.quotas.items():
        try:
            policies.quotas.put(subject, quota)
        except PolicyError as error:
            note(error.inside(_place_of_quota(subject)))
        if budget.is_over():
            yield
    for subject, stored in document.rules.items():
        for level in LEVELS:
            for number, rule in enumerate(stored.of(level), 1):
                try:
                    _put_rule(policies, subject, level, rule)
                except PolicyError as error:
                    note(error.inside(_place_of_subject(subject), f"{level} rule {number}"))
                if budget.is_over():
                    yield
    return policies


def document_of(policies: Policies) -> PolicyDocument:
    """Return the stored form of *policies*."""
    rules = {subject: stored_policies(policies, subject) for subject in policies}
    users = {
        name: StoredUser(user.groups, user.administrator, user.disabled)
        for name, user in policies.members.users.items()
    }
    return PolicyDocument(users, dict(policies.members.groups), rules, quotas=policies.quotas.stored())


def stored_policies(policies: Policies, subject: str) -> StoredPolicies:
    """Return the stored form of the rules of *subject*."""
    custom, default = (tuple(rule.stored() for rule in policies.rules_of(subject, level)) for level in LEVELS)
    return StoredPolicies(custom, default)


def _put_rule(policies: Policies, subject: str, level: RuleLevel, stored: StoredRule) -> None:
    count = len(policies)
    policies.put_rule(subject, level, parse_rule(stored))
    if len(policies) == count:
        raise PolicyError(f"there is another rule about {stored.resource!r}", "resource")


def decode_each(texts: dict[str, str], kind: type[T], place: Callable[[str], str], note: Note) -> Steps[dict[str, T]]:
    """Return each of *texts* as a *kind*; an error says which one, by *place* of its key. Empties *texts*."""
    decoder, budget = msgspec.json.Decoder(kind), Budget(MEMBER_US)
    found = {}
    for key in list(texts):
        text = texts.pop(key)  # freeing all at once takes long
        try:
            found[key] = decode_value(decoder, text)
        except PolicyError as error:
            note(error.inside(place(key)))
        if budget.is_over(1 + len(text) // MEMBER_CHARACTERS):
            yield
    return found


def _place_of_quota(subject: str) -> str:
    return f"quota of {show_subject(subject)}"


def _place_of_subject(subject: str) -> str:
    return f"rules of {show_subject(subject)}"
