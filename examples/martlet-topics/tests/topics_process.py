"""A broker in a process of its own, which a test kills; arguments: its directory and flush mode."""

import sys
from pathlib import Path

import trio
from msgspec.structs import replace

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.testing.peers import serving
from martlet.testing.stores import small_config
from martlet_topics.config import TopicsConfig
from martlet_topics.plugin import TopicsPlugin


async def main(directory: Path, flush: str) -> None:
    plugin = TopicsPlugin(TopicsConfig(listen="127.0.0.1:0", window=20, lease_s=1))
    store = small_config(flush=flush, flush_interval_ms=20, segment_bytes=1 << 20, page_bytes=1 << 16)

    def ports(broker: Broker) -> tuple[Protocol, ...]:
        return (plugin.protocol(broker, lambda address: print(address, flush=True)),)

    store = replace(store, cache_bytes=1 << 20)
    async with serving(directory, store=store, ports=ports):
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2])
