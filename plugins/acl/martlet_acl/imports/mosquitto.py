"""Mosquitto's password file and ACL file (mosquitto.conf(5), 2.0 and 2.1; security_default.c).

Mosquitto looks first at the entries of the user, then at patterns, which are for all users: so entries become custom
rules, and patterns rules of the default policy. In both a ``deny`` counts before all others; in rules the one that
matches fewer names does. So where an entry that allows something would count before a ``deny``, the names that both
have in common are denied as well.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from martlet.contracts import RuleLevel
from martlet_acl.imports.findings import Findings, Imported, ImportedUser
from martlet_acl.imports.topic_filters import check_filter, common_names
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.resources import parse_resource
from martlet_acl.policy.rules import ACTIONS, ALL, ALLOW, DENY, StoredRule
from martlet_acl.policy.subjects import ANONYMOUS, EVERYBODY, user_subject

__all__ = ["read_acl_file", "read_password_file"]

PBKDF2: Final = re.compile(r"\$7\$(?P<i>\d{1,9})\$(?P<salt>[\w+/]+=*)\$(?P<hash>[\w+/]+=*)", re.ASCII)
SALTED: Final = re.compile(r"\$6\$(?P<salt>[\w+/]+=*)\$(?P<hash>[\w+/]+=*)", re.ASCII)
ARGON2: Final = "$argon2id$"

ACCESS: Final = {
    "read": ("subscribe",),
    "write": ("publish",),
    "readwrite": ("publish", "subscribe"),
    "deny": (),
}
USER: Final = "{user}"
SYS: Final = "$SYS"
SHARED: Final = StoredRule("shared:mqtt/*", ("subscribe",), ALLOW)

NO_FILTERS: Final = (
    "Mosquitto accepts each subscription, and delivers what may be read; here a subscription to a filter that no rule "
    "covers is refused"
)


def read_password_file(source: str) -> Imported:
    """Return the users of a password file, with their hashes."""
    found = Findings()
    for number, line in enumerate(source.splitlines(), 1):
        place = f"line {number}"
        name, colon, stored = line.strip().partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not colon or not name:
            found.remark(place, "it is no user and password with a colon between them")
            continue
        verifier = _verifier(stored)
        if not verifier:
            found.remark(place, f"the password of user {name!r} is not hashed in a known way; set it anew")
        if stored.startswith("$6$"):
            found.remark(place, f"the password of user {name!r} has a weak hash, one round of SHA-512; set it anew")
        found.add_user(place, ImportedUser(name, password=verifier))
    return found.finish()


def _verifier(stored: str) -> str:
    """Return the verifier that the field *stored* is; empty if it is none."""
    if matched := PBKDF2.fullmatch(stored):
        return f"$pbkdf2-sha512$i={int(matched['i'])}${matched['salt'].rstrip('=')}${matched['hash'].rstrip('=')}"
    if matched := SALTED.fullmatch(stored):
        return f"$salted$h=sha512,at=end${matched['salt'].rstrip('=')}${matched['hash'].rstrip('=')}"
    return stored if stored.startswith(ARGON2) else ""


# the ACL file


@final
class _Entry(NamedTuple):
    """One line: *actions* on the names that *levels* select; none for deny. The first level is the platform topic."""

    place: str
    actions: tuple[str, ...]
    levels: list[str]

    @property
    def resource(self) -> str:
        return f"name:{'/'.join(self.levels)}"


def read_acl_file(source: str, topic: str = "mqtt") -> Imported:
    """Return the rules of an ACL file about names in *topic*.

    What allows something and cannot be said in rules is left out; what denies something denies more names instead.
    """
    found = Findings()
    entries: dict[str, list[_Entry]] = {}
    patterns: list[_Entry] = []
    subject = ANONYMOUS
    for number, line in enumerate(source.splitlines(), 1):
        place = f"line {number}"
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        try:
            if word == "user" and rest:
                subject = user_subject(rest)
            elif word in ("topic", "pattern") and rest:
                entry = _entry(found, place, rest, topic, is_pattern=word == "pattern")
                (patterns if word == "pattern" else entries.setdefault(subject, [])).append(entry)
            elif word and not word.startswith("#"):
                raise PolicyError("it is no line of an ACL file")
        except PolicyError as error:
            found.remark(place, f"{error}; it is not imported")
    for each, some in entries.items():
        _put_entries(found, each, "custom", some)
    _put_entries(found, EVERYBODY, "default", patterns)
    _put_entries(found, ANONYMOUS, "default", [entry for entry in patterns if USER not in entry.resource])
    _put_shared_groups(found)
    return found.finish()


def _entry(found: Findings, place: str, text: str, topic: str, *, is_pattern: bool) -> _Entry:
    """Return the entry of a line such as ``topic readwrite home/#``, whose first word is gone.

    Raises:
      PolicyError: it is invalid, or allows what cannot be said.
    """
    access, blank, name = text.partition(" ")
    if not blank:
        access, name = "readwrite", text
    actions = ACCESS.get(access)
    if actions is None:
        raise PolicyError(f"access {access!r:.40} is unknown")
    levels = name.strip().split("/")
    check_filter(levels)
    if levels[0].startswith("$"):
        if levels[0] != SYS or len(levels) < 2:
            raise PolicyError(f"there are no topics below {levels[0]!r:.40} to give rights for")
    else:
        levels.insert(0, topic)
    said = [_level(level, is_pattern=is_pattern) for level in levels]
    if not actions and is_pattern and "%u" in name:
        found.remark(place, "the deny has no effect on users whose names contain a /, which is one level here")
    if None not in said:
        return _Entry(place, actions, [level for level in said if level is not None])
    reason = (
        "client identifiers prove nothing, so rules cannot name them" if "%c" in name else "rules have other wildcards"
    )
    if actions:
        raise PolicyError(f"{name!r:.80} cannot be said: {reason}")
    wider = _Entry(place, actions, ["+" if level is None else level for level in said])
    found.remark(place, f"{name!r:.80} cannot be said: {reason}; {wider.resource!r:.80} is denied instead")
    return wider


def _level(level: str, *, is_pattern: bool) -> str | None:
    """Return *level* as it is in a rule; None if it cannot be said."""
    if any(special in level for special in "*{}") or (is_pattern and "%c" in level):
        return None
    return level.replace("%u", USER) if is_pattern else level


def _put_entries(found: Findings, subject: str, level: RuleLevel, entries: Sequence[_Entry]) -> None:
    """Add the rules of all entries of *subject*."""
    denials = [entry for entry in entries if not entry.actions]
    for entry in denials:
        if not found.put_rule(entry.place, subject, level, StoredRule(entry.resource, (ALL,), DENY)):
            everything = f"name:{entry.levels[0]}/#"
            found.remark(entry.place, f"{everything!r} is denied instead")
            found.put_rule(entry.place, subject, level, StoredRule(everything, (ALL,), DENY))
    for entry in _merged(entries):
        try:
            cuts = _cuts(entry, denials)
        except PolicyError as error:
            found.remark(entry.place, f"{error}; it is not imported")
            continue
        if cuts is None:
            found.remark(entry.place, "a deny has all of its names; it is not imported")
        elif found.put_rule(entry.place, subject, level, StoredRule(entry.resource, entry.actions, ALLOW)):
            for cut in cuts:
                found.put_rule(entry.place, subject, level, StoredRule(f"name:{'/'.join(cut)}", (ALL,), DENY))


def _merged(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return one entry for each resource that entries allow something on, with all actions."""
    merged: dict[str, _Entry] = {}
    for entry in entries:
        if entry.actions:
            old = merged.get(entry.resource, entry)
            actions = tuple(action for action in ACTIONS if action in entry.actions or action in old.actions)
            merged[entry.resource] = old._replace(actions=actions)
    return list(merged.values())


def _cuts(entry: _Entry, denials: Sequence[_Entry]) -> list[list[str]] | None:
    """Return the names that *entry* and a denial have in common, where *entry* would count; None if they are all.

    Raises:
      PolicyError: these names cannot be said.
    """
    cuts = []
    rank = parse_resource(entry.resource).rank
    for denial in denials:
        common = common_names(entry.levels, denial.levels)
        if common == entry.levels:
            return None
        if common is not None and rank < parse_resource(denial.resource).rank:
            cuts.append(common)
    return cuts


def _put_shared_groups(found: Findings) -> None:
    """Let everybody who may read names take part in shared subscriptions, as in Mosquitto."""
    reading = {each.subject for each in found.rules if "subscribe" in each.rule.actions and each.rule.decision == ALLOW}
    if reading:
        found.remark("", NO_FILTERS)
    for subject in (EVERYBODY, ANONYMOUS):
        if subject in reading or (subject == EVERYBODY and reading - {ANONYMOUS}):
            found.put_rule("", subject, "default", SHARED)
