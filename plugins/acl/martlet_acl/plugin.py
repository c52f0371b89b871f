"""The plugin: authenticates users, decides by rules, answers quotas, and lets administrators change them."""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import trio

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import (
    AccessControl,
    AccessEvent,
    Authenticator,
    Authorizer,
    Identity,
    Mechanism,
    Question,
    Quota,
    QuotaSource,
    Service,
    Subcommand,
)
from martlet.errors import ConfigError, MartletError, Reason, Refused
from martlet.message import Message, encode_properties
from martlet.plugins.hooks import Hooks
from martlet_acl.administration import Administration
from martlet_acl.answering import Requests
from martlet_acl.audit import AuditFile, AuditTrail
from martlet_acl.authorizer import RuleAuthorizer
from martlet_acl.config import AclConfig
from martlet_acl.endpoint import Endpoint
from martlet_acl.logins import Logins
from martlet_acl.observations import Observations
from martlet_acl.saved_state import SavedState
from martlet_acl.state import AclState
from martlet_acl.tokens import OAUTHBEARER, Tokens

__all__ = ["AclPlugin"]

log = logging.getLogger("martlet.acl")


class AclPlugin(Hooks):
    """Access control by the files ``config/acl.json`` and ``config/acl.secrets`` of the data directory."""

    config_class: ClassVar[type[Settings] | None] = AclConfig

    def __init__(self, config: AclConfig) -> None:
        super().__init__(config)
        self._config = config
        self._saved: SavedState | None = None

    @property
    def saved(self) -> SavedState:
        """Users, groups, rules, quotas and secrets; available once there is a broker."""
        assert self._saved is not None
        return self._saved

    def state(self) -> AclState:
        """Return what is in effect."""
        return self.saved.state

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        saved = self._saved = SavedState(broker)
        self.observations = Observations(broker.clock.now_ms)
        self._trail = self._begin_audit(broker) if self._config.audit_file else None
        note = self._trail.note_change if self._trail is not None else _note_nothing
        self.administration = Administration(saved, broker.ids.key, self._config.password_cost, note, self._may_change)
        self._tokens = Tokens(self._config, broker.clock, self._refusal_of) if self._config.jwks else None
        broker.stats.add("acl", self.statistics)
        broker.rules.listeners.append(self._note_event)
        return {AccessControl: self.administration}

    def martlet_authenticators(self, broker: Broker) -> Sequence[Authenticator]:
        logins = Logins(self.state, broker.ids.key, self._config.password_cost, self._note_login, self._tokens)
        return (logins.authenticate,)

    def martlet_mechanisms(self, broker: Broker) -> Mapping[str, Mechanism]:
        return {OAUTHBEARER: self._tokens.exchange} if self._tokens is not None else {}

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        return (RuleAuthorizer(self.state),)

    def martlet_quotas(self, broker: Broker) -> Sequence[QuotaSource]:
        return (self._quotas_of,)

    def _quotas_of(self, identity: Identity) -> Sequence[Quota]:
        """Return the quotas of *identity*; none while rules are only observed, when names may be claimed."""
        state = self.state()
        return () if state.observe else state.policies.quotas_of(identity)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        requests = Requests(self.administration, self.observations, broker.turns.finish)
        services: list[Service] = [Endpoint(broker, requests.answer).run]
        if self._config.watch_s:
            services.append(self._watch)
            if self._tokens is not None:
                services.append(partial(self._watch_keys, self._tokens, broker))
        if self._trail is not None:
            services.append(self._trail.run)
        return services

    def martlet_commands(self) -> Sequence[Subcommand]:
        from martlet_acl.commands.command import COMMAND  # a broker does not need it

        return [COMMAND]

    def martlet_reload(self) -> None:
        if self._saved is not None:
            trio.from_thread.run(self._saved.reload)
            if self._tokens is not None:
                self._tokens.load()

    async def _watch(self) -> None:
        await self.saved.watch(self._config.watch_s)

    async def _watch_keys(self, tokens: Tokens, broker: Broker) -> None:
        """Load the keys of tokens again when their file has changed; one error line for each wrong content."""
        told = ""
        while True:
            await trio.sleep(self._config.watch_s)
            try:
                if await trio.to_thread.run_sync(tokens.load):
                    log.info("acl.jwks has changed; its keys were loaded again")
                told = ""
            except ConfigError as error:
                if str(error) != told:
                    told = str(error)
                    log.error("%s; the keys loaded before stay in use", error)

    def _begin_audit(self, broker: Broker) -> AuditTrail:
        config = self._config
        path = os.path.join(broker.store.data_directory.path, config.audit_file)
        file = AuditFile(path, config.audit_bytes_max, config.audit_files_max)
        publish = partial(self._publish_audit, broker) if config.audit_topic else None
        trail = AuditTrail(file, broker.clock, publish)
        broker.authentication.listeners.append(trail.note_login)
        broker.rules.listeners.append(trail.note_access)
        return trail

    def _publish_audit(self, broker: Broker, lines: Sequence[tuple[str, bytes]]) -> None:
        """Publish lines of the audit trail; what is refused, because the disk is full, is only in the file."""
        topic = self._config.audit_topic
        try:
            broker.topics.ensure(topic, 1)
            messages = [Message(topic, line.rstrip(), encode_properties({"TAGS": kind})) for kind, line in lines]
            broker.publish_all(messages)
        except MartletError as error:
            log.error("the topic %r of the audit trail cannot be written; %s", topic, error)

    def _refusal_of(self, name: str) -> Refused | None:
        """Return why the user *name* of a token may not log in; he need not exist."""
        user = self.state().users.get(name)
        disabled = user is not None and user.disabled
        return Refused(Reason.CREDENTIALS, f"user {name!r} is disabled") if disabled else None

    def _note_login(self, user: str, method: str, reason: str) -> None:
        """Note a login that would be refused; also called in worker threads."""
        self.saved.unproved.add(self.state().keys.get(user, user) if method == "signature" else user)
        self.observations.note_login(user, method, reason)

    def _may_change(self, by: Identity) -> bool:
        """Whether the rules, were they enforced, would let a client change users and rules."""
        verdict = self.state().policies.decide(Question(by, "update", "cluster", ""))
        return verdict is not None and verdict.allowed and not self.saved.unproved.has(by)

    def _note_event(self, event: AccessEvent) -> None:
        if event.verdict.observed:
            self.observations.note_request(event.question, event.verdict, event.protocol)

    def statistics(self) -> dict[str, object]:
        """Return the numbers of users, keys, rules and quotas, and what was observed."""
        state = self.state()
        return {
            "mode": "observe" if state.observe else "enforce",
            "users": len(state.users),
            "groups": len(state.policies.members.groups),
            "keys": len(state.keys),
            "rules": len(state.policies),
            "quotas": len(state.policies.quotas),
            "version": state.version,
            "observed": self.observations.count,
            **({f"audit_{name}": count for name, count in self._trail.statistics().items()} if self._trail else {}),
        }


def _note_nothing(by: str, what: str) -> None: ...
