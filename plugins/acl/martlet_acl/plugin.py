"""The plugin: authenticates users, decides by rules, and lets administrators change both."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import trio

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import AccessControl, AccessEvent, Authenticator, Authorizer, Service
from martlet.plugins.hooks import Hooks
from martlet_acl.administration import Administration
from martlet_acl.authorizer import RuleAuthorizer
from martlet_acl.config import AclConfig
from martlet_acl.logins import Logins
from martlet_acl.observations import Observations
from martlet_acl.saved_state import SavedState
from martlet_acl.state import AclState

__all__ = ["AclPlugin"]


class AclPlugin(Hooks):
    """Access control by the files ``config/acl.json`` and ``config/acl.secrets`` of the data directory."""

    config_class: ClassVar[type[Settings] | None] = AclConfig

    def __init__(self, config: AclConfig) -> None:
        super().__init__(config)
        self._config = config
        self._saved: SavedState | None = None

    @property
    def saved(self) -> SavedState:
        """Users, groups, rules and secrets; available once there is a broker."""
        assert self._saved is not None
        return self._saved

    def state(self) -> AclState:
        """Return what is in effect."""
        return self.saved.state

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        saved = self._saved = SavedState(broker)
        self.observations = Observations(broker.clock.now_ms)
        self.administration = Administration(saved, broker.ids.key, self._config.password_cost)
        broker.stats.add("acl", self.statistics)
        broker.rules.listeners.append(self._note_event)
        return {AccessControl: self.administration}

    def martlet_authenticators(self, broker: Broker) -> Sequence[Authenticator]:
        cost, note = self._config.password_cost, self.observations.note_login
        return (Logins(self.state, broker.ids.key, cost, note).authenticate,)

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        return (RuleAuthorizer(self.state),)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        return (self._watch,) if self._config.watch_s else ()

    def martlet_reload(self) -> None:
        if self._saved is not None:
            trio.from_thread.run(self._saved.reload)

    async def _watch(self) -> None:
        await self.saved.watch(self._config.watch_s)

    def _note_event(self, event: AccessEvent) -> None:
        if event.verdict.observed:
            self.observations.note_request(event.question, event.verdict, event.protocol)

    def statistics(self) -> dict[str, object]:
        """Return the numbers of users, keys and rules, and what was observed."""
        state = self.state()
        return {
            "mode": "observe" if state.observe else "enforce",
            "users": len(state.users),
            "groups": len(state.policies.members.groups),
            "keys": len(state.keys),
            "rules": len(state.policies),
            "version": state.version,
            "observed": self.observations.count,
        }
