"""Access rules: asks the authorizers of the plugins, and caches their answers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, final
from weakref import WeakValueDictionary

from martlet.access.grant import ConsumeGrant, PublishGrant
from martlet.contracts import Authorizer, Identity
from martlet.errors import Reason, Refused
from martlet.tables.topics import RETRY_PREFIX

__all__ = ["Decisions", "FollowPermit", "GroupPermit", "Rules", "name_of_group"]

# Cached decisions per identity. A client uses few topics; the authorizers are asked again about the others.
DECISIONS_MAX: Final = 4096
# Cached decisions about names inside topics, of all identities together: some 150 bytes each.
NAMES_MAX: Final = 100_000
SEPARATOR: Final = "/"  # between a topic and a name inside it; no topic's name contains it
SHARED: Final = "$share"  # replaces the topic for groups that are no consumer groups; no topic's name contains a $


@final
class Rules:
    """The authorizers of all plugins, and a `Decisions` for each identity in use."""

    def __init__(self) -> None:
        self._authorizers: tuple[Authorizer, ...] = ()
        self._in_use: WeakValueDictionary[Identity, Decisions] = WeakValueDictionary()
        self.generation = 0  # incremented by each change; a plugin can cache results of decisions for one generation
        self.denied = 0
        # Topics in which each message has a name: its tag. Rules may be about these names.
        self.named: set[str] = set()
        self.on_changed: list[Callable[[], None]] = []
        self._names_known = 0

    @property
    def authorizers(self) -> tuple[Authorizer, ...]:
        """The authorizers in order; the first one that does not abstain decides. Without any, everything is allowed."""
        return self._authorizers

    @authorizers.setter
    def authorizers(self, authorizers: tuple[Authorizer, ...]) -> None:
        self._authorizers = authorizers
        self.changed()

    def changed(self) -> None:
        """Drop all cached decisions, because the authorizers may decide differently now."""
        self.generation += 1
        self._names_known = 0
        for decisions in list(self._in_use.values()):
            decisions.forget()
        for tell in self.on_changed:
            tell()

    def add_named(self, topics: Iterable[str]) -> None:
        """From now on decide about messages of *topics* by their names as well."""
        if not self.named.issuperset(topics):
            self.named.update(topics)
            self.changed()

    def note_name(self) -> None:
        """Count one more cached decision about a name; above `NAMES_MAX`, drop all of them."""
        self._names_known += 1
        if self._names_known > NAMES_MAX:
            self._names_known = 1
            for decisions in list(self._in_use.values()):
                decisions.forget_names()

    def of(self, identity: Identity) -> "Decisions":
        """Return the decisions for *identity*, which all its connections share."""
        decisions = self._in_use.get(identity)
        if decisions is None:
            decisions = self._in_use[identity] = Decisions(self, identity)
        return decisions

    def decide(self, identity: Identity, action: str, name: str) -> bool:
        """Ask the authorizers; deny if all of them abstain.

        A name inside a topic, ``topic/name``, is denied if the topic is. Otherwise the opinion on the name decides, and
        if there is none, the opinion on the topic.
        """
        if not self._authorizers:
            return True
        topic, inside, _ = name.partition(SEPARATOR)
        opinion = self._opinion(identity, action, topic)
        if inside and opinion is not False:
            of_name = self._opinion(identity, action, name)
            opinion = opinion if of_name is None else of_name
        return opinion is True

    def _opinion(self, identity: Identity, action: str, name: str) -> bool | None:
        """Return the first opinion of an authorizer; None if all abstain."""
        for authorizer in self._authorizers:
            opinion = authorizer(identity, action, name)
            if opinion is not None:
                return opinion
        return None


@final
class Decisions:
    """The cached decisions for one identity, one per action and name, until the rules change."""

    __slots__ = (
        "__weakref__",
        "_allowed",
        "_names",
        "_rules",
        "consumable",
        "identity",
        "publishable",
        "publishable_tags",
    )

    def __init__(self, rules: Rules, identity: Identity) -> None:
        self._rules = rules
        self.identity = identity
        self._allowed: dict[tuple[str, str], bool] = {}
        self._names: dict[tuple[str, str], dict[str, bool]] = {}  # (action, topic) -> name -> whether it is allowed
        # By topic the tags of messages that may be published: looked up once per message, like `publishable`.
        self.publishable_tags: dict[str, set[bytes]] = {}
        # Topics that may be published to: looked up once per message. Gates hold this dict, so it is never replaced.
        self.publishable: dict[str, PublishGrant] = {}
        # By group and topic, looked up once per pull.
        self.consumable: dict[tuple[str, str], ConsumeGrant] = {}

    @property
    def generation(self) -> int:
        """Incremented by each change of the rules."""
        return self._rules.generation

    def allows(self, action: str, name: str) -> bool:
        """Return whether the identity may do *action* (``publish``, ``read`` or ``manage``) on *name*."""
        rules = self._rules
        if not rules.authorizers:
            return True
        decision = self._allowed.get((action, name))
        if decision is None:
            decision = rules.decide(self.identity, action, name)
            if len(self._allowed) >= DECISIONS_MAX:
                self.forget()
            self._allowed[action, name] = decision
        return decision

    def check(self, action: str, name: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may do *action* on *name*."""
        if not self.allows(action, name):
            raise self._refusal(action, _describe(name))

    def _refusal(self, action: str, object_text: str) -> Refused:
        self._rules.denied += 1
        verb = "publish to" if action == "publish" else action
        return Refused(Reason.NO_PERMISSION, f"{self.identity.name!r} may not {verb} {object_text}")

    def has_names(self, topic: str) -> bool:
        """Whether decisions about *topic* depend on the names inside it."""
        rules = self._rules
        return bool(rules.authorizers) and topic in rules.named

    def allows_name(self, action: str, topic: str, name: str) -> bool:
        """Whether the identity may do *action* (``publish`` or ``read``) on *name*, or a topic filter, in *topic*."""
        rules = self._rules
        if not rules.authorizers:
            return True
        allowed = self._names.get((action, topic))
        if allowed is None:
            allowed = self._names[action, topic] = {}
        decision = allowed.get(name)
        if decision is None:
            decision = rules.decide(self.identity, action, f"{topic}{SEPARATOR}{name}" if name else topic)
            rules.note_name()
            allowed[name] = decision
        return decision

    def check_name(self, action: str, topic: str, name: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless `allows_name`."""
        if not self.allows_name(action, topic, name):
            raise self._refusal(action, f"{name!r:.200} in topic[{topic}]" if name else _describe(topic))

    def remember_publishable(self, grant: PublishGrant) -> None:
        """Cache *grant*, so that further messages for its topic need one look-up."""
        if len(self.publishable) >= DECISIONS_MAX:
            self.publishable.clear()
        self.publishable[grant.name] = grant

    def check_tag(self, topic: str, tag: bytes) -> None:
        """As `check_name`, for publishing a message with *tag*; further messages with the tag need one look-up."""
        self.check_name("publish", topic, tag.decode(errors="replace"))
        if self.has_names(topic):
            self._rules.note_name()
            self.publishable_tags.setdefault(topic, set()).add(tag)

    def remember_consumable(self, grant: ConsumeGrant) -> None:
        """Cache *grant*, so that further pulls of its group and topic need one look-up."""
        if len(self.consumable) >= DECISIONS_MAX:
            self.consumable.clear()
        self.consumable[grant.group, grant.topic] = grant

    def forget(self) -> None:
        """Drop all cached decisions."""
        self._allowed.clear()
        self.forget_names()
        self.publishable.clear()
        self.consumable.clear()

    def forget_names(self) -> None:
        """Drop the cached decisions about names inside topics."""
        self._names.clear()
        self.publishable_tags.clear()

    def reading(self, *names: str) -> Callable[[], None]:
        """Return a function that raises `Refused` if the identity may no longer read one of *names*."""

        def check() -> None:
            for name in names:
                self.check("read", name)

        return check


@final
class FollowPermit:
    """Whether one identity may follow filters and read names in some topics (`martlet.delivery.cursor.Permit`).

    *topics_of* returns the topics whose names a filter matches; a name is a filter that matches itself.
    """

    __slots__ = ("_decisions", "_topics_of")

    def __init__(self, decisions: Decisions, topics_of: Callable[[str], Sequence[str]]) -> None:
        self._decisions = decisions
        self._topics_of = topics_of

    @property
    def generation(self) -> int:
        """Incremented by each change of the rules."""
        return self._decisions.generation

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may follow *topic_filter* in all its topics."""
        for topic in self._topics_of(topic_filter):
            self._decisions.check_name("read", topic, topic_filter)

    def allows(self, name: str) -> bool:
        """Whether the identity may read messages of *name* in all its topics."""
        return all(self._decisions.allows_name("read", topic, name) for topic in self._topics_of(name))


@final
class GroupPermit:
    """Whether one identity may take part in a group, and which messages it may get (`membership.MemberPermit`).

    *topic_filter* is the filter of names in *topic* that the group selects; empty for the whole topic.
    """

    __slots__ = ("_decisions", "_group", "_topic", "_topic_filter")

    def __init__(self, decisions: Decisions, topic: str, group: str, topic_filter: str) -> None:
        self._decisions = decisions
        self._topic = topic
        self._group = group
        self._topic_filter = topic_filter

    @property
    def asks(self) -> bool:
        """Whether the permission depends on the names of messages."""
        return bool(self._topic_filter) and self._decisions.has_names(self._topic)

    def check(self) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may take part."""
        if self._topic_filter:
            self._decisions.check_name("read", self._topic, self._topic_filter)
        else:
            self._decisions.check("read", self._topic)
        self._decisions.check("read", self._group)

    def allows(self, name: str) -> bool:
        """Whether the identity may read messages of *name*."""
        return self._decisions.allows_name("read", self._topic, name)


def name_of_group(group: str, scope: str) -> str:
    """Return the name in decisions of the shared group *group* of *scope*, which is no consumer group."""
    return SEPARATOR.join((SHARED, scope, group))


def _describe(name: str) -> str:
    if name.startswith(SHARED + SEPARATOR):
        return f"shared group[{name.removeprefix(SHARED + SEPARATOR):.200}]"
    if name.startswith(RETRY_PREFIX):
        return f"consumer group[{name.removeprefix(RETRY_PREFIX)}]"
    return f"topic[{name}]" if name else "the broker"
