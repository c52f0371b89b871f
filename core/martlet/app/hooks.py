"""Calls the hooks of plugins that a broker needs, and installs their results; a new hook is listed here too."""

from typing import Any, Final

from martlet.broker import Broker
from martlet.errors import ConfigError
from martlet.plugins.loader import (
    Plugins,
    guarded_authenticator,
    guarded_authorizer,
    guarded_filter,
    guarded_mechanism,
    guarded_quotas,
)
from martlet.store import ColdTier, Store
from martlet.store.read.cold import RESTORED_FILE

__all__ = ["HOOKS_OF_A_BROKER", "cold_tier_of", "install", "require_cold_tier", "resolve"]

HOOKS_OF_A_BROKER: Final = (
    "martlet_capabilities",
    "martlet_filters",
    "martlet_authenticators",
    "martlet_mechanisms",
    "martlet_authorizers",
    "martlet_quotas",
    "martlet_stages",
    "martlet_routers",
    "martlet_cold_tiers",
    "martlet_projections",
    "martlet_protocols",
    "martlet_services",
)


async def resolve(plugins: Plugins, broker: Broker) -> dict[str, list[tuple[str, Any]]]:
    """Call every hook in `HOOKS_OF_A_BROKER` and install the results; return them by hook and plugin.

    If a plugin fails in one hook, its results of earlier hooks are removed.
    """
    results: dict[str, list[tuple[str, Any]]] = {hook: [] for hook in HOOKS_OF_A_BROKER}
    for hook in HOOKS_OF_A_BROKER:
        results[hook] = await plugins.call(hook, broker=broker)
        loaded = {plugin.name for plugin in plugins}
        results = {name: [pair for pair in pairs if pair[0] in loaded] for name, pairs in results.items()}
        install(broker, results)
    return results


def cold_tier_of(results: dict[str, list[tuple[str, Any]]]) -> tuple[str, ColdTier] | None:
    """Return the cold tier and the name of its plugin; None if no plugin has one.

    Raises:
      ConfigError: there are two.
    """
    tiers = [(plugin, tier) for plugin, given in results["martlet_cold_tiers"] for tier in given]
    if len(tiers) > 1:
        names = " and ".join(repr(plugin) for plugin, _ in tiers[:2])
        raise ConfigError(f"plugins {names} each have a cold tier, and a broker has one; enable only one of them")
    return tiers[0] if tiers else None


def require_cold_tier(store: Store) -> None:
    """Check that the data directory can be used without a cold tier.

    Raises:
      ConfigError: it was restored from one.
    """
    data = store.data_directory
    if any(data.read_generations(RESTORED_FILE)):
        raise ConfigError(
            f"data directory {data.path!r} was restored from a cold tier, which has its messages; enable the plugin "
            f"tiered and set tiered.url, or remove {RESTORED_FILE} to start without them"
        )


def install(broker: Broker, results: dict[str, list[tuple[str, Any]]]) -> None:
    broker.capabilities = {kind: each for _, given in results["martlet_capabilities"] for kind, each in given.items()}
    broker.filters = {
        language: guarded_filter(plugin, language, each)
        for plugin, given in results["martlet_filters"]
        for language, each in given.items()
    }
    broker.authentication.authenticators = tuple(
        guarded_authenticator(plugin, each) for plugin, given in results["martlet_authenticators"] for each in given
    )
    broker.authentication.mechanisms = {
        name: guarded_mechanism(plugin, name, each)
        for plugin, given in results["martlet_mechanisms"]
        for name, each in given.items()
    }
    broker.authorizers = tuple(
        guarded_authorizer(plugin, each) for plugin, given in results["martlet_authorizers"] for each in given
    )
    broker.quotas.sources = tuple(
        guarded_quotas(plugin, each) for plugin, given in results["martlet_quotas"] for each in given
    )
    broker.set_stages(
        [(name, stage) for name, given in results["martlet_stages"] for stage in given],
        [(name, router) for name, given in results["martlet_routers"] for router in given],
    )
