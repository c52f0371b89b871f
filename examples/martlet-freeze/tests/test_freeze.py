"""A frozen topic takes no messages, and nothing else changes."""

from pathlib import Path

from martlet.contracts import Identity
from martlet.testing.peers import serving
from martlet_freeze import FreezeConfig, FreezePlugin


async def test_only_publishing_to_a_frozen_topic_is_denied(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        broker, plugin = running.broker, FreezePlugin(FreezeConfig(["old"]))
        broker.authorizers = tuple(plugin.martlet_authorizers(broker))
        assert not broker.allowed(Identity(), "publish", "old")
        assert broker.allowed(Identity(), "read", "old")
        assert broker.allowed(Identity(), "publish", "new")
