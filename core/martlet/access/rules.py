"""Access rules: what the authorizers of the plugins say, and the answers of theirs that still hold."""

from collections.abc import Callable
from typing import Final, final
from weakref import WeakValueDictionary

from martlet.access.grant import ConsumeGrant, PublishGrant
from martlet.contracts import Authorizer, Identity
from martlet.errors import Reason, Refused
from martlet.tables.topics import RETRY_PREFIX

__all__ = ["Decisions", "Rules"]

# Decisions that one identity keeps. A client uses few topics; one that uses more asks again.
DECISIONS_MAX: Final = 4096


@final
class Rules:
    """The authorizers of all plugins; a `Decisions` for each identity that is in use."""

    def __init__(self) -> None:
        self._authorizers: tuple[Authorizer, ...] = ()
        self._in_use: WeakValueDictionary[Identity, Decisions] = WeakValueDictionary()
        self.generation = 0  # goes up with each change; what a plugin derives from decisions holds for one generation
        self.denied = 0

    @property
    def authorizers(self) -> tuple[Authorizer, ...]:
        """Asked in this order; the first opinion decides. Without any, everything is allowed."""
        return self._authorizers

    @authorizers.setter
    def authorizers(self, authorizers: tuple[Authorizer, ...]) -> None:
        self._authorizers = authorizers
        self.changed()

    def changed(self) -> None:
        """Forget all decisions: the authorizers may answer differently from now on."""
        self.generation += 1
        for decisions in list(self._in_use.values()):
            decisions.forget()

    def of(self, identity: Identity) -> "Decisions":
        """Return the decisions for *identity*, which all its connections share."""
        found = self._in_use.get(identity)
        if found is None:
            found = self._in_use[identity] = Decisions(self, identity)
        return found

    def decide(self, identity: Identity, action: str, name: str) -> bool:
        """Ask the authorizers; where there are some and none has an opinion, the answer is no."""
        for authorizer in self._authorizers:
            opinion = authorizer(identity, action, name)
            if opinion is not None:
                return opinion
        return not self._authorizers


@final
class Decisions:
    """What the authorizers said about one identity, each asked once per action and name until the rules change."""

    __slots__ = ("__weakref__", "_known", "_rules", "consumable", "identity", "publishable")

    def __init__(self, rules: Rules, identity: Identity) -> None:
        self._rules = rules
        self.identity = identity
        self._known: dict[tuple[str, str], bool] = {}
        # Topics that may be published to: looked up once per message. It is never replaced, gates hold it.
        self.publishable: dict[str, PublishGrant] = {}
        # By group and topic, looked up once per pull.
        self.consumable: dict[tuple[str, str], ConsumeGrant] = {}

    def allows(self, action: str, name: str) -> bool:
        """Whether the identity may do *action* (``publish``, ``read`` or ``manage``) on *name*."""
        rules = self._rules
        if not rules.authorizers:
            return True
        decision = self._known.get((action, name))
        if decision is None:
            decision = rules.decide(self.identity, action, name)
            if len(self._known) >= DECISIONS_MAX:
                self.forget()
            self._known[action, name] = decision
        return decision

    def check(self, action: str, name: str) -> None:
        """Raise `Refused` (NO_PERMISSION) unless the identity may do *action* on *name*."""
        if not self.allows(action, name):
            self._rules.denied += 1
            verb = "publish to" if action == "publish" else action
            raise Refused(Reason.NO_PERMISSION, f"{self.identity.name!r} may not {verb} {_shown(name)}")

    def remember_publishable(self, grant: PublishGrant) -> None:
        """Let further messages for its topic pass with one look-up."""
        if len(self.publishable) >= DECISIONS_MAX:
            self.publishable.clear()
        self.publishable[grant.name] = grant

    def remember_consumable(self, grant: ConsumeGrant) -> None:
        """Let further pulls of its group and topic pass with one look-up."""
        if len(self.consumable) >= DECISIONS_MAX:
            self.consumable.clear()
        self.consumable[grant.group, grant.topic] = grant

    def forget(self) -> None:
        """Ask again for everything."""
        self._known.clear()
        self.publishable.clear()
        self.consumable.clear()

    def reading(self, *names: str) -> Callable[[], None]:
        """Return what raises `Refused` once the identity may not read one of *names* any more."""

        def check() -> None:
            for name in names:
                self.check("read", name)

        return check


def _shown(name: str) -> str:
    if name.startswith(RETRY_PREFIX):
        return f"consumer group[{name.removeprefix(RETRY_PREFIX)}]"
    return f"topic[{name}]" if name else "the broker"
