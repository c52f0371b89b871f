"""The stored form of users, groups and rules, as JSON:

    {"users": {"alice": {"groups": ["shop"]}},
     "groups": {"shop": ["staff"]},
     "rules": {"user:alice": {"custom": [{"resource": "topic:orders*", "actions": ["publish"], "decision": "allow"}]}}}

An error names its place, such as ``rules of user alice, custom rule 3, networks``.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, final

import msgspec
from msgspec import Raw, Struct

from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS, Policies, PolicyLevel
from martlet_acl.policy.rules import StoredRule, parse_rule
from martlet_acl.policy.subjects import show_subject

__all__ = ["PolicyDocument", "StoredPolicies", "decode_document", "document_of", "fill_policies", "stored_policies"]

T = TypeVar("T")

BYTES_MAX: Final = 256 << 20

# The end of an error of msgspec, such as " - at `$.custom[2].actions`", and its parts.
_PATH: Final = re.compile(r" - at `\$(?P<path>.*)`\Z")
_PART: Final = re.compile(r"\.(?P<name>\w+)|\[(?P<number>\d+)\]|\[\.\.\.\]")


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
      rules: by subject.
    """

    users: dict[str, UserRecord] = {}
    groups: dict[str, tuple[str, ...]] = {}
    rules: dict[str, StoredPolicies] = {}


@final
class _RawDocument(Struct, frozen=True, forbid_unknown_fields=True):
    users: dict[str, Raw] = {}
    groups: dict[str, Raw] = {}
    rules: dict[str, Raw] = {}


def decode_document(data: bytes) -> PolicyDocument:
    """Return the document that the JSON *data* is; its names, patterns and references are not checked.

    Raises:
      PolicyError: it is invalid; the error says where.
    """
    if len(data) > BYTES_MAX:
        raise PolicyError(f"{len(data)} bytes are too many; {BYTES_MAX} are allowed")
    outer = _decode(msgspec.json.Decoder(_RawDocument), data)
    return PolicyDocument(
        _decode_each(outer.users, UserRecord, "user {}".format),
        _decode_each(outer.groups, tuple[str, ...], "group {}".format),
        _decode_each(outer.rules, StoredPolicies, _place_of_subject),
    )


def fill_policies(document: PolicyDocument) -> Policies:
    """Return what *document* says. Raises `PolicyError`."""
    policies = Policies()
    for name, user in document.users.items():
        try:
            policies.put_user(name, user)
        except PolicyError as error:
            raise error.inside(f"user {name}") from error
    policies.put_groups(document.groups)
    for subject, stored in document.rules.items():
        for level in LEVELS:
            _put_rules(policies, subject, level, stored.of(level))
    return policies


def document_of(policies: Policies) -> PolicyDocument:
    """Return the stored form of *policies*."""
    rules = {subject: stored_policies(policies, subject) for subject in policies}
    return PolicyDocument(dict(policies.members.users), dict(policies.members.groups), rules)


def stored_policies(policies: Policies, subject: str) -> StoredPolicies:
    """Return the stored form of the rules of *subject*."""
    custom, default = (tuple(rule.stored() for rule in policies.rules_of(subject, level)) for level in LEVELS)
    return StoredPolicies(custom, default)


def _put_rules(policies: Policies, subject: str, level: PolicyLevel, rules: tuple[StoredRule, ...]) -> None:
    for number, stored in enumerate(rules, 1):
        try:
            count = len(policies)
            policies.put_rule(subject, level, parse_rule(stored))
            if len(policies) == count:
                raise PolicyError(f"there is another rule about {stored.resource!r}", "resource")
        except PolicyError as error:
            raise error.inside(_place_of_subject(subject), f"{level} rule {number}") from error


def _decode_each(raws: Mapping[str, Raw], kind: type[T], place: Callable[[str], str]) -> dict[str, T]:
    """Return each of *raws* as a *kind*; an error says which one, by *place* of its key."""
    decoder = msgspec.json.Decoder(kind)
    found = {}
    for key, raw in raws.items():
        try:
            found[key] = _decode(decoder, raw)
        except PolicyError as error:
            raise error.inside(place(key)) from error
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


def _place_of_subject(subject: str) -> str:
    return f"rules of {show_subject(subject)}"
