"""The stored form of users, groups, quotas and rules, as JSON:

    {"users": {"alice": {"groups": ["shop"]}},
     "groups": {"shop": ["staff"]},
     "quotas": {"group:shop": {"messages_in": 100}},
     "rules": {"user:alice": {"custom": [{"resource": "topic:orders*", "actions": ["publish"], "decision": "allow"}]}}}

An error names its place, such as ``rules of user alice, custom rule 3, networks``. A function *note* is called with
each error, and the entry is left out; by default the first error is raised.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar, final

import msgspec
from msgspec import Raw, Struct

from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS, Policies, PolicyLevel
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import StoredRule, parse_rule
from martlet_acl.policy.subjects import show_subject

__all__ = [
    "Note",
    "PolicyDocument",
    "StoredPolicies",
    "StoredUser",
    "decode_document",
    "decode_each",
    "decode_json",
    "document_of",
    "fill_policies",
    "raise_problem",
    "stored_policies",
]

T = TypeVar("T")
Note: TypeAlias = Callable[[PolicyError], None]

BYTES_MAX: Final = 256 << 20

# The end of an error of msgspec, such as " - at `$.custom[2].actions`", and its parts.
_PATH: Final = re.compile(r" - at `\$(?P<path>.*)`\Z")
_PART: Final = re.compile(r"\.(?P<name>\w+)|\[(?P<number>\d+)\]|\[\.\.\.\]")


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

    def of(self, level: PolicyLevel) -> tuple[StoredRule, ...]:
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
class _RawDocument(Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 0
    observe: bool = False
    users: dict[str, Raw] = {}
    groups: dict[str, Raw] = {}
    quotas: dict[str, Raw] = {}
    rules: dict[str, Raw] = {}


def decode_document(data: bytes, note: Note = raise_problem) -> PolicyDocument:
    """Return the document that the JSON *data* is; its names, patterns and references are not checked.

    Raises:
      PolicyError: it is no JSON, or has unknown parts; the error says where.
    """
    outer = decode_json(data, _RawDocument)
    return PolicyDocument(
        decode_each(outer.users, StoredUser, "user {}".format, note),
        decode_each(outer.groups, tuple[str, ...], "group {}".format, note),
        decode_each(outer.rules, StoredPolicies, _place_of_subject, note),
        outer.version,
        outer.observe,
        decode_each(outer.quotas, StoredQuota, _place_of_quota, note),
    )


def decode_json(data: bytes, kind: type[T]) -> T:
    """Return *data* as a *kind*. Raises `PolicyError`, also if an object has a key twice: the first would be lost."""
    if len(data) > BYTES_MAX:
        raise PolicyError(f"{len(data)} bytes are too many; {BYTES_MAX} are allowed")
    outer = _decode(msgspec.json.Decoder(kind), data)
    try:
        json.loads(data, object_pairs_hook=_check_unique)
    except RecursionError as error:
        raise PolicyError("it is nested too deep") from error
    except ValueError as error:  # msgspec reads only what it keeps
        raise PolicyError(f"it is no JSON in UTF-8; {type(error).__name__}") from None
    return outer


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PolicyError(f"the key {twice!r} is there twice; the first one would be ignored")


def fill_policies(document: PolicyDocument, note: Note = raise_problem) -> Policies:
    """Return what *document* says."""
    policies = Policies()
    for name, user in document.users.items():
        try:
            policies.put_user(name, UserRecord(user.groups, user.administrator, user.disabled))
        except PolicyError as error:
            note(error.inside(f"user {name}"))
    try:
        policies.put_groups(document.groups)
    except PolicyError as error:
        note(error)
    for subject, quota in document.quotas.items():
        try:
            policies.quotas.put(subject, quota)
        except PolicyError as error:
            note(error.inside(_place_of_quota(subject)))
    for subject, stored in document.rules.items():
        for level in LEVELS:
            _put_rules(policies, subject, level, stored.of(level), note)
    return policies


def document_of(policies: Policies) -> PolicyDocument:
    """Return the stored form of *policies*."""
    rules = {subject: stored_policies(policies, subject) for subject in policies}
    users = {
        name: StoredUser(user.groups, user.administrator, user.disabled)
        for name, user in policies.members.users.items()
    }
    return PolicyDocument(users, dict(policies.members.groups), rules, quotas=dict(policies.quotas.items()))


def stored_policies(policies: Policies, subject: str) -> StoredPolicies:
    """Return the stored form of the rules of *subject*."""
    custom, default = (tuple(rule.stored() for rule in policies.rules_of(subject, level)) for level in LEVELS)
    return StoredPolicies(custom, default)


def _put_rules(policies: Policies, subject: str, level: PolicyLevel, rules: tuple[StoredRule, ...], note: Note) -> None:
    for number, stored in enumerate(rules, 1):
        try:
            count = len(policies)
            policies.put_rule(subject, level, parse_rule(stored))
            if len(policies) == count:
                raise PolicyError(f"there is another rule about {stored.resource!r}", "resource")
        except PolicyError as error:
            note(error.inside(_place_of_subject(subject), f"{level} rule {number}"))


def decode_each(raws: Mapping[str, Raw], kind: type[T], place: Callable[[str], str], note: Note) -> dict[str, T]:
    """Return each of *raws* as a *kind*; an error says which one, by *place* of its key."""
    decoder = msgspec.json.Decoder(kind)
    found = {}
    for key, raw in raws.items():
        try:
            found[key] = _decode(decoder, raw)
        except PolicyError as error:
            note(error.inside(place(key)))
    return found


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw) -> T:
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise PolicyError("it is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error)
        path = _PATH.search(text)
        place = _show_path(path["path"]) if path is not None else []
        raise PolicyError(_PATH.sub("", text), *place) from error


def _show_path(path: str) -> list[str]:
    """Return the place that msgspec calls *path*, such as ``.custom[2].actions``."""
    shown: list[str] = []
    for part in _PART.finditer(path):
        if part["name"]:
            shown.append(part["name"])
        elif part["number"] and shown and shown[-1] in LEVELS:
            shown[-1] += f" rule {int(part['number']) + 1}"
        elif part["number"]:
            shown.append(f"number {int(part['number']) + 1}")
    return shown


def _place_of_quota(subject: str) -> str:
    return f"quota of {show_subject(subject)}"


def _place_of_subject(subject: str) -> str:
    return f"rules of {show_subject(subject)}"
