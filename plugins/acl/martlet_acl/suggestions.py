"""Commands that would allow what was observed."""

import shlex
from typing import cast

from martlet.contracts import Action, Identity, Question, ResourceKind
from martlet_acl.observations import Observation
from martlet_acl.policy.asked import outer_question
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.resources import CLUSTER, parse_resource
from martlet_acl.policy.subjects import ANONYMOUS, parse_subject, user_subject
from martlet_acl.state import AclState

__all__ = ["suggestion"]


def suggestion(state: AclState, observed: Observation) -> str:
    """Return a command that would allow what was *observed*, or explain why it is denied; empty if there is none."""
    if observed.action == "login":
        return _for_login(state, observed)
    action, kind = cast(Action, observed.action), cast(ResourceKind, observed.kind)
    question = Question(Identity(observed.subject), action, kind, observed.name, observed.address)
    subject = user_subject(observed.subject) if observed.subject else ANONYMOUS
    outer = outer_question(question)
    for asked in (outer, question) if outer is not None else (question,):
        found, level = state.policies.find(asked)
        resource = CLUSTER.text if asked.kind == "cluster" else f"{asked.kind}:{asked.name}"
        if found is not None and not found.rule.allow:
            rule = found.rule
            if level == "custom" and rule.resource.form == "literal":
                return _command("remove", found.subject, rule.resource.text)
            return _allow(subject, observed.action, resource)
    return _allow(subject, observed.action, resource)


def _allow(subject: str, action: str, resource: str) -> str:
    try:
        parse_subject(subject)
        parse_resource(resource)
    except PolicyError:
        return ""  # a client chose a name that no rule can have
    return _command("allow", subject, action, resource)


def _for_login(state: AclState, observed: Observation) -> str:
    name, method = observed.subject, observed.name
    if method == "signature":
        owner = state.keys.get(name)
        if owner is None:
            return _command("key", "add", name, "--key", name) if name in state.users else ""
        if not state.is_enabled(owner):
            return _command("user", "enable", owner)
        return _command("key", "enable", name) if state.secrets_of(owner).keys[name].disabled else ""
    user = state.users.get(name)
    if user is None:
        return _command("user", "add", name) if name else ""
    return _command("user", "enable", name) if user.disabled else _command("user", "set", name, "--password")


def _command(*words: str) -> str:
    if not all(word.isprintable() for word in words):
        return ""
    return shlex.join(("martlet", "acl", *words))
