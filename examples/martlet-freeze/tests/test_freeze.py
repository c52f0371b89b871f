"""A frozen topic takes no messages, and nothing else changes."""

from pathlib import Path

from martlet.contracts import Identity
from martlet.testing.peers import serving
from martlet_freeze import FreezeConfig, FreezePlugin


async def test_only_publishing_to_a_frozen_topic_is_denied(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        broker, plugin = running.broker, FreezePlugin(FreezeConfig(["old"]))
        broker.authorizers = tuple(plugin.martlet_authorizers(broker))
        gate = broker.gate(Identity())
        assert not gate.allows("publish", "old")
        assert gate.allows("subscribe", "old")
        assert gate.allows("publish", "new")


async def test_later_plugins_decide_the_rest_where_the_configuration_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        broker, plugin = running.broker, FreezePlugin(FreezeConfig(["old"], allow_others=False))
        later = lambda identity, action, topic: identity.name == "ann"  # noqa: E731
        broker.authorizers = (*plugin.martlet_authorizers(broker), later)
        ann, bob = broker.gate(Identity("ann")), broker.gate(Identity("bob"))
        assert not ann.allows("publish", "old")
        assert ann.allows("publish", "new")
        assert not bob.allows("publish", "new")
