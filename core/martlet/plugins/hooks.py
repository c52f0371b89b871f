"""The hooks that a plugin may override.

A plugin is a class that inherits `Hooks` and overrides some of its methods; its entry point in the group
``martlet.plugins`` names the class. The hooks are cold: each is called once at start-up and returns plain callables and
objects, which the hot path then calls from a tuple. The order of plugins in the config is the order of the tuple.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pluggy

from martlet.config import Settings
from martlet.contracts import (
    Authenticator,
    Authorizer,
    Compile,
    Dispatcher,
    Mechanism,
    Protocol,
    QuotaSource,
    Router,
    Service,
    Stage,
    Subcommand,
)

if TYPE_CHECKING:
    from martlet.broker import Broker
    from martlet.state import Projection
    from martlet.store import ColdTier

__all__ = ["HOOKS", "Hooks", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("martlet")
hookimpl = pluggy.HookimplMarker("martlet")


class Hooks:
    """The base of a plugin: override the hooks you need, and name your class in an entry point.

    ``config_class`` is a subclass of `martlet.config.Settings`; ``self.config`` is one, filled from the plugin's
    section of the configuration. ``__init__`` may check it further and raise `ConfigError`.
    ``before`` has the names of plugins that must come later in ``plugins.enabled``, and why.
    """

    config_class: ClassVar[type[Settings] | None] = None
    before: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Any) -> None:
        self.config = config

    @hookspec
    def martlet_protocols(self, broker: "Broker") -> Sequence[Protocol]:
        """Return the ports that this plugin serves."""
        return ()

    @hookspec
    def martlet_stages(self, broker: "Broker") -> Sequence[Stage]:
        """Return functions that every message passes before it is stored."""
        return ()

    @hookspec
    def martlet_routers(self, broker: "Broker") -> Sequence[Router]:
        """Return functions that name further queues which index a message."""
        return ()

    @hookspec
    def martlet_filters(self, broker: "Broker") -> Mapping[str, Compile]:
        """Return filter languages by name, such as ``SQL92``."""
        return {}

    @hookspec
    def martlet_authenticators(self, broker: "Broker") -> Sequence[Authenticator]:
        """Return functions that identify clients; the first opinion of all plugins decides."""
        return ()

    @hookspec
    def martlet_mechanisms(self, broker: "Broker") -> Mapping[str, Mechanism]:
        """Return ways to identify clients in several steps, by name, such as ``SCRAM-SHA-256``."""
        return {}

    @hookspec
    def martlet_authorizers(self, broker: "Broker") -> Sequence[Authorizer]:
        """Return functions that allow or deny an action; the first opinion of all plugins decides."""
        return ()

    @hookspec
    def martlet_quotas(self, broker: "Broker") -> Sequence[QuotaSource]:
        """Return functions that answer the quotas of an identity; those of all plugins apply."""
        return ()

    @hookspec
    def martlet_capabilities(self, broker: "Broker") -> Mapping[type, object]:
        """Return objects that other plugins get from `Broker.capability`, by type."""
        return {}

    @hookspec
    def martlet_projections(self, broker: "Broker") -> Sequence["Projection"]:
        """Return state that is computed from the log; the broker replays it before its ports open."""
        return ()

    @hookspec
    def martlet_cold_tiers(self, broker: "Broker") -> Sequence["ColdTier"]:
        """Return the tier that keeps records for longer than the log; only one plugin may have one."""
        return ()

    @hookspec
    def martlet_dispatchers(self) -> Mapping[str, Dispatcher]:
        """Return by topic the functions that compute codes of queue entries; called before the store is opened."""
        return {}

    @hookspec
    def martlet_services(self, broker: "Broker") -> Sequence[Service]:
        """Return coroutine functions that run while the broker does."""
        return ()

    @hookspec
    def martlet_commands(self) -> Sequence[Subcommand]:
        """Return more ``martlet`` subcommands."""
        return ()

    @hookspec
    def martlet_reload(self) -> None:
        """Reload everything that may change while the broker runs, such as certificates; called on SIGHUP."""

    @hookspec
    def martlet_stopping(self) -> None:
        """Tell connected clients that the broker stops; called after its ports are closed."""


HOOKS = tuple(name for name in vars(Hooks) if name.startswith("martlet_"))
