"""The names of resources in decisions, as `Question`s and in words; functions as authorizers."""

from collections.abc import Callable, Mapping
from typing import Final, final

from martlet.contracts import Action, Authorizer, Decider, Identity, Network, Question, Verdict
from martlet.tables.topics import RETRY_PREFIX

__all__ = ["ALLOWED", "SEPARATOR", "SHARED", "as_decider", "denied_text", "name_of_group", "question"]

SEPARATOR: Final = "/"  # between a topic and a name inside it; no topic's name contains it
SHARED: Final = "$share"  # replaces the topic for groups that are no consumer groups; no topic's name contains a $
ALLOWED: Final = Verdict(allowed=True)
FUNCTION_ACTIONS: Final[Mapping[Action, str]] = {
    "publish": "publish",
    "subscribe": "read",
    "get": "read",
    "list": "read",
    "create": "manage",
    "update": "manage",
    "delete": "manage",
}
VERBS: Final[Mapping[Action, str]] = {"publish": "publish to", "subscribe": "subscribe to"}


def name_of_group(group: str, scope: str) -> str:
    """Return the name in decisions of the shared group *group* of *scope*, which is no consumer group."""
    return SEPARATOR.join((SHARED, scope, group))


def question(identity: Identity, action: Action, name: str, address: str) -> Question:
    """Return the question about *name*, as the gate names resources (`martlet.access.gate`)."""
    if not name:
        return Question(identity, action, "cluster", "", address)
    if name.startswith(RETRY_PREFIX):
        return Question(identity, action, "group", name.removeprefix(RETRY_PREFIX), address)
    topic, inside, below = name.partition(SEPARATOR)
    if topic == SHARED:
        return Question(identity, action, "shared", below, address)
    return Question(identity, action, "name" if inside else "topic", name, address)


def denied_text(user: str, action: Action, name: str) -> str:
    """Return the sentence that tells *user* what he may not do."""
    return f"{user!r} may not {VERBS.get(action, action)} {_describe(name)}"


def _describe(name: str) -> str:
    if name.startswith(SHARED + SEPARATOR):
        return f"shared group[{name.removeprefix(SHARED + SEPARATOR):.200}]"
    if name.startswith(RETRY_PREFIX):
        return f"consumer group[{name.removeprefix(RETRY_PREFIX)}]"
    topic, inside, below = name.partition(SEPARATOR)
    if inside:
        return f"{below!r:.200} in topic[{topic}]"
    return f"topic[{name}]" if name else "the cluster"


def as_decider(authorizer: Authorizer) -> Decider:
    """Return *authorizer*, a function as an object."""
    return _FunctionDecider(authorizer) if callable(authorizer) else authorizer


@final
class _FunctionDecider:
    """An authorizer that is a function of identity, one of three actions, and the gate's name of a resource."""

    def __init__(self, function: Callable[[Identity, str, str], bool | None]) -> None:
        self._function = function

    @property
    def networks(self) -> tuple[Network, ...]:
        return ()

    def decide(self, question: Question) -> Verdict | None:
        name = question.name
        if question.kind == "group":
            name = RETRY_PREFIX + name
        elif question.kind == "shared":
            name = SHARED + SEPARATOR + name if name else SHARED
        opinion = self._function(question.identity, FUNCTION_ACTIONS[question.action], name)
        return None if opinion is None else Verdict(opinion is True)
