"""Access rules: asks the authorizers of the plugins, and caches their answers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, final
from weakref import WeakValueDictionary, ref

from martlet.access.grant import ConsumeGrant, PublishGrant
from martlet.access.networks import AddressClasses
from martlet.access.questions import ALLOWED, SEPARATOR, as_decider, denied_text, question
from martlet.contracts import AccessEvent, Action, Authorizer, Decider, Identity, Verdict
from martlet.errors import Reason, Refused

__all__ = ["Decisions", "FollowPermit", "GroupPermit", "Rules"]

# Cached decisions per identity and class of address. A client uses few topics; the authorizers are asked again about
# the others.
DECISIONS_MAX: Final = 4096
# Cached decisions about names inside topics, of all identities together: some 150 bytes each.
NAMES_MAX: Final = 100_000
# References to decisions that are gone, kept beyond as many as twice those in use.
REMEMBERING_SPARE: Final = 1000
ADMINISTRATION: Final = frozenset(("create", "update", "delete"))
NO_OPINION: Final = Verdict(allowed=False)


@final
class Verdicts:
    """The cached verdicts for one identity at the addresses of one class."""

    __slots__ = ("__weakref__", "of_names", "of_resources")

    def __init__(self) -> None:
        self.of_resources: dict[tuple[Action, str], Verdict] = {}
        self.of_names: dict[tuple[Action, str], dict[str, Verdict]] = {}  # (action, topic) -> name inside -> verdict


NO_VERDICTS: Final = Verdicts()  # of decisions that were not asked yet


@final
class Rules:
    """The authorizers of all plugins, and a `Decisions` for each identity, address and protocol in use."""

    def __init__(self) -> None:
        self._authorizers: tuple[Authorizer, ...] = ()
        self._deciders: tuple[Decider, ...] = ()
        self._in_use: WeakValueDictionary[tuple[Identity, str, str], Decisions] = WeakValueDictionary()
        self._verdicts: WeakValueDictionary[tuple[Identity, tuple[int, ...]], Verdicts] = WeakValueDictionary()
        self._classes = AddressClasses(())
        # The decisions with grants that they remember. The others need no word of a change: ten thousand take 10 ms.
        self._remembering: list[ref[Decisions]] = []
        self.generation = 0  # incremented by each change; a plugin can cache results of decisions for one generation
        self.denied = 0
        # Topics in which each message has a name: its tag. Rules may be about these names.
        self.named: set[str] = set()
        self.on_changed: list[Callable[[], None]] = []
        self.listeners: list[Callable[[AccessEvent], None]] = []
        self._names_known = 0

    @property
    def authorizers(self) -> tuple[Authorizer, ...]:
        """The authorizers in order; the first one that does not abstain decides. Without any, everything is allowed."""
        return self._authorizers

    @authorizers.setter
    def authorizers(self, authorizers: tuple[Authorizer, ...]) -> None:
        self._authorizers = authorizers
        self._deciders = tuple(as_decider(each) for each in authorizers)
        self.changed()

    def changed(self) -> None:
        """Drop all cached decisions, because the authorizers may decide differently now."""
        self.generation += 1
        self._names_known = 0
        self._classes = AddressClasses(network for decider in self._deciders for network in decider.networks)
        self._verdicts = WeakValueDictionary()  # `clear` would remove them one by one
        remembering, self._remembering = self._remembering, []
        for reference in remembering:
            decisions = reference()
            if decisions is not None:
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

    def note_remembering(self, decisions: "Decisions") -> None:
        """Let *decisions* forget the grants that they remember from now on at the next change."""
        remembering = self._remembering
        if len(remembering) > REMEMBERING_SPARE + 2 * len(self._in_use):
            remembering = self._remembering = [each for each in remembering if each() is not None]
        remembering.append(ref(decisions))

    def of(self, identity: Identity, address: str = "", protocol: str = "") -> "Decisions":
        """Return the decisions for *identity* at *address*, which all its connections from there share."""
        key = identity, address, protocol
        decisions = self._in_use.get(key)
        if decisions is None:
            decisions = self._in_use[key] = Decisions(self, *key)
        return decisions

    def verdicts_of(self, identity: Identity, address: str) -> Verdicts:
        """Return the cache for *identity* at all addresses of the class of *address*."""
        key = identity, self._classes.of(address)
        verdicts = self._verdicts.get(key)
        if verdicts is None:
            verdicts = self._verdicts[key] = Verdicts()
        return verdicts

    def decide(self, identity: Identity, action: Action, name: str, address: str = "") -> Verdict:
        """Ask the authorizers; deny if all of them abstain.

        A name inside a topic, ``topic/name``, is denied if the topic is. Otherwise the opinion on the name decides, and
        if there is none, the opinion on the topic.
        """
        if not self._deciders:
            return ALLOWED
        topic, inside, _ = name.partition(SEPARATOR)
        opinion = self._opinion(identity, action, topic, address)
        if inside and (opinion is None or opinion.allowed):
            opinion = self._opinion(identity, action, name, address) or opinion
        return opinion or NO_OPINION

    def _opinion(self, identity: Identity, action: Action, name: str, address: str) -> Verdict | None:
        """Return the first opinion of an authorizer; None if all abstain."""
        asked = question(identity, action, name, address)
        for decider in self._deciders:
            opinion = decider.decide(asked)
            if opinion is not None:
                return opinion
        return None


@final
class Decisions:
    """The cached decisions for one identity at one address, one per action and name, until the rules change."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_cache",
        "_cached_at",
        "_protocol",
        "_remembers",
        "_rules",
        "consumable",
        "identity",
        "publishable",
        "publishable_tags",
    )

    def __init__(self, rules: Rules, identity: Identity, address: str = "", protocol: str = "") -> None:
        self._rules = rules
        self.identity = identity
        self._address = address
        self._protocol = protocol
        self._cache = NO_VERDICTS
        self._cached_at = -1  # the generation of the rules for which `_cache` was found
        self._remembers = False  # whether there are grants to forget
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

    def allows(self, action: Action, name: str) -> bool:
        """Return whether the identity may do *action* on *name*, without notifying listeners."""
        return self._verdict(action, name).allowed

    def observes(self, action: Action, name: str) -> bool:
        """Return whether *action* on *name* is allowed only because the rules are observed."""
        verdict = self._verdict(action, name)
        return verdict.allowed and verdict.observed

    def check(self, action: Action, name: str) -> bool:
        """Raise `Refused` (NO_PERMISSION) unless the identity may do *action* on *name*.

        Returns whether the permission may be remembered, because nobody observes it.
        """
        return self._accept(action, name, self._verdict(action, name))

    def check_any(self, actions: Sequence[Action], name: str) -> bool:
        """As `check`, but one of *actions* is enough; a refusal names the first."""
        best = NO_OPINION
        for action in actions:
            verdict = self._verdict(action, name)
            if verdict.allowed and not verdict.observed:
                return self._accept(action, name, verdict)
            if best is NO_OPINION or verdict.allowed:
                best = verdict
        return self._accept(actions[0], name, best)

    def _verdict(self, action: Action, name: str) -> Verdict:
        rules = self._rules
        if not rules.authorizers:
            return ALLOWED
        verdicts = (self._cache if self._cached_at == rules.generation else self._find_cache()).of_resources
        verdict = verdicts.get((action, name))
        if verdict is None:
            verdict = rules.decide(self.identity, action, name, self._address)
            if len(verdicts) >= DECISIONS_MAX:
                verdicts.clear()
            verdicts[action, name] = verdict
        return verdict

    def _find_cache(self) -> Verdicts:
        self._cached_at = self._rules.generation
        self._cache = self._rules.verdicts_of(self.identity, self._address)
        return self._cache

    def _accept(self, action: Action, name: str, verdict: Verdict) -> bool:
        """Raise `Refused` unless *verdict* allows it; return whether it is more than observed."""
        if verdict.allowed and not verdict.observed:
            if action in ADMINISTRATION:
                self._note(action, name, verdict)
            return True
        self._note(action, name, verdict)
        if verdict.allowed:
            return False
        text = denied_text(self.identity.name, action, name)
        raise Refused(Reason.NO_PERMISSION, f"{text}; {verdict.reason}" if verdict.reason else text)

    def _note(self, action: Action, name: str, verdict: Verdict) -> None:
        """Notify the listeners."""
        rules = self._rules
        rules.denied += not verdict.allowed
        if rules.listeners:
            event = AccessEvent(question(self.identity, action, name, self._address), verdict, self._protocol)
            for tell in rules.listeners:
                tell(event)

    def has_names(self, topic: str) -> bool:
        """Whether decisions about *topic* depend on the names inside it."""
        rules = self._rules
        return bool(rules.authorizers) and topic in rules.named

    def allows_name(self, action: Action, topic: str, name: str) -> bool:
        """As `allows`, for *name* or a topic filter in *topic*."""
        verdict = self._verdict_of_name(action, topic, name)
        if verdict.observed:
            self._note(action, f"{topic}{SEPARATOR}{name}" if name else topic, verdict)
        return verdict.allowed

    def _verdict_of_name(self, action: Action, topic: str, name: str) -> Verdict:
        rules = self._rules
        if not rules.authorizers:
            return ALLOWED
        of_names = (self._cache if self._cached_at == rules.generation else self._find_cache()).of_names
        verdicts = of_names.get((action, topic))
        if verdicts is None:
            verdicts = of_names[action, topic] = {}
        verdict = verdicts.get(name)
        if verdict is None:
            asked = f"{topic}{SEPARATOR}{name}" if name else topic
            verdict = rules.decide(self.identity, action, asked, self._address)
            rules.note_name()
            verdicts[name] = verdict
        return verdict

    def check_name(self, action: Action, topic: str, name: str) -> bool:
        """As `check`, for *name* or a topic filter in *topic*."""
        full_name = f"{topic}{SEPARATOR}{name}" if name else topic
        return self._accept(action, full_name, self._verdict_of_name(action, topic, name))

    def remember_publishable(self, grant: PublishGrant) -> None:
        """Cache *grant*, so that further messages for its topic need one look-up."""
        if len(self.publishable) >= DECISIONS_MAX:
            self.publishable.clear()
        self.publishable[grant.name] = grant
        self._note_remembered()

    def check_tag(self, topic: str, tag: bytes) -> None:
        """As `check_name`, for publishing a message with *tag*; further messages with the tag need one look-up."""
        if self.check_name("publish", topic, tag.decode(errors="replace")) and self.has_names(topic):
            self._rules.note_name()
            self.publishable_tags.setdefault(topic, set()).add(tag)
            self._note_remembered()

    def remember_consumable(self, grant: ConsumeGrant) -> None:
        """Cache *grant*, so that further pulls of its group and topic need one look-up."""
        if len(self.consumable) >= DECISIONS_MAX:
            self.consumable.clear()
        self.consumable[grant.group, grant.topic] = grant
        self._note_remembered()

    def _note_remembered(self) -> None:
        if not self._remembers:
            self._remembers = True
            self._rules.note_remembering(self)

    def forget(self) -> None:
        """Drop the grants that are remembered."""
        self._remembers = False
        self.publishable_tags.clear()
        self.publishable.clear()
        self.consumable.clear()

    def forget_names(self) -> None:
        """Drop the cached decisions about names inside topics."""
        self._cache.of_names.clear()
        self.publishable_tags.clear()

    def reading(self, *names: str) -> Callable[[], None]:
        """Return a function that raises `Refused` if the identity may no longer subscribe to one of *names*."""

        def check() -> None:
            for name in names:
                self.check("subscribe", name)

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
            self._decisions.check_name("subscribe", topic, topic_filter)

    def allows(self, name: str) -> bool:
        """Whether the identity may read messages of *name* in all its topics."""
        return all(self._decisions.allows_name("subscribe", topic, name) for topic in self._topics_of(name))


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
            self._decisions.check_name("subscribe", self._topic, self._topic_filter)
        else:
            self._decisions.check("subscribe", self._topic)
        self._decisions.check("subscribe", self._group)

    def allows(self, name: str) -> bool:
        """Whether the identity may take part, and read messages of *name* if the permission depends on names."""
        decisions, topic, topic_filter = self._decisions, self._topic, self._topic_filter
        if not decisions.allows("subscribe", self._group):
            return False
        if not topic_filter:
            return decisions.allows("subscribe", topic)
        return decisions.allows_name("subscribe", topic, topic_filter) and (
            not self.asks or decisions.allows_name("subscribe", topic, name)
        )
