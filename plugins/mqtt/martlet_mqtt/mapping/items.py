"""Messages of a run, as the store takes them.

The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
"""

from collections.abc import Mapping, Sequence

from martlet.store import Queue
from martlet.store.append.items import AppendItem
from martlet_mqtt.wire.names import Name

__all__ = ["run_items"]


def run_items(
    names: Sequence[Name], bodies: Sequence[bytes], queues: Mapping[Name, Queue], qos: int, born_ms: int, host: bytes
) -> list[AppendItem]:
    """Return the messages of QoS *qos* with *names* and *bodies*; *queues* has the queue of each name."""
    return [
        (queues[name], body, name.properties[qos], name.code, 0, 0, born_ms, host, 0, 0)
        for name, body in zip(names, bodies, strict=True)
    ]
