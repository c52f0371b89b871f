"""Commands that would allow what was observed.

A rule replaces the one of the same subject on the same resource, so a command names all actions that were observed
there, and those that the rule had before.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import cast, final

from martlet.access.networks import plain_address
from martlet.contracts import Action, Identity, Question, ResourceKind, RuleLevel
from martlet_acl.observations import Observation
from martlet_acl.policy.asked import Asked, outer_question
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.resources import parse_resource
from martlet_acl.policy.rules import BITS, Rule
from martlet_acl.policy.subjects import ANONYMOUS, parse_subject, user_subject
from martlet_acl.state import AclState

__all__ = ["Suggestions"]


class _Together:
    """What one subject did with one resource: the bits of its actions, and its addresses."""

    def __init__(self) -> None:
        self.actions = 0
        self.addresses: dict[str, None] = {}


@final
class Suggestions:
    """The commands for the observations of a report."""

    def __init__(self, state: AclState, report: Iterable[Observation]) -> None:
        self._state = state
        self._together: defaultdict[tuple[str, str, str], _Together] = defaultdict(_Together)
        for each in report:
            if each.action != "login":
                found = self._together[each.subject, each.kind, each.name]
                found.actions |= BITS[each.action]
                found.addresses[each.address] = None

    def of(self, observed: Observation) -> str:
        """Return a command that would allow what was *observed*; empty if there is none."""
        if observed.action == "login":
            return _for_login(self._state, observed)
        return _for_request(self._state, observed, self._together[observed.subject, observed.kind, observed.name])


def _for_request(state: AclState, observed: Observation, together: _Together) -> str:
    action, kind = cast(Action, observed.action), cast(ResourceKind, observed.kind)
    question = Question(Identity(observed.subject, observed.groups), action, kind, observed.name, observed.address)
    user = state.users.get(observed.subject)
    if user is not None and user.disabled:
        return _command("user", "enable", observed.subject)
    subject = user_subject(observed.subject) if observed.subject else ANONYMOUS
    outer = outer_question(question)
    levels = LEVELS
    for asked in (outer, question) if outer is not None else (question,):
        found, level = state.policies.find(asked)
        if found is not None and not found.rule.allow:
            rule = found.rule
            if level == "custom" and rule.resource.form == "literal":
                return _command("remove", found.subject, rule.resource.text)
            levels = LEVELS[: LEVELS.index(level) + 1]  # a default rule would not count beside a custom one
            break
    return _allow(state.policies, subject, together, asked, levels)


def _allow(
    policies: Policies, subject: str, together: _Together, question: Question, levels: Sequence[RuleLevel]
) -> str:
    asked = Asked(question)
    try:
        parse_subject(subject)
        resource = parse_resource(asked.text)
    except PolicyError:
        return ""  # a client chose a name that no rule can have
    if not asked.is_covered_by(resource) or not (asked.is_filter or resource.form == "literal"):
        return ""  # its name has the form of a pattern, which would allow other names
    text = resource.text
    for level in levels:
        old = policies.rule_on(subject, level, text)
        if old is None or old.allow:  # one that denies other actions must stay
            bits = together.actions | (old.actions if old is not None else 0)
            words = ",".join(action for action, bit in BITS.items() if bits & bit)
            networks = _networks(old, together) if old is not None and old.networks else []
            more = [word for network in networks for word in ("--from", network)]
            return _command("allow", subject, words, text, *more, *(["--default"] if level == "default" else []))
    return ""


def _networks(old: Rule, together: _Together) -> list[str]:
    """Return the networks of *old* and the addresses that they lack."""
    addresses = {each: plain_address(each) for each in together.addresses}
    lacking = [
        each
        for each, address in addresses.items()
        if address is not None and not any(address in network for network in old.networks)
    ]
    return [*old.stored().networks, *lacking]


def _for_login(state: AclState, observed: Observation) -> str:
    name, method = observed.subject, observed.name
    if name.startswith("-"):
        return ""  # the command would take it for an option
    if method == "signature":
        owner = state.keys.get(name)
        if owner is None:
            return _command("key", "add", name, "--key", name) if name in state.users else ""
        if not state.is_enabled(owner):
            return _command("user", "enable", owner)
        return _command("key", "enable", name) if state.secrets_of(owner).keys[name].disabled else ""
    user = state.users.get(name)
    if method == "token" and (user is None or not user.disabled):
        return ""  # the client needs another token
    if user is None:
        return _command("user", "add", name) if name else ""
    return _command("user", "enable", name) if user.disabled else _command("user", "set", name, "--password")


def _command(*words: str) -> str:
    if not all(word.isprintable() for word in words):
        return ""
    return shlex.join(("martlet", "acl", *words))
